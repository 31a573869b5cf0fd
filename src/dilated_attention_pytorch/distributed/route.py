"""Routes: the schedules of a call's sequences -> one rank's messages, tick by tick. Plain integers, without torch.

The rows that a rank sends to another are one stream, cut into messages of ``bucket_size`` rows. A message of a round
belongs to a tick that has the same number on every rank, also on those that have no message then. So all ranks go through
their messages in one common order, and none can wait for another in a circle, whatever their shards are.

A sequence of a batch is the whole row of tokens, the valid part of padded samples, or a packed document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dilated_attention_pytorch.distributed.schedule import Schedule, Transfer, make_schedule
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.sequences import spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence of the batch, and where the ranks' rows of it lie in their tensors."""

    samples: slice
    first_row: int  # of the sequence within the row of tokens
    schedule: Schedule
    whole: Shards  # of the row of tokens

    @property
    def batch(self) -> int:
        """Samples that share the sequence."""
        return int(self.samples.stop - self.samples.start)

    def chunk(self, rank: int, number: int) -> tuple[slice, slice]:
        """Samples and rows of one of a rank's chunks."""
        chunks = self.whole.chunks[rank]
        outside = min(max(self.first_row - chunks[number].start, 0), len(chunks[number]))
        start = sum(map(len, chunks[:number])) + outside
        return self.samples, slice(start, start + len(self.schedule.shards.chunks[rank][number]))

    def rows(self, rank: int, positions: range) -> tuple[slice, slice]:
        """Samples and rows of a rank that hold these positions of the sequence."""
        for number, chunk in enumerate(self.schedule.shards.chunks[rank]):
            if positions.start in chunk:
                start, stop = self.first_row + positions.start, self.first_row + positions.stop
                return self.samples, self.whole.rows_of(rank, number, range(start, stop))
        raise AssertionError(f"rank {rank} does not hold {positions}")

    def packing(self, transfer: Transfer) -> Plan:
        """The rows of a transfer as tiles with themselves: their heads, first rows and strides."""
        schedule = self.schedule
        return compile_plan(
            schedule.pattern, schedule.shards.length, schedule.key_heads, is_causal=False,
            queries=transfer.positions, keys=transfer.positions,
        ).of_branch(transfer.branch)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """Rows that travel together; gradients take the way back."""

    source: int
    target: int
    tick: int
    name: str  # for errors
    parts: tuple[tuple[int, Any], ...]  # number of the place, and a transfer (of tiles or of blocks) or a part of one


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank does in a call."""

    rank: int
    places: tuple[Place, ...]
    ticks: tuple[tuple[Message | None, Message | None], ...]  # what is sent and what is received


def cut(transfer: Transfer, rate: int, rows: int) -> tuple[Transfer, Transfer | None]:
    """The first ``rows`` rows of a transfer, and what is left of it.

    ``rows * rate`` consecutive positions of a segment hold exactly that many rows of each head.

    >>> cut(Transfer(source=1, target=0, branch=0, positions=range(10, 30), rows=5), rate=4, rows=2)
    (Transfer(source=1, target=0, branch=0, positions=range(10, 18), rows=2), \
Transfer(source=1, target=0, branch=0, positions=range(18, 30), rows=3))
    """
    if transfer.rows <= rows:
        return transfer, None
    source, target, branch, positions = transfer.source, transfer.target, transfer.branch, transfer.positions
    middle = positions.start + rows * rate
    first, rest = range(positions.start, middle), range(middle, positions.stop)
    return Transfer(source, target, branch, first, rows), Transfer(source, target, branch, rest, transfer.rows - rows)


def _stream(
    parts: list[tuple[int, Transfer]], rates: tuple[int, ...], bucket_size: int
) -> Iterator[tuple[tuple[int, Transfer], ...]]:
    """Transfers to one rank as messages of ``bucket_size`` rows, the last one shorter."""
    message: list[tuple[int, Transfer]] = []
    room = bucket_size
    for number, transfer in parts:
        rest: Transfer | None = transfer
        while rest is not None:
            first, rest = cut(rest, rates[transfer.branch], room)
            message.append((number, first))
            room -= first.rows
            if room == 0:
                yield tuple(message)
                message, room = [], bucket_size
    if message:
        yield tuple(message)


def _ticks_by_round(schedules: list[Schedule], bucket_size: int) -> list[int]:
    """For rounds 1, 2, ...: the most messages that any rank can have to send, the same number on every rank.

    It is a bound, and the number itself where the pieces of a segment are equal: two ranks of a group are at most as far
    apart as its first and last, so the rows of its pieces count in the rounds up to that distance and in as many last ones.
    """
    world = schedules[0].shards.world_size
    far: list[list[tuple[int, int]]] = [[] for _ in range(world)]  # by rank: distance and rows
    for schedule in schedules:
        for group in schedule.active_groups:
            ranks = [piece.rank for piece in group.pieces]
            distance = max(ranks) - min(ranks)
            for piece in group.pieces:
                far[piece.rank].append((distance, piece.rows))
    rows = [0] * world
    for some in {tuple(sorted(one)) for one in far}:  # few differ
        steps = [0] * (world + 1)
        for distance, count in some:
            steps[min(distance, world - 1)] += count
        for t in range(world - 1, 0, -1):
            steps[t - 1] += steps[t]  # now steps[t]: rows that travel as far as t
        for t in range(1, world):
            rows[t] = max(rows[t], steps[min(t, world - t)])
    return [-(-count // bucket_size) for count in rows[1:]]


@lru_cache(maxsize=64)
def make_route(
    pattern: Dilated,
    shards: Shards,
    rank: int,
    batch: int,
    key_heads: int,
    *,
    is_causal: bool,
    lengths: tuple[int, ...] | None = None,
    cu_seqlens: tuple[int, ...] | None = None,
    bucket_size: int,
    branch: int | None = None,
) -> Route:
    """The route of a rank, for one branch alone if it is given.

    16 positions on two ranks, all of which meet: each rank sends 8 rows, 3 at a time.

    >>> shards = Shards.of([8, 8], "contiguous")
    >>> route = make_route(Dilated([16], [1]), shards, 0, 1, 1, is_causal=False, bucket_size=3)
    >>> [(sent.name, [t.positions for _, t in sent.parts]) for sent, _ in route.ticks]
    [('round 1, message 1', [range(0, 3)]), ('round 1, message 2', [range(3, 6)]), ('round 1, message 3', [range(6, 8)])]
    """
    places = []
    for span in spans(batch, shards.length, shards.length, lengths, cu_seqlens):
        rows = range(span.keys.start, span.keys.stop)
        schedule = make_schedule(pattern, shards.within(rows), key_heads, is_causal=is_causal)
        places.append(Place(span.samples, rows.start, schedule if branch is None else schedule.only(branch), shards))
    if not places or shards.world_size == 1:
        return Route(rank, tuple(places), ())
    by_round: dict[int, tuple[list[tuple[int, Transfer]], list[tuple[int, Transfer]]]] = {}
    for number, place in enumerate(places):
        for t, sends, receives in place.schedule.rounds(rank):
            for side, transfers in zip(by_round.setdefault(t, ([], [])), (sends, receives), strict=True):
                side += [(number, transfer) for transfer in transfers]
    ticks: list[tuple[Message | None, Message | None]] = []
    world = shards.world_size
    for t, count in enumerate(_ticks_by_round([place.schedule for place in places], bucket_size), start=1):
        ends = (rank, (rank + t) % world), ((rank - t) % world, rank)
        sides: list[list[Message | None]] = []
        for (source, target), parts in zip(ends, by_round.get(t, ([], [])), strict=True):
            some = list(_stream(parts, pattern.dilation_rates, bucket_size))
            assert len(some) <= count, (t, len(some), count)
            messages = [
                Message(source, target, len(ticks) + s, f"round {t}, message {s + 1}", x) for s, x in enumerate(some)
            ]
            sides.append([*messages, *[None] * (count - len(messages))])
        ticks += zip(*sides, strict=True)
    return Route(rank, tuple(places), tuple(ticks))


def default_bucket_size(shards: Shards, device: str = "cpu") -> int:
    """A sixteenth of the longest shard, at least 512 rows, on a GPU 16,384: smaller tiles cost more than buffers save.

    >>> default_bucket_size(Shards.of([32768] * 8, "contiguous"))
    2048
    """
    least = 16384 if device == "cuda" else 512
    return max(least, -(-max(map(shards.rows, range(shards.world_size))) // 16))
