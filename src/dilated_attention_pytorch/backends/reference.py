"""The definition as code: dense attention with the additive bias log(multiplicity). Slow, obvious, differentiable.

It reads the pattern, never the plan, and no other backend imports it. Scores and softmax are computed in float64 for
float64 inputs and in float32 otherwise. Memory grows with the square of the length.

Shape letters: B batch, N queries, M keys, H query heads, G key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.dropout import Dropout

MAX_SCORES = 2**30  # B * H * N * M: 4 GiB in float32


def why_not(request: Request) -> list[str]:
    """Every device and every floating-point type is served; the size is checked when it is known."""
    return []


def check_size(scores: int) -> None:
    """Raise if so many scores are too many to materialise."""
    if scores > MAX_SCORES:
        raise ValueError(
            f"the reference backend materialises all scores and takes at most {MAX_SCORES} (B*H*N*M), got {scores}; "
            "use another backend (backend='auto' finds one) or a shorter sequence"
        )


def _full_precision(x: Tensor) -> torch.autocast:
    """Products in the type of their operands: autocast has acted on the inputs already."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def _scores_bhnm(query: Tensor, key: Tensor, scale: float) -> Tensor:
    group = query.shape[2] // key.shape[2]
    return torch.einsum("bnhd,bmhd->bhnm", query, key.repeat_interleave(group, dim=2)) * scale


def allowed_pairs(i: Tensor, j: Tensor, is_causal: bool, positions: Tensor | None) -> Tensor:
    """Which pairs causality allows, (N, M) or (B, 1, N, M): by ``positions`` if the sequence is in another order."""
    if not is_causal:
        return torch.ones((), dtype=torch.bool, device=j.device)
    if positions is None:
        return j <= i
    return positions[..., None, None, :] <= positions[..., None, :, None]


