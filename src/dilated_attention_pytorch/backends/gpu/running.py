"""Running sums: results to which the tiles of several calls are added, one call after the other.

The queries of a rank meet the keys of other ranks message by message. Each call computes partial results of its tiles. A
further launch merges them into the results so far, or adds them to the gradients so far. It reads and writes only the rows
of the tiles, so that a call on a few rows of a long sequence is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily


@dataclass(frozen=True, slots=True)
class RunningTiles:
    """Tiles of one sample and one branch within one segment: full rectangles, at most one for each key head.

    The starts of families are rows of the tensors. ``packed`` keys have the rows that a head reads one after the other. All
    heads of a family begin at row ``k_start`` then.
    """

    sample: int
    families: tuple[TileFamily, ...]
    packed: bool

    def extent(self, by_keys: bool) -> range:
        """The rows of the query tensor, or of the key tensor, between the first and the last of the tiles."""
        starts, stops = [], []
        for f in self.families:
            start, rows = (f.k_start, f.k_rows) if by_keys else (f.q_start, f.q_rows)
            stride, head_step = (1, 0) if by_keys and self.packed else (f.row_stride, f.head_row_step)
            last_head = start + (len(f.key_heads) - 1) * head_step
            starts.append(min(start, last_head))
            stops.append(max(start, last_head) + (rows - 1) * stride + 1)
        return range(min(starts), max(stops))

    def most_rows(self, by_keys: bool) -> int:
        """The most query rows, or key rows, of a tile."""
        return max(f.k_rows if by_keys else f.q_rows for f in self.families)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProblem(Problem):
    """Tiles whose results are added to given ones. ``keys`` is 0 if the rows of a key tensor count over all samples."""

    tiles: tuple[RunningTiles, ...]

    @staticmethod
    def of(problem: Problem, tiles: Iterable[RunningTiles], keys: int) -> RunningProblem:
        """Tiles between the query rows of a problem and key tensors of so many rows."""
        sizes = problem.batch, problem.queries, keys, problem.heads, problem.key_heads
        return RunningProblem(problem.pattern, problem.is_causal, *sizes, tiles=tuple(tiles))

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The tiles as plans, which count rows of the tensors."""
        rows = slice(0, self.queries), slice(0, self.keys)
        return tuple(
            (Span(slice(x.sample, x.sample + 1), *rows), Plan(x.families, range(self.queries), range(self.keys)))
            for x in self.tiles
        )

    def levels(self, by_keys: bool) -> list[int]:
        """A number for each item of ``tiles``: those with the same number have no row of the result in common."""
        levels: list[dict[int, list[range]]] = []  # by sample: extents
        found = []
        for tiles in self.tiles:
            own = tiles.extent(by_keys)
            numbers = (i for i, level in enumerate(levels) if not _meets(own, level.get(tiles.sample, ())))
            number = next(numbers, len(levels))
            if number == len(levels):
                levels.append({})
            levels[number].setdefault(tiles.sample, []).append(own)
            found.append(number)
        return found


def _meets(own: range, others: Iterable[range]) -> bool:
    return any(own.start < x.stop and x.start < own.stop for x in others)


@dataclass(frozen=True, slots=True)
class BlockSpan(Span):
    """Query rows and key rows that meet by lists. The keys need not be positions of the same sequence."""

    rows: range  # the query rows, counted from the start of their first block
    sample_rows: int  # rows of the key tensor between the keys of two samples, besides its stride

    @property
    def positions(self) -> range:
        """The positions of the query rows."""
        return self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningBlocks(Problem):
    """Lists of blocks between the query rows and the key rows of a span.

    ``running`` results are added to given ones, else they are written. ``running_keys`` says the same of dk and dv.
    ``keys`` is 0 if the rows of a key tensor count over all samples.
    """

    span: BlockSpan = field(hash=False)  # slices have no hash before Python 3.12
    lists: BlockLists  # compared by identity
    running: bool
    running_keys: bool

    @staticmethod
    def of(
        problem: Problem, span: BlockSpan, lists: BlockLists, is_causal: bool, running: bool, running_keys: bool
    ) -> RunningBlocks:
        """Lists between the query rows of a problem and key rows, which are packed unless samples have a distance of 0."""
        rule, keys = BlockRule(lists.block_size, None), 0 if span.sample_rows else problem.keys
        sizes = problem.batch, problem.queries, keys, problem.heads, problem.key_heads
        return RunningBlocks(rule, is_causal, *sizes, span=span, lists=lists, running=running, running_keys=running_keys)

    @property
    def key_rows(self) -> int:
        """The rows of dk and dv that the kernels write or add to."""
        samples: slice = self.span.samples
        return len(range(samples.start, samples.stop)) * self.span.length


def is_running(problem: Problem, *, by_keys: bool = False) -> bool:
    """Whether results are added to given ones: out and dq, or dk and dv."""
    if isinstance(problem, RunningBlocks):
        return problem.running_keys if by_keys else problem.running
    return isinstance(problem, RunningProblem)


def running_tiles(plan: Plan, samples: range, query_row: int, key_row: int, packed_rows: int = 0) -> Iterator[RunningTiles]:
    """The tiles of a plan between disjoint query and key positions, at these first rows of the tensors.

    The keys of the samples are packed, with ``packed_rows`` rows each, or in the rows of their own sample if that is 0.

    >>> from dilated_attention_pytorch.patterns.dilated import Dilated
    >>> from dilated_attention_pytorch.plan.tiles import compile_plan
    >>> plan = compile_plan(Dilated([16], [4]), 16, 1, is_causal=False, queries=range(8), keys=range(8, 16))
    >>> for x in running_tiles(plan, range(2), query_row=0, key_row=0, packed_rows=2):
    ...     print(x.sample, [(f.q_start, f.q_rows, f.k_start, f.k_rows) for f in x.families])
    0 [(0, 2, 0, 2)]
    1 [(0, 2, 2, 2)]
    """
    assert all(f.tiles == 1 and not f.causal and not f.zero_keys for f in plan.families), plan
    for number, sample in enumerate(samples):
        for _, families in groupby(plan.families, key=lambda f: f.branch):
            placed = tuple(
                replace(
                    f,
                    q_start=f.q_start - plan.queries.start + query_row,
                    k_start=key_row + number * packed_rows if packed_rows else f.k_start - plan.keys.start + key_row,
                )
                for f in families
            )
            yield RunningTiles(sample, placed, bool(packed_rows))
