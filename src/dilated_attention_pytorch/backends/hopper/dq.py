"""The backward kernel for Hopper by query rows: dq. See pieces.py for how the work is shared out.

Each of dq and dk/dv computes the scores again: seven matrix products instead of five, but no sums across programs, so no
atomics, no scratch for dq, the same bits every time, and weights that go from the registers of one product straight into the
next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilated_attention_pytorch.backends.hopper.pieces import (
    address,
    allocate_barriers,
    allocate_rows,
    find_item,
    find_part,
    hold,
    key_blocks,
    load_part,
    load_rows,
    row_descriptor,
    seen_keys,
    store_rows,
    tile_positions,
    wait_held,
)
from dilated_attention_pytorch.backends.triton.primitives import LOG2_E, own_part_row


@gluon.jit
def _load_dq_item(
    at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem = smem
    rows_full, rows_empty, k_full, k_empty, v_full, v_empty, _ = bars
    q_desc = row_descriptor(at[0], q_rows, steps[0], D, 64, BLOCK_D)
    k_desc = row_descriptor(at[1], k_rows, steps[1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(at[2], k_rows, steps[2], D, BLOCK_N, BLOCK_D)
    dout_desc = row_descriptor(at[3], q_rows, steps[3], D, 64, BLOCK_D)
    for half in gl.static_range(2):
        mbarrier.wait(rows_empty.index(half), number & 1 ^ 1)
        load_rows(q_desc, first + half * 64, rows_full, q_smem, half)
        load_rows(dout_desc, first + half * 64, rows_full, dout_smem, half)
    for block in range(blocks):
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        load_rows(k_desc, block * BLOCK_N, k_full, k_smem, stage)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        load_rows(v_desc, block * BLOCK_N, v_full, v_smem, stage)
        counter += 1
    return counter


@gluon.jit
def _produce_dq(
    tensors, TABLE, families, items, group, q_strides, k_strides, v_strides, dout_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    done = bars[6]
    counter = 0
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, heads, _, sample, _, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, False
        )
        blocks, _ = key_blocks(first, k_rows, causal, BLOCK_N)
        at = (
            address(Q, q_strides, sample, starts[0], heads[0]),
            address(K, k_strides, sample, starts[1], heads[1]),
            address(V, v_strides, sample, starts[1], heads[1]),
            address(DOUT, dout_strides, sample, starts[0], heads[0]),
        )
        stride64 = stride.to(gl.int64)
        steps = stride64 * q_strides[1], stride64 * k_strides[1], stride64 * v_strides[1], stride64 * dout_strides[1]
        parity = number & 1
        mbarrier.wait(done.index(parity), (number >> 1 & 1) ^ 1)
        if parity == 0:
            counter = _load_dq_item(
                at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars, D, BLOCK_D, BLOCK_N, STAGES
            )
        else:
            counter = _load_dq_item(
                at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars, D, BLOCK_D, BLOCK_N, STAGES
            )
        number += 1


@gluon.jit
def _score_gradient(s, dp, lse2, delta, scale_log2, n, masked, columns, seen):
    """ds = p (dp - delta) for query rows by keys."""
    p = gl.exp2(s * scale_log2 - lse2[:, None])
    if masked:
        p = gl.where(columns[None, :] < (seen - n)[:, None], p, 0.0)
    return p * (dp - delta[:, None])


@gluon.jit
def _compute_dq(
    half: gl.constexpr, results, statistics, tables, families, items, group, sizes, scale_log2, scale, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    PART_DQ, DQ = results
    LSE, DELTA = statistics
    TABLE, LAYOUT, OFFSETS = tables
    N, H, G, parts = sizes
    q_smem, dout_smem, k_smem, v_smem = smem
    rows_full, rows_empty, k_full, k_empty, v_full, v_empty, done = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    dtype: gl.constexpr = q_smem.dtype
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, O))
    counter = 0
    number = 0
    row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = find_item(
        TABLE, families, gl.program_id(0), group, False
    )
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        blocks, clear_blocks = key_blocks(first, k_rows, causal, BLOCK_N)
        begin = first + half * 64
        rows = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
        place = (sample.to(gl.int64) * H + heads[0]) * N + starts[0] + rows * stride
        # rows behind the tile: weights exp2(0 - inf) = 0
        lse2 = gl.load(LSE + place, mask=rows < q_rows, other=float("inf")) * LOG2_E
        delta = gl.load(DELTA + place, mask=rows < q_rows, other=0.0)
        seen = seen_keys(rows, k_rows, causal)
        mbarrier.wait(rows_full.index(half), number & 1)
        q = hold(q_smem.index(half), gl.DotOperandLayout(0, S, 2), HELD >= 1)
        dout = hold(dout_smem.index(half), gl.DotOperandLayout(0, S, 2), HELD >= 2)
        dq = gl.full([64, BLOCK_D], 0.0, gl.float32, O)

        # The scores of a block are computed while dq of the block before is still being added up.
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        dp = warpgroup_mma(dout, v_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        if HELD == 2:  # not before products have read the registers: only then they are loaded for sure
            mbarrier.arrive(rows_empty.index(half), count=1)
        mbarrier.arrive(v_empty.index(stage), count=1)
        ds = _score_gradient(s, dp, lse2, delta, scale_log2, 0, clear_blocks <= 0, columns, seen)
        ds = gl.convert_layout(ds.to(dtype), P)
        for block in range(1, blocks):
            counter += 1
            last = stage
            stage = counter % STAGES
            phase = counter // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            dp = warpgroup_mma(dout, v_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            last_ds = ds
            dq = warpgroup_mma(last_ds, k_smem.index(last), dq, is_async=True)
            s, q = wait_held(2, s, q, HELD >= 1)
            dp, dout = wait_held(1, dp, dout, HELD >= 2)
            mbarrier.arrive(v_empty.index(stage), count=1)
            n = block * BLOCK_N
            ds = _score_gradient(s, dp, lse2, delta, scale_log2, n, block >= clear_blocks, columns, seen)
            ds = gl.convert_layout(ds.to(dtype), P)
            # The product reads its left side from registers until it is done: they are named here, so that they last.
            dq, last_ds = warpgroup_mma_wait(0, deps=(dq, last_ds))
            mbarrier.arrive(k_empty.index(last), count=1)
        counter += 1
        if HELD < 2:
            mbarrier.arrive(rows_empty.index(half), count=1)
        dq = warpgroup_mma(ds, k_smem.index(stage), dq, is_async=True)
        # While the last product runs: the first part to be added, and the next item.
        inside = (begin + numbers) < q_rows
        positions = tile_positions(row, starts[0], begin, stride, numbers)
        places, there = find_part(LAYOUT, OFFSETS, row, 0, parts, own_sample, heads, H, G, positions, inside)
        part = load_part(PART_DQ, places, there, d, D, BLOCK_D)
        following = find_item(TABLE, families, gl.minimum(item + gl.num_programs(0), items - 1), group, False)
        dq_sum, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(done.index(number & 1), count=1)
        number += 1

        dq_sum = dq_sum * scale + part
        for child in range(1, gl.load(row + 24)):
            places, there = find_part(LAYOUT, OFFSETS, row, child, parts, own_sample, heads, H, G, positions, inside)
            dq_sum += load_part(PART_DQ, places, there, d, D, BLOCK_D)
        if FINAL:  # these tiles have all rows: the stride is 1
            start = ((sample.to(gl.int64) * N + starts[0] + begin) * H + heads[0]) * D
            store_rows(DQ, dq_sum, start, H * D, numbers, inside, d, D, BLOCK_D)
        else:
            start = (own_part_row(row, own_sample, heads[0], H, tile) + begin) * D
            store_rows(PART_DQ, dq_sum, start, D, numbers, inside, d, D, BLOCK_D)
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = following


@gluon.jit(do_not_specialize=["families", "items", "N", "H", "G", "parts"])
def dq_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DQ,  # (rows, D) float32
    DQ, TABLE, LAYOUT, OFFSETS, families, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,  # how many of q and dout stay in registers
):  # fmt: skip
    """dq of the items of a table: ``scale * sum_j p_ij (dp_ij - delta_i) k_j``."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
    )
    bars = (
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 2),
    )
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DQ, DQ
    statistics = LSE, DELTA
    tables = TABLE, LAYOUT, OFFSETS
    sizes = N, H, G, parts
    gl.warp_specialize([
        (_compute_dq, (gl.constexpr(0), results, statistics, tables, families, items, group, sizes, scale_log2, scale, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD)),
        (_compute_dq, (gl.constexpr(1), results, statistics, tables, families, items, group, sizes, scale_log2, scale, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD)),
        (_produce_dq, ((Q, K, V, DOUT), TABLE, families, items, group, q_strides, k_strides, v_strides, dout_strides, smem, bars, D, BLOCK_D, BLOCK_N, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip
