"""The forward kernel: one program per block of query rows of a tile. It may add partial results to its own."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_BATCH_SLICE,
    FAMILY_BRANCH,
    FAMILY_CHILDREN,
    FAMILY_FIRST_CHILD,
    FAMILY_FIRST_SAMPLE,
    FAMILY_PADDING,
    FAMILY_TO_POSITION,
    FAMILY_ZERO_KEYS,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import (
    LN_2,
    LOG2_E,
    block_offsets,
    dropout_stream,
    find_family,
    kept,
    load_block,
    load_listed,
    load_parts,
    load_places,
    locate,
    own_part_row,
    part_rows,
    row_offsets,
    wait_for_loads,
)


@triton.jit
def attend_keys(
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
    """One online-softmax pass over the keys from ``start`` to ``stop``.

    If BLOCK_SIZE is not 0, both count in the blocks of so many keys that LIST has, one after the other: with blocks of 64
    and the list 3, 7, keys 64 to 127 are those from row 7 * 64 on. The next block's number is loaded ahead of its keys.
    """
    listed = start * 0
    if BLOCK_SIZE > 0:
        listed = load_listed(LIST, start, stop, BLOCK_SIZE)
    for place in tl.range(start, stop, BLOCK_N):
        n = place
        if BLOCK_SIZE > 0:
            n = listed * BLOCK_SIZE + place % BLOCK_SIZE
            listed = load_listed(LIST, place + BLOCK_N, stop, BLOCK_SIZE)
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
            k_positions = k_start + columns * stride
            if PLACED:
                k_positions = load_places(own_places, k_positions, columns < k_rows)
            keep = kept(stream, q_positions[:, None], k_positions[None, :], threshold)
            p = tl.where(keep, p, 0.0)
        v = load_block(v_pointer + n * v_step, v_offsets, k_rows - n, D, BLOCK_N, BLOCK_D, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m2, total


@triton.jit
def merge(out, lse2, part_out, part_lse2):
    """Two partial softmaxes as one; either or both may be empty (-inf)."""
    larger2 = tl.maximum(lse2, part_lse2)
    safe2 = tl.where(larger2 == -float("inf"), 0.0, larger2)
    weight = tl.math.exp2(lse2 - safe2)
    part_weight = tl.math.exp2(part_lse2 - safe2)
    both = weight + part_weight
    share = tl.where(both > 0, 1.0 / both, 0.0)
    out = out * (weight * share)[:, None] + part_out * (part_weight * share)[:, None]
    return out, safe2 + tl.math.log2(both)


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    PARTS,  # (rows, D) float32
    PARTS_LSE2,  # (rows,) float32
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
    SEED,
    PLACES,  # (B, G, N) int32, if PLACED: the place in the ordered sequence of each row of a head
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
    N,
    H,
    G,
    group,
    parts,  # bundles of tiles that wrote partial results
    q_shift,  # position of query row 0
    scale_log2,  # |scale| * log2(e)
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ATTEND: tl.constexpr,  # compute attention, else only add partial results
    FINAL: tl.constexpr,  # write OUT, else partial results
    RUNNING: tl.constexpr,  # merge the partial results of these tiles into OUT and LSE
    IN_FOURS: tl.constexpr,  # the order of columns of partial results that are read, see load_parts
    DROPOUT: tl.constexpr,
    PLACED: tl.constexpr,  # dropout counts the places of rows, else the rows
    NEGATIVE: tl.constexpr,  # the scale is negative
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one block of query rows over all keys of its tile.

    Worked example: N = 16, one branch w = 8, r = 2, head 1 (offset 1), BLOCK_M = 2. The tile of segment 1 has the rows
    9, 11, 13, 15 (q_start = 9, stride = 2, q_rows = 4); block 1 of it are rows 13 and 15. If causal, row 13 sees keys 9 to
    13: no block before the diagonal is whole for BLOCK_N = 4, so all of them are masked.
    """
    program = tl.program_id(0)
    row = find_family(TABLE, families, program)
    block, member, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, k_stride, causal = locate(
        row, program, group, BLOCK_M, False
    )
    sample = tl.load(row + FAMILY_FIRST_SAMPLE) + own_sample
    head = key_head * group + member
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)

    # Zero keys have logit 0 and value 0: they only start the denominator.
    zero_keys = tl.load(row + FAMILY_ZERO_KEYS).to(tl.float32)
    m2 = tl.zeros([BLOCK_M], tl.float32) + tl.where(zero_keys > 0, 0.0, -float("inf"))
    total = tl.zeros([BLOCK_M], tl.float32) + zero_keys
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ATTEND:
        q_step = stride * q_stride_n
        q_pointer = Q + sample * q_stride_b + (q_start + first * stride) * q_stride_n + head * q_stride_h
        q = load_block(q_pointer, block_offsets(q_step, BLOCK_M, BLOCK_D, WIDE), q_rows - first, D, BLOCK_M, BLOCK_D, True)
        if NEGATIVE:
            q = -q
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
                q_positions = load_places(own_places, q_positions, rows < q_rows)

        seen = tl.where(causal, tl.minimum(first + BLOCK_M, k_rows), k_rows)
        whole = tl.where(causal, tl.minimum(first, k_rows), k_rows) // BLOCK_N * BLOCK_N
        acc, m2, total = attend_keys(
            acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, 0, whole, k_rows, rows,
            causal, scale_log2, stream, q_positions, k_first, k_stride, threshold, own_places,
            TABLE, D, BLOCK_D, BLOCK_N, 0, False, DROPOUT, PLACED, PRECISION,
        )  # fmt: skip
        acc, m2, total = attend_keys(
            acc, m2, total, q, k_pointer, v_pointer, k_step, v_step, k_offsets, v_offsets, whole, seen, k_rows, rows,
            causal, scale_log2, stream, q_positions, k_first, k_stride, threshold, own_places,
            TABLE, D, BLOCK_D, BLOCK_N, 0, True, DROPOUT, PLACED, PRECISION,
        )  # fmt: skip
        acc = acc / total[:, None]
        if DROPOUT:
            acc *= keep_scale
        m2 += tl.math.log2(total)
    inside = rows < q_rows
    d = tl.arange(0, BLOCK_D)
    first_row = q_start + first * stride
    positions = (first_row + tl.load(row + FAMILY_TO_POSITION) + row_offsets(stride, BLOCK_M, WIDE)).to(tl.int32)
    lse_pointers = LSE + (sample * H + head) * N + first_row + row_offsets(stride, BLOCK_M, WIDE)
    out_start = ((sample * N + first_row) * H + head) * D
    out_pointers = OUT + out_start + block_offsets(stride * H * D, BLOCK_M, BLOCK_D, WIDE)
    if RUNNING:
        m2 = tl.load(lse_pointers, mask=inside, other=-float("inf")) * LOG2_E
        acc = tl.load(out_pointers, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        places = own_part_row(row, own_sample, head, H, tile) + first + tl.arange(0, BLOCK_M)
        part_lse2 = tl.load(PARTS_LSE2 + places, mask=inside, other=-float("inf"))
        wait_for_loads()
        acc, m2 = merge(acc, m2, load_parts(PARTS, places, inside, D, BLOCK_D, IN_FOURS), part_lse2)
    batch_slice = tl.load(row + FAMILY_BATCH_SLICE)
    child = tl.load(row + FAMILY_FIRST_CHILD)
    for part in range(child, child + tl.load(row + FAMILY_CHILDREN)):
        places, there = part_rows(LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, head, H, key_head, G, positions)
        part_lse2 = tl.load(PARTS_LSE2 + places, mask=there & inside, other=-float("inf"))
        there = part_lse2 > -float("inf")
        part_out = load_parts(PARTS, places, there, D, BLOCK_D, IN_FOURS)
        acc, m2 = merge(acc, m2, part_out, part_lse2)
    if FINAL:
        tl.store(lse_pointers, m2 * LN_2, mask=inside)
        tl.store(out_pointers, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    else:
        places = own_part_row(row, own_sample, head, H, tile) + first
        tl.store(PARTS_LSE2 + places + tl.arange(0, BLOCK_M), m2, mask=inside)
        part_pointers = PARTS + places * D + tl.arange(0, BLOCK_M)[:, None] * D + d[None, :]
        tl.store(part_pointers, acc, mask=inside[:, None] & (d < D)[None, :])
