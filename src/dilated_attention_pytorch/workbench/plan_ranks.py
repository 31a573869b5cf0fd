"""What one rank computes, receives and sends, exactly and without a plan for every rank.

The rank with most to do is simulated. With up to 16 ranks all are looked at. With more, two are: the one that receives most
by the counts of all ranks, and the first one, which sends most if causal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from dilated_attention_pytorch.call import Call, Sharding, make_call
from dilated_attention_pytorch.distributed.cost import MEMORY_SHARE, Costs, choose_transport
from dilated_attention_pytorch.distributed.heads import received_bytes, why_not_heads
from dilated_attention_pytorch.distributed.own_rows import whole_problem
from dilated_attention_pytorch.distributed.schedules import DilatedSchedule, Transfer, default_bucket_size
from dilated_attention_pytorch.distributed.traffic import Holdings, messages_by_round
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.explain import Explanation, explain
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.workbench.plan_settings import PlanSettings

ALL_RANKS = 16
_COUNTED_RANKS = 64  # up to which lengths are tried with the counts of all ranks


@dataclass(frozen=True, slots=True)
class Tiles:
    """Equal tiles of one branch, over samples and query heads."""

    q_rows: float
    k_rows: float
    causal: bool
    count: float
    listed: bool = False  # blocks of a list, of which a program computes a row

    @property
    def pairs(self) -> float:
        """Query-key pairs that meet."""
        each = self.q_rows * (self.q_rows + 1) / 2 if self.causal else self.q_rows * self.k_rows
        return each * self.count


@dataclass(frozen=True, slots=True)
class RankWork:
    """The rank with most to do. Bytes are of messages, in one direction."""

    rank: int
    rows: int  # positions
    transport: str | None  # None on one rank
    own: tuple[Tiles, ...]
    remote: tuple[Tiles, ...]  # own queries with keys of other ranks
    received: int  # bytes of a forward
    received_near: int  # of them from ranks of the same node
    backward_received: int  # keys and values again, and gradients of what the rank sent
    sent: int  # bytes of a forward
    messages: int  # that the rank waits for in a forward, one after the other
    message_rows: int  # of the largest message, times samples and key heads
    crossing: tuple[int, ...]  # by branch with rows of other ranks: the query rows that meet those of a message


def meta_call(settings: PlanSettings) -> Call:
    """The call on whole tensors, which need no memory."""
    query, key = _meta(settings)
    call, _ = make_call(query, key, key, settings.pattern, is_causal=settings.is_causal)
    return call


def _meta(settings: PlanSettings) -> tuple[torch.Tensor, torch.Tensor]:
    both = (
        torch.empty(settings.batch, settings.tokens, heads, settings.head_dim, dtype=settings.torch_dtype, device="meta")
        for heads in (settings.heads, settings.key_heads)
    )
    query, key = both
    return query, key


def explained(settings: PlanSettings, *, sharded: bool = False) -> Explanation:
    """What ``explain`` says of the call on one GPU, or on all if ``sharded``."""
    query, key = _meta(settings)
    return explain(
        query, key, key, settings.pattern, is_causal=settings.is_causal, device=settings.machine.target,
        world_size=settings.gpus if sharded else None, layout=settings.layout if sharded else None,
    )  # fmt: skip


@lru_cache(maxsize=512)
def rank_work(settings: PlanSettings) -> RankWork:
    """The rank with most to do, for any pattern and number of GPUs.

    >>> from dilated_attention_pytorch import Dilated
    >>> work = rank_work(PlanSettings(tokens=65536, pattern=Dilated([2048, 65536], [1, 16]), heads=8, head_dim=64, gpus=8))
    >>> work.received, work.messages, work.transport
    (7340032, 7, 'ring')
    """
    if not isinstance(settings.pattern, Dilated):
        return _block_work(settings)
    shards = Shards.even(settings.tokens, settings.gpus, settings.layout)
    schedule = DilatedSchedule(settings.pattern, shards, settings.key_heads, settings.is_causal)
    if settings.gpus == 1:
        return RankWork(0, settings.tokens, None, _own_tiles(settings, schedule, 0), (), 0, 0, 0, 0, 0, 0, ())
    transport, by_rank, bucket = _chosen_transport(settings, shards)
    if transport == "ulysses":
        return _heads_work(settings, shards)
    ranks = range(settings.gpus)
    looked_at = ranks if settings.gpus <= ALL_RANKS else {0, int(by_rank.argmax())}
    works = [_row_work(settings, schedule, rank, bucket) for rank in looked_at]
    worst = max(works, key=lambda x: (x.received, sum(t.pairs for t in (*x.own, *x.remote))))
    messages = max(x.messages for x in works)
    return replace(
        worst,
        transport=transport,
        messages=messages if transport == "ring" else min(1, messages),
        backward_received=max(x.backward_received for x in works),
    )


def _sharded_call(settings: PlanSettings, shards: Shards) -> Call:
    """The call of a rank."""
    device = torch.device("cuda" if settings.machine.gpu.capability[0] else "cpu")
    return replace(meta_call(settings), sharding=Sharding(None, shards, transport=settings.transport), device=device)


def _chosen_transport(settings: PlanSettings, shards: Shards) -> tuple[str, torch.Tensor, int]:
    """The transport as a call chooses it, the rows times samples that each rank receives, and the rows of a message."""
    call = _sharded_call(settings, shards)
    bucket = default_bucket_size(shards, call.device.type)
    holdings = Holdings.of(whole_problem(call, settings.tokens), shards)
    by_rank = holdings.received(settings.gpus, is_causal=settings.is_causal)
    reasons, item = why_not_heads(call, shards), call.dtype.itemsize
    if settings.transport == "ulysses" and reasons:
        raise ValueError("heads cannot be exchanged (--transport ulysses): " + "; ".join(reasons))
    costs = Costs(
        bytes=int(by_rank.max()) * settings.key_heads * 2 * settings.head_dim * item,
        messages=sum(messages_by_round(holdings, settings.gpus, bucket)),
        shard_bytes=2 * shards.longest * (call.heads + call.key_heads) * call.batch * call.head_dim * item,
        ulysses_bytes=None if reasons else max(received_bytes(call, shards)),
    )
    return choose_transport(costs) if settings.transport == "auto" else settings.transport, by_rank, bucket


def rank_bounds(settings: PlanSettings) -> RankWork:
    """What decides about the memory of the rank that receives most, without a look at its single messages."""
    pattern, shards = settings.pattern, Shards.even(settings.tokens, settings.gpus, settings.layout)
    if not isinstance(pattern, Dilated) or settings.gpus == 1:
        return rank_work(settings)
    few = settings.gpus <= _COUNTED_RANKS
    transport, rank, copies = settings.transport, settings.gpus - 1, settings.batch * settings.key_heads
    if few:
        transport, by_rank, bucket = _chosen_transport(settings, shards)
        rank = int(by_rank.argmax())
    else:
        bucket = default_bucket_size(shards, "cuda" if settings.machine.gpu.capability[0] else "cpu")
    if transport == "ulysses":
        return _heads_work(settings, shards)
    schedule = DilatedSchedule(pattern, shards, settings.key_heads, settings.is_causal)
    crossing: dict[int, int] = defaultdict(int)  # by branch: rows of queries in a segment that other ranks hold as well
    rows = received_rows = 0  # of the largest message, if it is not cut; of all of them
    for number, (w, r) in enumerate(pattern.branches):
        shared = 0
        for chunk in shards.chunks[rank]:
            for start in {x // w * w for x in (chunk.start, chunk.stop - 1)}:
                stop = min(start + w, settings.tokens)
                inside = min(chunk.stop, stop) - max(chunk.start, start)
                if inside < stop - start:
                    crossing[number] = max(crossing[number], -(-inside // r))
                    others = max(chunk.start, start) - start if settings.is_causal else stop - start - inside
                    shared = max(shared, min(len(chunk), others))
                    received_rows += -(-others // r)
        rows += -(-shared // r)
    element = 2 * settings.head_dim * settings.torch_dtype.itemsize * settings.key_heads
    received = int(by_rank[rank]) * element if few else received_rows * element * settings.batch
    if transport == "auto":
        shard = 2 * shards.longest * (settings.heads + settings.key_heads) * settings.batch * settings.head_dim
        all_at_once = 2 * received <= MEMORY_SHARE * shard * settings.torch_dtype.itemsize
        transport = "allgather" if all_at_once else "ring"
    return RankWork(
        rank=rank, rows=shards.longest, transport=transport, own=_own_tiles(settings, schedule, rank), remote=(),
        received=received, received_near=0, backward_received=0, sent=received, messages=0,
        message_rows=min(bucket, rows) * copies, crossing=tuple(sorted(crossing.values())),
    )  # fmt: skip


def _own_tiles(settings: PlanSettings, schedule: DilatedSchedule, rank: int) -> tuple[Tiles, ...]:
    copies = settings.heads // settings.key_heads * settings.batch
    return tuple(
        Tiles(f.q_rows, f.k_rows, f.causal, f.tiles * len(f.key_heads) * copies)
        for plan in schedule.own_plans(rank)
        for f in plan.families
    )


def _row_work(settings: PlanSettings, schedule: DilatedSchedule, rank: int, bucket: int) -> RankWork:
    """What a rank does if rows travel; the transport is not known yet."""
    node = settings.machine.gpus_per_node
    rows: dict[tuple[int, bool], int] = defaultdict(int)  # by peer, and whether it is received
    tiles: dict[tuple[float, float], float] = defaultdict(float)
    crossing: dict[int, int] = defaultdict(int)
    for transfer in schedule.of_rank(rank):
        arrives = transfer.target == rank
        rows[transfer.source if arrives else transfer.target, arrives] += transfer.rows
        if arrives:
            for q_rows, k_rows in _remote_rows(schedule, rank, transfer):
                crossing[transfer.branch] = max(crossing[transfer.branch], math.ceil(q_rows))
                parts = max(1.0, k_rows / bucket)
                tiles[q_rows, k_rows / parts] += parts
    copies = settings.batch * settings.key_heads
    element, returned = (
        2 * settings.head_dim * copies * x.itemsize for x in (settings.torch_dtype, accumulate_dtype(settings.torch_dtype))
    )
    received, sent = (sum(x for (_, side), x in rows.items() if side == arrives) for arrives in (True, False))
    near = sum(x for (peer, arrives), x in rows.items() if arrives and peer // node == rank // node)
    return RankWork(
        rank=rank,
        rows=schedule.shards.rows(rank),
        transport=None,
        own=_own_tiles(settings, schedule, rank),
        remote=tuple(Tiles(q, k, False, x * settings.heads * settings.batch) for (q, k), x in tiles.items()),
        received=received * element,
        received_near=near * element,
        backward_received=received * element + sent * returned,
        sent=sent * element,
        messages=sum(-(-x // bucket) for (_, arrives), x in rows.items() if arrives),
        message_rows=max((min(bucket, x) for x in rows.values()), default=0) * copies,
        crossing=tuple(sorted(crossing.values())),
    )


def _remote_rows(schedule: DilatedSchedule, rank: int, transfer: Transfer) -> list[tuple[float, float]]:
    """Rows of queries and keys of the tiles of a transfer, of an average head."""
    w, r = schedule.pattern.branches[transfer.branch]
    start = transfer.positions.start // w * w
    found = []
    for chunk in schedule.shards.chunks[rank]:
        inside = min(chunk.stop, start + w) - max(chunk.start, start)
        if inside > 0 and (not schedule.is_causal or transfer.positions.start <= chunk.start):
            found.append((inside / r, len(transfer.positions) / r))
    return found


def _heads_work(settings: PlanSettings, shards: Shards) -> RankWork:
    """A rank with the whole sequence for its share of heads."""
    call = _sharded_call(settings, shards)
    forward, backward = (received_bytes(call, shards, backward=x) for x in (False, True))
    share = -(-settings.key_heads // settings.gpus) * (settings.heads // settings.key_heads)
    tile = Tiles(settings.tokens, settings.tokens, settings.is_causal, share * settings.batch)
    most, near = max(forward), (min(settings.machine.gpus_per_node, settings.gpus) - 1) / (settings.gpus - 1)
    return RankWork(
        rank=0, rows=shards.longest, transport="ulysses", own=(tile,), remote=(), received=most,
        received_near=round(most * near), backward_received=max(backward), sent=most, messages=2, message_rows=0,
        crossing=(),
    )  # fmt: skip


def _block_work(settings: PlanSettings) -> RankWork:
    """Equal shares of the blocks, and the traffic that ``explain`` counts."""
    found, ranks = explained(settings, sharded=settings.gpus > 1), settings.gpus
    assert found.blocks is not None
    size, traffic = found.blocks.size, found.sharding
    rows = -(-settings.tokens // ranks)
    lists = max(1.0, settings.tokens / size) * settings.heads * settings.batch  # rows of blocks
    own = Tiles(min(size, settings.tokens), found.pairs / lists / size, False, lists / ranks, listed=True)
    if traffic is None:
        return RankWork(0, rows, None, (own,), (), 0, 0, 0, 0, 0, 0, ())
    most = traffic.bytes // (2 * settings.head_dim * settings.torch_dtype.itemsize)
    return RankWork(
        rank=0, rows=rows, transport=traffic.transport, own=(own,), remote=(), received=traffic.bytes,
        received_near=traffic.bytes if ranks <= settings.machine.gpus_per_node else 0,
        backward_received=traffic.backward_bytes, sent=traffic.bytes, messages=traffic.waits,
        message_rows=-(-most // max(1, traffic.waits)), crossing=(rows,) if most else (),
    )  # fmt: skip
