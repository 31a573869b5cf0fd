"""Which positions of a sequence each rank holds. Plain integers, without torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from operator import itemgetter
from typing import Any, TypeVar

from dilated_attention_pytorch.integers import as_integer

LAYOUTS = ("contiguous", "zigzag")
_Value = TypeVar("_Value")


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
    # The chunks that are not empty, by position: start, stop, rank, and number of the chunk within the rank.
    held: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False, compare=False)
    _known: dict[str, Any] = field(init=False, repr=False, compare=False)  # computed once, when asked for

    def __post_init__(self) -> None:
        held = [
            (chunk.start, chunk.stop, rank, number)
            for rank, chunks in enumerate(self.chunks)
            for number, chunk in enumerate(chunks)
            if chunk
        ]
        held.sort()
        stop = 0  # of the chunks so far, in the order of positions
        for start, end, rank, number in held:
            if start != stop or self.chunks[rank][number].step != 1:
                raise ValueError(
                    "the chunks of all ranks hold every position from 0 once, in ranges of step 1: got "
                    f"{self.chunks[rank][number]} where position {stop} should follow; "
                    "Shards.of([3, 5], 'contiguous') makes them from lengths"
                )
            stop = end
        object.__setattr__(self, "length", stop)
        object.__setattr__(self, "held", tuple(held))
        object.__setattr__(self, "_known", {})

    def __hash__(self) -> int:
        return self._once("hash", lambda: hash(self.chunks))

    def _once(self, name: str, compute: Callable[[], _Value]) -> _Value:
        """A value that takes the time of all ranks. A call asks for it several times."""
        if name not in self._known:
            self._known[name] = compute()
        value: _Value = self._known[name]
        return value

    @property
    def identity(self) -> str:
        """The same text for equal shards in every process: all chunks of a few ranks, else a hash of them."""

        def compute() -> str:
            whole = repr(self)
            few = len(self.chunks) <= 8
            return (
                whole if few else f"{self.world_size} ranks, {self.length} positions, {sha256(whole.encode()).hexdigest()}"
            )

        return self._once("identity", compute)

    @staticmethod
    def of(lengths: Sequence[int], layout: str) -> Shards:
        """Shards of these lengths, one per rank."""
        check_layout(layout)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"shards need at least one rank and no negative length, got {list(lengths)}")
        return _shards(tuple(lengths), layout)

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
        return self._once("longest", lambda: max(map(self.rows, range(self.world_size))))

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

    def _holding(self, rows: range) -> tuple[tuple[int, int, int, int], ...]:
        """The chunks of ``held`` with any of these rows."""
        first = bisect_right(self.held, rows.start, key=itemgetter(0)) - 1
        return self.held[max(0, first) : bisect_left(self.held, rows.stop, key=itemgetter(0))] if rows else ()

    def holders(self, rows: range) -> set[int]:
        """The ranks that hold any of these rows.

        >>> Shards.of([4, 4], "zigzag").holders(range(1, 3))
        {0, 1}
        """
        return {rank for _, _, rank, _ in self._holding(rows)}

    def within(self, rows: range) -> Shards:
        """The shards of a range of rows, counted from its start: a document of a packed batch.

        >>> Shards.of([3, 5], "contiguous").within(range(2, 6)).chunks
        ((range(0, 1),), (range(1, 4),))
        """
        chunks = list(self._once("empty", lambda: tuple((range(0),) * len(own) for own in self.chunks)))
        held = []
        for start, stop, rank, number in self._holding(rows):
            start, stop = max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start
            held.append((start, stop, rank, number))
            own = chunks[rank]
            chunks[rank] = (*own[:number], range(start, stop), *own[number + 1 :])
        # Chunks of valid shards are valid: the check would take time for every rank.
        within = object.__new__(Shards)
        values = {"chunks": tuple(chunks), "length": len(rows), "held": tuple(held), "_known": {}}
        for name, x in values.items():
            object.__setattr__(within, name, x)
        return within


@lru_cache(maxsize=8)  # shards of 4,096 ranks take about 2 MB
def _shards(lengths: tuple[int, ...], layout: str) -> Shards:
    if layout == "contiguous":
        ends = list(accumulate(lengths))
        return Shards(tuple((range(end - n, end),) for n, end in zip(lengths, ends, strict=True)))
    sizes = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
    ends = list(accumulate(sizes))
    halves = [range(end - n, end) for n, end in zip(sizes, ends, strict=True)]
    return Shards(tuple((halves[p], halves[-1 - p]) for p in range(len(lengths))))
