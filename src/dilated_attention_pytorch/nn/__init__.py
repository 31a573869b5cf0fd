"""Modules."""

from dilated_attention_pytorch.nn.block_sparse import BlockSparseRingDilatedAttention
from dilated_attention_pytorch.nn.block_sparse_distributed import BlockSparseRingDistributedDilatedAttention
from dilated_attention_pytorch.nn.dilated import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.nn.ring import RingDilatedAttention

__all__ = [
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDistributedDilatedAttention",
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
]
