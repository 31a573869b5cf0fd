"""Launch plans: the tiles of a problem as tables of integers that kernels read, and the layout of partial results.

The tiles of a problem are bundles (bundles.py), and bundles whose children are done share a launch: rates 1, 2, 4 and 12
are the launches {12}, {4}, {2}, {1}. The last launch adds what is left and writes the result, every row once. A partial
result is float32 and has only the rows of its bundle, no row twice.

Layout of partial results: a bundle of segment length w and rate r keeps ``capacity`` rows for each head and each of the
``segments`` that have rows of the result. The row of head ``h`` of sample ``b`` of a sequence, at position ``i``, is, for
offset ``o`` of the head,

    base + ((b * heads + h) * segments + i // w - first_segment) * capacity + (i % w - o) // r - first_number

if ``i % w >= o`` and ``(i % w - o) % r == 0``. ``capacity`` is ``ceil(w / r)`` and ``first_number`` 0. A single segment
keeps only the row numbers that the result has: decoding one token keeps two rows, not a segment.

Sequences of their own (``lengths``, ``starts``, ``cu_seqlens``) add rows to the tables and no launches. If partial results
would take much memory, they are computed one share of the batch after the other (shares.py). Each share has launches of its
own and puts its partial results in the same memory.

The tiles of a ``RunningProblem`` have another layout, without a tree: see ``_RunningBuilder``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, groupby, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.balance import MOST_ITEMS, balanced_order, item_rows
from dilated_attention_pytorch.backends.gpu.bundles import BundleTree
from dilated_attention_pytorch.backends.gpu.running import RunningProblem
from dilated_attention_pytorch.backends.gpu.shares import BatchSlice, of_heads, shares_of
from dilated_attention_pytorch.backends.gpu.tables import FAMILY_COLUMNS, LAYOUT_COLUMNS, keep_for_device
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily

# A program that only adds partial results takes this many rows.
SUM_ROWS = 64
# The most elements of a buffer of partial results that a share should have, 1 GiB: enough for long launches.
PARTIAL_ELEMENTS = 2**28
_T = TypeVar("_T")
_NONE = torch.empty(0, dtype=torch.int64, device="cpu")
_MOST_KEPT = 256  # a scale that changes with every call makes new launches with every call


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the tiles it computes, by family."""

    table: Tensor  # (families, FAMILY_COLUMNS) int64
    programs: int
    attends: bool  # else it only adds partial results, for whole sequences
    final: bool  # it writes the result, else partial results
    children: int  # the most partial results that are added to a result; 0 if none are, else every family has some
    begins_share: bool  # it overwrites what the launch before may read
    running: bool = False  # it adds the partial results of its tiles to what the result holds
    common_rows: int = 0  # divides the rows of all tiles; 1 if some are not consecutive
    order: Tensor = _NONE  # (items,) int64 or empty: the items in the order in which persistent programs take them


