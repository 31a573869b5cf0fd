"""Execution: run the tiles of a plan through a tile kernel, merge forward, sum backward. No decisions about attention.

A tile kernel computes ordinary dense attention, with lse, on 4-d strided views (U units, heads, rows, D), where a unit is
one tile of one sample. The views alias q, k and v: a dilated branch is a stride, never a copy.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size, U units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.execute.merge import accumulate_dtype, merge_
from dilated_attention_pytorch.execute.strided import Piece, Positions, cut, shared_rows
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.plan.tiles import Plan

# A partial result of one kernel call has at most this many elements, or an eighth of the output if that is more.
_SMALL_PART = 2**20
# Of the query rows and key rows in two slices: what dropout multiplies their weights by, (U, heads, rows, keys).
Factors = Callable[[slice, slice], Tensor]


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
    for piece in cut(
        plan, query.shape[0], group, query.shape[3], limit, shared_rows((*tensors, *(positions or ()))), packed
    ):
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
    piece: Piece,
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
    for piece in cut(plan, query.shape[0], group, query.shape[3], limit, shared_rows(tensors), packed):
        _backward_piece_(piece, *by_row, dlse_bnh, *qkv, grads, scale, kernel, dropout, positions)


def _backward_piece_(
    piece: Piece,
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


def _add_gradients_(piece: Piece, grads: tuple[Tensor, ...], part: tuple[Tensor, ...]) -> None:
    piece.queries(grads[0]).add_(part[0])
    for grad, dkv in zip(grads[1:], part[1:], strict=True):
        piece.keys(grad).add_(piece.sum_members(dkv))
