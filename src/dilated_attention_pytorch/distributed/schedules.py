"""Schedules: pattern and shards -> what every rank needs from the others. Plain integers, no torch.

Dilated patterns: a segment that one rank holds sends nothing. Of a segment that several ranks hold, each rank needs the
rows of the others that the heads of the branch read: ``1 / r`` of them, and only the earlier ones if causal. A schedule
stores once for all ranks which of them share which segments, so that schedules of thousands of ranks stay small. The
transfers of one rank are made from it on demand.

Block lists: a rank reads the key blocks that the lists of its query blocks name. If several ranks hold a block, each sends
its rows of it. If causal, a chunk of queries reads no later position than its own last one.

In round ``t``, every rank sends to the rank ``t`` after it and receives from the rank ``t`` before it. All ranks therefore
have the same order of messages, whatever their shards are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, product

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
    sums: dict[int, tuple[int, ...]] = field(repr=False)  # by heads: rows of the first n holdings with a head in common

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
    """What every rank needs from every other.

    16 positions on two ranks, with segments of 4 at rate 1 and segments of 16 at rate 4. Only the second branch crosses
    ranks, and each rank receives the 2 rows per head that the other holds of it.

    >>> shards = Shards.of([8, 8], "contiguous")
    >>> schedule = make_schedule(Dilated([4, 16], [1, 4]), shards, key_heads=4, is_causal=False)
    >>> list(schedule.receives(0))
    [Transfer(source=1, target=0, branch=1, positions=range(8, 16), rows=2)]
    >>> schedule.received_rows(0)
    2
    """

    pattern: Dilated
    shards: Shards
    key_heads: int
    is_causal: bool
    segments: tuple[SharedSegment, ...]
    segments_of: tuple[tuple[int, ...], ...] = field(repr=False)  # by rank: numbers of segments
    branch: int | None = None  # only this one of the pattern's branches, if not None

    def of_branch(self, branch: int | None) -> DilatedSchedule:
        """The same schedule for one branch; for all of them if it is None."""
        if branch is None:
            return self
        numbers = tuple(tuple(n for n in own if self.segments[n].branch == branch) for own in self.segments_of)
        return replace(self, segments_of=numbers, branch=branch)

    def own_plans(self, rank: int) -> Iterator[Plan]:
        """The tiles of a rank's own queries and keys, for every pair of its chunks."""
        return self._plans(rank, self.shards.chunks[rank], self.branch)

    def plans(self, transfer: Transfer) -> Iterator[Plan]:
        """The tiles of a transfer at its target, for every chunk of queries there."""
        return self._plans(transfer.target, (transfer.positions,), transfer.branch)

    def _plans(self, rank: int, keys: tuple[range, ...], branch: int | None) -> Iterator[Plan]:
        sizes = self.shards.length, self.key_heads
        for queries, at in product(self.shards.chunks[rank], keys):
            plan = compile_plan(self.pattern, *sizes, is_causal=self.is_causal, queries=queries, keys=at)
            plan = plan if branch is None else plan.of_branch(branch)
            if plan.families:
                yield plan

    def _segments_of(self, rank: int) -> Iterator[SharedSegment]:
        return (self.segments[number] for number in self.segments_of[rank])

    def receives(self, rank: int) -> Iterator[Transfer]:
        """What a rank needs from others, by segment and position."""
        for segment in self._segments_of(rank):
            own = [holding for holding in segment.holdings if holding.rank == rank]
            for holding in segment.holdings:
                if holding.rank != rank and segment.needed(own, holding, self.is_causal):
                    yield Transfer(holding.rank, rank, segment.branch, holding.positions, holding.rows)

    def sends(self, rank: int) -> Iterator[Transfer]:
        """What others need from a rank, by segment, position and target."""
        for segment in self._segments_of(rank):
            by_rank: dict[int, list[Holding]] = {}
            for holding in segment.holdings:
                by_rank.setdefault(holding.rank, []).append(holding)
            for holding in by_rank[rank]:
                for target, own in by_rank.items():
                    if target != rank and segment.needed(own, holding, self.is_causal):
                        yield Transfer(rank, target, segment.branch, holding.positions, holding.rows)

    def received_rows(self, rank: int) -> int:
        """The rows per key head and sample that a rank receives in a forward."""
        rows = 0
        for segment in self._segments_of(rank):
            positions = range(segment.holdings[0].positions.start, segment.holdings[-1].positions.stop)
            chunks = (x for chunk in self.shards.chunks[rank] for x in overlap((chunk,), positions))
            numbers = (bisect_right(segment.holdings, x.start, key=lambda x: x.positions.start) - 1 for x in chunks)
            own = {i: segment.holdings[i] for i in numbers if segment.holdings[i].rows}
            heads = {holding.heads for holding in own.values()}
            if len(heads) == 1:  # takes the time of a search, not of a sum over thousands of ranks
                sums = segment.sums[heads.pop()]
                rows += sums[max(own) + 1 if self.is_causal else -1] - sum(holding.rows for holding in own.values())
            elif heads:
                mine, others = list(own.values()), (holding for holding in segment.holdings if holding.rank != rank)
                rows += sum(holding.rows for holding in others if segment.needed(mine, holding, self.is_causal))
        return rows


