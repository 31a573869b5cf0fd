"""Sums in fixed point: the same bits in whatever order they are added up.

Programs that each have a part of a row's gradient may add it in memory as they come to it, if they add integers: the row
counts in quanta, and sums of integers do not depend on their order. 32 bits are what float32 sums have, if the quantum
fits: it is 2**-30 of a bound of the row's result,

    |dq_i| = |sum_j p_ij (dout_i . v_j - delta_i) k_j|  <=  (|dout_i| max_j |v_j| + |delta_i|) max_j |k_j|,

because weights are positive and their sum is at most 1. (On the way sums may overflow: only the last one has to fit.)

The bound knows nothing of which keys a row looks at. Where some keys or values are larger by orders of magnitude than those
around them, quanta would be too coarse for rows that only see the small ones, and nothing fits where a number is not
finite. Such tensors are found (``resolution``), and their results are left to kernels that add in floating point.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.backends.triton.configs import padded
from dilated_attention_pytorch.backends.triton.launch import launch_one

_BITS = 30  # of the bound: one for the sign, one for the roundings of weights and gradients
# The largest product of a value's norm and a key's element over the smallest that 128 rows have on average, up to which
# quanta are fine enough. Normal numbers have 10. With this many, sums of 300 parts are off by 2**-15 of what rows add up on
# average: sums of products that were rounded to bfloat16 are not nearer.
_MOST_RANGE = 512.0
_ROWS = 128


@triton.jit
def _norm(x):
    """Of each row, without squares that overflow or vanish."""
    largest = tl.max(tl.abs(x), 1)
    y = x / tl.where(largest > 0.0, largest, 1.0)[:, None]
    return largest * tl.sqrt(tl.sum(y * y, 1))


@triton.jit
def _raise_to(place, x):
    """Floating-point numbers that are not negative are ordered as their bits are, infinity and no number behind them."""
    tl.atomic_max(place, x.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _load_rows(X, stride_n, n, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < D)[None, :]
    return tl.load(X + (n * stride_n)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def extremes_kernel(
    K,
    V,
    EXTREMES,  # (3, B * G) int32, bits of float32: |k| and |v| at most, and 1 / (their averages), at most
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    M,
    G,
    heads,  # B * G
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest element of keys and norm of values, and the smallest averages, of each sample and head."""
    blocks = tl.cdiv(M, BLOCK)
    head = tl.program_id(0) // blocks
    n = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = n < M
    sample, own = (head // G).to(tl.int64), (head % G).to(tl.int64)
    k = _load_rows(K + sample * k_stride_b + own * k_stride_h, k_stride_n, n, inside, D, BLOCK_D)
    v = _load_rows(V + sample * v_stride_b + own * v_stride_h, v_stride_n, n, inside, D, BLOCK_D)
    k_norm, v_norm = _norm(k), _norm(v)
    largest_k, largest_v = tl.max(tl.max(tl.abs(k), 1), 0), tl.max(v_norm, 0)
    # Rows of zeros (padding) do not count.
    some = (k_norm > 0.0) | (v_norm > 0.0)
    rows = tl.maximum(tl.sum(some.to(tl.float32), 0), 1.0)
    average = tl.sqrt(tl.sum(k_norm * k_norm, 0) / (rows * D)) * tl.sqrt(tl.sum(v_norm * v_norm, 0) / rows)
    # tl.max passes over what is no number, sums do not.
    broken = tl.sum(tl.sum(k * 0.0, 1), 0) + tl.sum(tl.sum(v * 0.0, 1), 0)
    nothing = (largest_k == 0.0) | (largest_v == 0.0)
    _raise_to(EXTREMES + head, tl.abs(largest_k + broken))
    _raise_to(EXTREMES + heads + head, tl.abs(largest_v + broken))
    _raise_to(EXTREMES + 2 * heads + head, tl.abs(tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, average))))


