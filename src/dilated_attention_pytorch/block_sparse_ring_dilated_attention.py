"""Block-sparse attention under its long name."""

from dilated_attention_pytorch.nn.block_sparse import BlockSparseRingDilatedAttention
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig

__all__ = ["BlockSparseRingDilatedAttention", "SparsePatternConfig"]
