"""The module path that earlier reports import ``BlockSparseRingDistributedDilatedAttention`` from."""

from dilated_attention_pytorch.nn import BlockSparseRingDistributedDilatedAttention
from dilated_attention_pytorch.patterns.tiers import DistributedSparseConfig

__all__ = ["BlockSparseRingDistributedDilatedAttention", "DistributedSparseConfig"]
