"""Pieces: the part of a family of tiles that one kernel call computes, as strided views of the tensors.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size, U units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily

# Units are a dimension of a kernel's grid, and some have 16 bits.
_MOST_UNITS = 2**15
# Elements of a partial result, where nothing else limits them: stock kernels may count in 32 bits.
_MOST_ELEMENTS = 2**30


# Of the query rows (B, N) and of the key rows (B, M) of a plan, packed or not: each sees those that are not larger.
Positions = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a family that one kernel call computes, and where its rows lie."""

    family: TileFamily
    plan: Plan
    samples: range  # of the batch
    units: range  # tiles, or samples where the family has one tile, or both where they follow one another evenly
    heads: range  # of the family's key heads, by number
    group: int  # query heads per key head
    members: range  # of each group
    packed: bool = False  # keys lie in a tensor of their own: of each head the rows that it reads, one after the other

    def queries(self, x_bnh: Tensor) -> Tensor:
        """The query rows of a tensor (B, N, H, ...) as a view (U, heads, rows, ...)."""
        heads = self._query_heads
        return self._view(x_bnh, self._first_row(by_keys=False), self.family.q_rows, heads.start, len(heads), heads.step)

    def keys(self, x_bmg: Tensor) -> Tensor:
        """The key rows of a tensor (B, M, G, ...) as a view (U, heads, rows, ...)."""
        if self.packed:
            head, count = self._head(0), len(self.heads)
            heads = slice(head, head + (count - 1) * self._step + 1, self._step)
            samples = slice(self.units.start, self.units.stop)  # a packed family has one tile
            return x_bmg[samples, : self.family.k_rows, heads].transpose(1, 2)
        row = self._first_row(by_keys=True)
        return self._view(x_bmg, row, self.family.k_rows, self._head(0), len(self.heads), self._step)

    def repeated_keys(self, x_bmg: Tensor) -> Tensor:
        """The same, a single key head repeated (stride 0) for the members of its group."""
        view = self.keys(x_bmg)
        return view.expand(-1, len(self.members), *view.shape[2:]) if len(self.heads) == 1 else view

    def positions(self, positions: Positions | None) -> dict[str, Any]:
        """The further argument of a kernel, if rows are masked by position: the positions of its rows."""
        if positions is None:
            return {}
        q, k = (x.unsqueeze(-1).expand(-1, -1, 2) for x in positions)  # any head; two, so that the stride is 0
        return {"positions": (self.queries(q), replace(self, packed=False).repeated_keys(k))}

    def places(self, *, by_keys: bool) -> Iterator[tuple[int, int]]:
        """The head and the first row of a tensor that each head of ``queries`` (or ``repeated_keys``) views.

        Two key heads of which the second starts a row later, each with three query heads: the middle ones.

        >>> from dilated_attention_pytorch.plan import compile_plan
        >>> from dilated_attention_pytorch.patterns import Dilated
        >>> plan = compile_plan(Dilated([8], [2]), 16, 2, is_causal=False)
        >>> piece = Piece(plan.families[0], plan, range(1), range(2), range(2), 3, range(1, 2))
        >>> list(piece.places(by_keys=False)), list(piece.places(by_keys=True))
        ([(1, 0), (4, 1)], [(0, 0), (1, 1)])
        """
        row = self._first_row(by_keys=by_keys)
        for index, query_head in enumerate(self._query_heads):
            yield query_head // self.group if by_keys else query_head, row + index * self._row_step

    def sum_members(self, dkv: Tensor) -> Tensor:
        """Undo the repetition of ``repeated_keys`` for a gradient."""
        return dkv.sum(1, keepdim=True) if len(self.heads) == 1 and len(self.members) > 1 else dkv

    def dropout(self, dropout: Dropout | None, device: torch.device) -> dict[str, Any]:
        """The further argument of a kernel, if there is dropout."""
        if dropout is None:
            return {}
        family = self.family

        def column(values: range, *shape: int) -> Tensor:
            return torch.arange(values.start, values.stop, values.step, device=device).view(shape)

        unit, number = column(self.units, -1, 1, 1, 1), column(self.heads, 1, -1, 1, 1)
        first = self._head(0) * self.group + self.members.start
        head = first + (number - self.heads.start) * self._step * self.group
        if len(self.heads) == 1:
            head = first + column(range(len(self.members)), 1, -1, 1, 1)
        sample = self.samples.start + unit // family.tiles
        shift = unit % family.tiles * family.tile_step + number * family.head_row_step

        def factors(rows: slice, keys: slice) -> Tensor:
            i = column(range(rows.start, rows.stop), 1, 1, -1, 1) * family.row_stride + family.q_start + shift
            j = column(range(keys.start, keys.stop), 1, 1, 1, -1) * family.row_stride + family.k_start + shift
            some: Tensor = dropout.factors(sample, head, family.branch, i, j)
            return some

        return {"factors": factors}

    @property
    def _step(self) -> int:
        return self.family.key_heads.step

    @property
    def _query_heads(self) -> range:
        """One key head serves all members of its group, or several key heads one member of each group."""
        step = 1 if len(self.heads) == 1 else self.group * self._step
        first = self._head(0) * self.group + self.members.start
        return range(first, first + max(len(self.heads), len(self.members)) * step, step)

    @property
    def _row_step(self) -> int:
        """Rows from a head of a view to the next: members of one group read the same rows."""
        return self.family.head_row_step if len(self.heads) > 1 else 0

    def _first_row(self, *, by_keys: bool) -> int:
        family = self.family
        row = family.k_start - self.plan.keys.start if by_keys else family.q_start - self.plan.queries.start
        return row + self.heads.start * family.head_row_step

    def _head(self, index: int) -> int:
        return self.family.key_heads[self.heads[index]]

    def _view(self, x: Tensor, row: int, rows: int, head: int, heads: int, head_step: int) -> Tensor:
        family = self.family
        stride_b, stride_n, stride_h, *rest = x.stride()
        unit_stride = stride_b if family.tiles == 1 else family.tile_step * stride_n
        start = self.samples.start * stride_b + self.units.start * unit_stride + row * stride_n + head * stride_h
        return x.as_strided(
            (len(self.units), heads, rows, *x.shape[3:]),
            (unit_stride, head_step * stride_h + self._row_step * stride_n, family.row_stride * stride_n, *rest),
            x.storage_offset() + start,
        )


