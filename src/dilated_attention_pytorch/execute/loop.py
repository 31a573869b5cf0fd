"""Execution through stock kernels: one loop that runs the calls of a plan, merges forward and sums backward.

A tile kernel computes dense attention, with lse, on 4-d tensors (U units, heads, rows, D), where a unit is one tile of one
sample. Dilated patterns give strided views of q, k and v (``strided.py``), block lists gathered blocks (``listed.py``).
The loop does not distinguish them, and neither does the distributed executor, which runs the same loop over messages.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.listed import ListedCall, ListedTiles, PlacedDropout
from dilated_attention_pytorch.execute.strided import Positions, StridedCall, StridedTiles
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

# A partial result of one kernel call has at most this many elements, or an eighth of the output if that is more.
_SMALL_PARTIAL = 2**20


@dataclass(frozen=True, slots=True)
class TileKernel:
    """Dense attention on tiles. Causal tiles are square; lse is the natural logarithm, float32 or better.

    ``scale`` is positive: stock operators mask scores with -inf before they scale them.

    ``forward(q, k, v, causal, scale) -> (out, lse)``
    ``backward(dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv)`` where ``out`` enters only through the row sums
    ``delta = (dout * out).sum(-1)`` and ``lse`` only through the weights ``exp(s - lse)``: both may come from a larger
    softmax of which the tile is a part.

    A call with dropout also passes ``factors=``, a function of two slices of query rows and key rows. It returns what the
    weights are multiplied by, (U, heads, rows, keys). A call that masks by position passes ``positions=``, those of the
    query rows and of the key rows, (U, heads, rows) each. Kernels without these arguments refuse such calls beforehand.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# Tiles between the query rows and the key rows of tensors, and the calls of a kernel over them.
TileSet = StridedTiles | ListedTiles
TileCall = StridedCall | ListedCall


@dataclass(frozen=True, slots=True)
class StockCalls:
    """How tiles are computed: the kernel, a positive scale, and the most elements of a partial result."""

    kernel: TileKernel
    scale: float
    limit: int


class Sums(NamedTuple):
    """Results in the accumulation type, into which partial results are merged."""

    out: Tensor  # (B, N, H, D)
    lse_bnh: Tensor

    @staticmethod
    def like(query: Tensor) -> Sums:
        """The neutral element of the merge for these queries."""
        dtype = accumulate_dtype(query.dtype)
        lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        return Sums(torch.zeros(query.shape, dtype=dtype, device=query.device), lse_bnh)

    def results(self, dtype: torch.dtype) -> Results:
        """The same as the results of a call."""
        return Results(self.out.to(dtype), self.lse_bnh.transpose(1, 2).contiguous())


class RowGradients(NamedTuple):
    """What the backward of a tile reads by query row."""

    dout: Tensor  # (B, N, H, D)
    out: Tensor
    lse_bnh: Tensor
    dlse_bnh: Tensor | None

    @staticmethod
    def of(saved: Saved) -> RowGradients:
        """The rows of a whole call."""
        dlse_bnh = None if saved.dlse is None else saved.dlse.transpose(1, 2).contiguous()
        return RowGradients(saved.dout, saved.out, saved.lse.transpose(1, 2).contiguous(), dlse_bnh)

    def at(self, rows: tuple[slice, ...]) -> RowGradients:
        """Only these samples, rows (and heads)."""
        return RowGradients(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def partial_limit(query: Tensor) -> int:
    """The most elements of a partial result."""
    return max(_SMALL_PARTIAL, query.numel() // 8)


def positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """The same scores with a positive scale: (query, scale, sign), where dq is to be multiplied by the sign."""
    if scale > 0:
        return query, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return query * sign, -scale or 1.0, sign


def attend_(tiles: TileSet, inputs: Inputs, sums: Sums, how: StockCalls) -> None:
    """Merge the attention of tiles into ``sums``."""
    for call in tiles.calls(inputs, sums, how.limit):
        # A function of its own, so that no partial result outlives its merge.
        _attend_call_(call, inputs, sums, how)


def _attend_call_(call: TileCall, inputs: Inputs, sums: Sums, how: StockCalls) -> None:
    q, k, v = call.queries(inputs.query), call.keys(inputs.key), call.keys(inputs.value)
    more = call.factors(q.device) | call.mask()
    partial, partial_lse = how.kernel.forward(q, k, v, call.causal, how.scale, **more)
    del q, k, v, more  # gathered rows are not needed while results are merged
    call.merge_(*sums, partial, partial_lse)


def add_gradients_(tiles: TileSet, inputs: Inputs, rows: RowGradients, grads: Inputs, how: StockCalls) -> None:
    """Add the gradients of tiles to ``grads``."""
    sums = tiles.key_sums(grads)
    others = tuple(x for x in (*rows, *grads) if x is not None)
    for call in tiles.calls(inputs, others, how.limit):
        _add_gradients_of_call_(call, inputs, rows, sums, how)
    tiles.add_key_sums_(grads, sums)


def _add_gradients_of_call_(call: TileCall, inputs: Inputs, rows: RowGradients, sums: Inputs, how: StockCalls) -> None:
    q, k, v = call.queries(inputs.query), call.keys(inputs.key), call.keys(inputs.value)
    lse, mask = call.lse(rows.lse_bnh), call.mask()
    dout, out = call.queries(rows.dout), call.queries(rows.out)
    more = call.factors(q.device) | mask
    dq, dk, dv = how.kernel.backward(dout, q, k, v, out, lse, call.causal, how.scale, **more)
    call.add_queries_(sums.query, dq)
    call.add_keys_(sums.key, dk)
    call.add_keys_(sums.value, dv)
    if rows.dlse_bnh is not None:
        dq, dk = _lse_gradients(call, q, k, lse, call.queries(rows.dlse_bnh), how)
        call.add_queries_(sums.query, dq)
        call.add_keys_(sums.key, dk)


def _lse_gradients(
    call: TileCall, q: Tensor, k: Tensor, lse: Tensor, dlse: Tensor, how: StockCalls
) -> tuple[Tensor, Tensor]:
    """``(dq, dk)`` of tiles through lse, ``ds = p * dlse``: the gradient with values 0 and a delta of ``-dlse``."""
    unit, minus_dlse, zeros = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k)
    unit[..., 0] = 1.0
    # Half precision could not hold dlse. Each unit has a size of its own, so that samples do not depend on one another.
    size = dlse.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(dlse.dtype).tiny)
    minus_dlse[..., 0] = -dlse / size
    dq, dk, _ = how.kernel.backward(unit, q, k, zeros, minus_dlse, lse, call.causal, how.scale, **call.mask())
    return dq * size.unsqueeze(-1), dk * size.unsqueeze(-1)


