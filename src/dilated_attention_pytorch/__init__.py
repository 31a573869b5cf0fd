"""Dilated attention over very long sequences, exact on every device."""

from dilated_attention_pytorch.api import attention, attention_weights, dilated_attention
from dilated_attention_pytorch.block_sparse import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.explanation import Explanation, explain
from dilated_attention_pytorch.nn import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention_pytorch.patterns import Dilated

__all__ = [
    "BlockSparse",
    "BlockSparseRingDilatedAttention",
    "Dilated",
    "DilatedAttention",
    "Explanation",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
    "SparsePatternConfig",
    "attention",
    "attention_weights",
    "dilated_attention",
    "explain",
]
__version__ = "0.1.0"
