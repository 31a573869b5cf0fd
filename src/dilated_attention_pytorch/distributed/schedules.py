"""Schedules: pattern and shards -> what every rank needs from the others. Plain integers, no torch.

Dilated patterns: a segment that one rank holds sends nothing. Of a segment that several ranks hold, each rank needs the
rows of the others that the heads of the branch read: ``1 / r`` of them, and only the earlier ones if causal. A schedule
stores nothing but the shards. The transfers of one rank are made from it on demand, in a time that does not depend on ranks
with which it shares no segment.

Block lists: a rank reads the key blocks that the lists of its query blocks name. If several ranks hold a block, each sends
its rows of it. If causal, a chunk of queries reads no later position than its own last one.

In round ``t``, every rank sends to the rank ``t`` after it and receives from the rank ``t`` before it. All ranks therefore
have the same order of messages, whatever their shards are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from operator import itemgetter

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards

Ranges = tuple[range, ...]  # ascending, disjoint and not adjacent; none is empty


def joined(ranges: Iterable[range]) -> Ranges:
    """The union of ranges.

    >>> joined([range(8, 12), range(0, 4), range(2, 6), range(6, 6), range(12, 13)])
    (range(0, 6), range(8, 13))
    """
    found: list[range] = []
    for x in sorted((x for x in ranges if x), key=lambda x: x.start):
        if found and x.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, x.stop))
        else:
            found.append(x)
    return tuple(found)


def overlap(ranges: Ranges, within: range) -> Ranges:
    """The intersection of ranges with one range.

    >>> overlap((range(0, 6), range(8, 13)), range(4, 10))
    (range(4, 6), range(8, 10))
    """
    found = []
    for index in range(max(0, bisect_right(ranges, within.start, key=lambda x: x.start) - 1), len(ranges)):
        x = ranges[index]
        if x.start >= within.stop:
            break
        found.append(range(max(x.start, within.start), min(x.stop, within.stop)))
    return tuple(x for x in found if x)


def blocks_of(positions: range, block_size: int) -> range:
    """The blocks with these positions."""
    return range(positions.start // block_size, -(-positions.stop // block_size)) if positions else range(0)


def positions_read(
    chunks: Sequence[range], named: Sequence[Ranges], block_size: int, length: int, *, is_causal: bool
) -> Ranges:
    """The positions that the query chunks of a rank read, given the key blocks that each chunk names.

    Blocks of 4 positions and a sequence of 7; the queries 0 to 5 name the blocks 0 and 1:

    >>> positions_read([range(0, 6)], [(range(0, 2),)], 4, 7, is_causal=False)
    (range(0, 7),)
    >>> positions_read([range(0, 6)], [(range(0, 2),)], 4, 7, is_causal=True)
    (range(0, 6),)
    """
    return joined(
        range(run.start * block_size, min(run.stop * block_size, chunk.stop if is_causal else length))
        for chunk, runs in zip(chunks, named, strict=True)
        for run in runs
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a segment: consecutive positions."""

    rank: int
    positions: range
    rows: int  # the most rows that one head reads of them, which is the size of a message
    heads: int  # the key heads that read any of them, as bits: all heads, unless there are fewer positions than the rate


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A segment of a branch that several ranks hold, in the order of positions."""

    branch: int
    holdings: tuple[Holding, ...]

    def needed(self, own: list[Holding], other: Holding, is_causal: bool) -> bool:
        """Whether a head of a rank with the holdings ``own`` sees keys of another rank's holding."""
        starts = (mine.positions.start for mine in own if mine.heads & other.heads)
        return any(not is_causal or other.positions.start <= start for start in starts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Keys and values of a holding that a rank sends to another; their gradients return."""

    source: int
    target: int
    branch: int
    positions: range
    rows: int

    def split(self, rate: int, rows: int) -> tuple[Transfer, Transfer | None]:
        """The first ``rows`` rows, and the remainder.

        ``rows * rate`` consecutive positions of a segment hold exactly ``rows`` rows of each head.

        >>> Transfer(source=1, target=0, branch=0, positions=range(10, 30), rows=5).split(rate=4, rows=2)
        (Transfer(source=1, target=0, branch=0, positions=range(10, 18), rows=2), \
Transfer(source=1, target=0, branch=0, positions=range(18, 30), rows=3))
        """
        if self.rows <= rows:
            return self, None
        first, remainder = self.positions[: rows * rate], self.positions[rows * rate :]
        return replace(self, positions=first, rows=rows), replace(self, positions=remainder, rows=self.rows - rows)


@dataclass(frozen=True, slots=True)
class DilatedSchedule:
    """What a rank of a sequence needs from the others. ``branch`` selects one of the pattern's branches if not None.

    16 positions on two ranks, with segments of 4 at rate 1 and segments of 16 at rate 4. Only the second branch crosses
    ranks, and each rank receives the 2 rows per head that the other holds of it.

    >>> shards = Shards.of([8, 8], "contiguous")
    >>> schedule = DilatedSchedule(Dilated([4, 16], [1, 4]), shards, key_heads=4, is_causal=False)
    >>> list(schedule.receives(0))
    [Transfer(source=1, target=0, branch=1, positions=range(8, 16), rows=2)]
    >>> schedule.received_rows(0)
    2
    """

    pattern: Dilated
    shards: Shards
    key_heads: int
    is_causal: bool
    branch: int | None = None

    def __post_init__(self) -> None:
        self.pattern.check_key_heads(self.key_heads)

    def of_branch(self, branch: int | None) -> DilatedSchedule:
        """The same schedule for one branch; for all of them if it is None."""
        return replace(self, branch=branch)

    def own_plans(self, rank: int) -> Iterator[Plan]:
        """The tiles of a rank's own queries and keys, for every pair of its chunks."""
        return self._plans(rank, self.shards.chunks[rank], self.branch)

    def plans(self, transfer: Transfer) -> Iterator[Plan]:
        """The tiles of a transfer at its target, for every chunk of queries there."""
        return self._plans(transfer.target, (transfer.positions,), transfer.branch)

    def _plans(self, rank: int, keys: tuple[range, ...], branch: int | None) -> Iterator[Plan]:
        sizes = self.shards.length, self.key_heads
        for queries, at in product(self.shards.chunks[rank], keys):
            if queries and at:
                plan = compile_plan(self.pattern, *sizes, is_causal=self.is_causal, queries=queries, keys=at)
                plan = plan if branch is None else plan.of_branch(branch)
                if plan.families:
                    yield plan

    def segments(self, rank: int) -> Iterator[SharedSegment]:
        """The segments that a rank holds together with others, by branch and position.

        Inside a chunk, segments belong to one rank: only the first and the last segment of a chunk may be shared.
        """
        held, length = self.shards.held, self.shards.length
        for branch, (w, r) in enumerate(self.pattern.branches):
            if self.branch not in (None, branch):
                continue
            heads_of: dict[int, int] = {}  # by offset: the key heads, as bits
            for g in range(self.key_heads):
                offset = self.pattern.offset(g, self.key_heads, r)
                heads_of[offset] = heads_of.get(offset, 0) | 1 << g
            chunks = [chunk for chunk in self.shards.chunks[rank] if chunk]
            for number in sorted({x // w for chunk in chunks for x in (chunk.start, chunk.stop - 1)}):
                start, stop = number * w, min((number + 1) * w, length)
                first = bisect_right(held, start, key=itemgetter(0)) - 1
                inside = held[first : bisect_left(held, stop, key=itemgetter(0))]
                if any(other != rank for _, _, other, _ in inside):
                    cut = ((other, range(max(a, start), min(b, stop))) for a, b, other, _ in inside)
                    yield SharedSegment(branch, tuple(_holding(*one, start, r, heads_of) for one in cut))

    def of_rank(self, rank: int) -> Iterator[Transfer]:
        """What a rank receives and sends, by segment; within a segment by position, then by target."""
        for segment in self.segments(rank):
            by_rank: dict[int, list[Holding]] = {}
            for holding in segment.holdings:
                by_rank.setdefault(holding.rank, []).append(holding)
            for holding in segment.holdings:
                if holding.rank != rank and segment.needed(by_rank[rank], holding, self.is_causal):
                    yield Transfer(holding.rank, rank, segment.branch, holding.positions, holding.rows)
            for holding in by_rank[rank]:
                for target, own in by_rank.items():
                    if target != rank and segment.needed(own, holding, self.is_causal):
                        yield Transfer(rank, target, segment.branch, holding.positions, holding.rows)

    def receives(self, rank: int) -> Iterator[Transfer]:
        """What a rank needs from others, by segment and position."""
        return (transfer for transfer in self.of_rank(rank) if transfer.target == rank)

    def sends(self, rank: int) -> Iterator[Transfer]:
        """What others need from a rank, by segment, position and target."""
        return (transfer for transfer in self.of_rank(rank) if transfer.source == rank)

    def received_rows(self, rank: int) -> int:
        """The rows per key head and sample that a rank receives in a forward."""
        return sum(transfer.rows for transfer in self.receives(rank))


def _holding(rank: int, positions: range, segment: int, rate: int, heads_of: dict[int, int]) -> Holding:
    """What a rank holds of the segment that starts at ``segment``; ``heads_of`` has key heads as bits, by offset.

    Positions 1 to 3 of a segment at rate 2: the head of offset 0 reads one of them, the head of offset 1 two.

    >>> _holding(5, range(1, 4), 0, 2, {0: 0b01, 1: 0b10})
    Holding(rank=5, positions=range(1, 4), rows=2, heads=3)
    """
    first, (rows, more) = positions.start - segment, divmod(len(positions), rate)
    # Every head reads ``rows`` of them, and some heads read one more.
    heads = 0
    for offset, bits in heads_of.items():
        if (offset - first) % rate < more:
            heads |= bits
    return Holding(rank, positions, rows + (heads > 0), sum(heads_of.values()) if rows else heads)


def default_bucket_size(shards: Shards, device: str = "cpu") -> int:
    """A sixteenth of the longest shard, at least 512 rows, and at least 16,384 on a GPU, where small tiles are slow.

    >>> default_bucket_size(Shards.of([32768] * 8, "contiguous"))
    2048
    """
    return max(16384 if device == "cuda" else 512, -(-shards.longest // 16))


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Rows of one chunk of the source that a rank sends to another; their gradients return."""

    source: int
    target: int
    ranges: Ranges  # positions

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """What every rank needs from every other.

    12 positions on three ranks; the last rank reads the positions 2 to 5 and its own rows:

    >>> schedule = BlockSchedule(Shards.of([4, 4, 4], "contiguous"), ((), (), (range(2, 6), range(8, 12))))
    >>> [(x.source, x.ranges) for x in schedule.receives(2)]
    [(0, (range(2, 4),)), (1, (range(4, 6),))]
    >>> schedule.received_rows(2)
    4
    """

    shards: Shards
    read: tuple[Ranges, ...]  # by rank: the positions that it reads

    def transfers(self, source: int, target: int) -> Iterator[BlockTransfer]:
        """What a rank sends to another, by chunk and position; nothing to itself."""
        for chunk in self.shards.chunks[source] if source != target else ():
            ranges = overlap(self.read[target], chunk)
            if ranges:
                yield BlockTransfer(source, target, ranges)

    def receives(self, rank: int) -> Iterator[BlockTransfer]:
        """What a rank needs from others, by source and chunk."""
        held, found = self.shards.held, []
        first = stop = 0  # of the chunks that hold positions read so far
        for run in self.read[rank]:
            first = max(stop, bisect_right(held, run.start, key=itemgetter(0)) - 1)
            stop = max(stop, bisect_left(held, run.stop, key=itemgetter(0)))
            found += [(source, number, range(a, b)) for a, b, source, number in held[first:stop] if source != rank]
        for source, _, chunk in sorted(found, key=itemgetter(0, 1)):
            yield BlockTransfer(source, rank, overlap(self.read[rank], chunk))

    def sends(self, rank: int) -> Iterator[BlockTransfer]:
        """What others need from a rank, by target and chunk."""
        readers = (target for target, ranges in enumerate(self.read) if ranges)
        return (x for target in readers for x in self.transfers(rank, target))

    @property
    def reach(self) -> int:
        """The largest distance between ranks, one of which reads rows of the other."""
        held, reach = self.shards.held, 0
        for rank, ranges in enumerate(self.read):
            for run in ranges:
                first = bisect_right(held, run.start, key=itemgetter(0)) - 1
                stop = bisect_left(held, run.stop, key=itemgetter(0))
                reach = max(reach, *(abs(source - rank) for _, _, source, _ in held[first:stop]))
        return reach

    def of_rank(self, rank: int) -> Iterator[BlockTransfer]:
        """What a rank receives and sends."""
        return chain(self.receives(rank), self.sends(rank))

    def received_rows(self, rank: int) -> int:
        """The rows per key head and sample that a rank receives in a forward."""
        own = sum(len(x) for chunk in self.shards.chunks[rank] for x in overlap(self.read[rank], chunk))
        return sum(map(len, self.read[rank])) - own
