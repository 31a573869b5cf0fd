"""The module path that earlier reports import ``BlockSparseRingDilatedAttention`` from."""

from dilated_attention_pytorch.nn import BlockSparseRingDilatedAttention
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig

__all__ = ["BlockSparseRingDilatedAttention", "SparsePatternConfig"]
