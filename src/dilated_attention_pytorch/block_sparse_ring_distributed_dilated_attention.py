"""Multi-head block-sparse attention on a sharded sequence under its long name."""

from dilated_attention_pytorch.blocks.tiers import DistributedSparseConfig
from dilated_attention_pytorch.nn.block_sparse_distributed import BlockSparseRingDistributedDilatedAttention

__all__ = ["BlockSparseRingDistributedDilatedAttention", "DistributedSparseConfig"]
