"""Launch tables: the tiles of a problem as rows of integers that a kernel reads, and the layout of partial results.

Tiles are grouped: a group is one branch's rectangles or one branch's triangles, so that within a group every row of the
result belongs to one tile. All groups but the last write *parts*: compact float32 results of the rows they have, no row
twice. A group whose rows another, denser group has as well (rate 4 and rate 2, say) is that group's *child*: the denser one
adds the child's part to its own result before it writes that. The last group, the densest, covers all rows; it adds what
is left and writes the result, once. If no group covers all rows, a kernel without attention adds up what is left. Groups
whose children are done go in one launch: rates 1, 2, 4, 12 are the launches {12}, {4}, {2}, {1}. Segments must begin at
multiples of the denser rate, so that the rows of both keep their rests by it: segments of 16384 begin at many rests by 6,
but at even rows, so a group of rate 6 there is a child of one of rate 2, and has no children itself.

Layout of parts: a group of segment length w and rate r keeps ``capacity`` rows for each head and each of the ``segments``
that hold rows of the result. The row of head ``h`` of a sample ``b`` of a sequence, at position ``i``, is, for offset ``o``
of the head,

    base + ((b * heads + h) * segments + i // w - first_segment) * capacity + (i % w - o) // r - first_number

if ``i % w >= o`` and ``(i % w - o) % r == 0``. ``capacity`` is ``ceil(w / r)`` and ``first_number`` 0, but a single segment
keeps only the row numbers that the result has: decoding one token keeps two rows, not a segment.

Sequences of their own (``lengths``, ``cu_seqlens``) only add rows to the tables: a batch has no more launches for it.

Sequences, samples and heads have nothing to do with one another. So where parts would take much memory, they are computed
one *share* after the other (shares.py), each with launches of its own that write their parts to the same memory. A share
has *pieces* of the batch; one share of all sequences is the rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, count
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.shares import Piece, of_heads, shares_of
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily

# One row of a launch table; kernels read it by these numbers (primitives.py).
COLUMNS = (
    "first_program",  # 0
    "first_sample",
    "tiles",
    "tile_step",
    "heads",
    "first_head",  # 5
    "head_step",
    "head_row_step",
    "q_start",  # rows of the tensors, not positions
    "q_rows",
    "k_start",  # 10
    "k_rows",
    "row_stride",
    "causal",
    "zero_keys",
    "branch",  # 15
    "piece",
    "to_position",  # of a row of the result: its position in its sequence, less its row in the tensor
    "part_base",
    "segments",
    "capacity",  # 20
    "own_segment",  # the first tile's, counted from the layout's first
    "own_number",  # the first row's, counted from the layout's first
    "first_child",  # groups whose parts are added to this one's result
    "children",
)


# Programs that only add up parts take this many rows.
SUM_ROWS = 64
# Numbers that a share should have in a buffer of parts at most, 1 GiB: enough for its launches to be long.
PART_NUMBERS = 2**28
# One entry of the layout of parts.
LAYOUT = ("base", "segments", "capacity", "w", "r", "first_segment", "first_number", "w_inverse", "r_inverse")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the tiles it computes, by family."""

    table: Tensor  # (families, COLUMNS) int64
    programs: int
    attends: bool  # else it only adds up parts, for whole sequences
    final: bool  # it writes the result, else parts
    children: int  # the most parts that are added to a result; 0 if none are, else every family has some
    begins_share: bool  # it overwrites what the launch before may read


