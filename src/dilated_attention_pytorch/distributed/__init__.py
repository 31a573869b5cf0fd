"""Sequences sharded over ranks: ``attention(..., group=...)``, and functions to shard and to gather."""

from dilated_attention_pytorch.distributed.sequence import gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.shards import Shards

__all__ = ["Shards", "gather_sequence", "shard_sequence"]
