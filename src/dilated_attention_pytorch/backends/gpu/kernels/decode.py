"""One query row per head with the rows of all branches: a decoding step in one launch.

The rows that a key head reads at a position are blocks of ``BLOCK_N`` rows, numbered over all branches. Block ``i`` belongs
to partial result ``i % partials``. The programs of a key head share its partial results, and the one that ends last merges
them. Rows of branches to which the position does not belong are not read.

``CACHED`` rows are in the slots of a cache (plan/held.py). The step then also appends the token: the program that has the
block of its slot writes it, and the last program of a sample counts it. Otherwise the rows are those of the sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.primitives import LN_2

# Rows of the table, see execute/step.py: each has one number per branch. The offsets of the key heads follow.
LENGTH, RATE, SEGMENT_ROWS, SLOTS, FIRST_ROW, OFFSETS = map(tl.constexpr, range(6))


@triton.jit
def _divided(x, y):
    """The quotient and the remainder of int64 numbers below 2**50, of which ``y`` is positive.

    A division in float64 is at most 1 off. It takes a fraction of the time of an integer division of 64 bits.
    """
    quotient = (x.to(tl.float64) / y.to(tl.float64)).to(tl.int64)
    remainder = x - quotient * y
    quotient = tl.where(remainder < 0, quotient - 1, tl.where(remainder >= y, quotient + 1, quotient))
    return quotient, x - quotient * y


@triton.jit
def _of_lane(values, is_own):
    """The value of one lane."""
    return tl.sum(tl.where(is_own, values, 0), 0)


@triton.jit
def _merge(PARTIAL, OUT, LSE, row, used, partials, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """Merge the first ``used`` partial results of one query head, ``row`` of (B, H)."""
    d = tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_S)
    at = PARTIAL + (row * partials + number) * (BLOCK_D + 1)
    lse2 = tl.load(at + BLOCK_D, mask=number < used, other=float("-inf"))
    largest = tl.max(lse2, 0)
    weights = tl.exp2(lse2 - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    out = tl.load(at[:, None] + d[None, :], mask=(number < used)[:, None], other=0.0)
    # A row without keys has the sum 0. NaN stays NaN.
    result = tl.sum(out * weights[:, None], 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
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
    PARTIAL,  # (B, H, partials, BLOCK_D + 1) float32: out, and lse in base 2
    ARRIVED,  # (B * G + B,) int32, zeros before and after: programs that have ended by key head, key heads by sample
    TABLE,  # (5 + G, branches) int64
    position: tl.int64,  # of the token, unless CACHED
    k_stride_b: tl.int64, v_stride_b: tl.int64,  # they grow with a sequence, so that a launch must serve all of them
    samples, branches, splits, partials, G, max_tokens,
    q_stride_b, q_stride_h, new_k_stride_b, new_k_stride_h, new_v_stride_b, new_v_stride_h,
    k_stride_n, k_stride_h, v_stride_n, v_stride_h, scale_log2,
    HEADS: tl.constexpr,  # query heads per key head
    ROWS: tl.constexpr,  # at least HEADS, and 16 for products of matrices
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    LANES: tl.constexpr,  # at least the number of branches
    CACHED: tl.constexpr, HAS_VALID: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one token per sample."""
    split = tl.program_id(0) % splits
    own = (tl.program_id(0) // splits).to(tl.int64)  # a key head of a sample
    head = own % G
    sample = own // G
    d = tl.arange(0, BLOCK_D)
    present = d < D
    if CACHED:
        position = tl.load(SEEN + sample)
    has_token = True
    is_beyond = False
    if HAS_VALID:
        has_token = tl.load(VALID + sample) != 0
    if BOUNDED:
        is_beyond = has_token & (position >= max_tokens)
        has_token = has_token & (position < max_tokens)

    if has_token:
        lane = tl.arange(0, LANES)
        known = lane < branches
        length = tl.load(TABLE + LENGTH * branches + lane, mask=known, other=1)
        rate = tl.load(TABLE + RATE * branches + lane, mask=known, other=1)
        offset = tl.load(TABLE + (OFFSETS + head) * branches + lane, mask=known, other=-1)
        segment, inside = _divided(position + length * 0, length)
        row, phase = _divided(inside, rate)
        last = tl.where(phase == offset, row, -1)  # the row of the token in its segment
        if CACHED:
            slots = tl.load(TABLE + SLOTS * branches + lane, mask=known, other=1)
            segment_rows = tl.load(TABLE + SEGMENT_ROWS * branches + lane, mask=known, other=1)
            _, start = _divided(segment * segment_rows, slots)
            first_row = tl.load(TABLE + FIRST_ROW * branches + lane, mask=known, other=0)
        else:
            first_row = segment * length + offset
        counts = ((last + BLOCK_N) // BLOCK_N).to(tl.int32)  # 0 if there is no row
        stops = tl.cumsum(counts, 0)
        blocks = tl.sum(counts, 0)

        i = tl.arange(0, ROWS)
        q_at = Q + sample * q_stride_b + (head * HEADS + i)[:, None] * q_stride_h + d[None, :]
        q = tl.load(q_at, mask=(i < HEADS)[:, None] & present[None, :], other=0.0)
        # A partial result has the same blocks whatever the number of programs is, so that bits do not depend on the batch.
        for number in range(split, tl.minimum(blocks, partials), splits):
            largest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.full([ROWS], 0.0, tl.float32)
            acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
            for block in range(number, blocks, partials):
                is_own = (block >= stops - counts) & (block < stops)
                rows = (block - _of_lane(stops - counts, is_own)) * BLOCK_N + tl.arange(0, BLOCK_N)
                own_last = _of_lane(last, is_own).to(tl.int32)
                if CACHED:
                    own_slots = _of_lane(slots, is_own).to(tl.int32)
                    slot = _of_lane(start, is_own).to(tl.int32) + rows
                    at = _of_lane(first_row, is_own) + tl.where(slot < own_slots, slot, slot - own_slots)
                    read = rows < own_last
                else:
                    at = _of_lane(first_row, is_own) + rows * _of_lane(rate, is_own)
                    read = rows <= own_last
                k_at = K + sample * k_stride_b + head * k_stride_h + at[:, None] * k_stride_n + d[None, :]
                v_at = V + sample * v_stride_b + head * v_stride_h + at[:, None] * v_stride_n + d[None, :]
                mask = read[:, None] & present[None, :]
                k = tl.load(k_at, mask=mask, other=0.0)
                v = tl.load(v_at, mask=mask, other=0.0)
                is_new = (rows == own_last)[:, None]
                if CACHED and tl.max(rows, 0) >= own_last:  # the slot of the token is in this block
                    new_k = tl.load(NEW_K + sample * new_k_stride_b + head * new_k_stride_h + d, mask=present, other=0.0)
                    new_v = tl.load(NEW_V + sample * new_v_stride_b + head * new_v_stride_h + d, mask=present, other=0.0)
                    k = tl.where(is_new, new_k[None, :], k)
                    v = tl.where(is_new, new_v[None, :], v)
                    tl.store(k_at, k, mask=is_new & present[None, :])
                    tl.store(v_at, v, mask=is_new & present[None, :])
                if ROWS == 1:
                    scores2 = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1)[None, :] * scale_log2
                else:
                    scores2 = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
                scores2 = tl.where((rows <= own_last)[None, :], scores2, float("-inf"))
                larger = tl.maximum(largest, tl.max(scores2, 1))
                safe = tl.where(larger == float("-inf"), 0.0, larger)
                weights = tl.exp2(scores2 - safe[:, None])
                shrink = tl.exp2(largest - safe)
                total = total * shrink + tl.sum(weights, 1)
                acc = acc * shrink[:, None]
                if ROWS == 1:
                    acc += tl.sum(tl.trans(weights) * v.to(tl.float32), 0)[None, :]
                else:
                    acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
                largest = larger
            partial = PARTIAL + ((own * HEADS + i) * partials + number) * (BLOCK_D + 1)
            out = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
            tl.store(partial[:, None] + d[None, :], out, mask=(i < HEADS)[:, None])
            tl.store(partial + BLOCK_D, largest + tl.log2(total), mask=i < HEADS)
        tl.debug_barrier()  # the results of all threads are stored before the program counts itself
        arrived = tl.atomic_add(ARRIVED + own, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.debug_barrier()
            tl.atomic_xchg(ARRIVED + own, 0, sem="relaxed")
            for j in range(HEADS):
                _merge(PARTIAL, OUT, LSE, own * HEADS + j, tl.minimum(blocks, partials), partials, D, BLOCK_D, BLOCK_S)
            if CACHED:
                _append(ARRIVED + samples * G, SEEN, ROLLED_BACK, sample, G)
    elif split == 0:  # 0 and -inf, or NaN for a token beyond the promised number
        nothing = tl.where(is_beyond, float("nan"), 0.0)
        for j in range(HEADS):
            tl.store(OUT + (own * HEADS + j) * D + d, (nothing + d * 0.0).to(OUT.dtype.element_ty), mask=present)
            tl.store(LSE + own * HEADS + j, tl.where(is_beyond, float("nan"), float("-inf")))
