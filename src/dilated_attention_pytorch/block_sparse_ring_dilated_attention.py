"""Block-sparse attention under its long name."""

from dilated_attention_pytorch.blocks.pattern import SparsePatternConfig
from dilated_attention_pytorch.nn.block_sparse import BlockSparseRingDilatedAttention

__all__ = ["BlockSparseRingDilatedAttention", "SparsePatternConfig"]