def _holding(rank: int, positions: range, segment: int, rate: int, offsets: tuple[int, ...]) -> Holding:
    """What a rank holds of the segment that starts at ``segment``.

    Positions 1 to 3 of a segment at rate 2: the head of offset 0 reads one of them, the head of offset 1 two.

    >>> _holding(5, range(1, 4), 0, 2, (0, 1))
    Holding(rank=5, positions=range(1, 4), rows=2, heads=3)
    """
    first, stop = positions.start - segment, positions.stop - segment
    rows = {o: max(0, -(-(stop - o) // rate)) - max(0, -(-(first - o) // rate)) for o in set(offsets)}
    heads = sum(1 << g for g, o in enumerate(offsets) if rows[o])
    return Holding(rank, positions, max(rows.values()), heads)


@lru_cache(maxsize=64)
def make_schedule(pattern: Dilated, shards: Shards, key_heads: int, *, is_causal: bool) -> DilatedSchedule:
    """The schedule of a sequence. Every rank makes the same one."""
    pattern.check_key_heads(key_heads)
    held = sorted((chunk.start, chunk.stop, rank) for rank, chunks in enumerate(shards.chunks) for chunk in chunks if chunk)
    starts = [start for start, _, _ in held]
    segments: list[SharedSegment] = []
    segments_of: list[list[int]] = [[] for _ in range(shards.world_size)]
    for branch, (w, r) in enumerate(pattern.branches):
        offsets = tuple(pattern.offset(g, key_heads, r) for g in range(key_heads))
        # A segment with several holders has the start of a chunk inside.
        for number in sorted({start // w for start in starts if start % w}):
            segment = range(number * w, min((number + 1) * w, shards.length))
            index = bisect_right(starts, segment.start) - 1
            holdings = []
            while index < len(held) and held[index][0] < segment.stop:
                start, stop, rank = held[index]
                positions = range(max(start, segment.start), min(stop, segment.stop))
                holdings.append(_holding(rank, positions, segment.start, r, offsets))
                index += 1
            ranks = {holding.rank for holding in holdings}
            if len(ranks) > 1:
                for rank in ranks:
                    segments_of[rank].append(len(segments))
                sums = {
                    heads: tuple(accumulate((x.rows if x.heads & heads else 0 for x in holdings), initial=0))
                    for heads in {holding.heads for holding in holdings}
                }
                segments.append(SharedSegment(branch, tuple(holdings), sums))
    return DilatedSchedule(pattern, shards, key_heads, is_causal, tuple(segments), tuple(map(tuple, segments_of)))


def messages_by_round(schedules: list[DilatedSchedule], bucket_size: int) -> list[int]:
    """For rounds 1, 2, ...: a bound on the messages of any rank, which is the same number on every rank.

    The bound is exact if the holdings of a segment are equal. Two ranks that share a segment are at most as far from each
    other as its first and last rank. Its rows therefore count in the rounds up to that distance, and in as many last ones.
    """
    world = schedules[0].shards.world_size
    far: list[list[tuple[int, int]]] = [[] for _ in range(world)]  # by rank: distance and rows
    for schedule in schedules:
        for segment in (x for x in schedule.segments if schedule.branch in (None, x.branch)):
            ranks = [holding.rank for holding in segment.holdings]
            distance = max(ranks) - min(ranks)
            for holding in segment.holdings:
                far[holding.rank].append((distance, holding.rows))
    most = [0] * world
    for distances in {tuple(sorted(one)) for one in far}:  # few differ
        reaching = [0] * (world + 1)  # rows that travel as far as t
        for distance, rows in distances:
            reaching[min(distance, world - 1)] += rows
        for t in range(world - 1, 0, -1):
            reaching[t - 1] += reaching[t]
        for t in range(1, world):
            most[t] = max(most[t], reaching[min(t, world - t)])
    return [-(-rows // bucket_size) for rows in most[1:]]


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
        """What a rank needs from others."""
        return (x for source in range(self.shards.world_size) for x in self.transfers(source, rank))

    def sends(self, rank: int) -> Iterator[BlockTransfer]:
        """What others need from a rank."""
        return (x for target in range(self.shards.world_size) for x in self.transfers(rank, target))

    def received_rows(self, rank: int) -> int:
        """The rows per key head and sample that a rank receives in a forward."""
        own = sum(len(x) for chunk in self.shards.chunks[rank] for x in overlap(self.read[rank], chunk))
        return sum(map(len, self.read[rank])) - own
