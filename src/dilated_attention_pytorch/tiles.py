"""Execution: run the tiles of a plan through a tile kernel, merge forward, sum backward. No decisions about attention.

A tile kernel computes ordinary dense attention, with lse, on 4-d strided views (U units, heads, rows, D), where a unit is
one tile of one sample. The views alias q, k and v: a dilated branch is a stride, never a copy.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.dropout import Dropout
from dilated_attention_pytorch.merge import accumulate_dtype, merge_
from dilated_attention_pytorch.plan import Plan, TileFamily
from dilated_attention_pytorch.problem import Problem
from dilated_attention_pytorch.spans import Span

# A partial result of one kernel call has at most this many elements, or an eighth of the output if that is more.
_SMALL_PART = 2**20
# Of the query rows and key rows in two slices: what dropout multiplies their weights by, (U, heads, rows, keys).
Factors = Callable[[slice, slice], Tensor]
# Of the query rows (B, N) and of the key rows (B, M) of a plan, packed or not: each sees those that are not larger.
Positions = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TileKernel:
    """Dense attention on tiles. Causal tiles are square; lse is the natural logarithm, float32 or better.

    ``scale`` is positive: stock operators mask scores with -inf before they scale them.

    ``forward(q, k, v, causal, scale) -> (out, lse)``
    ``backward(dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv)`` where ``out`` enters only through the row sums
    ``delta = (dout * out).sum(-1)`` and ``lse`` only through the weights ``exp(s - lse)``: both may come from a larger
    softmax of which the tile is a part.

    A call with dropout passes ``factors=`` as well, one by order ``positions=``, the positions of the query rows and of the
    key rows, (U, heads, rows) each: a row then sees the keys whose positions are not larger than its own. Kernels without
    these arguments refuse such calls beforehand.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Piece:
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
        family = self.family
        if len(self.heads) == 1:  # one key head serves all members of its group
            first, count, step = self._head(0) * self.group + self.members.start, len(self.members), 1
        else:  # one member of each group
            first, count, step = self._head(0) * self.group + self.members.start, len(self.heads), self.group * self._step
        row = family.q_start - self.plan.queries.start
        return self._view(x_bnh, row, family.q_rows, first, count, step)

    def keys(self, x_bmg: Tensor) -> Tensor:
        """The key rows of a tensor (B, M, G, ...) as a view (U, heads, rows, ...)."""
        if self.packed:
            head, count = self._head(0), len(self.heads)
            heads = slice(head, head + (count - 1) * self._step + 1, self._step)
            samples = slice(self.units.start, self.units.stop)  # a packed family has one tile
            return x_bmg[samples, : self.family.k_rows, heads].transpose(1, 2)
        row = self.family.k_start - self.plan.keys.start
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

    def _head(self, index: int) -> int:
        return self.family.key_heads[self.heads[index]]

    def _view(self, x: Tensor, row: int, rows: int, head: int, heads: int, head_step: int) -> Tensor:
        family = self.family
        stride_b, stride_n, stride_h, *rest = x.stride()
        unit_stride = stride_b if family.tiles == 1 else family.tile_step * stride_n
        row += self.heads.start * family.head_row_step
        start = self.samples.start * stride_b + self.units.start * unit_stride + row * stride_n + head * stride_h
        row_step = family.head_row_step if len(self.heads) > 1 else 0
        return x.as_strided(
            (len(self.units), heads, rows, *x.shape[3:]),
            (unit_stride, head_step * stride_h + row_step * stride_n, family.row_stride * stride_n, *rest),
            x.storage_offset() + start,
        )


def _split(whole: range, size: int) -> Iterator[range]:
    return (whole[start : start + size] for start in range(0, len(whole), size))


