"""The backward kernels over block lists: dq by the lists, dk and dv by the transposed ones. No atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.backward import dkv_over_queries, dq_over_keys
from dilated_attention_pytorch.backends.gpu.kernels.block_forward import (
    block_stream,
    dropout_row,
    listed_keys,
    load_list,
    locate_block,
    query_rows,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import (
    LOG2_E,
    block_offsets,
    load_block,
    load_sums,
    store_block,
)


@triton.jit
def block_dq_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    DQ,
    ROWS,
    COUNTS,
    STARTS,
    INDICES,
    SEED,
    rows,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    N,
    H,
    group,
    scale_log2,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    RUNNING: tl.constexpr,  # add to what the results hold
    DROPOUT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of BLOCK_M query rows; the rows and keys are those of ``block_forward_kernel``."""
    row, part, head, sample, block, q_row, q_first, k_row, q_length, k_length = locate_block(
        ROWS, rows, BLOCK_SIZE // BLOCK_M
    )
    key_head = head // group
    first, stop = query_rows(block, part, q_first, q_length, BLOCK_M, BLOCK_SIZE)
    count, LIST = load_list(row, head, COUNTS, STARTS, INDICES)
    whole, seen = listed_keys(LIST, count, first, stop, k_length, CAUSAL, BLOCK_N, BLOCK_SIZE)

    positions = first + tl.arange(0, BLOCK_M)
    inside = positions < stop
    one = tl.full([], 1, tl.int64)
    q_step = one * q_stride_n
    dout_step = one * dout_stride_n
    q_pointer = Q + sample * q_stride_b + (q_row + first) * q_step + head.to(tl.int64) * q_stride_h
    dout_pointer = DOUT + sample * dout_stride_b + (q_row + first) * dout_step + head.to(tl.int64) * dout_stride_h
    q = load_block(q_pointer, block_offsets(q_step, BLOCK_M, BLOCK_D, WIDE), stop - first, D, BLOCK_M, BLOCK_D, True)
    dout = load_block(
        dout_pointer, block_offsets(dout_step, BLOCK_M, BLOCK_D, WIDE), stop - first, D, BLOCK_M, BLOCK_D, True
    )
    place = (sample * H + head) * N + q_row + positions
    lse2 = tl.load(LSE + place, mask=inside, other=float("inf")) * LOG2_E
    delta = tl.load(DELTA + place, mask=inside, other=0.0)
    k_step = one * k_stride_n
    v_step = one * v_stride_n
    k_pointer = K + sample * k_stride_b + k_row * k_step + key_head.to(tl.int64) * k_stride_h
    v_pointer = V + sample * v_stride_b + k_row * v_step + key_head.to(tl.int64) * v_stride_h
    k_offsets = block_offsets(k_step, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = block_offsets(v_step, BLOCK_N, BLOCK_D, WIDE)

    stream = block_stream(SEED, sample, head, DROPOUT)
    zero = dropout_row(row, k_row, DROPOUT)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = dq_over_keys(
        dq, q, dout, lse2, delta, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, 0, whole, k_length, positions,
        CAUSAL, scale_log2, stream, zero + positions, zero, 1, threshold, keep_scale, ROWS, LIST,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, DROPOUT, False, PRECISION,
    )  # fmt: skip
    dq = dq_over_keys(
        dq, q, dout, lse2, delta, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, whole, seen, k_length,
        positions, CAUSAL, scale_log2, stream, zero + positions, zero, 1, threshold, keep_scale, ROWS,
        LIST, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, True, DROPOUT, False, PRECISION,
    )  # fmt: skip
    start = ((sample * N + q_row + first) * H + head) * D
    offsets = block_offsets(one * H * D, BLOCK_M, BLOCK_D, WIDE)
    dq *= scale
    if RUNNING:
        dq += load_sums(DQ, start, offsets, inside, D, BLOCK_D)
    store_block(DQ, start, offsets, inside, dq, D, BLOCK_D)


@triton.jit
def listed_queries(
    LIST,
    count,
    block,
    k_first,
    q_first,
    length,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Of the listed query rows: from where they see keys, from where and to where they see all of them, how many they are.

    Lists ascend: the first entry may be the diagonal or begin before the first query, the last one may end early.
    """
    head = tl.load(LIST, mask=count > 0, other=0)
    last = tl.load(LIST + count - 1, mask=count > 0, other=0)
    rows = tl.where(count > 0, (count - 1) * BLOCK_SIZE + tl.minimum(length - last * BLOCK_SIZE, BLOCK_SIZE), 0)
    late = q_first > head * BLOCK_SIZE
    begin = rows * 0
    clear = tl.where(late, BLOCK_SIZE, 0)
    if CAUSAL:
        diagonal = (head == block) & (late == 0)
        inner = k_first - block * BLOCK_SIZE
        begin = tl.where(diagonal, inner // BLOCK_M * BLOCK_M, begin)
        clear = tl.where(diagonal, (inner + BLOCK_N + BLOCK_M - 1) // BLOCK_M * BLOCK_M, clear)
    clear = tl.minimum(clear, rows)
    begin = tl.minimum(begin, clear)
    return begin, clear, tl.maximum(rows // BLOCK_M * BLOCK_M, clear), rows


@triton.jit
def block_dkv_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    DK,
    DV,
    ROWS,
    COUNTS,
    STARTS,
    INDICES,
    SEED,
    rows,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    N,
    M,
    H,
    G,
    group,
    scale_log2,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    RUNNING: tl.constexpr,  # add to what the results hold
    DROPOUT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of BLOCK_N key rows, summed over the query blocks that read them and the query heads of the group.

    Worked example: blocks of 64, causal, length 150, BLOCK_M = BLOCK_N = 64. Key block 1 is read by the query blocks 1 and
    2: 64 + 22 listed rows, of which the first 64 are masked (begin = 0, clear = 64), as is the block of the last 22.
    """
    row, part, key_head, sample, block, q_row, q_first, k_row, q_length, k_length = locate_block(
        ROWS, rows, BLOCK_SIZE // BLOCK_N
    )
    first = block * BLOCK_SIZE + part * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < k_length
    one = tl.full([], 1, tl.int64)
    k_step = one * k_stride_n
    v_step = one * v_stride_n
    k_pointer = K + sample * k_stride_b + (k_row + first) * k_step + key_head.to(tl.int64) * k_stride_h
    v_pointer = V + sample * v_stride_b + (k_row + first) * v_step + key_head.to(tl.int64) * v_stride_h
    k = load_block(k_pointer, block_offsets(k_step, BLOCK_N, BLOCK_D, WIDE), k_length - first, D, BLOCK_N, BLOCK_D, True)
    v = load_block(v_pointer, block_offsets(v_step, BLOCK_N, BLOCK_D, WIDE), k_length - first, D, BLOCK_N, BLOCK_D, True)
    q_step = one * q_stride_n
    dout_step = one * dout_stride_n
    q_offsets = block_offsets(q_step, BLOCK_M, BLOCK_D, WIDE)
    dout_offsets = block_offsets(dout_step, BLOCK_M, BLOCK_D, WIDE)

    zero = dropout_row(row, k_row, DROPOUT)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group):
        head = key_head * group + member
        count, LIST = load_list(row, head, COUNTS, STARTS, INDICES)
        count = tl.where(first < k_length, count, 0)
        begin, clear, end, listed_rows = listed_queries(
            LIST, count, block, first, q_first, q_length, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_SIZE
        )
        crossing = (clear - begin + BLOCK_M - 1) // BLOCK_M
        cut = (listed_rows - end + BLOCK_M - 1) // BLOCK_M
        q_pointer = Q + sample * q_stride_b + q_row * q_step + head.to(tl.int64) * q_stride_h
        dout_pointer = DOUT + sample * dout_stride_b + q_row * dout_step + head.to(tl.int64) * dout_stride_h
        stream = block_stream(SEED, sample, head, DROPOUT)
        statistics = (sample * H + head) * N + q_row
        dk, dv = dkv_over_queries(
            dk, dv, k, v, q_pointer, dout_pointer, LSE + statistics, DELTA + statistics, q_step, dout_step, q_offsets,
            dout_offsets, begin, crossing, end, cut, q_length, columns, CAUSAL, scale_log2, stream, zero, zero + columns,
            one, threshold, keep_scale, ROWS, LIST, listed_rows, q_first,
            D, BLOCK_D, BLOCK_M, BLOCK_SIZE, True, DROPOUT, False, WIDE, PRECISION,
        )  # fmt: skip
        dk, dv = dkv_over_queries(
            dk, dv, k, v, q_pointer, dout_pointer, LSE + statistics, DELTA + statistics, q_step, dout_step, q_offsets,
            dout_offsets, clear, (end - clear) // BLOCK_M, 0, 0, q_length, columns, CAUSAL, scale_log2, stream, zero,
            zero + columns, one, threshold, keep_scale, ROWS, LIST, listed_rows, q_first,
            D, BLOCK_D, BLOCK_M, BLOCK_SIZE, False, DROPOUT, False, WIDE, PRECISION,
        )  # fmt: skip
    start = ((sample * M + k_row + first) * G + key_head) * D
    offsets = block_offsets(one * G * D, BLOCK_N, BLOCK_D, WIDE)
    dk *= scale
    if DROPOUT:
        dv *= keep_scale
    if RUNNING:
        dk += load_sums(DK, start, offsets, inside, D, BLOCK_D)
        dv += load_sums(DV, start, offsets, inside, D, BLOCK_D)
    store_block(DK, start, offsets, inside, dk, D, BLOCK_D)
    store_block(DV, start, offsets, inside, dv, D, BLOCK_D)
