"""The transport that ``"auto"`` takes: a small model of bytes, messages and memory."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.distributed.heads import received_bytes, why_not_heads
from dilated_attention_pytorch.distributed.messages import RankPlan
from dilated_attention_pytorch.shards import Shards

LATENCY_S = 50e-6  # of a message that a rank waits for, with what it costs to post it and to compute with it
BYTES_PER_S = 10e9
MEMORY_SHARE = 1 / 8  # of a rank's own queries, keys, values and output that messages may take


@dataclass(frozen=True, slots=True)
class Costs:
    """What a forward sends, on the rank that receives most. The numbers are the same on every rank."""

    bytes: int  # of keys and values that a forward receives
    messages: int
    shard_bytes: int  # queries, keys, values and output of the longest shard
    ulysses_bytes: int | None  # None where heads cannot be exchanged


def costs_of(call: Call, plan: RankPlan, shards: Shards) -> Costs:
    """The costs of a call whose pattern does not depend on content; ``plan`` is that of any rank."""
    element_size = call.dtype.itemsize
    return Costs(
        bytes=2 * plan.most_received * call.head_dim * element_size,
        messages=len(plan.ticks),
        shard_bytes=2 * shards.longest * (call.heads + call.key_heads) * call.batch * call.head_dim * element_size,
        ulysses_bytes=None if why_not_heads(call, shards) else received_bytes(call, shards),
    )


def choose_transport(costs: Costs) -> str:
    """The transport of least time, ``messages waited for one by one * 50 us + bytes / (10 GB/s)``.

    * ring: a rank waits for every message, and has memory for two in each direction.
    * allgather: a rank waits once, and has memory for all messages, sent and received. This memory grows with the ranks, so
      the transport is taken only if it stays below an eighth of the rank's own tensors.
    * ulysses: a rank waits twice, and has memory for one more shard, for any number of ranks.

    Sparse branches bring 1 MiB in 7 messages to a rank with tensors of 32 MiB. A dense segment brings 56 MiB in 112
    messages, or 28 MiB if heads are exchanged. With as many query as key heads on two ranks, that saves nothing:

    >>> choose_transport(Costs(bytes=2**20, messages=7, shard_bytes=32 * 2**20, ulysses_bytes=None))
    'allgather'
    >>> choose_transport(Costs(bytes=56 * 2**20, messages=112, shard_bytes=32 * 2**20, ulysses_bytes=None))
    'ring'
    >>> choose_transport(Costs(bytes=56 * 2**20, messages=112, shard_bytes=32 * 2**20, ulysses_bytes=28 * 2**20))
    'ulysses'
    >>> choose_transport(Costs(bytes=8 * 2**20, messages=1, shard_bytes=32 * 2**20, ulysses_bytes=8 * 2**20))
    'ring'
    """
    received = {"ring": costs.bytes}
    if 2 * costs.bytes <= MEMORY_SHARE * costs.shard_bytes:
        received["allgather"] = costs.bytes
    if costs.ulysses_bytes is not None:
        received["ulysses"] = costs.ulysses_bytes
    return min(received, key=lambda name: waits(name, costs) * LATENCY_S + received[name] / BYTES_PER_S)


def waits(transport: str, costs: Costs) -> int:
    """How often a rank waits for messages, one after the other."""
    return {"ring": costs.messages, "allgather": min(1, costs.messages), "ulysses": 2}[transport]
