"""The backward kernels: delta per row, dq by query block, dk and dv by key block. No atomics: one writer per row.

dq and dk/dv each compute the scores again, so that neither needs another program's sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_BATCH_SLICE,
    FAMILY_BRANCH,
    FAMILY_CHILDREN,
    FAMILY_FIRST_CHILD,
    FAMILY_FIRST_SAMPLE,
    FAMILY_OWN_DELTA,
    FAMILY_PADDING,
    FAMILY_TO_POSITION,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import (
    LOG2_E,
    block_offsets,
    dropout_stream,
    find_family,
    kept,
    load_block,
    load_listed,
    load_parts,
    load_places,
    load_sums,
    locate,
    own_part_row,
    part_rows,
    row_offsets,
    store_block,
)


@triton.jit
def _bits(x):
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _store_shift(AT, x, inside, BLOCK: tl.constexpr):
    """Write four words for each row: three bfloat16 whose sum is ``x``, to the 24 bits of a float32, and zeros."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)  # the first bfloat16 is enough for an infinite x and for NaN
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    zero = tl.zeros((BLOCK,), tl.int32)
    # (rows, 2, 2), of which the last counts fastest.
    words = tl.join(tl.join(_bits(first) | _bits(second) << 16, zero), tl.join(_bits(third), zero))
    tl.store(AT[:, None] + tl.arange(0, 4)[None, :], tl.reshape(words, (BLOCK, 4)), mask=inside[:, None])


