"""Execution through stock operators with one merge: all tiles first, then one kernel that reads every partial result once.

The same as ``tiles.forward`` and ``tiles.backward``, which merge after every call. Partial results are in the operators'
type, and together as large as the rows that the branches have: ``1 / r`` of the output for a branch of rate ``r``.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from dilated_attention_pytorch.execute.loop import TileKernel, lse_gradients, positive_scale
from dilated_attention_pytorch.execute.strided import Cut, Piece, shared_rows
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span

# A program of the merging kernel looks at every entry of its head: with more of them, merging piece by piece is as fast.
_MOST_ENTRIES = 256


def serves(query: Tensor) -> bool:
    """Whether one kernel can merge the partial results of stock operators for this query."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def few_pieces(problem: Problem, head_dim: int) -> bool:
    """Whether the merge of a problem is worth one kernel: thousands of documents are merged piece by piece."""
    from dilated_attention_pytorch.backends.gpu.parts import longest_list  # imports triton

    apart = Cut(problem, head_dim, None)  # samples that follow one another only make it less
    return max(longest_list(apart, by_keys=False), longest_list(apart, by_keys=True)) <= _MOST_ENTRIES


def pairs_per_piece(problem: Problem, head_dim: int) -> float:
    """Query-key pairs of a kernel call, on average: what there is to do for each launch."""
    pieces = Cut(problem, head_dim, None).pieces()
    calls = (len(piece.units) * len(piece.heads) * len(piece.members) * piece.family.pairs_per_tile for _, piece in pieces)
    return sum(calls) / max(1, len(pieces))


def _by_query(span: Span, piece: Piece, x_bnh: Tensor) -> Tensor:
    return piece.queries(x_bnh[span.samples, span.queries])


def _inputs(span: Span, piece: Piece, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (piece.repeated_keys(x[span.samples, span.keys]) for x in (key, value))
    return _by_query(span, piece, query), k, v


def _keep(results: tuple[Tensor, ...], *parts: list[Tensor]) -> None:
    """Add each result to its list; kernels read rows of consecutive elements, which is how operators return them."""
    for result, kept in zip(results, parts, strict=True):
        kept.append(result if result.stride(-1) == 1 else result.contiguous())


def forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, scale: float, kernel: TileKernel
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``: the attention of all tiles, merged."""
    from dilated_attention_pytorch.backends.gpu.parts import merge_parts  # imports triton

    query, scale, _ = positive_scale(query, scale)
    cut = Cut(problem, query.shape[-1], shared_rows((query, key, value)))
    parts: list[Tensor] = []
    parts_lse: list[Tensor] = []
    for span, piece in cut.pieces():
        part, part_lse = kernel.forward(*_inputs(span, piece, query, key, value), piece.family.causal, scale)
        _keep((part,), parts)
        parts_lse.append(part_lse)
    return merge_parts(cut, parts, parts_lse, query)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``: the gradients of all tiles, summed, given the merged ``out`` and ``lse``."""
    from dilated_attention_pytorch.backends.gpu.parts import sum_parts  # imports triton

    query, scale, sign = positive_scale(query, scale)
    lse_bnh = lse.transpose(1, 2).contiguous()
    dlse_bnh = None if dlse is None else dlse.transpose(1, 2).contiguous()
    rows = shared_rows((query, dout, out, lse_bnh, key, value))
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    alone = [problem.only(branch) for branch in range(len(problem.pattern.branches))]
    dq_parts: list[Tensor] = []
    dk_parts: list[Tensor] = []
    dv_parts: list[Tensor] = []
    cuts, value_cuts = [], []  # whose pieces the parts belong to, in order
    for one in alone if detach_mixing else [problem]:
        cut = Cut(one, query.shape[-1], rows)
        if detach_mixing:
            out = forward(one, query, key, value, scale=scale, kernel=kernel)[0]
        for span, piece in cut.pieces():
            q, k, v, lse_rows = *_inputs(span, piece, query, key, value), _by_query(span, piece, lse_bnh).contiguous()
            by_query = _by_query(span, piece, dout), q, k, v, _by_query(span, piece, out), lse_rows
            _keep(kernel.backward(*by_query, piece.family.causal, scale), dq_parts, dk_parts, dv_parts)
        cuts.append(cut)
        value_cuts.append(cut)
        if dlse_bnh is None:
            continue
        for span, piece in cut.pieces():
            q, k, _ = _inputs(span, piece, query, key, value)
            statistics = _by_query(span, piece, lse_bnh).contiguous(), _by_query(span, piece, dlse_bnh)
            _keep(lse_gradients(kernel, q, k, *statistics, piece.family.causal, scale), dq_parts, dk_parts)
        cuts.append(cut)
    dq = sum_parts(cuts, dq_parts, query, by_keys=False, factor=sign)
    dq_parts.clear()  # before the next result exists
    dk = sum_parts(cuts, dk_parts, key, by_keys=True)
    dk_parts.clear()
    return dq, dk, sum_parts(value_cuts, dv_parts, value, by_keys=True)
