"""The definition, written out again and as plainly as possible: loops over positions, float64, no library code.

Everything the library computes is compared with this.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

M32 = 2**32


def plain_word(seed: int, b: int, h: int, branch: int, i: int, j: int) -> int:
    """The hash of dropout written out in unbounded Python integers."""

    def f(x):
        x %= M32
        x = (x ^ x >> 16) * 0x85EBCA6B % M32
        x = (x ^ x >> 13) * 0xC2B2AE35 % M32
        return x ^ x >> 16

    stream = f(f(seed % M32) + (seed >> 32) % M32)
    stream = f(f(f(stream + b) + h) + branch)
    x = f(stream + i * 0x9E3779B1) ^ (j * 0x85157AF5 % M32)
    x = ((x ^ x >> 16) * 0x85EBCA6B + f(stream ^ 0x7F4A7C15) + i * 0x2C1B3C6D) % M32
    return (x ^ x >> 15) * 0xC2B2AE35 % M32


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


@functools.cache
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


def ordered_multiplicities(pattern, positions: list[int], heads: int, key_heads: int, causal: bool) -> Tensor:
    """(H, n, n) by original positions: pairs meet by their places, and causality goes by their positions."""
    n = len(positions)
    place_of = [positions.index(i) for i in range(n)]
    count = multiplicities(pattern, n, n, heads, key_heads, False)[:, place_of][:, :, place_of]
    return count.tril() if causal else count


def ordered_attention(q, k, v, pattern, order, is_causal):
    """``(out, lse)`` in float64, differentiable, one sample and one head after the other."""
    q, k, v = q.double(), k.double(), v.double()
    (batch, n, heads, d), key_heads = q.shape, k.shape[2]
    out = torch.zeros(batch, n, heads, d, dtype=torch.float64)
    lse = torch.full((batch, heads, n), -math.inf, dtype=torch.float64)
    for b in range(batch):
        positions = (order.positions if order.positions.dim() == 1 else order.positions[b]).tolist()
        count = ordered_multiplicities(pattern, positions, heads, key_heads, is_causal)
        for h in range(heads):
            g = h // (heads // key_heads)
            meets = (count[h] > 0).any(1)
            biased = d**-0.5 * q[b, :, h][meets] @ k[b, :, g].T + count[h][meets].log()
            out[b, meets, h] = biased.softmax(-1) @ v[b, :, g]
            lse[b, h, meets] = biased.logsumexp(-1)
    return out, lse


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to a type costs at this magnitude: the measure of flash-attention's own tests."""
    x = x.to(dtype)
    return ((x + 0.3 - 0.3) - x).abs().max().double()


def assert_rounding_only(actual, yardstick, exact, dtype: torch.dtype) -> None:
    """out, lse, dq, dk, dv: at most twice the error of plain attention in the same type against float64, plus rounding.

    The errors compared are root mean squares over all elements; the largest single error, which scatters more, may be four
    times that of plain attention.
    """
    for name, a, y, e in zip(("out", "lse", "dq", "dk", "dv"), actual, yardstick, exact, strict=True):
        a, y, e = (x.detach().double().cpu() for x in (a, y, e))
        empty = e == -math.inf
        assert torch.equal(a == -math.inf, empty), f"{name}: other rows are empty"
        a, y, e = (x.masked_fill(empty, 0.0) for x in (a, y, e))
        if e.numel():
            typical = lambda x: x.square().mean().sqrt()  # noqa: E731
            error, allowed = typical(a - e), 2 * typical(y - e) + torch.finfo(dtype).eps * typical(e) / 2
            assert error <= allowed, f"{name}: typical error {error:.2e}, allowed {allowed:.2e}"
            error, allowed = (a - e).abs().max(), 4 * (y - e).abs().max() + 2 * rounding(e, dtype)
            assert error <= allowed, f"{name}: largest error {error:.2e}, allowed {allowed:.2e}"


def plain(pattern, causal: bool):
    """Eager dense attention with the bias log(multiplicity) in the type of its inputs: the yardstick of rounding."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        (n, heads, d), (m, key_heads) = q.shape[1:], k.shape[1:3]
        count = multiplicities(pattern, n, m, heads, key_heads, causal).to(q.device)
        k, v = (x.repeat_interleave(heads // key_heads, 2) for x in (k, v))
        empty = (count == 0).all(-1, keepdim=True)
        bias = count.log().masked_fill(empty, 0.0).to(q.dtype)
        s = torch.einsum("bnhd,bmhd->bhnm", q, k) * d**-0.5 + bias
        out = torch.einsum("bhnm,bmhd->bnhd", s.softmax(-1).masked_fill(empty, 0.0), v)
        return out, s.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)

    return call


def grads(outputs, inputs, cotangents) -> tuple[Tensor, ...]:
    """Gradients of ``sum(out * dout)`` over all outputs, ignoring the -inf of empty rows."""
    total = sum((torch.where(o.isfinite(), o, 0.0) * c).sum() for o, c in zip(outputs, cotangents, strict=True))
    return torch.autograd.grad(total, inputs)


def random_inputs(b, n, m, heads, key_heads, d, dtype=torch.float64, device="cpu"):
    q = torch.randn(b, n, heads, d, dtype=torch.float64)
    k = torch.randn(b, m, key_heads, d, dtype=torch.float64)
    v = torch.randn(b, m, key_heads, d, dtype=torch.float64)
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v)]


def with_grads(call, inputs, dout, dlse):
    """[out, lse, dq, dk, dv], in float64."""
    out, lse = call(*inputs)
    return [x.detach().double() for x in (out, lse, *grads((out, lse), inputs, (dout.to(out), dlse.to(lse))))]


def assert_same(actual, expected, tolerance=1e-11):
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