@dataclass(frozen=True, slots=True, eq=False)
class LaunchPlan:
    """The launches of one kernel on one device, for results by query row or by key row."""

    problem: Problem
    tables: Tensor  # the memory of all tables
    launches: tuple[Launch, ...]
    bundles: int  # that write partial results
    layout: Tensor  # (slices of the batch, bundles, LAYOUT_COLUMNS) int64
    offsets: Tensor  # (bundles, key heads) int64
    partial_rows: int
    complete: bool  # every row that the layout has is written
    covered: bool  # every row of the result is written
    kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def once(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """``make(self, *arguments)``, made at the first call and kept as long as the tables are."""
        key = (make, *arguments)
        found: _T | None = self.kept.get(key)
        if found is None:
            if len(self.kept) >= _MOST_KEPT:
                self.kept.clear()
            found = self.kept[key] = make(self, *arguments)
        return found


def find_launch_plan(
    problem: Problem, *, block: int, by_keys: bool, head_dim: int, device: torch.device, separate: bool = False,
    persistent: int = 0, own_deltas: bool = False,
) -> LaunchPlan:  # fmt: skip
    """The launches for programs that take ``block`` query rows of a query head, or key rows of a key head.

    ``separate``: each launch has one bundle. Then no two tiles of a launch share a row of the other side either.
    ``persistent``: each of so many programs takes several items; 0 if each item has a program of its own.
    ``own_deltas``: each branch has a delta of its own, (branches, B, H, N).
    """
    most_rows = max(1, PARTIAL_ELEMENTS // head_dim)
    if isinstance(problem, RunningProblem):
        assert not own_deltas, "tiles of messages have the delta of all branches"
        found = _running_plan(problem, block, by_keys, most_rows, device, separate, persistent)
    else:
        found = _launch_plan(problem, block, by_keys, most_rows, device, separate, persistent, own_deltas)
    keep_for_device(found, (found.tables,))
    return found


def partial_rows(problem: Problem, *, by_keys: bool, head_dim: int) -> int:
    """The rows of partial results that a launch plan of this problem has, without its tables."""
    return _Builder(problem, SUM_ROWS, by_keys, max(1, PARTIAL_ELEMENTS // head_dim)).partial_rows


# Tables of long batches of documents take megabytes on the device, and most training steps have new ones.
@lru_cache(maxsize=48)
def _launch_plan(
    problem: Problem, block: int, by_keys: bool, most_rows: int, device: torch.device, separate: bool, persistent: int,
    own_deltas: bool,
) -> LaunchPlan:  # fmt: skip
    return _Builder(problem, block, by_keys, most_rows, own_deltas).plan(device, separate, persistent)


# The tables of a message are small, and a call may have hundreds of messages.
@lru_cache(maxsize=1024)
def _running_plan(
    problem: RunningProblem, block: int, by_keys: bool, most_rows: int, device: torch.device, separate: bool,
    persistent: int,
) -> LaunchPlan:  # fmt: skip
    return _RunningBuilder(problem, block, by_keys, most_rows).plan(device, separate, persistent)


def inverse(divisor: int) -> int:
    """What kernels divide numbers below 2**31 by (primitives.quotient): a factor, and a shift in the bits above 32.

    >>> factor, shift = inverse(6) % 2**32, inverse(6) >> 32
    >>> 2 * 1000 * factor >> 32 >> shift
    166
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor) | shift << 32


def _layout_entry(rows: range, w: int, r: int) -> tuple[int, ...]:
    """LAYOUT_COLUMNS without the base, for a bundle of segment length ``w`` and rate ``r`` and these positions.

    >>> _layout_entry(range(100), 16, 4)[:6], _layout_entry(range(99, 100), 16, 4)[:6]
    ((7, 4, 16, 4, 0, 0), (1, 1, 16, 4, 6, 0))
    """
    first, last = rows.start // w, (rows.stop - 1) // w
    if first < last:
        return last - first + 1, -(-w // r), w, r, first, 0, inverse(w), inverse(r)
    # Offsets are below r: the row number of a position is its quotient by r, or one less.
    low, high = max(0, rows.start % w // r - 1), (rows.stop - 1) % w // r
    return 1, high - low + 1, w, r, first, low, inverse(w), inverse(r)


def _whole(plan: Plan, key_heads: int) -> TileFamily:
    """All rows of a sequence as one tile, for adding partial results."""
    return TileFamily(
        branch=0, key_heads=range(key_heads), head_row_step=0, q_start=plan.queries.start, q_rows=len(plan.queries),
        k_start=plan.keys.start, k_rows=len(plan.keys), row_stride=1, tile_step=len(plan.keys), tiles=1, causal=False,
        zero_keys=0,
    )  # fmt: skip


def _on_device(tables: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Tables of int64 as views of one memory, which is copied and kept as a whole."""
    # Each begins at a multiple of 16 bytes, so that kernels are compiled once.
    starts = list(accumulate((x.numel() + x.numel() % 2 for x in tables), initial=0))
    memory = torch.zeros(starts[-1], dtype=torch.int64, device="cpu")
    for start, x in zip(starts, tables, strict=False):
        memory[start : start + x.numel()] = x.flatten()
    memory = memory.to(device, non_blocking=True)  # pageable memory is staged at once, without waiting for the GPU
    return memory, [memory[start : start + x.numel()].view(x.shape) for start, x in zip(starts, tables, strict=False)]


def _balanced(launches: list[Launch], block: int, by_keys: bool, persistent: int) -> list[Launch]:
    """The launches with the order in which persistent programs take their items."""

    def order(one: Launch) -> Tensor | None:
        if not (persistent and one.attends and persistent < one.programs <= MOST_ITEMS):
            return None
        return balanced_order(item_rows(one.table, one.programs, block, by_keys, persistent), persistent)

    found = [order(one) for one in launches]
    return [one if own is None else replace(one, order=own) for one, own in zip(launches, found, strict=True)]


def _tables(launches: list[Launch]) -> list[Tensor]:
    """All tables of launches, those of one after those of another."""
    return [x for one in launches for x in (one.table, one.order)]


def _with_tables(launches: list[Launch], tables: list[Tensor]) -> tuple[Launch, ...]:
    """The launches with their tables on a device."""
    pairs = zip(tables[::2], tables[1::2], strict=True)
    return tuple(replace(one, table=table, order=order) for one, (table, order) in zip(launches, pairs, strict=True))


class _Builder:
    """Makes the tables of a launch plan."""

    def __init__(
        self, problem: Problem, block: int, by_keys: bool, most_rows: int, own_deltas: bool = False
    ) -> None:  # fmt: skip
        self.problem, self.block, self.by_keys = problem, block, by_keys
        self.delta_rows = problem.batch * problem.heads * problem.queries if own_deltas else 0  # of a branch
        self.plans, self.tree = problem.plans(), BundleTree(problem, by_keys)
        self.heads_per_key = 1 if by_keys else problem.heads_per_key  # of the result
        self.layout_index = {number: i for i, number in enumerate(self.tree.order)}  # of a bundle in the layout
        entries = [[self._entry(plan, bundle) for bundle in self.tree.order] for _, plan in self.plans]
        head_rows = [self.heads_per_key * sum(segments * capacity for segments, capacity, *_ in own) for own in entries]
        samples = [range(span.samples.start, span.samples.stop) for span, _ in self.plans]
        # Rows that no tile writes are filled once, before all launches: then all slices are one share.
        most_rows = most_rows if self.tree.square else sum(head_rows) * problem.key_heads * problem.batch
        self.shares = shares_of(samples, head_rows, problem.key_heads, most_rows)
        self.layout, self.partial_rows = self._layout(entries)

    def _entry(self, plan: Plan, bundle: int) -> tuple[int, ...]:
        w, r = self.tree.branch(bundle)
        # A rate above the length of the segment reads one row of it, like any such rate; kernels count in 32 bits.
        w = min(w, plan.keys.stop)
        return _layout_entry(plan.keys if self.by_keys else plan.queries, w, min(r, w))

    def _layout(self, entries: list[list[tuple[int, ...]]]) -> tuple[list[tuple[int, ...]], int]:
        """The layout by slice and bundle, given the entries of sequences, and the rows of the largest share."""
        layout: list[tuple[int, ...]] = []
        partial_rows = 0
        for share in self.shares:
            used = 0
            for batch_slice in share:
                for entry in entries[batch_slice.sequence]:
                    key_head_rows = self.heads_per_key * entry[0] * entry[1]
                    # Kernels count all heads; those before the first of the slice have no memory.
                    layout.append((used - batch_slice.key_heads.start * key_head_rows, *entry))
                    used += len(batch_slice.samples) * len(batch_slice.key_heads) * key_head_rows
            partial_rows = max(partial_rows, used)
        return layout, partial_rows

    def _row(self, f: TileFamily, batch_slice: BatchSlice, bundle: int) -> tuple[int, ...]:
        """A row of a launch table without its first program."""
        tree, (span, plan) = self.tree, self.plans[batch_slice.sequence]
        q_start = f.q_start - plan.queries.start + span.queries.start
        k_start = f.k_start - plan.keys.start + span.keys.start
        start, tensor_row = (f.k_start, k_start) if self.by_keys else (f.q_start, q_start)
        in_layout: tuple[int, ...] = (0, 0, 0, 0, 0)
        if bundle < tree.root:
            entry = self.layout[batch_slice.number * tree.root + self.layout_index[bundle]]
            base, segments, capacity, w, r, first_segment, first_number, *_ = entry
            in_layout = (base, segments, capacity, start // w - first_segment, start % w // r - first_number)
        children = tree.children[bundle]
        return (
            batch_slice.samples.start, f.tiles, f.tile_step, len(f.key_heads), f.key_heads.start, f.key_heads.step,
            f.head_row_step, q_start, f.q_rows, k_start, f.k_rows, min(f.row_stride, plan.keys.stop), int(f.causal),
            f.zero_keys, f.branch, batch_slice.number, start - tensor_row, *in_layout,
            self.layout_index[children[0]] if children else 0, len(children),
            min(f.row_stride, plan.keys.stop), f.head_row_step, span.padding,
            f.branch * self.delta_rows,
        )  # fmt: skip

    def _launch(self, share: list[BatchSlice], bundles: list[int], attends: bool) -> Launch:
        rows, programs, common_rows = [], 0, 0
        for bundle, batch_slice in product(bundles, share):
            families = [_whole(self.plans[batch_slice.sequence][1], self.problem.key_heads)]
            if attends:
                families = self.tree.bundles[bundle].get(batch_slice.sequence, [])
            for f in (of_heads(family, batch_slice.key_heads) for family in families):
                if f.key_heads:
                    common_rows = math.gcd(common_rows, f.q_rows, f.k_rows) if f.row_stride == 1 else 1
                    rows.append((programs, *self._row(f, batch_slice, bundle)))
                    blocks = -(-(f.k_rows if self.by_keys else f.q_rows) // (self.block if attends else SUM_ROWS))
                    heads = self.heads_per_key * len(f.key_heads)
                    programs += blocks * heads * f.tiles * len(batch_slice.samples)
        children = [len(self.tree.children[bundle]) for bundle in bundles]
        assert all(children) or not any(children), "all bundles of a launch have children, or none has"
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(FAMILY_COLUMNS))
        return Launch(
            table, programs, attends, bundles == [self.tree.root], max(children, default=0), False,
            common_rows=common_rows,
        )  # fmt: skip

    def _launches(self, separate: bool) -> list[Launch]:
        tree, levels = self.tree, self.tree.levels()
        if separate:
            levels = [[bundle] for level in levels for bundle in level]
        launches: list[Launch] = []
        for share in self.shares:
            every = [self._launch(share, level, True) for level in levels]
            every.append(self._launch(share, [tree.root], tree.root_attends))
            own = [one for one in every if one.programs]
            launches += [replace(one, begins_share=i == 0) for i, one in enumerate(own)]
        return launches

    def plan(self, device: torch.device, separate: bool, persistent: int) -> LaunchPlan:
        """The launch plan on a device."""
        launches = _balanced(self._launches(separate), self.block, self.by_keys, persistent)
        layout = torch.tensor(self.layout, dtype=torch.int64, device="cpu").reshape(-1, len(LAYOUT_COLUMNS))
        offsets = torch.tensor(self.tree.offsets(), dtype=torch.int64, device="cpu")
        memory, (layout, offsets, *tables) = _on_device([layout, offsets, *_tables(launches)], device)
        return LaunchPlan(
            problem=self.problem, tables=memory, bundles=self.tree.root, layout=layout, offsets=offsets,
            launches=_with_tables(launches, tables),
            partial_rows=self.partial_rows, complete=self.tree.square,
            covered=self.problem.lengths is None and bool(self.plans),
        )  # fmt: skip


class _RunningBuilder:
    """Makes the tables of a ``RunningProblem``: launches that attend, and behind them launches that add to the result.

    The partial results of an item of ``tiles`` are ``capacity`` rows for each head. All tiles of a share attend in one
    launch, because no two of them write the same partial result. Items that have a row of the result in common are added
    one after the other, in an order that does not depend on the GPU.
    """

    def __init__(self, problem: RunningProblem, block: int, by_keys: bool, most_rows: int) -> None:
        self.problem, self.block, self.by_keys = problem, block, by_keys
        self.heads_per_key = 1 if by_keys else problem.heads_per_key  # of the result
        self.capacity = [tiles.most_rows(by_keys) for tiles in problem.tiles]
        samples = [range(tiles.sample, tiles.sample + 1) for tiles in problem.tiles]
        self.shares = shares_of(samples, [self.heads_per_key * x for x in self.capacity], problem.key_heads, most_rows)
        self.bases: dict[int, int] = {}  # by the number of a slice
        self.partial_rows = 0
        for share in self.shares:
            used = 0
            for batch_slice in share:
                key_head_rows = self.heads_per_key * self.capacity[batch_slice.sequence]
                self.bases[batch_slice.number] = used - batch_slice.key_heads.start * key_head_rows
                used += len(batch_slice.key_heads) * key_head_rows
            self.partial_rows = max(self.partial_rows, used)

    def _launch(self, slices: list[BatchSlice], attends: bool) -> Launch:
        rows, programs = [], 0
        for x in slices:
            tiles = self.problem.tiles[x.sequence]
            for f in tiles.families:
                own = of_heads(f, x.key_heads)
                if not own.key_heads:
                    continue
                k_start, k_stride, k_step = own.k_start, f.row_stride if f.k_rows > 1 else 1, f.head_row_step
                if tiles.packed:
                    k_start, k_stride, k_step = f.k_start, 1, 0
                rows.append((
                    programs, tiles.sample, 1, 0, len(own.key_heads), own.key_heads.start, own.key_heads.step,
                    f.head_row_step, own.q_start, f.q_rows, k_start, f.k_rows, f.row_stride if f.q_rows > 1 else 1, 0, 0,
                    f.branch, x.number, 0, self.bases[x.number], 1, self.capacity[x.sequence], 0, 0, 0, 0,
                    k_stride, k_step, 0, 0,
                ))  # fmt: skip
                blocks = -(-(f.k_rows if self.by_keys else f.q_rows) // (self.block if attends else SUM_ROWS))
                programs += blocks * self.heads_per_key * len(own.key_heads)
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(FAMILY_COLUMNS))
        return Launch(table, programs, attends, not attends, 0, False, running=not attends)

    def _launches(self, separate: bool) -> list[Launch]:
        by_result, by_query = self.problem.levels(self.by_keys), self.problem.levels(by_keys=False)
        launches: list[Launch] = []
        for share in self.shares:
            attending = _by_level(share, by_query) if separate else [share]
            launches += [self._launch(slices, True) for slices in attending]
            launches += [self._launch(slices, False) for slices in _by_level(share, by_result)]
        return launches

    def plan(self, device: torch.device, separate: bool, persistent: int) -> LaunchPlan:
        """The launch plan on a device."""
        launches = _balanced(self._launches(separate), self.block, self.by_keys, persistent)
        none = torch.zeros(1, dtype=torch.int64, device="cpu")
        memory, (layout, *tables) = _on_device([none, *_tables(launches)], device)
        return LaunchPlan(
            problem=self.problem, tables=memory, bundles=0, layout=layout, offsets=layout,
            launches=_with_tables(launches, tables),
            partial_rows=self.partial_rows, complete=True, covered=True,
        )  # fmt: skip


def _by_level(share: list[BatchSlice], levels: list[int]) -> list[list[BatchSlice]]:
    """The slices of a share by the level of their tiles, in the order of levels."""
    ordered = sorted(share, key=lambda x: levels[x.sequence])
    return [list(slices) for _, slices in groupby(ordered, key=lambda x: levels[x.sequence])]