def _meets(pattern: Dilated, branch: int, i: Tensor, j: Tensor, heads: int, key_heads: int, allowed: Tensor) -> Tensor:
    """Which pairs meet in a branch: (H, N, M), or (B, H, N, M) if that differs by sample."""
    group = heads // key_heads
    masks = [pattern.meets(branch, i, j, key_head=h // group, key_heads=key_heads) for h in range(heads)]
    return torch.stack(masks) & allowed


def _zero_keys_hn1(pattern: Dilated, branch: int, i: Tensor, length: int, heads: int, key_heads: int) -> Tensor:
    group = heads // key_heads
    return torch.stack(
        [pattern.zero_keys(branch, i, length, key_head=h // group, key_heads=key_heads) for h in range(heads)]
    )


def _logsumexp(scores: Tensor) -> Tensor:
    """``logsumexp`` over the last dimension whose gradient is zero, not NaN, where every score is -inf."""
    empty = (scores == -torch.inf).all(-1)
    safe = torch.logsumexp(scores.masked_fill(empty.unsqueeze(-1), 0.0), -1)
    return safe.masked_fill(empty, -torch.inf)


def _softmax(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``, exactly 0 where the score is -inf."""
    masked = scores == -torch.inf
    return torch.exp(scores.masked_fill(masked, 0.0) - lse.unsqueeze(-1).masked_fill(masked, 0.0)).masked_fill(masked, 0.0)


def weights(
    query: Tensor,
    key: Tensor,
    pattern: Dilated,
    rows: Tensor,
    *,
    length: int,
    is_causal: bool,
    scale: float,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention weights (B, H, rows, M) of query rows at the positions ``rows``, and their lse (B, H, rows).

    ``key`` holds the positions 0 .. length - 1 and ``query`` one row for each entry of ``rows``. If the sequence is in
    another order, ``positions`` (M,) or (B, M) are what causality goes by, and ``query`` has all rows.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    i, j = rows[:, None], torch.arange(length, device=key.device)[None, :]
    with _full_precision(query):
        s = _scores_bhnm(query, key, scale)
    count = torch.zeros((heads, len(rows), length), dtype=s.dtype, device=s.device)
    zeros = torch.zeros((heads, len(rows), 1), dtype=s.dtype, device=s.device)
    allowed = allowed_pairs(i, j, is_causal, positions)
    for branch in range(len(pattern.branches)):
        count = count + _meets(pattern, branch, i, j, heads, key_heads, allowed)
        if pattern.torchscale_padding and not is_causal:
            zeros = zeros + _zero_keys_hn1(pattern, branch, i, length, heads, key_heads)
    # -inf by selection, not by addition: a NaN score of a pair that does not meet must not count
    s = torch.where(count > 0, s + count.clamp(min=1).log(), -torch.inf)
    lse = _logsumexp(torch.cat((s, zeros.log().expand((*s.shape[:-1], 1))), -1))
    return _softmax(s, lse), lse


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    detach_mixing: bool,
    first_sample: int,
    first_row: int,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of whole sequences; the queries are the last N of the M positions.

    ``first_sample`` and ``first_row`` place the tensors in the caller's batch, which is what dropout counts by;
    ``positions`` is what causality goes by, see ``weights``.
    """
    n, m, heads, key_heads = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    check_size(query.shape[0] * heads * n * m)
    dtype = query.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = query.to(compute), key.to(compute), value.to(compute)
    rows = torch.arange(m - n, m, device=query.device)
    p, lse = weights(query, key, pattern, rows, length=m, is_causal=is_causal, scale=scale, positions=positions)
    if detach_mixing or dropout_p > 0.0:
        # p / multiplicity: the weight of a pair in each branch in which it meets
        i, j = rows[:, None], torch.arange(m, device=query.device)[None, :]
        allowed = allowed_pairs(i, j, is_causal, positions)
        meets = [_meets(pattern, b, i, j, heads, key_heads, allowed) for b in range(len(pattern.branches))]
        share = p / torch.stack(meets).sum(0).clamp(min=1)
        p = torch.zeros_like(p)
        for branch, met in enumerate(meets):
            part = share * met
            if detach_mixing:
                part = _with_detached_mixing(part, pattern, branch, i, m, heads, key_heads, is_causal, lse)
            if dropout_p > 0.0:
                assert seed is not None
                dropout = Dropout(dropout_p, seed.to(i.device), first_sample, first_row)
                part = part * _kept(dropout, branch, i, j, query.shape[0], heads).to(compute)
            p = p + part
    with _full_precision(query):
        out = torch.einsum("bhnm,bmhd->bnhd", p, value.repeat_interleave(heads // key_heads, dim=2))
    return out.to(dtype).contiguous(), lse


def block_weights(query: Tensor, key: Tensor, met_bhnm: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The weights (B, H, N, M) and lse (B, H, N) of the pairs of a mask that broadcasts to (B, H, N, M)."""
    with _full_precision(query):
        s = torch.where(met_bhnm, _scores_bhnm(query, key, scale), -torch.inf)
    lse = _logsumexp(s) if s.shape[-1] else torch.full(s.shape[:-1], -torch.inf, dtype=s.dtype, device=s.device)
    return _softmax(s, lse), lse


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, met_bhnm: Tensor, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of a multiplicity that is 0 or 1; the queries are the last positions."""
    heads, key_heads = query.shape[2], key.shape[2]
    check_size(query.shape[0] * heads * query.shape[1] * key.shape[1])
    dtype = query.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = query.to(compute), key.to(compute), value.to(compute)
    p, lse = block_weights(query, key, met_bhnm, scale)
    if dropout is not None:
        (n, m), device = (query.shape[1], key.shape[1]), query.device
        i, j = torch.arange(m - n, m, device=device)[:, None], torch.arange(m, device=device)[None, :]
        p = p * _kept(dropout, 0, i, j, query.shape[0], heads).to(compute)
    with _full_precision(query):
        out = torch.einsum("bhnm,bmhd->bnhd", p, value.repeat_interleave(heads // key_heads, dim=2))
    return out.to(dtype).contiguous(), lse


def _with_detached_mixing(
    part: Tensor,
    pattern: Dilated,
    branch: int,
    i: Tensor,
    length: int,
    heads: int,
    key_heads: int,
    is_causal: bool,
    lse: Tensor,
) -> Tensor:
    """The same weights, with the share of the branch in the mixture taken as a constant."""
    alpha = part.sum(-1, keepdim=True)
    if pattern.torchscale_padding and not is_causal:
        zeros = _zero_keys_hn1(pattern, branch, i, length, heads, key_heads)
        alpha = alpha + torch.where(zeros > 0, zeros * torch.exp(-lse.unsqueeze(-1)), 0.0)
    own_softmax = torch.where(alpha > 0, part / torch.where(alpha > 0, alpha, 1.0), 0.0)
    return own_softmax * alpha.detach()


def _kept(dropout: Dropout, branch: int, i: Tensor, j: Tensor, batch: int, heads: int) -> Tensor:
    """1 / (1 - p) where the pair is kept, else 0: (B, H, N, M)."""
    b = torch.arange(batch, device=i.device)[:, None, None, None]
    h = torch.arange(heads, device=i.device)[None, :, None, None]
    kept: Tensor = dropout.factors(b, h, branch, i, j)
    return kept
