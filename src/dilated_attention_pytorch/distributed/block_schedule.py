"""Schedules of block lists: the positions that every rank reads -> who sends which rows to whom. Plain integers, no torch.

A rank reads the key blocks that its query blocks name. Of a block that several ranks hold, each sends its part; if causal,
a chunk of queries reads nothing behind itself. A pattern names the blocks (``block_work``), this file does not know why.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.shards import Shards

Ranges = tuple[range, ...]  # ascending, apart from one another, none empty


def joined(ranges: Iterable[range]) -> Ranges:
    """The union of ranges.

    >>> joined([range(8, 12), range(0, 4), range(2, 6), range(6, 6), range(12, 13)])
    (range(0, 6), range(8, 13))
    """
    found: list[range] = []
    for some in sorted((x for x in ranges if x), key=lambda x: x.start):
        if found and some.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, some.stop))
        else:
            found.append(some)
    return tuple(found)


def overlap(ranges: Ranges, part: range) -> Ranges:
    """What lies inside of a part.

    >>> overlap((range(0, 6), range(8, 13)), range(4, 10))
    (range(4, 6), range(8, 10))
    """
    found = []
    for index in range(max(0, bisect_right(ranges, part.start, key=lambda x: x.start) - 1), len(ranges)):
        some = ranges[index]
        if some.start >= part.stop:
            break
        if some.stop > part.start:
            found.append(range(max(some.start, part.start), min(some.stop, part.stop)))
    return tuple(x for x in found if x)


def positions_read(
    chunks: Sequence[range], named: Sequence[Ranges], block_size: int, length: int, *, is_causal: bool
) -> Ranges:
    """The positions that a rank's chunks of queries read, given the key blocks that each names.

    Positions 0 to 5 in blocks of 4; the queries 0 to 5 name the blocks 0 and 1, of a sequence of 7 positions:

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
    """Rows of one of the source's chunks on their way to a rank; gradients take the way back."""

    source: int
    target: int
    chunk: int
    ranges: Ranges  # positions

    @property
    def rows(self) -> int:
        """How many."""
        return sum(map(len, self.ranges))


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """Who needs what from whom. 12 positions on three ranks; the last one reads the block 2 to 5, and its own rows:

    >>> schedule = BlockSchedule(Shards.of([4, 4, 4], "contiguous"), ((), (), (range(2, 6), range(8, 12))))
    >>> [(x.source, x.ranges) for x in schedule.receives(2)]
    [(0, (range(2, 4),)), (1, (range(4, 6),))]
    >>> schedule.bytes(2, key_heads=8, head_dim=64, element_size=2)  # 4 rows x 8 heads x 64 x (key, value) x 2 bytes
    8192
    """

    shards: Shards
    read: tuple[Ranges, ...]  # by rank

    def transfers(self, source: int, target: int) -> Iterator[BlockTransfer]:
        """What a rank sends to another, by chunk and position; nothing to itself."""
        if source == target:
            return
        for number, chunk in enumerate(self.shards.chunks[source]):
            ranges = overlap(self.read[target], chunk) if chunk else ()
            if ranges:
                yield BlockTransfer(source, target, number, ranges)

    def receives(self, rank: int) -> Iterator[BlockTransfer]:
        """What a rank needs from others."""
        return (x for source in range(self.shards.world_size) for x in self.transfers(source, rank))

    def sends(self, rank: int) -> Iterator[BlockTransfer]:
        """What others need from a rank."""
        return (x for target in range(self.shards.world_size) for x in self.transfers(rank, target))

    def rows(self, rank: int) -> int:
        """How many rows a rank receives."""
        own = sum(len(x) for chunk in self.shards.chunks[rank] for x in overlap(self.read[rank], chunk))
        return sum(map(len, self.read[rank])) - own

    def bytes(self, rank: int, *, key_heads: int, head_dim: int, element_size: int, batch: int = 1) -> int:
        """Bytes of keys and values that a rank receives in a forward."""
        return self.rows(rank) * key_heads * head_dim * 2 * element_size * batch