@triton.jit
def delta_kernel(
    DOUT,
    OUT,  # (B, N, H, D), contiguous
    DLSE,  # (B, H, N), contiguous, if HAS_DLSE
    LSE,  # (B, H, N), if HAS_SHIFTS
    DELTA,  # (B, H, N)
    SHIFTS,  # (B, H, N, 8) int32, if HAS_SHIFTS: -lse / scale and -delta, as _store_shift says
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    rows,  # B * N * H
    N,
    H,
    inverse_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
):
    """delta = dout . out - dlse for every row and head; and the shifts that hopper/kernels/dkv.py adds to products."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows
    sample, n, head = index // H // N, index // H % N, index % H
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < D)[None, :]
    dout_rows = sample * dout_stride_b + n * dout_stride_n + head * dout_stride_h
    dout = tl.load(DOUT + dout_rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.load(OUT + index[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(dout * out, 1)
    place = (sample * H + head) * N + n
    if HAS_DLSE:
        delta -= tl.load(DLSE + place, mask=inside, other=0.0)
    tl.store(DELTA + place, delta, mask=inside)
    if HAS_SHIFTS:
        lse = tl.load(LSE + place, mask=inside, other=0.0)
        _store_shift(SHIFTS + place * 8, -lse * inverse_scale, inside, BLOCK)
        _store_shift(SHIFTS + place * 8 + 4, -delta, inside, BLOCK)


@triton.jit
def dq_over_keys(
    dq,
    q,
    dout,
    lse2,
    delta,
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
    own_places,
    LIST,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    PLACED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over the keys from ``start`` to ``stop``, which may be listed: see ``attend_keys``."""
    listed = start * 0
    if BLOCK_SIZE > 0:
        listed = load_listed(LIST, start, stop, BLOCK_SIZE)
    for place in tl.range(start, stop, BLOCK_N):
        n = place
        if BLOCK_SIZE > 0:
            n = listed * BLOCK_SIZE + place % BLOCK_SIZE
            listed = load_listed(LIST, place + BLOCK_N, stop, BLOCK_SIZE)
        k = load_block(k_pointer + n * k_step, k_offsets, k_rows - n, D, BLOCK_N, BLOCK_D, MASKED)
        v = load_block(v_pointer + n * v_step, v_offsets, k_rows - n, D, BLOCK_N, BLOCK_D, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.math.exp2(s * scale_log2 - lse2[:, None])
        columns = n + tl.arange(0, BLOCK_N)
        if MASKED:
            visible = (columns < k_rows)[None, :] & ((columns[None, :] <= rows[:, None]) | (not causal))
            p = tl.where(visible, p, 0.0)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            k_positions = k_start + columns * stride
            if PLACED:
                k_positions = load_places(own_places, k_positions, columns < k_rows)
            keep = kept(stream, q_positions[:, None], k_positions[None, :], threshold)
            dp = tl.where(keep, dp, 0.0) * keep_scale
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    PARTS,  # (rows, D) float32
    DQ,
    SEED,
    PLACES,
    TABLE,
    LAYOUT,
    OFFSETS,
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
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    N,
    H,
    G,
    group,
    parts,
    q_shift,
    scale_log2,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ATTEND: tl.constexpr,
    FINAL: tl.constexpr,
    RUNNING: tl.constexpr,  # add the partial results of these tiles to what the result holds
    IN_FOURS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PLACED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of one block of query rows: ``scale * sum_j p_ij (dp_ij - delta_i) k_j``."""
    program = tl.program_id(0)
    row = find_family(TABLE, families, program)
    block, member, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, k_stride, causal = locate(
        row, program, group, BLOCK_M, False
    )
    sample = tl.load(row + FAMILY_FIRST_SAMPLE) + own_sample
    head = key_head * group + member
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < q_rows
    first_row = q_start + first * stride
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ATTEND:
        place = (sample * H + head) * N + first_row + row_offsets(stride, BLOCK_M, WIDE)

        q_step = stride * q_stride_n
        dout_step = stride * dout_stride_n
        q_pointer = Q + sample * q_stride_b + (q_start + first * stride) * q_stride_n + head * q_stride_h
        dout_pointer = DOUT + sample * dout_stride_b + (q_start + first * stride) * dout_stride_n + head * dout_stride_h
        q = load_block(q_pointer, block_offsets(q_step, BLOCK_M, BLOCK_D, WIDE), q_rows - first, D, BLOCK_M, BLOCK_D, True)
        dout = load_block(
            dout_pointer, block_offsets(dout_step, BLOCK_M, BLOCK_D, WIDE), q_rows - first, D, BLOCK_M, BLOCK_D, True
        )
        # rows behind the tile: p = exp2(0 - inf) = 0
        lse2 = tl.load(LSE + place, mask=inside, other=float("inf")) * LOG2_E
        delta = tl.load(DELTA + tl.load(row + FAMILY_OWN_DELTA) + place, mask=inside, other=0.0)
        k_step = k_stride * k_stride_n
        v_step = k_stride * v_stride_n
        k_pointer = K + sample * k_stride_b + k_start * k_stride_n + key_head * k_stride_h
        v_pointer = V + sample * v_stride_b + k_start * v_stride_n + key_head * v_stride_h
        k_offsets = block_offsets(k_step, BLOCK_N, BLOCK_D, WIDE)
        v_offsets = block_offsets(v_step, BLOCK_N, BLOCK_D, WIDE)
        stream = tl.full([], 0, tl.uint32)
        own_places = PLACES + (sample * G + key_head) * N
        q_positions = q_start + q_shift + rows * stride
        k_first = k_start
        if DROPOUT:
            stream = dropout_stream(SEED, sample, head, tl.load(row + FAMILY_BRANCH))
            padding = tl.load(row + FAMILY_PADDING)
            q_positions -= padding
            k_first -= padding
            if PLACED:
                q_positions = load_places(own_places, q_positions, inside)

        seen = tl.where(causal, tl.minimum(first + BLOCK_M, k_rows), k_rows)
        whole = tl.where(causal, tl.minimum(first, k_rows), k_rows) // BLOCK_N * BLOCK_N
        dq = dq_over_keys(
            dq, q, dout, lse2, delta, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, 0, whole, k_rows, rows,
            causal, scale_log2, stream, q_positions, k_first, k_stride, threshold, keep_scale, own_places,
            TABLE, D, BLOCK_D, BLOCK_N, 0, False, DROPOUT, PLACED, PRECISION,
        )  # fmt: skip
        dq = dq_over_keys(
            dq, q, dout, lse2, delta, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, whole, seen, k_rows, rows,
            causal, scale_log2, stream, q_positions, k_first, k_stride, threshold, keep_scale, own_places,
            TABLE, D, BLOCK_D, BLOCK_N, 0, True, DROPOUT, PLACED, PRECISION,
        )  # fmt: skip
        dq *= scale
    positions = (first_row + tl.load(row + FAMILY_TO_POSITION) + row_offsets(stride, BLOCK_M, WIDE)).to(tl.int32)
    start = ((sample * N + first_row) * H + head) * D
    offsets = block_offsets(stride * H * D, BLOCK_M, BLOCK_D, WIDE)
    if RUNNING:
        places = own_part_row(row, own_sample, head, H, tile) + first + tl.arange(0, BLOCK_M)
        dq += load_sums(DQ, start, offsets, inside, D, BLOCK_D) + load_parts(PARTS, places, inside, D, BLOCK_D, IN_FOURS)
    batch_slice = tl.load(row + FAMILY_BATCH_SLICE)
    child = tl.load(row + FAMILY_FIRST_CHILD)
    for part in range(child, child + tl.load(row + FAMILY_CHILDREN)):
        places, there = part_rows(LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, head, H, key_head, G, positions)
        dq += load_parts(PARTS, places, there & inside, D, BLOCK_D, IN_FOURS)
    if FINAL:
        store_block(DQ, start, offsets, inside, dq, D, BLOCK_D)
    else:
        start = (own_part_row(row, own_sample, head, H, tile) + first) * D
        offsets = tl.arange(0, BLOCK_M)[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
        store_block(PARTS, start, offsets, inside, dq, D, BLOCK_D)


@triton.jit
def _place(index, first_blocks, start, then, BLOCK_M: tl.constexpr):
    return tl.where(index < first_blocks, start + index * BLOCK_M, then + (index - first_blocks) * BLOCK_M)


@triton.jit
def dkv_over_queries(
    dk,
    dv,
    k,
    v,
    q_pointer,
    dout_pointer,
    lse_pointer,
    delta_pointer,
    q_step,
    dout_step,
    q_offsets,
    dout_offsets,
    start,
    first_blocks,
    then,
    blocks,
    q_rows,
    columns,
    causal,
    scale_log2,
    stream,
    q_position,
    k_positions,
    stride,
    threshold,
    keep_scale,
    own_places,
    LIST,
    listed_rows,
    first_row,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    PLACED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over ``first_blocks`` blocks of query rows from ``start`` and ``blocks`` blocks from ``then``.

    If BLOCK_SIZE is not 0, rows are counted in listed blocks, see ``attend_keys``. A listed block has only its rows from
    ``first_row`` on, which are its first ones then.
    """
    offsets = row_offsets(stride, BLOCK_M, WIDE)
    listed = first_blocks * 0
    if BLOCK_SIZE > 0:
        listed = load_listed(LIST, _place(0, first_blocks, start, then, BLOCK_M), listed_rows, BLOCK_SIZE)
    for index in tl.range(0, first_blocks + blocks):
        m = _place(index, first_blocks, start, then, BLOCK_M)
        stop = q_rows
        if BLOCK_SIZE > 0:
            inner = m % BLOCK_SIZE
            m = listed * BLOCK_SIZE + inner
            if MASKED:
                m = tl.maximum(listed * BLOCK_SIZE, first_row) + inner
                stop = tl.minimum(q_rows, (listed + 1) * BLOCK_SIZE)
            following = _place(index + 1, first_blocks, start, then, BLOCK_M)
            listed = load_listed(LIST, following, listed_rows, BLOCK_SIZE)
        q = load_block(q_pointer + m * q_step, q_offsets, stop - m, D, BLOCK_M, BLOCK_D, MASKED)
        rows = m + tl.arange(0, BLOCK_M)
        if MASKED:
            lse = tl.load(lse_pointer + m * stride + offsets, mask=rows < stop, other=float("inf"))
            delta = tl.load(delta_pointer + m * stride + offsets, mask=rows < stop, other=0.0)
        else:
            lse = tl.load(lse_pointer + m * stride + offsets)
            delta = tl.load(delta_pointer + m * stride + offsets)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.math.exp2(s * scale_log2 - (lse * LOG2_E)[None, :])
        if MASKED:
            p = tl.where((columns[:, None] <= rows[None, :]) | (not causal), p, 0.0)
        dout = load_block(dout_pointer + m * dout_step, dout_offsets, stop - m, D, BLOCK_M, BLOCK_D, MASKED)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if DROPOUT:
            q_positions = q_position + rows * stride
            if PLACED:
                q_positions = load_places(own_places, q_positions, rows < q_rows)
            keep = kept(stream, q_positions[None, :], k_positions[:, None], threshold)
            dv = tl.dot(tl.where(keep, p, 0.0).to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.where(keep, dp, 0.0) * keep_scale
        else:
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    DK_PARTS,  # (rows, D) float32
    DV_PARTS,
    DK,
    DV,
    SEED,
    PLACES,
    TABLE,
    LAYOUT,
    OFFSETS,
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
    dout_stride_b,
    dout_stride_n,
    dout_stride_h,
    N,
    M,
    H,
    G,
    group,
    parts,
    q_shift,
    scale_log2,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ATTEND: tl.constexpr,
    FINAL: tl.constexpr,
    RUNNING: tl.constexpr,  # add the partial results of these tiles to what the result holds
    IN_FOURS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PLACED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of one block of key rows, summed over the query rows that see it and the query heads of its key head."""
    program = tl.program_id(0)
    row = find_family(TABLE, families, program)
    block, _, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, k_stride, causal = locate(
        row, program, group, BLOCK_N, True
    )
    sample = tl.load(row + FAMILY_FIRST_SAMPLE) + own_sample
    first = block * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < k_rows

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if ATTEND:
        k_step = k_stride * k_stride_n
        v_step = k_stride * v_stride_n
        k_pointer = K + sample * k_stride_b + (k_start + first * k_stride) * k_stride_n + key_head * k_stride_h
        v_pointer = V + sample * v_stride_b + (k_start + first * k_stride) * v_stride_n + key_head * v_stride_h
        k = load_block(k_pointer, block_offsets(k_step, BLOCK_N, BLOCK_D, WIDE), k_rows - first, D, BLOCK_N, BLOCK_D, True)
        v = load_block(v_pointer, block_offsets(v_step, BLOCK_N, BLOCK_D, WIDE), k_rows - first, D, BLOCK_N, BLOCK_D, True)
        q_step = stride * q_stride_n
        dout_step = stride * dout_stride_n
        q_offsets = block_offsets(q_step, BLOCK_M, BLOCK_D, WIDE)
        dout_offsets = block_offsets(dout_step, BLOCK_M, BLOCK_D, WIDE)
        own_places = PLACES + (sample * G + key_head) * N
        q_first = q_start + q_shift
        k_positions = k_start + columns * k_stride
        if DROPOUT:
            padding = tl.load(row + FAMILY_PADDING)
            q_first -= padding
            k_positions -= padding
            if PLACED:
                k_positions = load_places(own_places, k_positions, inside)

        # Masked blocks of query rows: those that cross the diagonal, from row `begin` on, and the one that the tile's end
        # cuts.
        # Between them, from row `clear` to row `end`, all rows see all of this block's keys.
        begin = tl.where(causal, first // BLOCK_M * BLOCK_M, 0)
        clear = tl.where(causal, (first + BLOCK_N + BLOCK_M - 1) // BLOCK_M * BLOCK_M, 0)
        end = tl.maximum(q_rows // BLOCK_M * BLOCK_M, tl.minimum(clear, q_rows))
        crossing = (tl.minimum(clear, q_rows) - begin + BLOCK_M - 1) // BLOCK_M
        cut = tl.where(end < q_rows, 1, 0)
        for member in tl.range(0, group):
            head = key_head * group + member
            q_pointer = Q + sample * q_stride_b + q_start * q_stride_n + head * q_stride_h
            dout_pointer = DOUT + sample * dout_stride_b + q_start * dout_stride_n + head * dout_stride_h
            statistics = (sample * H + head) * N + q_start
            delta_pointer = DELTA + tl.load(row + FAMILY_OWN_DELTA) + statistics
            stream = tl.full([], 0, tl.uint32)
            if DROPOUT:
                stream = dropout_stream(SEED, sample, head, tl.load(row + FAMILY_BRANCH))
            dk, dv = dkv_over_queries(
                dk, dv, k, v, q_pointer, dout_pointer, LSE + statistics, delta_pointer, q_step, dout_step, q_offsets,
                dout_offsets, begin, crossing, end, cut, q_rows, columns, causal, scale_log2, stream, q_first,
                k_positions, stride, threshold, keep_scale, own_places,
                TABLE, 0, 0, D, BLOCK_D, BLOCK_M, 0, True, DROPOUT, PLACED, WIDE, PRECISION,
            )  # fmt: skip
            dk, dv = dkv_over_queries(
                dk, dv, k, v, q_pointer, dout_pointer, LSE + statistics, delta_pointer, q_step, dout_step, q_offsets,
                dout_offsets, clear, (end - clear) // BLOCK_M, 0, 0, q_rows, columns, causal, scale_log2, stream, q_first,
                k_positions, stride, threshold, keep_scale, own_places,
                TABLE, 0, 0, D, BLOCK_D, BLOCK_M, 0, False, DROPOUT, PLACED, WIDE, PRECISION,
            )  # fmt: skip
        dk *= scale
        if DROPOUT:
            dv *= keep_scale
    first_row = k_start + first * k_stride
    positions = (first_row + tl.load(row + FAMILY_TO_POSITION) + row_offsets(k_stride, BLOCK_N, WIDE)).to(tl.int32)
    start = ((sample * M + first_row) * G + key_head) * D
    offsets = block_offsets(k_stride * G * D, BLOCK_N, BLOCK_D, WIDE)
    if RUNNING:
        places = own_part_row(row, own_sample, key_head, G, tile) + first + tl.arange(0, BLOCK_N)
        dk += load_sums(DK, start, offsets, inside, D, BLOCK_D) + load_parts(DK_PARTS, places, inside, D, BLOCK_D, IN_FOURS)
        dv += load_sums(DV, start, offsets, inside, D, BLOCK_D) + load_parts(DV_PARTS, places, inside, D, BLOCK_D, IN_FOURS)
    batch_slice = tl.load(row + FAMILY_BATCH_SLICE)
    child = tl.load(row + FAMILY_FIRST_CHILD)
    for part in range(child, child + tl.load(row + FAMILY_CHILDREN)):
        places, there = part_rows(
            LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, key_head, G, key_head, G, positions
        )
        dk += load_parts(DK_PARTS, places, there & inside, D, BLOCK_D, IN_FOURS)
        dv += load_parts(DV_PARTS, places, there & inside, D, BLOCK_D, IN_FOURS)
    if FINAL:
        store_block(DK, start, offsets, inside, dk, D, BLOCK_D)
        store_block(DV, start, offsets, inside, dv, D, BLOCK_D)
    else:
        start = (own_part_row(row, own_sample, key_head, G, tile) + first) * D
        offsets = tl.arange(0, BLOCK_N)[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
        store_block(DK_PARTS, start, offsets, inside, dk, D, BLOCK_D)
        store_block(DV_PARTS, start, offsets, inside, dv, D, BLOCK_D)
