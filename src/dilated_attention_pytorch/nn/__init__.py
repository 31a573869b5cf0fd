"""Modules."""

from dilated_attention_pytorch.nn.attention import (
    Attention,
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    RingDilatedAttention,
)
from dilated_attention_pytorch.nn.projected import BlockSparseRingDistributedDilatedAttention, MultiheadDilatedAttention

__all__ = [
    "Attention", "BlockSparseRingDilatedAttention", "BlockSparseRingDistributedDilatedAttention", "DilatedAttention",
    "MultiheadDilatedAttention", "RingDilatedAttention",
]  # fmt: skip
