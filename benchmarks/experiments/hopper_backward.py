"""The next backward kernels for Hopper: one wait and one release per block.

**An experiment, not part of the library**: it compiles for sm_90 and has not been run yet. `benchmarks/tune_hopper.py
--experiment` compares it with the portable kernels and times it. Against `backends/hopper/dq.py` and `dkv.py`: rows that are used
together share a barrier. Predicted: 100 of about 900 cycles per block of 64 at D = 64.
"""

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
    ROWS,
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

# Triton 3.9 renamed it.
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _load_dq_item(
    at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem = smem
    rows_full, rows_empty, full, empty, _ = bars
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
        mbarrier.wait(empty.index(stage), counter // STAGES & 1 ^ 1)
        load_rows(k_desc, block * BLOCK_N, full, k_smem, stage)
        load_rows(v_desc, block * BLOCK_N, full, v_smem, stage)
        counter += 1
    return counter


@gluon.jit
def _produce_dq(
    tensors, TABLE, families, items, group, q_strides, k_strides, v_strides, dout_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    done = bars[4]
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
    rows_full, rows_empty, full, empty, done = bars
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
        mbarrier.wait(full.index(stage), counter // STAGES & 1)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        dp = warpgroup_mma(dout, v_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        if HELD == 2:  # not before products have read the registers: only then they are loaded for sure
            mbarrier.arrive(rows_empty.index(half), count=1)
        ds = _score_gradient(s, dp, lse2, delta, scale_log2, 0, clear_blocks <= 0, columns, seen)
        ds = gl.convert_layout(ds.to(dtype), P)
        for block in range(1, blocks):
            counter += 1
            last = stage
            stage = counter % STAGES
            mbarrier.wait(full.index(stage), counter // STAGES & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(dout, v_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            last_ds = ds
            dq = warpgroup_mma(last_ds, k_smem.index(last), dq, is_async=True)
            s, q = wait_held(2, s, q, HELD >= 1)
            dp, dout = wait_held(1, dp, dout, HELD >= 2)
            n = block * BLOCK_N
            ds = _score_gradient(s, dp, lse2, delta, scale_log2, n, block >= clear_blocks, columns, seen)
            ds = gl.convert_layout(ds.to(dtype), P)
            # The product reads its left side from registers until it is done: they are named here, so that they last.
            dq, last_ds = warpgroup_mma_wait(0, deps=(dq, last_ds))
            mbarrier.arrive(empty.index(last), count=1)
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
        mbarrier.arrive(empty.index(stage), count=1)
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
        allocate_barriers(STAGES, 2),
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


@gluon.jit
def _load_kv(at, steps, first, k_rows, number, smem, bars, D: gl.constexpr, BLOCK_D: gl.constexpr):
    k_desc = row_descriptor(at[0], k_rows, steps[0], D, 64, BLOCK_D)
    v_desc = row_descriptor(at[1], k_rows, steps[1], D, 64, BLOCK_D)
    for half in gl.static_range(2):
        mbarrier.wait(bars[1].index(half), number & 1 ^ 1)
        load_rows(k_desc, first + half * 64, bars[0], smem[0], half)
        load_rows(v_desc, first + half * 64, bars[0], smem[1], half)


@gluon.jit
def _load_unit(
    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, lse_at, delta_at, steps, stride, q_rows, begin_block,
    blocks, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for an item's keys and values, if this is its first unit, then for rows of q and dout, and their statistics."""
    if member == 0:
        _load_kv(kv_at, kv_steps, first, k_rows, number, smem, bars, D, BLOCK_D)
    _, _, q_smem, dout_smem, lse_smem, delta_smem = smem
    _, _, full, empty, _ = bars
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, BLOCK_M, BLOCK_D)
    dout_desc = row_descriptor(dout_at, q_rows, steps[1], D, BLOCK_M, BLOCK_D)
    for block in range(begin_block, blocks):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), (counter // STAGES & 1) ^ 1)
        load_rows(q_desc, block * BLOCK_M, full, q_smem, stage)
        load_rows(dout_desc, block * BLOCK_M, full, dout_smem, stage)
        # Rows behind the tile's end are masked; any statistics do.
        rows = gl.minimum(block * BLOCK_M + gl.arange(0, BLOCK_M, LINE), q_rows - 1) * stride
        copy_elements(lse_smem.index(stage), lse_at + rows)
        copy_elements(delta_smem.index(stage), delta_at + rows)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        counter += 1
    return counter


@gluon.jit
def query_blocks(first, q_rows, causal, BLOCK_M: gl.constexpr):
    """Which blocks of query rows see the keys from ``first`` on: from, to; the first that needs no causal mask, and the end
    of the whole ones."""
    begin = gl.where(causal, first // BLOCK_M, 0)
    clear = gl.where(causal, (first + ROWS + BLOCK_M - 1) // BLOCK_M, 0)
    return begin, (q_rows + BLOCK_M - 1) // BLOCK_M, clear, q_rows // BLOCK_M


@gluon.jit
def _produce_dkv(
    tensors, statistics, TABLE, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    LSE, DELTA = statistics
    N, H = sizes
    done = bars[4]
    counter = 0
    number = 0
    unit = 0  # a query head of an item
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, heads, _, sample, _, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, True
        )
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M)
        kv_at = (
            address(K, k_strides, sample, starts[1], heads[1]),
            address(V, v_strides, sample, starts[1], heads[1]),
        )
        stride64 = stride.to(gl.int64)
        kv_steps = stride64 * k_strides[1], stride64 * v_strides[1]
        steps = stride64 * q_strides[1], stride64 * dout_strides[1]
        for member in range(group):
            head = heads[1] * group + member
            q_at = address(Q, q_strides, sample, starts[0], head)
            dout_at = address(DOUT, dout_strides, sample, starts[0], head)
            place = (sample.to(gl.int64) * H + head) * N + starts[0]
            parity = unit & 1
            mbarrier.wait(done.index(parity), (unit >> 1 & 1) ^ 1)
            # Keys are loaded inside of the branches as well: two branches that only made descriptors would be merged
            # into one by the compiler, and with them their two places into one.
            if parity == 0:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, LSE + place, DELTA + place, steps, stride,
                    q_rows, begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
            else:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, LSE + place, DELTA + place, steps, stride,
                    q_rows, begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
            unit += 1
        number += 1


@gluon.jit
def _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, k_rows, causal):
    """The weights of keys by query rows."""
    p = gl.exp2(s * scale_log2 - lse2[None, :])
    if masked:
        seen = gl.where(rows < q_rows, seen_keys(rows, k_rows, causal), 0)
        p = gl.where(columns[:, None] < seen[None, :], p, 0.0)
    return p


@gluon.jit
def _compute_dkv(
    half: gl.constexpr, results, tables, families, items, group, sizes, scale_log2, scale, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    PART_DK, PART_DV, DK, DV = results
    TABLE, LAYOUT, OFFSETS = tables
    M, G, parts = sizes
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem = smem
    rows_full, rows_empty, full, empty, done = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    dtype: gl.constexpr = q_smem.dtype
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, O))
    counter = 0
    number = 0
    unit = 0
    row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = find_item(
        TABLE, families, gl.program_id(0), group, True
    )
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        from_block, blocks, clear, whole = query_blocks(first, q_rows, causal, BLOCK_M)
        begin = first + half * 64
        columns = begin + gl.arange(0, 64, gl.SliceLayout(1, S))
        mbarrier.wait(rows_full.index(half), number & 1)
        k = hold(k_smem.index(half), gl.DotOperandLayout(0, S, 2), HELD >= 1)
        v = hold(v_smem.index(half), gl.DotOperandLayout(0, S, 2), HELD >= 2)
        dk = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
        dv = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
        for _ in range(group):
            if OVERLAP:
                p = gl.full([64, BLOCK_M], 0.0, dtype, P)
                ds = gl.full([64, BLOCK_M], 0.0, dtype, P)
                # The first block is added up with weights 0 and then once more with its own: it stays until then.
                last = counter % STAGES
            for block in range(from_block, blocks):
                stage = counter % STAGES
                mbarrier.wait(full.index(stage), counter // STAGES & 1)
                s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                dp = warpgroup_mma(v, dout_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                rows = block * BLOCK_M + m
                masked = (block < clear) | (block >= whole)
                if OVERLAP:
                    last_p = p
                    last_ds = ds
                    dv = warpgroup_mma(last_p, dout_smem.index(last), dv, is_async=True)
                    dk = warpgroup_mma(last_ds, q_smem.index(last), dk, is_async=True)
                    s, k = wait_held(3, s, k, HELD >= 1)
                    dp, v = wait_held(2, dp, v, HELD >= 2)
                    lse2 = lse_smem.index(stage).load(gl.SliceLayout(0, S)) * LOG2_E
                    delta = delta_smem.index(stage).load(gl.SliceLayout(0, S))
                    weights = _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, k_rows, causal)
                    p = gl.convert_layout(weights.to(dtype), P)
                    ds = gl.convert_layout((weights * (dp - delta[None, :])).to(dtype), P)
                    # Products read their left sides from registers until they are done: named here, so that they last.
                    dv, dk, last_p, last_ds = warpgroup_mma_wait(0, deps=(dv, dk, last_p, last_ds))
                    mbarrier.arrive(empty.index(last), count=1, pred=block > from_block)
                    last = stage
                else:
                    s, k = wait_held(1, s, k, HELD >= 1)
                    lse2 = lse_smem.index(stage).load(gl.SliceLayout(0, S)) * LOG2_E
                    weights = _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, k_rows, causal)
                    p = gl.convert_layout(weights.to(dtype), P)
                    dv = warpgroup_mma(p, dout_smem.index(stage), dv, is_async=True)
                    dp, v = wait_held(1, dp, v, HELD >= 2)
                    delta = delta_smem.index(stage).load(gl.SliceLayout(0, S))
                    ds = gl.convert_layout((weights * (dp - delta[None, :])).to(dtype), P)
                    dk = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
                    dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
                    mbarrier.arrive(empty.index(stage), count=1)
                counter += 1
            if OVERLAP:
                dv = warpgroup_mma(p, dout_smem.index(last), dv, is_async=True)
                dk = warpgroup_mma(ds, q_smem.index(last), dk, is_async=True)
                dv, dk, p, ds = warpgroup_mma_wait(0, deps=(dv, dk, p, ds))
                mbarrier.arrive(empty.index(last), count=1)
            mbarrier.arrive(done.index(unit & 1), count=1)
            unit += 1
        mbarrier.arrive(rows_empty.index(half), count=1)
        number += 1

        inside = (begin + numbers) < k_rows
        positions = tile_positions(row, starts[1], begin, stride, numbers)
        head = heads[1]
        if FINAL:  # these tiles have all rows: the stride is 1
            start = ((sample.to(gl.int64) * M + starts[1] + begin) * G + head) * D
            step = G * D
            dk_at, dv_at = DK, DV
        else:
            start = (own_part_row(row, own_sample, head, G, tile) + begin) * D
            step = D
            dk_at, dv_at = PART_DK, PART_DV
        dk = dk * scale
        # One after the other: the parts of both do not fit into the registers together.
        for child in range(gl.load(row + 24)):
            places, there = find_part(LAYOUT, OFFSETS, row, child, parts, own_sample, (head, head), G, G, positions, inside)
            dk += load_part(PART_DK, places, there, d, D, BLOCK_D)
        store_rows(dk_at, dk, start, step, numbers, inside, d, D, BLOCK_D)
        for child in range(gl.load(row + 24)):
            places, there = find_part(LAYOUT, OFFSETS, row, child, parts, own_sample, (head, head), G, G, positions, inside)
            dv += load_part(PART_DV, places, there, d, D, BLOCK_D)
        store_rows(dv_at, dv, start, step, numbers, inside, d, D, BLOCK_D)
        next_item = gl.minimum(item + gl.num_programs(0), items - 1)
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, next_item, group, True
        )


@gluon.jit(do_not_specialize=["families", "items", "N", "M", "H", "G", "parts"])
def dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DK,  # (rows, D) float32
    PART_DV, DK, DV, TABLE, LAYOUT, OFFSETS, families, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,  # how many of k and v stay in registers
    OVERLAP: gl.constexpr,  # compute scores while the block before is still being added up
):  # fmt: skip
    """dk and dv of the items of a table, summed over the query rows that see them and the query heads of their group."""
    dtype: gl.constexpr = Q.dtype.element_ty
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINES),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINES),
    )
    bars = (
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(STAGES, 34),  # two loads of rows, and 32 threads for lse and delta
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 2),
    )
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DK, PART_DV, DK, DV
    statistics = LSE, DELTA
    tables = TABLE, LAYOUT, OFFSETS
    gl.warp_specialize([
        (_compute_dkv, (gl.constexpr(0), results, tables, families, items, group, (M, G, parts), scale_log2, scale, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP)),
        (_compute_dkv, (gl.constexpr(1), results, tables, families, items, group, (M, G, parts), scale_log2, scale, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP)),
        (_produce_dkv, ((Q, K, V, DOUT), statistics, TABLE, families, items, group, (N, H), q_strides, k_strides, v_strides, dout_strides, smem, bars, D, BLOCK_D, BLOCK_M, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip
