"""Which positions of a sequence each rank holds. Plain integers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dilated_attention_pytorch.integers import as_integer

LAYOUTS = ("contiguous", "zigzag")


def check_layout(layout: str) -> None:
    """Raise if there is no layout of this name."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")


@dataclass(frozen=True, slots=True)
class Shards:
    """The chunks of every rank. A chunk is a range of positions, possibly empty. A rank's rows are its chunks in order.

    >>> Shards.of([3, 5, 0], "contiguous").chunks
    ((range(0, 3),), (range(3, 8),), (range(8, 8),))

    In the zigzag layout, rank p holds the p-th chunk from the start and the p-th chunk from the end. Every rank then has
    early and late positions, which balances causal attention:

    >>> Shards.of([4, 4], "zigzag").chunks
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    """

    chunks: tuple[tuple[range, ...], ...]
    length: int = field(init=False, repr=False, compare=False)  # positions of the whole sequence

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", sum(map(self.rows, range(self.world_size))))
        stop = 0  # of the chunks so far, in the order of positions
        for chunk in sorted((chunk for chunks in self.chunks for chunk in chunks if chunk), key=lambda chunk: chunk.start):
            if chunk.start != stop or chunk.step != 1:
                raise ValueError(
                    f"the chunks of all ranks hold every position from 0 once, in ranges of step 1: got {chunk} where "
                    f"position {stop} should follow; Shards.of([3, 5], 'contiguous') makes them from lengths"
                )
            stop = chunk.stop

    @staticmethod
    def of(lengths: Sequence[int], layout: str) -> Shards:
        """Shards of these lengths, one per rank."""
        check_layout(layout)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"shards need at least one rank and no negative length, got {list(lengths)}")
        if layout == "contiguous":
            ends = list(accumulate(lengths))
            return Shards(tuple((range(end - n, end),) for n, end in zip(lengths, ends, strict=True)))
        sizes = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
        ends = list(accumulate(sizes))
        halves = [range(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        return Shards(tuple((halves[p], halves[-1 - p]) for p in range(len(lengths))))

    @staticmethod
    def even(length: int, world_size: int, layout: str) -> Shards:
        """Shards of a sequence of this length. Their lengths differ by at most one row, and the longer ones come first."""
        world_size = as_integer("world_size", world_size, 1)
        return Shards.of([length // world_size + (p < length % world_size) for p in range(world_size)], layout)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.chunks)

    @property
    def longest(self) -> int:
        """The rows of the longest shard."""
        return max(map(self.rows, range(self.world_size)))

    def rows(self, rank: int) -> int:
        """The number of rows of a rank."""
        return sum(map(len, self.chunks[rank]))

    def rows_of(self, rank: int, positions: range) -> slice:
        """The rows of a rank's tensors at these positions, which are in one of its chunks.

        >>> Shards.of([4, 4], "zigzag").rows_of(0, range(7, 8))
        slice(3, 4, None)
        """
        first = 0  # row of the chunk
        for chunk in self.chunks[rank]:
            if positions.start in chunk:
                start = first + positions.start - chunk.start
                return slice(start, start + len(positions))
            first += len(chunk)
        raise AssertionError(f"rank {rank} does not hold {positions}")

    def within(self, rows: range) -> Shards:
        """The shards of a range of rows, counted from its start: a document of a packed batch.

        >>> Shards.of([3, 5], "contiguous").within(range(2, 6)).chunks
        ((range(0, 1),), (range(1, 4),))
        """

        def cut(x: int) -> int:
            return min(max(x, rows.start), rows.stop) - rows.start

        return Shards(tuple(tuple(range(cut(c.start), cut(c.stop)) for c in chunks) for chunks in self.chunks))
