"""Schedules of block lists: the positions that every rank reads -> who sends which rows to whom. Plain integers, no torch.

A rank reads the key blocks that the lists of its query blocks name. If several ranks hold a block, each sends its rows of
it. If causal, a chunk of queries reads no later position than its own last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
        if source == target:
            return
        for chunk in self.shards.chunks[source]:
            ranges = overlap(self.read[target], chunk) if chunk else ()
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
