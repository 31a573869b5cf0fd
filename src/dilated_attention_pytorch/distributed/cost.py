"""The transport that ``"auto"`` takes, by a small model of bytes, messages and memory; and what each rank receives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.distributed.heads import heads_of, received_bytes, why_not_heads
from dilated_attention_pytorch.distributed.listed_shards import listed_span
from dilated_attention_pytorch.distributed.means import MeanBytes, mean_bytes
from dilated_attention_pytorch.distributed.messages import RankPlan, SequenceShards
from dilated_attention_pytorch.distributed.schedules import BlockSchedule
from dilated_attention_pytorch.distributed.traffic import RankTraffic, dilated_traffic, is_one_sequence
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
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
        ulysses_bytes=None if why_not_heads(call, shards) else max(received_bytes(call, shards)),
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
    """How often a rank waits for messages, one after the other, at most."""
    return {"ring": costs.messages, "allgather": min(1, costs.messages), "ulysses": 2}[transport]


def block_traffic(problem: Problem, shards: Shards, plan: RankPlan) -> RankTraffic:
    """What all ranks of a block-sparse call send one another; ``plan`` is that of any rank."""
    sequences: Iterable[SequenceShards[BlockSchedule]] = plan.sequences
    if not is_one_sequence(problem):  # the plan has the sequences of its own rank
        crossing = (x for x in problem.spans() if len(shards.holders(range(x.keys.start, x.keys.stop))) > 1)
        sequences = (x for span in crossing for x in listed_span(problem, shards, span, 0))
    world = range(shards.world_size)
    received, sent, sources = [0 for _ in world], [0 for _ in world], [set[int]() for _ in world]
    for sequence in sequences:
        for rank in {holder for _, _, holder, _ in sequence.schedule.shards.held}:
            for transfer in sequence.schedule.receives(rank):
                elements = math.prod(sequence.shape(transfer.rows))
                received[rank] += elements
                sent[transfer.source] += elements
                sources[rank].add(transfer.source)  # all rows from a rank travel in one message
    return RankTraffic(tuple(received), tuple(sent), tuple(map(len, sources)))


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """What one rank receives."""

    forward: int  # bytes
    backward: int  # bytes: keys and values again, and gradients of what it sent
    waits: int  # messages of a forward that it waits for, one after the other


def received_by_rank(
    call: Call, problem: Problem, shards: Shards, plan: RankPlan, transport: str, bucket_size: int
) -> list[ReceivedBytes]:
    """What each rank of a call receives, exactly; ``plan`` is that of any rank. Gradients return in the accumulation type.

    The problem has the blocks that an adaptive pattern chose. The messages by which ranks choose them are counted.
    """
    if transport == "ulysses":
        both = (received_bytes(call, shards, backward=backward) for backward in (False, True))
        each = zip(*both, range(shards.world_size), strict=True)
        return [ReceivedBytes(forward, backward, _swaps(call, shards, rank)) for forward, backward, rank in each]
    dilated = isinstance(problem.pattern, Dilated)
    traffic = dilated_traffic(problem, shards, bucket_size) if dilated else block_traffic(problem, shards, plan)
    element, returned = (2 * call.head_dim * x.itemsize for x in (call.dtype, accumulate_dtype(call.dtype)))
    found = []
    for rank, (rows, sent, messages) in enumerate(zip(traffic.received, traffic.sent, traffic.messages, strict=True)):
        waits = min(1, messages) if transport == "allgather" else messages
        chosen = choice_of(call, problem, shards, rank)
        forward, backward = rows * element, rows * element + sent * returned
        found.append(ReceivedBytes(forward + chosen.received, backward, waits + chosen.messages))
    return found


def choice_of(call: Call, problem: Problem, shards: Shards, rank: int) -> MeanBytes:
    """The means that a rank holds and receives to choose blocks; nothing unless the pattern of the call is adaptive."""
    if not isinstance(call.pattern, BlockSparse) or not call.pattern.is_adaptive or shards.world_size == 1:
        return MeanBytes(0, 0, 0)
    rule = BlockRule(call.pattern.block_size, call.pattern.config)
    return mean_bytes(replace(problem, pattern=rule), shards, rank, call.head_dim, call.dtype.itemsize)


def _swaps(call: Call, shards: Shards, rank: int) -> int:
    """How many of the two exchanges of heads bring anything to a rank."""
    rows, own = shards.rows(rank), len(heads_of(rank, call.key_heads, shards.world_size))
    return call.batch and int(own > 0 and shards.length > rows) + int(rows > 0 and call.key_heads > own)
