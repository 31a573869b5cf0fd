"""One query row per head with the rows of all branches: a decoding step in one launch.

Programs share the rows of a key head: each computes a partial result of ``BLOCK_N`` rows of one branch. The program that
ends last merges them. Programs whose branch has no row at this position end at once, so only rows that are needed are read.

``CACHED`` rows are in the slots of a cache (plan/held.py). The step then also appends the token: the program that reads its
slot writes it, and the last program of a sample counts it. Otherwise the rows are those of the sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.primitives import LN_2

# Rows of the table, see execute/step.py: each has one number per branch. The offsets of the key heads follow.
LENGTH, RATE, SEGMENT_ROWS, SLOTS, FIRST_ROW, OFFSETS = map(tl.constexpr, range(6))


@triton.jit
def _last_row(TABLE, branch, branches, head, position, mask):
    """The number of the row at a position within its segment; -1 if it is no row of this branch and key head."""
    inside = position % tl.load(TABLE + LENGTH * branches + branch, mask=mask, other=1)
    rate = tl.load(TABLE + RATE * branches + branch, mask=mask, other=1)
    offset = tl.load(TABLE + (OFFSETS + head) * branches + branch, mask=mask, other=-1)
    return tl.where(inside % rate == offset, inside // rate, -1)


@triton.jit
def _merge(
    PARTIAL_OUT, PARTIAL_LSE2, OUT, LSE, TABLE, BLOCKS, row, position, head, blocks, branches,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query head, ``row`` of (B, H)."""
    d = tl.arange(0, BLOCK_D)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.full([BLOCK_D], 0.0, tl.float32)
    for first in range(0, blocks, BLOCK_S):
        block = first + tl.arange(0, BLOCK_S)
        known = block < blocks
        branch = tl.load(BLOCKS + block * 2, mask=known, other=0)
        first_row = tl.load(BLOCKS + block * 2 + 1, mask=known, other=0)
        used = known & (first_row <= _last_row(TABLE, branch, branches, head, position, known))
        partial = row * blocks + block
        lse2 = tl.load(PARTIAL_LSE2 + partial, mask=used, other=float("-inf"))
        new = tl.maximum(largest, tl.max(lse2, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(lse2 - safe)
        out = tl.load(PARTIAL_OUT + partial[:, None] * BLOCK_D + d[None, :], mask=used[:, None], other=0.0)
        shrink = tl.exp2(largest - safe)
        acc = acc * shrink + tl.sum(out * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new
    # A row without keys has the sum 0. NaN stays NaN.
    result = tl.where(total == 0.0, 0.0, acc / total)
    tl.store(OUT + row * D + d, result.to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + row, (largest + tl.log2(total)) * LN_2)


@triton.jit
def _append(ARRIVED, SEEN, ROLLED_BACK, sample, heads):
    """Count a key head of a sample, and the token with the last one: then all programs of the sample have read SEEN."""
    arrived = tl.atomic_add(ARRIVED + sample, 1, sem="acq_rel")
    if arrived == heads - 1:
        tl.atomic_xchg(ARRIVED + sample, 0, sem="relaxed")
        tl.store(SEEN + sample, tl.load(SEEN + sample) + 1)
        tl.store(ROLLED_BACK + sample, tl.maximum(tl.load(ROLLED_BACK + sample) - 1, 0))


@triton.jit(do_not_specialize=["position"])
def decode_kernel(
    Q,  # (B, H, D)
    NEW_K, NEW_V,  # (B, G, D), the token to be appended, if CACHED
    K, V,
    SEEN,  # (B,) int64, the position of the token, if CACHED
    ROLLED_BACK,  # (B,) int64, see execute/step.py, if CACHED
    VALID,  # (B,) bool, samples that have a token, if HAS_VALID
    OUT,  # (B, H, D)
    LSE,  # (B, H) float32
    PARTIAL_OUT,  # (B, H, blocks, BLOCK_D) float32
    PARTIAL_LSE2,  # (B, H, blocks) float32, base 2
    ARRIVED,  # (B * G + B,) int32, zeros before and after: programs that have ended by key head, key heads by sample
    TABLE,  # (5 + G, branches) int64
    BLOCKS,  # (blocks, 2) int32: the branch of each block of rows, and its first row
    position: tl.int64,  # of the token, unless CACHED
    samples, branches, blocks, G, max_tokens,
    q_stride_b, q_stride_h, new_k_stride_b, new_k_stride_h, new_v_stride_b, new_v_stride_h,
    k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h, scale_log2,
    HEADS: tl.constexpr,  # query heads per key head
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    CACHED: tl.constexpr, HAS_VALID: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Attention of one token per sample."""
    block = tl.program_id(0) % blocks
    own = (tl.program_id(0) // blocks).to(tl.int64)  # a key head of a sample
    head = own % G
    sample = own // G
    d = tl.arange(0, BLOCK_D)
    present = d < D
    if CACHED:
        position = tl.load(SEEN + sample)
    first_head = own * HEADS
    has_token = True
    is_beyond = False
    if HAS_VALID:
        has_token = tl.load(VALID + sample) != 0
    if BOUNDED:
        is_beyond = has_token & (position >= max_tokens)
        has_token = has_token & (position < max_tokens)

    if has_token:
        branch = tl.load(BLOCKS + block * 2)
        first = tl.load(BLOCKS + block * 2 + 1)
        last = _last_row(TABLE, branch, branches, head, position, branch >= 0)
        if first <= last:
            length = tl.load(TABLE + LENGTH * branches + branch)
            rows = first + tl.arange(0, BLOCK_N)
            read = rows <= last
            if CACHED:
                slots = tl.load(TABLE + SLOTS * branches + branch)
                slot = position // length * tl.load(TABLE + SEGMENT_ROWS * branches + branch) % slots + rows
                at = tl.load(TABLE + FIRST_ROW * branches + branch) + tl.where(slot < slots, slot, slot - slots)
                read = rows < last
            else:
                rate = tl.load(TABLE + RATE * branches + branch)
                at = position // length * length + tl.load(TABLE + (OFFSETS + head) * branches + branch) + rows * rate
            k_at = K + sample * k_stride_b + head * k_stride_h + at[:, None] * k_stride_n + d[None, :]
            v_at = V + sample * v_stride_b + head * v_stride_h + at[:, None] * v_stride_n + d[None, :]
            mask = read[:, None] & present[None, :]
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
            if CACHED and last < first + BLOCK_N:  # the slot of the token is in this block
                new_k = tl.load(NEW_K + sample * new_k_stride_b + head * new_k_stride_h + d, mask=present, other=0.0)
                new_v = tl.load(NEW_V + sample * new_v_stride_b + head * new_v_stride_h + d, mask=present, other=0.0)
                is_new = (rows == last)[:, None]
                k = tl.where(is_new, new_k[None, :], k)
                v = tl.where(is_new, new_v[None, :], v)
                tl.store(k_at, k, mask=is_new & present[None, :])
                tl.store(v_at, v, mask=is_new & present[None, :])
            k = k.to(tl.float32)
            v = v.to(tl.float32)
            for i in tl.static_range(HEADS):
                q = tl.load(Q + sample * q_stride_b + (head * HEADS + i) * q_stride_h + d, mask=present, other=0.0)
                scores2 = tl.sum(k * q.to(tl.float32)[None, :], 1) * scale_log2
                scores2 = tl.where(rows <= last, scores2, float("-inf"))
                largest = tl.max(scores2, 0)
                weights = tl.exp2(scores2 - tl.where(largest == float("-inf"), 0.0, largest))
                total = tl.sum(weights, 0)
                partial = (first_head + i) * blocks + block
                out = tl.sum(v * weights[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
                tl.store(PARTIAL_OUT + partial * BLOCK_D + d, out)
                tl.store(PARTIAL_LSE2 + partial, largest + tl.log2(total))
        tl.debug_barrier()  # the results of all threads are stored before the program counts itself
        arrived = tl.atomic_add(ARRIVED + own, 1, sem="acq_rel")
        if arrived == blocks - 1:
            tl.debug_barrier()
            tl.atomic_xchg(ARRIVED + own, 0, sem="relaxed")
            for i in range(HEADS):
                _merge(
                    PARTIAL_OUT, PARTIAL_LSE2, OUT, LSE, TABLE, BLOCKS, first_head + i, position, head, blocks, branches,
                    D, BLOCK_D, BLOCK_S,
                )  # fmt: skip
            if CACHED:
                _append(ARRIVED + samples * G, SEEN, ROLLED_BACK, sample, G)
    elif block == 0:  # 0 and -inf, or NaN for a token beyond the promised number
        nothing = tl.where(is_beyond, float("nan"), 0.0)
        for i in range(HEADS):
            tl.store(OUT + (first_head + i) * D + d, (nothing + d * 0.0).to(OUT.dtype.element_ty), mask=present)
            tl.store(LSE + first_head + i, tl.where(is_beyond, float("nan"), float("-inf")))
