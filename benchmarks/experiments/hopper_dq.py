"""An experiment: the dq kernel with a third group of warps that adds parts and stores, see hopper_forward.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
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
    wait_held,
)
from dilated_attention_pytorch.backends.triton.primitives import LOG2_E, own_part_row

# Triton 3.9 renamed it.
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _load_dq_item(
    at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem, _, _, _, _ = smem
    rows_full, rows_empty, k_full, k_empty, v_full, v_empty, _, _, _, _, _, _ = bars
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
    tensors, statistics, TABLE, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    LSE, DELTA = statistics
    N, H = sizes
    done, info_full, info_empty, stat_full = bars[6], bars[9], bars[10], bars[11]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 8, LINE)
    counter = 0
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, heads, _, sample, _, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, False
        )
        blocks, clear_blocks = key_blocks(first, k_rows, causal, BLOCK_N)
        _publish(smem[5], info_full, info_empty, number, lane, blocks, clear_blocks, first, k_rows, causal.to(gl.int32))
        # Statistics of the rows; the slot is free when the numbers of two items ago have been read, and more than that.
        place = (sample.to(gl.int64) * H + heads[0]) * N + starts[0]
        rows = gl.minimum(first + gl.arange(0, 128, LINE), q_rows - 1) * stride
        copy_elements(smem[6].index(number & 1), LSE + place + rows)
        copy_elements(smem[7].index(number & 1), DELTA + place + rows)
        async_copy.mbarrier_arrive(stat_full.index(number & 1), increment_count=False)
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
def _number(facts, columns, which: gl.constexpr):
    """One of the numbers that the producer has left."""
    return gl.sum(gl.where(columns == which, facts, 0), 0)


@gluon.jit
def _publish(info_smem, info_full, info_empty, number, lane, a, b, c, d, e):
    """Leave five numbers for the computing groups."""
    slot = number & 1
    mbarrier.wait(info_empty.index(slot), (number >> 1 & 1) ^ 1)
    low = gl.where(lane == 0, a, gl.where(lane == 1, b, c))
    info_smem.index(slot).store(gl.where(lane < 3, low, gl.where(lane == 3, d, e)))
    mbarrier.arrive(info_full.index(slot), count=1)


@gluon.jit
def _finish_rows(
    sums_smem, factor, PARTS, RESULT, start, step, row, tables, parts, own_sample, heads, result_heads, G, position, stride,
    begin, stop, D: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Sums of 64 rows, times a factor, with the parts of sparser branches, into the result."""
    _TABLE, LAYOUT, OFFSETS = tables
    LANES: gl.constexpr = BLOCK_D // 4 if BLOCK_D < 128 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    numbers = gl.arange(0, 32, gl.SliceLayout(1, L))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L))
    for half in gl.static_range(2):  # 32 rows at a time: the registers are needed elsewhere
        rows = begin + half * 32 + numbers
        inside = rows < stop
        total = sums_smem.slice(half * 32, 32, 0).load(L) * factor
        for child in range(gl.load(row + 24)):
            places, there = find_part(
                LAYOUT, OFFSETS, row, child, parts, own_sample, heads, result_heads, G, position + rows * stride, inside
            )
            total += load_part(PARTS, places, there, d, D, BLOCK_D)
        store_rows(RESULT, total, start + half * 32 * step, step, numbers, inside, d, D, BLOCK_D)


