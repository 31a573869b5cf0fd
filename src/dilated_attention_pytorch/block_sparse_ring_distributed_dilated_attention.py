"""Multi-head block-sparse attention on a sharded sequence under its long name."""

from dilated_attention_pytorch.nn.block_sparse_distributed import BlockSparseRingDistributedDilatedAttention
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig

__all__ = ["BlockSparseRingDistributedDilatedAttention", "DistributedSparseConfig"]
