"""The bits of one sample in a batch whose other samples hold other ordinary rows, NaN, inf or huge logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KINDS = ("huge logits", "nan"), ("inf", "ordinary")  # of samples 0 and 2


def spoil(x: list[Tensor], kinds: tuple[str, str]) -> list[Tensor]:
    """q, k, v and dout with other contents of samples 0 and 2. Sample 1 stays."""
    q, k, v, dout = (y.clone() for y in x)
    n = q.shape[1]
    for b, kind in zip((0, 2), kinds, strict=True):
        if kind == "nan":
            k[b, n // 3], v[b, 7], q[b, n - 5, 0], dout[b, 9] = (torch.nan,) * 4
        elif kind == "inf":
            k[b, n // 3, :, 3], v[b, n // 2], dout[b, 9] = torch.inf, torch.inf, -torch.inf
        elif kind == "huge logits":
            q[b], k[b] = 200.0 * q[b], 200.0 * k[b]
        else:
            for y in (q, k, v, dout):
                y[b] = torch.randn_like(y[b])
    return [q, k, v, dout]


def check_bits_of_a_sample(call: Callable[..., tuple[Tensor, Tensor]], n: int, heads: int, head_dim: int, **options: Any):
    """``call(q, k, v)`` returns out and lse. Sample 1 has the same five results beside all kinds of neighbours."""
    x = [torch.randn(3, n, heads, head_dim, **options) for _ in range(4)]
    x[0][1] *= 3.0  # large scores: an online softmax and another one differ in bits
    x[1][1] *= 3.0

    def of_sample(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        inputs = [y.detach().requires_grad_() for y in (q, k, v)]
        out, lse = call(*inputs)
        return [y[1].detach() for y in (out, lse, *torch.autograd.grad(out, inputs, dout))]

    plain = of_sample(*x)
    assert all(y.isfinite().all() for y in plain)
    for kinds in KINDS:
        beside = of_sample(*spoil(x, kinds))
        for name, mine, other in zip(("out", "lse", "dq", "dk", "dv"), plain, beside, strict=True):
            assert torch.equal(mine, other), f"{name} beside {kinds}"