def _split(whole: range, size: int) -> Iterator[range]:
    return (whole[start : start + size] for start in range(0, len(whole), size))


def shared_rows(tensors: tuple[Tensor, ...]) -> int | None:
    """The rows of a sample, if all tensors (B, N, ...) have as many and their samples follow one another evenly."""
    rows = tensors[0].shape[1]
    return rows if all(x.shape[1] == rows and x.stride(0) == rows * x.stride(1) for x in tensors) else None


def cut(
    plan: Plan, batch: int, group: int, head_dim: int, limit: int, rows: int | None, packed: bool = False
) -> Iterator[Piece]:
    """Cut the families of a plan into kernel calls with partial results of at most ``limit`` elements where possible.

    Tiles of several samples share a call if they are evenly spaced: ``rows`` is that of ``shared_rows``.
    """
    for family in plan.families:
        even = rows == family.tiles * family.tile_step
        if family.tiles == 1:
            runs = [(range(batch), range(batch))]
        elif batch == 1 or even:
            runs = [(range(batch), range(batch * family.tiles))]
        else:
            runs = [(range(b, b + 1), range(family.tiles)) for b in range(batch)]
        heads = range(len(family.key_heads))
        # A call takes the same number of query and key heads: one key head with its group, or one member of each group.
        calls = [(heads, range(j, j + 1)) for j in range(group)]
        if len(heads) == 1:
            calls = [(heads, range(group))]
        budget = max(1, limit // (family.q_rows * head_dim))  # in tiles of one query head
        for samples, units in runs:
            for call_heads, members in calls:
                for some_heads in _split(call_heads, min(len(call_heads), budget)):
                    most_units = min(_MOST_UNITS, max(1, budget // (len(some_heads) * len(members))))
                    for some_units in _split(units, most_units):
                        yield Piece(family, plan, samples, some_units, some_heads, group, members, packed)


def packed_views(plan: Plan, x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the key rows that a plan's families read, in place and packed, family by family: to copy either way.

    The plan is that of the rows with themselves, not causal, of one branch, within one segment.
    """
    for family in plan.families:
        heads, samples = range(len(family.key_heads)), range(x.shape[0])
        apart = Piece(family, plan, samples, samples, heads, 1, range(1))
        together = Piece(family, plan, samples, samples, heads, 1, range(1), packed=True)
        yield apart.keys(x), together.keys(packed)


@dataclass(frozen=True, slots=True)
class Cut:
    """A problem as few and large kernel calls, where partial results may be as large as the output."""

    problem: Problem
    head_dim: int
    rows: int | None  # of a sample: ``shared_rows`` of all tensors

    def pieces(self) -> tuple[tuple[Span, Piece], ...]:
        """Every piece with the sequence whose rows it counts."""
        return _pieces(self)


@lru_cache(maxsize=256)
def _pieces(cut_problem: Cut) -> tuple[tuple[Span, Piece], ...]:
    problem, found = cut_problem.problem, []
    for span, plan in problem.plans():
        batch = span.samples.stop - span.samples.start
        # Only a sequence of all rows has samples that follow one another.
        rows = cut_problem.rows if len(plan.queries) == len(plan.keys) == cut_problem.rows else None
        group = problem.heads // problem.key_heads
        some = cut(plan, batch, group, cut_problem.head_dim, _MOST_ELEMENTS, rows)
        found += [(span, piece) for piece in some]
    return tuple(found)