def tile_sets(problem: Problem, options: Options, device: torch.device) -> Iterator[tuple[Span, TileSet]]:
    """The sequences of a problem, each with its tiles."""
    if isinstance(problem.pattern, Dilated):
        for span, plan in problem.plans():
            dropout = options.dropout and options.dropout.at(span.samples.start, span.dropout_row)
            yield span, StridedTiles(plan, dropout=dropout, positions=_positions(options, span))
    else:
        for span, lists in lists_of(problem, options.chosen, device):
            placed = None
            if options.dropout is not None:
                rows = torch.arange(span.length, device=device)
                queries = rows[span.positions.start : span.positions.stop]
                placed = PlacedDropout(options.dropout.at(span.samples.start, span.dropout_row), queries, rows)
            yield span, ListedTiles(lists, span.positions, problem.is_causal, placed, _positions(options, span))


def _positions(options: Options, span: Span) -> Positions | None:
    if options.positions is None:
        return None
    return options.positions[span.query_rows], options.positions[span.key_rows]


def forward(problem: Problem, inputs: Inputs, options: Options, kernel: TileKernel) -> Results:
    """The attention of all tiles, merged."""
    query, scale, _ = positive_scale(inputs.query, options.scale)
    how = StockCalls(kernel, scale, partial_limit(query))
    return _sums(problem, inputs._replace(query=query), options, how).results(query.dtype)


def _sums(problem: Problem, inputs: Inputs, options: Options, how: StockCalls) -> Sums:
    sums = Sums.like(inputs.query)
    for span, tiles in tile_sets(problem, options, inputs.query.device):
        own = Sums(*(x[span.query_rows] for x in sums))
        attend_(tiles, _at(inputs, span), own, how)
    return sums


def _at(inputs: Inputs, span: Span) -> Inputs:
    """The rows of one sequence."""
    return Inputs(inputs.query[span.query_rows], inputs.key[span.key_rows], inputs.value[span.key_rows])


def backward(problem: Problem, inputs: Inputs, saved: Saved, options: Options, kernel: TileKernel) -> Inputs:
    """The gradients of all tiles, summed, given the merged results."""
    query, scale, sign = positive_scale(inputs.query, options.scale)
    inputs, how = inputs._replace(query=query), StockCalls(kernel, scale, partial_limit(query))
    grads = Inputs(*(torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in inputs))
    rows = RowGradients.of(saved)
    problems = [problem]
    if options.detach_mixing and isinstance(problem.pattern, Dilated):
        problems = [problem.of_branch(branch) for branch in range(len(problem.pattern.branches))]
    for one in problems:
        if options.detach_mixing:
            # With constant mixing weights, delta comes from the branch's own output, which is computed again.
            rows = rows._replace(out=_sums(one, inputs, options, how).out.to(query.dtype))
        for span, tiles in tile_sets(one, options, query.device):
            add_gradients_(tiles, _at(inputs, span), rows.at(span.query_rows), _at(grads, span), how)
    if sign != 1.0:
        grads.query.mul_(sign)
    return Inputs(*(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)))
