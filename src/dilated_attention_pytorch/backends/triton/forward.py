"""The forward kernel: one program per block of query rows of a tile, merged into what earlier launches left."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.triton.primitives import (
    LN_2,
    LOG2_E,
    block_offsets,
    dropout_stream,
    find_family,
    kept,
    load_block,
    locate,
    row_offsets,
)


@triton.jit
def _attend_keys(
    acc,
    m2,
    total,
    q,
    k_pointer,
    v_pointer,
    k_step,
    v_step,
    k_offsets,
    v_offsets,
    start,
    stop,
    k_rows,
    rows,
    causal,
    scale_log2,
    stream,
    q_positions,
    k_start,
    stride,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One online-softmax pass over the keys from ``start`` to ``stop``."""
    for n in tl.range(start, stop, BLOCK_N):
        k = load_block(k_pointer + n * k_step, k_offsets, k_rows - n, D, BLOCK_N, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        columns = n + tl.arange(0, BLOCK_N)
        if MASKED:
            visible = (columns < k_rows)[None, :] & ((columns[None, :] <= rows[:, None]) | (not causal))
            s = tl.where(visible, s * scale_log2, -float("inf"))
            m2_new = tl.maximum(m2, tl.max(s, 1))
            p = tl.math.exp2(s - m2_new[:, None])
        else:
            m2_new = tl.maximum(m2, tl.max(s, 1) * scale_log2)
            p = tl.math.exp2(s * scale_log2 - m2_new[:, None])
        alpha = tl.math.exp2(m2 - m2_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        m2 = m2_new
        if DROPOUT:
            keep = kept(stream, q_positions[:, None], (k_start + columns * stride)[None, :], threshold)
            p = tl.where(keep, p * keep_scale, 0.0)
        v = load_block(v_pointer + n * v_step, v_offsets, k_rows - n, D, BLOCK_N, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m2, total


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    PARTIAL,  # (B, N, H, D) float32: earlier launches' output, where LSE is not -inf
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
    TABLE,
    SEED,
    families,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    N,
    H,
    group,
    q_shift,  # position of query row 0
    q_sign,  # -1.0 if the scale is negative
    scale_log2,  # |scale| * log2(e)
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,  # earlier launches may have left partial results
    FINAL: tl.constexpr,  # write OUT, else PARTIAL
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one block of query rows over all keys of its tile.

    Worked example: N = 16, one branch w = 8, r = 2, head 1 (offset 1), BLOCK_M = 2. The tile of segment 1 has the rows
    9, 11, 13, 15 (q_start = 9, stride = 2, q_rows = 4); block 1 of it are rows 13 and 15. If causal, row 13 sees keys 9 to
    13: no block before the diagonal is whole for BLOCK_N = 4, so all of them are masked.
    """
    program = tl.program_id(0)
    row = find_family(TABLE, families, program)
    block, member, key_head, sample, q_start, q_rows, k_start, k_rows, stride, causal = locate(
        row, program, group, BLOCK_M, False
    )
    head = key_head * group + member
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)

    q_step = stride * q_stride_n
    q_pointer = Q + sample * q_stride_b + (q_start + first * stride) * q_stride_n + head * q_stride_h
    q = load_block(q_pointer, block_offsets(q_step, BLOCK_M, BLOCK_D), q_rows - first, D, BLOCK_M, BLOCK_D, True)
    q = (q * q_sign).to(q.dtype)
    k_step = stride * k_stride_n
    v_step = stride * v_stride_n
    k_pointer = K + sample * k_stride_b + k_start * k_stride_n + key_head * k_stride_h
    v_pointer = V + sample * v_stride_b + k_start * v_stride_n + key_head * v_stride_h
    k_offsets = block_offsets(k_step, BLOCK_N, BLOCK_D)
    v_offsets = block_offsets(v_step, BLOCK_N, BLOCK_D)

    # Zero keys have logit 0 and value 0: they only start the denominator.
    zero_keys = tl.load(row + 14).to(tl.float32)
    m2 = tl.zeros([BLOCK_M], tl.float32) + tl.where(zero_keys > 0, 0.0, -float("inf"))
    total = tl.zeros([BLOCK_M], tl.float32) + zero_keys
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stream = tl.full([], 0, tl.uint32)
    q_positions = q_start + q_shift + rows * stride
    if DROPOUT:
        stream = dropout_stream(SEED, sample, head, tl.load(row + 15))

    seen = tl.where(causal, tl.minimum(first + BLOCK_M, k_rows), k_rows)
    whole = tl.where(causal, tl.minimum(first, k_rows), k_rows) // BLOCK_N * BLOCK_N
    acc, m2, total = _attend_keys(
        acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, 0, whole, k_rows, rows, causal,
        scale_log2, stream, q_positions, k_start, stride, threshold, keep_scale,
        D, BLOCK_D, BLOCK_N, False, DROPOUT, PRECISION,
    )  # fmt: skip
    acc, m2, total = _attend_keys(
        acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, whole, seen, k_rows, rows, causal,
        scale_log2, stream, q_positions, k_start, stride, threshold, keep_scale,
        D, BLOCK_D, BLOCK_N, True, DROPOUT, PRECISION,
    )  # fmt: skip

    out = acc / total[:, None]
    lse2 = m2 + tl.math.log2(total)
    inside = rows < q_rows
    first_row = q_start + first * stride
    lse_pointers = LSE + (sample * H + head) * N + first_row + row_offsets(stride, BLOCK_M)
    out_start = ((sample * N + first_row) * H + head) * D
    out_offsets = block_offsets(stride * H * D, BLOCK_M, BLOCK_D)
    out_mask = inside[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    if MERGE:
        old2 = tl.load(lse_pointers, mask=inside, other=-float("inf")) * LOG2_E
        there = old2 > -float("inf")
        old = tl.load(PARTIAL + out_start + out_offsets, mask=out_mask & there[:, None], other=0.0)
        larger2 = tl.maximum(old2, lse2)
        old_weight = tl.math.exp2(old2 - larger2)
        new_weight = tl.math.exp2(lse2 - larger2)
        both = old_weight + new_weight
        out = old * (old_weight / both)[:, None] + out * (new_weight / both)[:, None]
        lse2 = larger2 + tl.math.log2(both)
    tl.store(lse_pointers, lse2 * LN_2, mask=inside)
    if FINAL:
        tl.store(OUT + out_start + out_offsets, out.to(OUT.dtype.element_ty), mask=out_mask)
    else:
        tl.store(PARTIAL + out_start + out_offsets, out, mask=out_mask)
