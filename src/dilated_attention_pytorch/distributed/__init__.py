"""Sequences sharded over ranks: ``attention(..., group=...)``, functions to shard and to gather, and a simulation."""

from dilated_attention_pytorch.distributed.failures import GroupError
from dilated_attention_pytorch.distributed.groups import local_device
from dilated_attention_pytorch.distributed.sequence import gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.simulate import RankMemory, simulate_ring
from dilated_attention_pytorch.shards import Shards

__all__ = ["GroupError", "RankMemory", "Shards", "gather_sequence", "local_device", "shard_sequence", "simulate_ring"]
