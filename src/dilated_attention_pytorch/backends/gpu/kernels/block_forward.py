"""The forward kernel over block lists: one program per block of query rows, or part of one. See block_tables.py."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    BLOCK_DROPOUT_ROW,
    BLOCK_FIRST_LIST,
    BLOCK_K_LENGTH,
    BLOCK_K_ROW,
    BLOCK_LIST_STEP,
    BLOCK_NUMBER,
    BLOCK_Q_FIRST,
    BLOCK_Q_LENGTH,
    BLOCK_Q_ROW,
    BLOCK_SAMPLE,
    BLOCK_WIDTH,
)
from dilated_attention_pytorch.backends.gpu.kernels.forward import attend_keys, merge
from dilated_attention_pytorch.backends.gpu.kernels.primitives import (
    LN_2,
    LOG2_E,
    block_offsets,
    dropout_stream,
    load_block,
    load_sums,
    store_block,
    wait_for_loads,
)


@triton.jit
def locate_block(ROWS, rows, PARTS: tl.constexpr):
    """Which part of which row of the table a program computes, and of which head: the rows of a head follow one another."""
    program = tl.program_id(0)
    tile = program % (rows * PARTS)
    head = program // (rows * PARTS)
    row = ROWS + tile // PARTS * BLOCK_WIDTH
    sample = tl.load(row + BLOCK_SAMPLE)
    block = tl.load(row + BLOCK_NUMBER).to(tl.int32)
    q_row = tl.load(row + BLOCK_Q_ROW)
    q_first = tl.load(row + BLOCK_Q_FIRST).to(tl.int32)
    k_row = tl.load(row + BLOCK_K_ROW)
    q_length = tl.load(row + BLOCK_Q_LENGTH).to(tl.int32)
    k_length = tl.load(row + BLOCK_K_LENGTH).to(tl.int32)
    return row, tile % PARTS, head, sample, block, q_row, q_first, k_row, q_length, k_length


@triton.jit
def load_list(row, head, COUNTS, STARTS, INDICES):
    """The number of entries of a head's list, and where they are."""
    number = tl.load(row + BLOCK_FIRST_LIST) + head * tl.load(row + BLOCK_LIST_STEP)
    return tl.load(COUNTS + number), INDICES + tl.load(STARTS + number)


@triton.jit
def query_rows(block, part, q_first, length, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """From which position to which a program's query rows are: none if the first is not below the last."""
    first = tl.maximum(block * BLOCK_SIZE, q_first) + part * BLOCK_M
    return first, tl.minimum(first + BLOCK_M, tl.minimum((block + 1) * BLOCK_SIZE, length))


@triton.jit
def listed_keys(LIST, count, first, stop, length, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """How many listed keys, counted in whole BLOCK_N, all query rows see, and up to where any of them sees any.

    Lists ascend, so only the last entry may hold keys that are hidden: behind the diagonal or behind the sequence.
    """
    count = tl.where(first < stop, count, 0)
    before = tl.maximum(count - 1, 0) * BLOCK_SIZE
    last = tl.load(LIST + count - 1, mask=count > 0, other=0) * BLOCK_SIZE
    whole = length - last
    seen = length - last
    if CAUSAL:
        whole = tl.minimum(whole, first + 1 - last)
        seen = tl.minimum(seen, stop - last)
    whole = before + tl.minimum(whole, BLOCK_SIZE) // BLOCK_N * BLOCK_N
    seen = before + tl.minimum(seen, BLOCK_SIZE)
    return tl.where(count > 0, whole, 0), tl.where(count > 0, seen, 0)


@triton.jit
def block_stream(SEED, sample, head, DROPOUT: tl.constexpr):
    """The part of the hash of dropout that is the same for a head: there is one branch, number 0."""
    stream = tl.full([], 0, tl.uint32)
    if DROPOUT:
        stream = dropout_stream(SEED, sample, head, tl.full([], 0, tl.int64))
    return stream


@triton.jit
def dropout_row(row, k_row, DROPOUT: tl.constexpr):
    """The number of position 0 in dropout; any number without it."""
    if DROPOUT:
        k_row = tl.load(row + BLOCK_DROPOUT_ROW)
    return k_row


@triton.jit
def block_forward_kernel(
    Q,
    K,
    V,
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
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
    N,
    H,
    group,
    scale_log2,  # |scale| * log2(e)
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    RUNNING: tl.constexpr,  # merge into what OUT and LSE hold
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,  # the scale is negative
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of BLOCK_M query rows over the key blocks of their list.

    Worked example: blocks of 64, causal, length 150, BLOCK_M = 32 and BLOCK_N = 64. The first program of query block 2 has
    rows 128 to 149; its list 0, 2 are the keys 0 to 63, which all rows see, and 128 to 149, which are masked: whole = 64,
    seen = 64 + 22.
    """
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
    q_pointer = Q + sample * q_stride_b + (q_row + first) * q_stride_n + head.to(tl.int64) * q_stride_h
    q_offsets = block_offsets(one * q_stride_n, BLOCK_M, BLOCK_D, WIDE)
    q = load_block(q_pointer, q_offsets, stop - first, D, BLOCK_M, BLOCK_D, True)
    if NEGATIVE:
        q = -q
    k_step = one * k_stride_n
    v_step = one * v_stride_n
    k_pointer = K + sample * k_stride_b + k_row * k_step + key_head.to(tl.int64) * k_stride_h
    v_pointer = V + sample * v_stride_b + k_row * v_step + key_head.to(tl.int64) * v_stride_h
    k_offsets = block_offsets(k_step, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = block_offsets(v_step, BLOCK_N, BLOCK_D, WIDE)

    stream = block_stream(SEED, sample, head, DROPOUT)
    zero = dropout_row(row, k_row, DROPOUT)
    m2 = tl.zeros([BLOCK_M], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, m2, total = attend_keys(
        acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, 0, whole, k_length, positions,
        CAUSAL, scale_log2, stream, zero + positions, zero, 1, threshold, ROWS, LIST,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, DROPOUT, False, PRECISION,
    )  # fmt: skip
    acc, m2, total = attend_keys(
        acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, whole, seen, k_length, positions,
        CAUSAL, scale_log2, stream, zero + positions, zero, 1, threshold, ROWS, LIST,
        D, BLOCK_D, BLOCK_N, BLOCK_SIZE, True, DROPOUT, False, PRECISION,
    )  # fmt: skip
    # A row without keys: 0, and -inf as m2 is.
    total = tl.where(total == 0, 1.0, total)
    acc = acc / total[:, None]
    if DROPOUT:
        acc *= keep_scale
    m2 += tl.math.log2(total)
    place = (sample * H + head) * N + q_row + positions
    out_start = ((sample * N + q_row + first) * H + head) * D
    out_offsets = block_offsets(one * H * D, BLOCK_M, BLOCK_D, WIDE)
    if RUNNING:
        last_lse2 = tl.load(LSE + place, mask=inside, other=-float("inf")) * LOG2_E
        wait_for_loads()
        acc, m2 = merge(acc, m2, load_sums(OUT, out_start, out_offsets, inside, D, BLOCK_D), last_lse2)
    tl.store(LSE + place, m2 * LN_2, mask=inside)
    store_block(OUT, out_start, out_offsets, inside, acc, D, BLOCK_D)
