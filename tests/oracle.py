"""The definition, written out again and as plainly as possible: loops over positions, float64, no library code.

Everything the library computes is compared with this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def offset(rule, key_head: int, key_heads: int, rate: int) -> int:
    if rule == "interleaved":
        return key_head % rate
    if rule == "blocked":
        return key_head // math.ceil(key_heads / rate)
    return rule[key_head] % rate


def met_in(branch: tuple[int, int], o: int, i: int, j: int) -> bool:
    w, r = branch
    return i // w == j // w and (i % w) % r == o and (j % w) % r == o


def multiplicity(branches, rule, key_head: int, key_heads: int, i: int, j: int, causal: bool) -> int:
    if causal and j > i:
        return 0
    return sum(met_in((w, r), offset(rule, key_head, key_heads, r), i, j) for w, r in branches)


def zero_keys(branch: tuple[int, int], o: int, i: int, length: int) -> int:
    """The zero rows that the paper authors' code pads the segment of ``i`` with, as far as this head sees them."""
    w, r = branch
    if (i % w) % r != o:
        return 0
    rows = min(w, length - i // w * w)
    return sum(t % r == o for t in range(rows, math.ceil(min(w, length) / r) * r))


def multiplicities(pattern, n: int, m: int, heads: int, key_heads: int, causal: bool) -> Tensor:
    """(H, N, M) for queries that are the last n of m positions."""
    group = heads // key_heads
    table = [
        [
            [multiplicity(pattern.branches, pattern.offsets, h // group, key_heads, a + m - n, j, causal) for j in range(m)]
            for a in range(n)
        ]
        for h in range(heads)
    ]
    return torch.tensor(table, dtype=torch.float64).reshape(heads, n, m)


def attention(q: Tensor, k: Tensor, v: Tensor, pattern, *, is_causal=False, scale=None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` in float64, differentiable by autograd; whole sequences."""
    q, k, v = q.double(), k.double(), v.double()
    (batch, n, heads, d), (m, key_heads) = q.shape, k.shape[1:3]
    group = heads // key_heads
    scale = d**-0.5 if scale is None else scale
    count = multiplicities(pattern, n, m, heads, key_heads, is_causal)
    zeros = torch.zeros(heads, n, 1, dtype=torch.float64)
    if pattern.torchscale_padding and not is_causal:
        for h in range(heads):
            for a in range(n):
                zeros[h, a, 0] = sum(
                    zero_keys((w, r), offset(pattern.offsets, h // group, key_heads, r), a + m - n, m)
                    for w, r in pattern.branches
                )
    out = torch.zeros(batch, n, heads, d, dtype=torch.float64)
    lse = torch.full((batch, heads, n), -math.inf, dtype=torch.float64)
    for h in range(heads):
        s = scale * q[:, :, h] @ k[:, :, h // group].transpose(1, 2)
        meets = (count[h] > 0).any(1)  # rows that meet somebody; the others keep 0 and -inf
        biased = s[:, meets] + count[h][meets].log()
        padded = torch.cat((biased, zeros[h][meets].log().expand(batch, -1, -1)), -1)
        p = padded.softmax(-1)[..., :m]
        out[:, meets, h] = p @ v[:, :, h // group]
        lse[:, h, meets] = padded.logsumexp(-1)
    return out, lse


def grads(outputs, inputs, cotangents) -> tuple[Tensor, ...]:
    """Gradients of ``sum(out * dout)`` over all outputs, ignoring the -inf of empty rows."""
    total = sum((torch.where(o.isfinite(), o, 0.0) * c).sum() for o, c in zip(outputs, cotangents, strict=True))
    return torch.autograd.grad(total, inputs)