def _pieces(
    plan: Plan, batch: int, group: int, head_dim: int, limit: int, tensors: tuple[Tensor, ...], packed: bool = False
) -> Iterator[_Piece]:
    """Cut the families of a plan into kernel calls with partial results of at most ``limit`` elements where possible."""
    for family in plan.families:
        span = family.tiles * family.tile_step
        even = all(x.shape[1] == span and x.stride(0) == span * x.stride(1) for x in tensors)
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
                    for some_units in _split(units, max(1, budget // (len(some_heads) * len(members)))):
                        yield _Piece(family, plan, samples, some_units, some_heads, group, members, packed)


def part_limit(query: Tensor) -> int:
    """The most elements of a partial result."""
    return max(_SMALL_PART, query.numel() // 8)


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """The same scores with a positive scale: (query, scale, sign), where dq is to be multiplied by the sign."""
    if scale > 0:
        return query, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return query * sign, -scale or 1.0, sign


def _accumulate(
    plans: tuple[tuple[Span, Plan], ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``out (B, N, H, D)`` and ``lse (B, N, H)``, both in the accumulation type."""
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    for span, plan in plans:
        rows, columns = (span.samples, span.queries), (span.samples, span.keys)
        part = (query[rows], key[columns], value[columns], out[rows], lse_bnh[rows])
        placed = dropout and dropout.at(span.samples.start, span.keys.start)
        some = None if positions is None else (positions[rows], positions[columns])
        limit = part_limit(query)
        attend_(plan, *part, scale=scale, kernel=kernel, dropout=placed, limit=limit, positions=some)
    return out, lse_bnh


def attend_(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    *,
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    limit: int,
    packed: bool = False,
    positions: Positions | None = None,
) -> None:
    """Merge the tiles of a plan into ``out`` and ``lse``; tensors hold the plan's query and key rows (or packed keys)."""
    tensors = (query, key, value, out, lse_bnh)
    group = query.shape[2] // key.shape[2]
    for piece in _pieces(plan, query.shape[0], group, query.shape[3], limit, (*tensors, *(positions or ())), packed):
        # A function of its own, so that no partial result outlives its merge.
        _forward_piece_(piece, *tensors, scale, kernel, dropout, positions)


def forward(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``: the attention of all tiles, merged."""
    query, scale, _ = positive_scale(query, scale)
    out, lse_bnh = _accumulate(problem.plans(), query, key, value, scale, kernel, dropout, positions)
    return out.to(query.dtype), lse_bnh.transpose(1, 2).contiguous()


def _forward_piece_(
    piece: _Piece,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    positions: Positions | None,
) -> None:
    q, k, v = piece.queries(query), piece.repeated_keys(key), piece.repeated_keys(value)
    more = piece.dropout(dropout, q.device) | piece.positions(positions)
    part, part_lse = kernel.forward(q, k, v, piece.family.causal, scale, **more)
    if piece.family.zero_keys:
        with_zeros = torch.logaddexp(part_lse, torch.full_like(part_lse, piece.family.zero_keys).log())
        part = part * torch.exp(part_lse - with_zeros).unsqueeze(-1)
        part_lse = with_zeros
    merge_(piece.queries(out), piece.queries(lse_bnh), part, part_lse)


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    detach_mixing: bool,
    kernel: TileKernel,
    dropout: Dropout | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``: the gradients of all tiles, summed, given the merged ``out`` and ``lse``."""
    query, scale, sign = positive_scale(query, scale)
    dtype = accumulate_dtype(query.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value))
    lse_bnh = lse.transpose(1, 2).contiguous()
    dlse_bnh = None if dlse is None else dlse.transpose(1, 2).contiguous()
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    alone = [problem.only(branch) for branch in range(len(problem.pattern.branches))]
    for part in alone if detach_mixing else [problem]:
        some, some_out = part.plans(), out
        if detach_mixing:
            some_out = _accumulate(some, query, key, value, scale, kernel, dropout, positions)[0].to(query.dtype)
        for span, plan in some:
            rows, columns = (span.samples, span.queries), (span.samples, span.keys)
            by_row = dout[rows], some_out[rows], lse_bnh[rows]
            some_dlse = None if dlse_bnh is None else dlse_bnh[rows]
            qkv = query[rows], key[columns], value[columns]
            grads = dq[rows], dk[columns], dv[columns]
            options: dict[str, Any] = {
                "scale": scale,
                "kernel": kernel,
                "dropout": dropout and dropout.at(span.samples.start, span.keys.start),
                "limit": part_limit(query),
                "positions": None if positions is None else (positions[rows], positions[columns]),
            }
            add_gradients_(plan, by_row, some_dlse, qkv, grads, **options)
    if sign != 1.0:
        dq *= sign
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def add_gradients_(
    plan: Plan,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    limit: int,
    packed: bool = False,
    positions: Positions | None = None,
) -> None:
    """Add the gradients of the tiles of a plan to ``grads`` (dq, dk, dv); ``by_row`` is dout, out and lse (B, N, H)."""
    tensors = (*by_row, *qkv, *grads, *(() if dlse_bnh is None else (dlse_bnh,)), *(positions or ()))
    query, key, _ = qkv
    group = query.shape[2] // key.shape[2]
    for piece in _pieces(plan, query.shape[0], group, query.shape[3], limit, tensors, packed):
        _backward_piece_(piece, *by_row, dlse_bnh, *qkv, grads, scale, kernel, dropout, positions)


def packed_views(plan: Plan, x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the key rows that a plan's families read, in place and packed, family by family: to copy either way.

    The plan is that of the rows with themselves, not causal, of one branch, within one segment.
    """
    for family in plan.families:
        heads, samples = range(len(family.key_heads)), range(x.shape[0])
        apart = _Piece(family, plan, samples, samples, heads, 1, range(1))
        together = _Piece(family, plan, samples, samples, heads, 1, range(1), packed=True)
        yield apart.keys(x), together.keys(packed)


def _backward_piece_(
    piece: _Piece,
    dout: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    dlse_bnh: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    kernel: TileKernel,
    dropout: Dropout | None,
    positions: Positions | None,
) -> None:
    q, k, v = piece.queries(query), piece.repeated_keys(key), piece.repeated_keys(value)
    lse, causal, mask = piece.queries(lse_bnh).contiguous(), piece.family.causal, piece.positions(positions)
    more = piece.dropout(dropout, q.device) | mask
    part = kernel.backward(piece.queries(dout), q, k, v, piece.queries(out), lse, causal, scale, **more)
    _add_gradients_(piece, grads, part)
    if dlse_bnh is not None:
        dlse = piece.queries(dlse_bnh)
        _add_gradients_(piece, grads[:2], lse_gradients(kernel, q, k, lse, dlse, causal, scale, **mask))


def lse_gradients(
    kernel: TileKernel, q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor, causal: bool, scale: float, **mask: Any
) -> tuple[Tensor, Tensor]:
    """``(dq, dk)`` of a tile through lse, ``ds = p * dlse``: the gradient with values 0 and a delta of ``-dlse``."""
    unit, minus_dlse, zeros = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k)
    unit[..., 0] = 1.0
    size = dlse.abs().amax().clamp(min=torch.finfo(dlse.dtype).tiny)  # half precision could not hold it
    minus_dlse[..., 0] = -dlse / size
    dq, dk, _ = kernel.backward(unit, q, k, zeros, minus_dlse, lse, causal, scale, **mask)
    return dq * size, dk * size


def _add_gradients_(piece: _Piece, grads: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
    piece.queries(grads[0]).add_(part[0])
    for grad, dkv in zip(grads[1:], part[1:], strict=True):
        piece.keys(grad).add_(piece.sum_members(dkv))
