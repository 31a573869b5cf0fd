"""The definition as code: dense attention with the additive bias log(multiplicity). Slow, obvious, differentiable.

It reads patterns and lists, never tiles, and no other backend imports it. Scores and softmax are computed in float64 for
float64 inputs and in float32 otherwise. Memory grows with the square of the length. It is not an operator: autograd
differentiates it, also twice and in forward mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

MAX_SCORES = 2**30  # B * H * N * M: 4 GiB in float32


@dataclass(frozen=True, slots=True)
class _Meetings:
    """The pairs of one sequence that meet, by branch, for chosen query rows. A block-sparse pattern is one branch."""

    branches: list[Tensor]  # boolean, each broadcasts to (B, H, rows, M)
    # Zero keys that each branch shows a row, (H, rows, 1), or None without torchscale_padding; None for block lists.
    zero_keys: list[Tensor | None] | None


class ReferenceBackend:
    """Dense attention from the definition, for tests and short sequences."""

    name = "reference"

    def why_not(self, request: Request) -> list[str]:
        """Every device and every floating-point type is served; the size is checked when it is known."""
        return []

    def kernel_name(self, request: Request) -> str:
        """What computes a request."""
        return "dense, from the definition"

    def forward(self, problem: Problem, inputs: Inputs, options: Options) -> Results:
        """The attention of a problem."""
        query, key, value = inputs
        if isinstance(problem.pattern, Dilated) and problem.lengths is None and problem.cu_seqlens is None:
            whole = Span(slice(0, problem.batch), slice(0, problem.queries), slice(0, problem.keys))
            return _attend(problem, whole, None, inputs, options)
        # Sequences are computed one by one: a NaN in one cannot reach another through 0 * NaN.
        # The results are selected from the inputs, so that they belong to the graph even if every sequence is empty. Under
        # torch.vmap, they have the mapped dimension of any input, and lse gets it from the output.
        never = torch.zeros((), dtype=torch.bool, device=query.device)
        out = torch.where(never, query + key.sum() + value.sum(), 0.0)
        lse = out[..., 0].transpose(1, 2).to(accumulate_dtype(query.dtype))
        lse = torch.where(never, lse, -torch.inf).contiguous()
        for span, lists in _sequences(problem, options, query.device):
            own = Inputs(query[span.query_rows], key[span.key_rows], value[span.key_rows])
            out[span.query_rows], lse[span.samples, :, span.queries] = _attend(problem, span, lists, own, options)
        return Results(out, lse)

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, options: Options) -> Inputs:
        """Never called: autograd differentiates the forward."""
        raise AssertionError("autograd differentiates the reference backend")

    def row_weights(self, problem: Problem, inputs: Inputs, rows: Tensor, options: Options) -> Tensor:
        """The attention weights (B, H, rows, M) of chosen rows of the query tensor."""
        query, key, _ = inputs
        compute = accumulate_dtype(query.dtype)
        shape = (problem.batch, problem.heads, len(rows), problem.keys)
        result = torch.zeros(shape, dtype=compute, device=query.device)
        for span, lists in _sequences(problem, options, query.device):
            inside = (rows >= span.queries.start) & (rows < span.queries.stop)
            positions = rows[inside] - span.queries.start + span.positions.start
            met = _meetings(problem, span, lists, positions, None)
            q, k = query[span.samples][:, rows[inside]].to(compute), key[span.key_rows].to(compute)
            weights, _ = _weights(q, k, met, options.scale)
            result[span.samples, :, inside.nonzero().squeeze(1), span.keys] = weights.to(compute)
        return result


REFERENCE = ReferenceBackend()


def _sequences(problem: Problem, options: Options, device: torch.device) -> list[tuple[Span, BlockLists | None]]:
    if isinstance(problem.pattern, Dilated):
        return [(span, None) for span in problem.spans()]
    return [*lists_of(problem, options.chosen, device)]


def _attend(problem: Problem, span: Span, lists: BlockLists | None, inputs: Inputs, options: Options) -> Results:
    """The results of one sequence; the queries are the last N of its M positions."""
    n, m, heads = inputs.query.shape[1], inputs.key.shape[1], problem.heads
    scores = inputs.query.shape[0] * heads * n * m
    if scores > MAX_SCORES:
        raise ValueError(
            f"the reference backend materialises all scores and takes at most {MAX_SCORES} (B*H*N*M), got {scores}; "
            "use another backend (backend='auto' finds one) or a shorter sequence"
        )
    dtype = inputs.query.dtype
    query, key, value = (x.to(accumulate_dtype(dtype)) for x in inputs)
    rows = torch.arange(m - n, m, device=query.device)
    positions = None if options.positions is None else options.positions[span.key_rows]
    met = _meetings(problem, span, lists, rows, positions)
    p, lse = _weights(query, key, met, options.scale)
    if options.detach_mixing or options.dropout is not None:
        dropout = options.dropout and options.dropout.at(span.samples.start, span.dropout_row)
        p = _by_branch(p, lse, met, dropout, detached=options.detach_mixing)
    with _full_precision(query):
        out = torch.einsum("bhnm,bmhd->bnhd", p, value.repeat_interleave(problem.heads_per_key, dim=2))
    return Results(out.to(dtype).contiguous(), lse)


def _meetings(problem: Problem, span: Span, lists: BlockLists | None, rows: Tensor, positions: Tensor | None) -> _Meetings:
    """Which keys meet query rows at the positions ``rows``; ``positions`` (B, N) are compared instead of causality."""
    length, heads = span.length, problem.heads
    i, j = rows[:, None], torch.arange(length, device=rows.device)[None, :]
    allowed = torch.ones((), dtype=torch.bool, device=rows.device)
    if positions is not None:
        allowed = positions[..., None, None, :] <= positions[..., None, :, None]
    elif problem.is_causal:
        allowed = j <= i
    if lists is not None:
        size = lists.block_size
        return _Meetings([lists.mask()[:, :, rows // size - lists.first][..., j[0] // size] & allowed], None)
    pattern, branches = problem.dilated, []
    zero_keys: list[Tensor | None] = []
    key_heads = [(h // problem.heads_per_key, problem.key_heads) for h in range(heads)]
    for branch in range(len(pattern.branches)):
        masks = [pattern.meets(branch, i, j, key_head=g, key_heads=of) for g, of in key_heads]
        branches.append(torch.stack(masks) & allowed)
        zero_keys.append(None)
        if pattern.torchscale_padding and not problem.is_causal:
            counts = [pattern.zero_keys(branch, i, length, key_head=g, key_heads=of) for g, of in key_heads]
            zero_keys[-1] = torch.stack(counts)
    return _Meetings(branches, zero_keys)


def _weights(query: Tensor, key: Tensor, met: _Meetings, scale: float) -> tuple[Tensor, Tensor]:
    """The attention weights (B, H, rows, M) and lse (B, H, rows)."""
    heads_per_key = query.shape[2] // key.shape[2]
    with _full_precision(query):
        s = torch.einsum("bnhd,bmhd->bhnm", query, key.repeat_interleave(heads_per_key, dim=2)) * scale
    count = torch.zeros(s.shape[1:], dtype=s.dtype, device=s.device)
    for branch in met.branches:
        count = count + branch
    # -inf by selection, not by addition: a NaN score of a pair that does not meet must not count.
    s = torch.where(count > 0, s + count.clamp(min=1).log(), -torch.inf)
    all_scores = s
    if met.zero_keys is not None:
        zeros = torch.zeros((*s.shape[1:-1], 1), dtype=s.dtype, device=s.device)
        for zero_keys in met.zero_keys:
            zeros = zeros if zero_keys is None else zeros + zero_keys
        all_scores = torch.cat((s, zeros.log().expand((*s.shape[:-1], 1))), -1)
    if not all_scores.shape[-1]:
        return s, torch.full(s.shape[:-1], -torch.inf, dtype=s.dtype, device=s.device)
    lse = _logsumexp(all_scores)
    return _softmax(s, lse), lse


def _by_branch(p: Tensor, lse: Tensor, met: _Meetings, dropout: Dropout | None, *, detached: bool) -> Tensor:
    """The weights as a sum over branches, with dropout, and with constant mixing weights if these are detached."""
    batch, heads, n, m = p.shape
    # p / multiplicity is the weight of a pair in each branch in which it meets.
    share = p / torch.stack([branch.expand(p.shape[-branch.dim() :]) for branch in met.branches]).sum(0).clamp(min=1)
    i = torch.arange(m - n, m, device=p.device)[:, None]
    j = torch.arange(m, device=p.device)[None, :]
    b, h = (torch.arange(size, device=p.device) for size in (batch, heads))
    p = torch.zeros_like(p)
    for number, branch in enumerate(met.branches):
        partial = share * branch
        if detached:
            zero_keys = None if met.zero_keys is None else met.zero_keys[number]
            partial = _with_detached_mixing(partial, zero_keys, lse)
        if dropout is not None:
            factors: Tensor = dropout.factors(b[:, None, None, None], h[None, :, None, None], number, i, j)
            partial = partial * factors.to(p.dtype)
        p = p + partial
    return p


def _with_detached_mixing(partial: Tensor, zero_keys: Tensor | None, lse: Tensor) -> Tensor:
    """The same weights, with the share of the branch in the mixture taken as a constant."""
    alpha = partial.sum(-1, keepdim=True)
    if zero_keys is not None:
        alpha = alpha + torch.where(zero_keys > 0, zero_keys * torch.exp(-lse.unsqueeze(-1)), 0.0)
    own_softmax = torch.where(alpha > 0, partial / torch.where(alpha > 0, alpha, 1.0), 0.0)
    return own_softmax * alpha.detach()


def _full_precision(x: Tensor) -> torch.autocast:
    """Products in the type of their operands: autocast has acted on the inputs already."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def _logsumexp(scores: Tensor) -> Tensor:
    """``logsumexp`` over the last dimension whose gradient is zero, not NaN, where every score is -inf."""
    empty = (scores == -torch.inf).all(-1)
    safe = torch.logsumexp(scores.masked_fill(empty.unsqueeze(-1), 0.0), -1)
    return safe.masked_fill(empty, -torch.inf)


def _softmax(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``, exactly 0 where the score is -inf."""
    masked = scores == -torch.inf
    return torch.exp(scores.masked_fill(masked, 0.0) - lse.unsqueeze(-1).masked_fill(masked, 0.0)).masked_fill(masked, 0.0)