@triton.jit
def resolution_kernel(
    DOUT,
    DELTA,  # (B, H, N)
    EXTREMES,
    RESOLUTION,  # (B, H, N) float32: quanta of 1; 0 for rows whose gradient is 0
    UNFIT,  # (1,) int32
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    N,
    H,
    group,
    heads,  # B * G
    most_range,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """How many quanta 1 has in each row, a power of 2; and 1 in UNFIT if quanta do not do."""
    blocks = tl.cdiv(N, BLOCK)
    head = tl.program_id(0) // blocks
    n = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = n < N
    sample, own = (head // H).to(tl.int64), (head % H).to(tl.int64)
    dout = _load_rows(DOUT + sample * dout_stride_b + own * dout_stride_h, dout_stride_n, n, inside, D, BLOCK_D)
    place = head.to(tl.int64) * N + n
    delta = tl.load(DELTA + place, mask=inside, other=0.0)
    key_head = head // group  # of all samples
    largest_k = tl.load(EXTREMES + key_head).to(tl.float32, bitcast=True)
    largest_v = tl.load(EXTREMES + heads + key_head).to(tl.float32, bitcast=True)
    inverse = tl.load(EXTREMES + 2 * heads + key_head).to(tl.float32, bitcast=True)
    bound = (_norm(dout) * largest_v + tl.abs(delta)) * largest_k
    # 2**exponent is more than the bound; powers of 2 by their bits.
    exponent = tl.maximum((bound.to(tl.int32, bitcast=True) >> 23) - 126, BITS - 126)
    resolution = (BITS - exponent + 127 << 23).to(tl.float32, bitcast=True)
    tl.store(RESOLUTION + place, tl.where(bound == 0.0, 0.0, resolution), mask=inside)
    finite = bound < float("inf")  # not if it is no number
    fit = (largest_k * largest_v * inverse <= most_range) & (tl.sum((~finite & inside).to(tl.int32), 0) == 0)
    tl.store(UNFIT, 1, mask=~fit)


@triton.jit
def finish_kernel(
    COUNTS,  # (B, H, N, D) int32
    RESOLUTION,
    UNFIT,
    RESULT,  # (B, N, H, D)
    N,
    H,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What counts of quanta are, times ``scale``; nothing if they are unfit."""
    if tl.load(UNFIT) == 0:
        blocks = tl.cdiv(N, BLOCK)
        head = tl.program_id(0) // blocks
        n = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = n < N
        d = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (d < D)[None, :]
        place = head.to(tl.int64) * N + n
        resolution = tl.load(RESOLUTION + place, mask=inside, other=0.0)
        counts = tl.load(COUNTS + place[:, None] * D + d[None, :], mask=mask, other=0).to(tl.float32)
        # Two factors: a quantum times a small scale may be too small for float32 where their result is not.
        some = resolution > 0.0
        quantum = tl.where(some, 1.0 / tl.where(some, resolution, 1.0), 0.0)
        rows = ((head // H).to(tl.int64) * N + n) * H + head % H
        values = counts * quantum[:, None] * scale
        tl.store(RESULT + rows[:, None] * D + d[None, :], values.to(RESULT.dtype.element_ty), mask=mask)


def sizes(head_dim: int) -> dict[str, int]:
    """What all three kernels are specialised on."""
    return {"D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK": _ROWS}


def resolution(dout: Tensor, key: Tensor, value: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Quanta of 1 for each row of dq, (B, H, N), and (1,): whether dq has to be added up in floating point instead."""
    (batch, n, heads, d), (m, key_heads) = dout.shape, key.shape[1:3]
    found = torch.zeros(3 * batch * key_heads + 1, dtype=torch.int32, device=key.device)
    extremes, unfit = found[:-1], found[-1:]
    result = torch.empty_like(delta)
    of_keys = (*key.stride()[:3], *value.stride()[:3], m, key_heads, batch * key_heads)
    programs = -(-m // _ROWS) * batch * key_heads
    launch_one(extremes_kernel, programs, (key, value, extremes), of_keys, sizes(d))
    of_queries = (*dout.stride()[:3], n, heads, heads // key_heads, batch * key_heads, _MOST_RANGE)
    tensors = dout, delta, extremes, result, unfit
    launch_one(resolution_kernel, -(-n // _ROWS) * batch * heads, tensors, of_queries, {**sizes(d), "BITS": _BITS})
    return result, unfit


def finish(counts: Tensor, resolution: Tensor, unfit: Tensor, scale: float, result: Tensor) -> None:
    """Write what ``counts`` of quanta are to ``result``, unless they are unfit."""
    batch, heads, n, d = counts.shape
    tensors = counts, resolution, unfit, result
    launch_one(finish_kernel, -(-n // _ROWS) * batch * heads, tensors, (n, heads, scale), sizes(d))