@gluon.jit
def _compute_dq(
    half: gl.constexpr, items, scale_log2, smem, bars,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem, dq_smem, info_smem, lse_smem, delta_smem = smem
    (
        rows_full,
        rows_empty,
        k_full,
        k_empty,
        v_full,
        v_empty,
        done,
        sums_full,
        sums_empty,
        info_full,
        info_empty,
        stat_full,
    ) = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ALL: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])  # every thread has all eight numbers
    dtype: gl.constexpr = q_smem.dtype
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    eight = gl.arange(0, 8, ALL)
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    counter = 0
    number = 0
    for _item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(info_full.index(slot), number >> 1 & 1)
        facts = info_smem.index(slot).load(ALL)
        blocks = _number(facts, eight, 0)
        clear_blocks = _number(facts, eight, 1)
        begin = _number(facts, eight, 2) + half * 64
        k_rows = _number(facts, eight, 3)
        causal = _number(facts, eight, 4) != 0
        seen = seen_keys(begin + gl.arange(0, 64, gl.SliceLayout(1, S)), k_rows, causal)
        mbarrier.wait(stat_full.index(slot), number >> 1 & 1)
        lse2 = lse_smem.index(slot).slice(half * 64, 64).load(gl.SliceLayout(1, S)) * LOG2_E
        delta = delta_smem.index(slot).slice(half * 64, 64).load(gl.SliceLayout(1, S))
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
        mbarrier.arrive(info_empty.index(slot), count=1)  # the weights have been computed with all of it
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
        mbarrier.wait(sums_empty.index(half), (number & 1) ^ 1)
        dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(done.index(slot), count=1)
        dq_smem.index(half).store(dq)
        mbarrier.arrive(sums_full.index(half), count=1)
        number += 1


@gluon.jit
def _finish_dq(
    results, tables, families, items, group, sizes, scale, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    PART_DQ, DQ = results
    N, H, G, parts = sizes
    sums_full, sums_empty = bars[7], bars[8]
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, heads, own_sample, sample, tile, starts, q_rows, _k_rows, stride, _causal = find_item(
            tables[0], families, item, group, False
        )
        position = starts[0] + gl.load(row + 17).to(gl.int32)
        for half in gl.static_range(2):
            begin = first + half * 64
            mbarrier.wait(sums_full.index(half), number & 1)
            if FINAL:  # these tiles have all rows: the stride is 1
                start = ((sample.to(gl.int64) * N + starts[0] + begin) * H + heads[0]) * D
                _finish_rows(
                    smem[4].index(half), scale, PART_DQ, DQ, start, H * D, row, tables, parts, own_sample, heads, H, G,
                    position, stride, begin, q_rows, D, BLOCK_D,
                )  # fmt: skip
            else:
                start = (own_part_row(row, own_sample, heads[0], H, tile) + begin) * D
                _finish_rows(
                    smem[4].index(half), scale, PART_DQ, PART_DQ, start, D, row, tables, parts, own_sample, heads, H, G,
                    position, stride, begin, q_rows, D, BLOCK_D,
                )  # fmt: skip
            mbarrier.arrive(sums_empty.index(half), count=1)  # after the stores: only then the sums are loaded for sure
        number += 1


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
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_D], SUMS),
        gl.allocate_shared_memory(gl.int32, [2, 8], LINES),
        gl.allocate_shared_memory(gl.float32, [2, 128], LINES),
        gl.allocate_shared_memory(gl.float32, [2, 128], LINES),
    )
    bars = (
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(2, 1),
        allocate_barriers(2, 1),
        allocate_barriers(2, 2),
        allocate_barriers(2, 32),
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
        (_compute_dq, (gl.constexpr(0), items, scale_log2, smem, bars, BLOCK_D, BLOCK_N, STAGES, HELD)),
        (_compute_dq, (gl.constexpr(1), items, scale_log2, smem, bars, BLOCK_D, BLOCK_N, STAGES, HELD)),
        (_finish_dq, (results, tables, families, items, group, sizes, scale, smem, bars, D, BLOCK_D, FINAL)),
        (_produce_dq, ((Q, K, V, DOUT), statistics, TABLE, families, items, group, (N, H), q_strides, k_strides, v_strides, dout_strides, smem, bars, D, BLOCK_D, BLOCK_N, STAGES)),
    ], [4, 4, 1], [200, 72, 40] if BLOCK_D <= 64 else [208, 64, 32])  # fmt: skip
