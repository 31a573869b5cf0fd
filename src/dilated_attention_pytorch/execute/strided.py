"""Calls of a stock kernel over families of tiles: strided views of the tensors, never copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.execute.merge import merge_, merge_lse
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily
from dilated_attention_pytorch.values import Inputs

# Units are a dimension of a kernel's grid, and some of these have 16 bits.
_MAX_UNITS = 2**15
# Original positions of query rows (B, N) and of key rows (B, M): a row sees the keys of no larger position.
Positions = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class StridedTiles:
    """The tiles of a plan over tensors that hold its query rows and its key rows.

    ``packed`` keys are in a tensor of their own: of each head only the rows that it reads, one after the other.
    """

    plan: Plan
    packed: bool = False
    dropout: Dropout | None = None  # placed at the first sample and row of the tensors
    positions: Positions | None = None

    def calls(self, inputs: Inputs, others: tuple[Tensor, ...], limit: int) -> Iterable[StridedCall]:
        """Kernel calls with partial results of at most ``limit`` elements where possible.

        ``others`` are the further tensors that the calls view.
        """
        (batch, _, heads, head_dim), key_heads = inputs.query.shape, inputs.key.shape[2]
        # The samples of a batch of one follow one another evenly.
        rows = None if batch == 1 else shared_rows((*inputs, *others, *(self.positions or ())))
        sizes = batch, rows, heads // key_heads, limit // head_dim
        return self.make_calls(*sizes) if self.dropout or self.positions else _calls(self, *sizes)

    def make_calls(self, batch: int, rows: int | None, heads_per_key: int, limit: int) -> Iterator[StridedCall]:
        """The same by sizes: the rows that all tensors have in common, and the most rows of a partial result."""
        for family in self.plan.families:
            budget = max(1, limit // family.q_rows)
            for samples, units in _unit_runs(family, batch, rows):
                yield from self._family_calls(family, heads_per_key, budget, samples, units)

    def _family_calls(
        self, family: TileFamily, heads_per_key: int, budget: int, samples: range, units: range
    ) -> Iterator[StridedCall]:
        """The calls of a family; ``budget`` counts tiles of one query head."""
        heads = range(len(family.key_heads))
        # A call takes equally many query and key heads: one key head with its query heads, or one query head of each.
        splits = [range(heads_per_key)] if len(heads) == 1 else [range(j, j + 1) for j in range(heads_per_key)]
        for members in splits:
            for call_heads in _split(heads, min(len(heads), budget)):
                most_units = min(_MAX_UNITS, max(1, budget // (len(call_heads) * len(members))))
                for call_units in _split(units, most_units):
                    yield StridedCall(self, family, samples, call_units, call_heads, heads_per_key, members)

    def key_sums(self, grads: Inputs) -> Inputs:
        """Where the gradients of calls are added: the gradients themselves."""
        return grads

    def add_key_sums_(self, grads: Inputs, sums: Inputs) -> None:
        """Add what ``key_sums`` holds beside the gradients: nothing."""


class CallRows(NamedTuple):
    """Where the rows of a call are in a tensor (B, N, H, ...) of any strides."""

    shape: tuple[int, int, int]  # units, heads and rows
    first: tuple[int, int, int]  # sample, row and head
    unit: tuple[int, int]  # samples and rows from one unit to the next
    head: tuple[int, int]  # rows and heads from one head to the next
    step: int  # rows from one row to the next

    def view(self, x: Tensor) -> Tensor:
        """The rows as a view (U, heads, rows, ...)."""
        stride_b, stride_n, stride_h, *rest = x.stride()
        sample, row, head = self.first
        (samples, rows), (head_rows, heads) = self.unit, self.head
        return x.as_strided(
            (*self.shape, *x.shape[3:]),
            (samples * stride_b + rows * stride_n, head_rows * stride_n + heads * stride_h, self.step * stride_n, *rest),
            x.storage_offset() + sample * stride_b + row * stride_n + head * stride_h,
        )


@dataclass(frozen=True, slots=True)
class StridedCall:
    """The tiles of a family that one kernel call computes, and where their rows are."""

    tiles: StridedTiles
    family: TileFamily
    samples: range  # of the batch
    units: range  # tiles, or samples if the family has one tile, or both if they follow one another evenly
    heads: range  # of the family's key heads, by number
    heads_per_key: int
    members: range  # of the query heads of each key head
    query_rows: CallRows = field(init=False, repr=False, compare=False)
    key_rows: CallRows = field(init=False, repr=False, compare=False)  # each key head once

    @property
    def causal(self) -> bool:
        """Whether the tiles are causal squares."""
        return self.family.causal

    def __post_init__(self) -> None:
        family, one_head = self.family, len(self.heads) == 1
        step = 1 if one_head else self.heads_per_key * family.key_heads.step
        first = self._key_heads.start * self.heads_per_key + self.members.start
        heads = range(first, first + max(len(self.heads), len(self.members)) * step, step)
        rows = self._rows(family.q_start - self.tiles.plan.queries.start, family.q_rows, heads)
        object.__setattr__(self, "query_rows", rows)
        if self.tiles.packed:  # a packed family has one tile
            shape = len(self.units), len(self._key_heads), family.k_rows
            rows = CallRows(shape, (self.units.start, 0, self._key_heads.start), (1, 0), (0, self._key_heads.step), 1)
        else:
            rows = self._rows(family.k_start - self.tiles.plan.keys.start, family.k_rows, self._key_heads)
        object.__setattr__(self, "key_rows", rows)

    def queries(self, x_bnh: Tensor) -> Tensor:
        """The query rows of a tensor (B, N, H, ...) as a view (U, heads, rows, ...)."""
        return self.query_rows.view(x_bnh)

    def keys(self, x_bmg: Tensor) -> Tensor:
        """The key rows of a tensor (B, M, G, ...) as a view; a single key head is repeated with stride 0."""
        view = self.key_rows.view(x_bmg)
        members = len(self.members)
        return view.expand(-1, members, *view.shape[2:]) if members > 1 and len(self.heads) == 1 else view

    def lse(self, lse_bnh: Tensor) -> Tensor:
        """The lse of the query rows, (U, heads, rows)."""
        return self.queries(lse_bnh).contiguous()

    def mask(self) -> dict[str, Any]:
        """The further argument of a kernel that masks pairs by position."""
        if self.tiles.positions is None:
            return {}
        # One head serves all; there are two of them in the view, so that their stride is 0.
        q, k = (x.unsqueeze(-1).expand(-1, -1, 2) for x in self.tiles.positions)
        first = self.family.k_start - self.tiles.plan.keys.start
        keys = self._rows(first, self.family.k_rows, self._key_heads).view(k)
        keys = keys.expand(-1, len(self.members), -1) if len(self.heads) == 1 else keys
        return {"positions": (self.queries(q), keys)}

    def factors(self, device: torch.device) -> dict[str, Any]:
        """The further argument of a kernel that drops weights."""
        dropout, family = self.tiles.dropout, self.family
        if dropout is None:
            return {}

        def column(values: range, *shape: int) -> Tensor:
            return torch.arange(values.start, values.stop, values.step, device=device).view(shape)

        unit, number = column(self.units, -1, 1, 1, 1), column(self.heads, 1, -1, 1, 1)
        first = self._key_heads.start * self.heads_per_key + self.members.start
        head = first + (number - self.heads.start) * self.family.key_heads.step * self.heads_per_key
        if len(self.heads) == 1:
            head = first + column(range(len(self.members)), 1, -1, 1, 1)
        sample = self.samples.start + unit // family.tiles
        shift = unit % family.tiles * family.tile_step + number * family.head_row_step

        def factors(rows: slice, keys: slice) -> Tensor:
            i = column(range(rows.start, rows.stop), 1, 1, -1, 1) * family.row_stride + family.q_start + shift
            j = column(range(keys.start, keys.stop), 1, 1, 1, -1) * family.row_stride + family.k_start + shift
            kept: Tensor = dropout.factors(sample, head, family.branch, i, j)
            return kept

        return {"factors": factors}

    def merge_(self, out: Tensor, lse_bnh: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
        """Merge the result of the call into ``out`` and ``lse``."""
        if self.family.zero_keys:
            zeros_lse = torch.full_like(partial_lse, self.family.zero_keys).log_()
            weight, partial_lse = merge_lse(zeros_lse, partial_lse)
            partial = partial * weight.unsqueeze(-1)
        merge_(self.queries(out), self.queries(lse_bnh), partial, partial_lse)

    def add_queries_(self, x_bnhd: Tensor, partial: Tensor) -> None:
        """Add to the query rows."""
        self.queries(x_bnhd).add_(partial)

    def add_keys_(self, x_bmgd: Tensor, partial: Tensor) -> None:
        """Add to the key rows; a single key head gets the sum over its query heads."""
        if len(self.heads) == 1 and len(self.members) > 1:
            partial = partial.sum(1, keepdim=True)
        self.key_rows.view(x_bmgd).add_(partial)

    @property
    def _key_heads(self) -> range:
        return self.family.key_heads[self.heads.start : self.heads.stop]

    def _rows(self, row: int, rows: int, heads: range) -> CallRows:
        family = self.family
        unit = (1, 0) if family.tiles == 1 else (0, family.tile_step)
        first = self.units.start
        at = self.samples.start + first * unit[0], row + self.heads.start * family.head_row_step + first * unit[1]
        # Query heads of one key head read the same rows.
        row_step = family.head_row_step if len(self.heads) > 1 else 0
        shape = len(self.units), len(heads), rows
        return CallRows(shape, (*at, heads.start), unit, (row_step, heads.step), family.row_stride)


@lru_cache(maxsize=64)
def _calls(tiles: StridedTiles, batch: int, rows: int | None, heads_per_key: int, limit: int) -> tuple[StridedCall, ...]:
    return tuple(tiles.make_calls(batch, rows, heads_per_key, limit))


def shared_rows(tensors: tuple[Tensor, ...]) -> int | None:
    """The rows of a sample, if all tensors (B, N, ...) have as many and their samples follow one another evenly."""
    rows = tensors[0].shape[1]
    return rows if all(x.shape[1] == rows and x.stride(0) == rows * x.stride(1) for x in tensors) else None


def _unit_runs(family: TileFamily, batch: int, rows: int | None) -> list[tuple[range, range]]:
    """Samples and units that calls can take together; ``rows`` is ``shared_rows`` of all tensors.

    Tiles of several samples share a call if they are evenly spaced.
    """
    if family.tiles == 1:
        return [(range(batch), range(batch))]
    if batch == 1 or rows == family.tiles * family.tile_step:
        return [(range(batch), range(batch * family.tiles))]
    return [(range(b, b + 1), range(family.tiles)) for b in range(batch)]


def _split(whole: range, size: int) -> Iterator[range]:
    return (whole[start : start + size] for start in range(0, len(whole), size))


def packed_rows(plan: Plan, samples: int) -> Iterator[tuple[CallRows, CallRows]]:
    """Yield where the key rows of each family are, in place and packed, so that rows can be copied either way.

    The plan is that of the rows with themselves, not causal, of one branch, within one segment.
    """
    for family in plan.families:
        at = family, range(samples), range(samples), range(len(family.key_heads)), 1, range(1)
        in_place, together = (StridedCall(StridedTiles(plan, is_packed), *at).key_rows for is_packed in (False, True))
        yield in_place, together