_T = TypeVar("_T")
_MOST_KEPT = 256  # a scale that changes with every call makes new calls with every call


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The launches of one kernel on one device, for results by query row or by key row."""

    problem: Problem
    tables: Tensor  # the memory of all tables
    launches: tuple[Launch, ...]
    groups: int  # that write parts
    layout: Tensor  # (pieces, groups, LAYOUT) int64
    offsets: Tensor  # (groups, key heads) int64
    part_rows: int
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


# Families of a branch and kind, by sequence.
_Group = dict[int, list[TileFamily]]


def _groups(problem: Problem) -> list[_Group]:
    """Sparse branches first."""
    grouped: dict[tuple[int, int, bool], _Group] = defaultdict(lambda: defaultdict(list))
    for sequence, (_, plan) in enumerate(problem.plans()):
        for family in plan.families:
            grouped[-family.row_stride, family.branch, family.causal][sequence].append(family)
    return [grouped[key] for key in sorted(grouped)]


def _example(group: _Group) -> TileFamily:
    """One of a group's families, which have branch and rate in common."""
    return next(iter(group.values()))[0]


def _group_layout(rows: range, w: int, r: int) -> tuple[int, int, int, int, int, int]:
    """Segments, capacity, w, r, first segment and first row number of a group's parts for these positions.

    >>> _group_layout(range(100), 16, 4), _group_layout(range(99, 100), 16, 4)
    ((7, 4, 16, 4, 0, 0), (1, 1, 16, 4, 6, 0))
    """
    first, last = rows.start // w, (rows.stop - 1) // w
    if first < last:
        return last - first + 1, -(-w // r), w, r, first, 0
    # Offsets below r: the row number of a position is its quotient by r, or one less.
    low, high = max(0, rows.start % w // r - 1), (rows.stop - 1) % w // r
    return 1, high - low + 1, w, r, first, low


def inverse(divisor: int) -> int:
    """What kernels divide numbers below 2**31 by (primitives.quotient): a factor, and a shift in the bits above 32.

    >>> factor, shift = inverse(6) % 2**32, inverse(6) >> 32
    >>> 2 * 1000 * factor >> 32 >> shift
    166
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor) | shift << 32


def _covers(problem: Problem, length: int, dense: TileFamily, sparse: TileFamily) -> bool:
    """Whether one branch has every row that a sparser one has, for every head."""
    rate = dense.row_stride
    lengths = [problem.pattern.branches[family.branch][0] for family in (dense, sparse)]
    if sparse.row_stride % rate or any(w % rate and w < length for w in lengths):
        return False
    # Segments of both begin at multiples of the rate: a head's rows have the rest of its offset in all of them.
    offsets = [
        [problem.pattern.offset(g, problem.key_heads, family.row_stride) for g in range(problem.key_heads)]
        for family in (dense, sparse)
    ]
    return all(s % rate == d for d, s in zip(*offsets, strict=True))


def _tree(problem: Problem, groups: list[_Group], root: int, square: bool) -> list[list[int]]:
    """The children of each group and, last, of the root, by their numbers: sparse groups have small numbers.

    Rates 12, 4, 2 before a root of rate 1: 12 is the child of 4, 4 is that of 2, and 2 is that of the root.
    """
    length = max((plan.keys.stop for _, plan in problem.plans()), default=0)
    children: list[list[int]] = [[] for _ in range(root + 1)]
    for child in range(root):
        # A part of a result may lack rows: then every group is added up at the end.
        denser = range(child + 1, root) if square else range(0)
        parents = (p for p in denser if _covers(problem, length, _example(groups[p]), _example(groups[child])))
        children[next(parents, root)].append(child)
    return children


# What captured graphs read when they are replayed, as long as the process lives.
_CAPTURED: list[object] = []


def keep_for_device(owner: object, tensors: Iterable[Tensor]) -> None:
    """Note that the current stream reads cached ``tensors`` of ``owner``, those of them that are on a GPU, and one GPU."""
    # What an adaptive pattern chooses is not kept: its tables have only the shape of it.
    tensors = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    if not tensors:
        return
    # Tables may leave the cache while the GPU still reads them, on another stream than they were made on.
    stream = torch.cuda.current_stream(tensors[0].device)
    for tensor in tensors:
        tensor.record_stream(stream)
    if torch.cuda.is_current_stream_capturing() and not any(owner is captured for captured in _CAPTURED):
        _CAPTURED.append(owner)


def work(
    problem: Problem, *, block: int, by_keys: bool, head_dim: int, device: torch.device, apart: bool = False
) -> Work:  # fmt: skip
    """The launches for programs that take ``block`` query rows of a query head, or key rows of a key head.

    ``apart``: one group in each launch, so that no two tiles of a launch have the same row of the other side either.
    """
    most_rows = max(1, PART_NUMBERS // head_dim)
    todo = _work(problem, block=block, by_keys=by_keys, most_rows=most_rows, device=device, apart=apart)
    keep_for_device(todo, (todo.tables,))
    return todo


def _on_device(tables: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Tables of int64 as views of one memory: one copy brings them all, one note keeps them all."""
    # Each begins at a multiple of 16 bytes, so that kernels are compiled once.
    starts = list(accumulate((x.numel() + x.numel() % 2 for x in tables), initial=0))
    memory = torch.zeros(starts[-1], dtype=torch.int64)
    for start, x in zip(starts, tables, strict=False):
        memory[start : start + x.numel()] = x.flatten()
    memory = memory.to(device)
    return memory, [memory[start : start + x.numel()].view(x.shape) for start, x in zip(starts, tables, strict=False)]


# Tables of long batches of documents take megabytes on the device, and most training steps bring new ones.
@lru_cache(maxsize=48)
def _work(
    problem: Problem, *, block: int, by_keys: bool, most_rows: int, device: torch.device, apart: bool
) -> Work:  # fmt: skip
    plans = problem.plans()
    square = all(len(plan.queries) == len(plan.keys) for _, plan in plans)
    groups = _groups(problem)
    attends = bool(groups) and _example(groups[-1]).row_stride == 1 and (square or not by_keys)
    root = len(groups) - attends
    tree = _tree(problem, groups, root, square)
    # The children of a group follow one another in the layout of parts.
    order = [child for siblings in reversed(tree) for child in siblings]
    place = {group: i for i, group in enumerate(order)}
    level = [0] * (root + 1)
    for group, siblings in enumerate(tree):
        level[group] = 1 + max((level[child] for child in siblings), default=-1)
    by_level = [[g for g in range(root) if level[g] == some] for some in range(level[root])]
    if apart:
        by_level = [[g] for level_groups in by_level for g in level_groups]
    group_size = 1 if by_keys else problem.heads // problem.key_heads

    def part_layout(plan: Plan, group: int) -> tuple[int, ...]:
        """LAYOUT without its base."""
        w, r = problem.pattern.branches[_example(groups[group]).branch]
        # A rate above the segment's length reads one row of it, like any such rate; kernels count in 32 bits.
        w = min(w, plan.keys.stop)
        r = min(r, w)
        return *_group_layout(plan.keys if by_keys else plan.queries, w, r), inverse(w), inverse(r)

    layouts = [[part_layout(plan, group) for group in order] for _, plan in plans]
    head_rows = [group_size * sum(segments * capacity for segments, capacity, *_ in entries) for entries in layouts]
    samples = [range(span.samples.start, span.samples.stop) for span, _ in plans]
    # Rows that no tile writes are filled once, before all launches: then nothing else may have been there.
    most_rows = most_rows if square else sum(head_rows) * problem.key_heads * problem.batch
    shares = shares_of(samples, head_rows, problem.key_heads, most_rows)

    layout: list[tuple[int, ...]] = []
    part_rows = 0
    for share in shares:
        used = 0
        for piece in share:
            for entry in layouts[piece.sequence]:
                one_head = entry[0] * entry[1]
                # Kernels count all heads: those before a piece's first have no memory.
                layout.append((used - piece.key_heads.start * group_size * one_head, *entry))
                used += len(piece.samples) * len(piece.key_heads) * group_size * one_head
        part_rows = max(part_rows, used)

    def row(f: TileFamily, piece: Piece, number: int, group: int, first_program: int) -> tuple[int, ...]:
        span, plan = plans[piece.sequence]
        q_start = f.q_start - plan.queries.start + span.queries.start
        k_start = f.k_start - plan.keys.start + span.keys.start
        start, tensor_row = (f.k_start, k_start) if by_keys else (f.q_start, q_start)
        part: tuple[int, ...] = (0, 0, 0, 0, 0)
        if group < root:
            base, segments, capacity, w, r, first_segment, first_number, *_ = layout[number * root + place[group]]
            part = (base, segments, capacity, start // w - first_segment, start % w // r - first_number)
        columns = (
            first_program, piece.samples.start, f.tiles, f.tile_step, len(f.key_heads), f.key_heads.start,
            f.key_heads.step, f.head_row_step, q_start, f.q_rows, k_start, f.k_rows,
            min(f.row_stride, plan.keys.stop), int(f.causal),
            f.zero_keys, f.branch, number, start - tensor_row, *part,
            place[tree[group][0]] if tree[group] else 0, len(tree[group]),
        )  # fmt: skip
        assert len(columns) == len(COLUMNS)
        return columns

    def launch(share: list[tuple[int, Piece]], some_groups: list[int], attends: bool) -> Launch:
        rows, programs = [], 0
        for group in some_groups:
            for number, piece in share:
                whole = [] if attends else [_whole(plans[piece.sequence][1], problem.key_heads)]
                for family in groups[group].get(piece.sequence, ()) if attends else whole:
                    f = of_heads(family, piece.key_heads)
                    if f.key_heads:
                        rows.append(row(f, piece, number, group, programs))
                        blocks = -(-(f.k_rows if by_keys else f.q_rows) // (block if attends else SUM_ROWS))
                        programs += blocks * group_size * len(f.key_heads) * f.tiles * len(piece.samples)
        children = [len(tree[group]) for group in some_groups]
        assert all(children) or not any(children), "the groups of a launch are of one level: with children, or without"
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, len(COLUMNS))
        return Launch(table, programs, attends, some_groups == [root], max(children, default=0), False)

    launches: list[Launch] = []
    numbers = count()
    for share in shares:
        numbered = [(next(numbers), piece) for piece in share]
        every = [*(launch(numbered, some_groups, True) for some_groups in by_level), launch(numbered, [root], attends)]
        own = [one for one in every if one.programs]
        launches += [replace(one, begins_share=i == 0) for i, one in enumerate(own)]
    longest = max((plan.keys.stop for _, plan in plans), default=0)
    offsets = [
        [
            min(problem.pattern.offset(g, problem.key_heads, _example(groups[group]).row_stride), longest)
            for g in range(problem.key_heads)
        ]
        for group in order
    ]
    memory, (layout_table, offset_table, *tables) = _on_device(
        [
            torch.tensor(layout, dtype=torch.int64).reshape(-1, len(LAYOUT)),
            torch.tensor(offsets, dtype=torch.int64),
            *(one.table for one in launches),
        ],
        device,
    )
    return Work(
        problem=problem,
        tables=memory,
        launches=tuple(replace(one, table=table) for one, table in zip(launches, tables, strict=True)),
        groups=root,
        layout=layout_table,
        offsets=offset_table,
        part_rows=part_rows,
        complete=square,
        covered=problem.lengths is None and bool(plans),
    )


def _whole(plan: Plan, key_heads: int) -> TileFamily:
    """All rows of a sequence as one tile, for adding up parts."""
    return TileFamily(
        branch=0,
        key_heads=range(key_heads),
        head_row_step=0,
        q_start=plan.queries.start,
        q_rows=len(plan.queries),
        k_start=plan.keys.start,
        k_rows=len(plan.keys),
        row_stride=1,
        tile_step=len(plan.keys),
        tiles=1,
        causal=False,
        zero_keys=0,
    )
