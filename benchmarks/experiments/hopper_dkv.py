"""An experiment: the dk/dv kernel with a third group of warps that adds parts and stores, see hopper_forward.py."""

from __future__ import annotations

from hopper_dq import _finish_rows, _number, _publish
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
    hold,
    load_rows,
    row_descriptor,
    seen_keys,
    wait_held,
)
from dilated_attention_pytorch.backends.triton.primitives import LOG2_E, own_part_row

# Triton 3.9 renamed it.
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


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
    _, _, q_smem, dout_smem, lse_smem, delta_smem, _, _, _ = smem
    _, _, q_full, dout_full, row_full, empty, _, _, _, _, _ = bars
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, BLOCK_M, BLOCK_D)
    dout_desc = row_descriptor(dout_at, q_rows, steps[1], D, BLOCK_M, BLOCK_D)
    for block in range(begin_block, blocks):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), (counter // STAGES & 1) ^ 1)
        load_rows(q_desc, block * BLOCK_M, q_full, q_smem, stage)
        load_rows(dout_desc, block * BLOCK_M, dout_full, dout_smem, stage)
        # Rows behind the tile's end are masked; any statistics do.
        rows = gl.minimum(block * BLOCK_M + gl.arange(0, BLOCK_M, LINE), q_rows - 1) * stride
        copy_elements(lse_smem.index(stage), lse_at + rows)
        copy_elements(delta_smem.index(stage), delta_at + rows)
        async_copy.mbarrier_arrive(row_full.index(stage), increment_count=False)
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
    done, info_full, info_empty = bars[6], bars[9], bars[10]
    lane = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    counter = 0
    number = 0
    unit = 0  # a query head of an item
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, heads, _, sample, _, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, True
        )
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M)
        _publish(smem[8], info_full, info_empty, number, lane, first, q_rows, k_rows, causal.to(gl.int32), 0)
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
    half: gl.constexpr, items, group, scale_log2, smem, bars,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, dk_smem, dv_smem, info_smem = smem
    rows_full, rows_empty, q_full, dout_full, row_full, empty, done, sums_full, sums_empty, info_full, info_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ALL: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])  # every thread has all eight numbers
    dtype: gl.constexpr = q_smem.dtype
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    eight = gl.arange(0, 8, ALL)
    counter = 0
    number = 0
    unit = 0
    for _item in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(info_full.index(slot), number >> 1 & 1)
        facts = info_smem.index(slot).load(ALL)
        first = _number(facts, eight, 0)
        q_rows = _number(facts, eight, 1)
        k_rows = _number(facts, eight, 2)
        causal = _number(facts, eight, 3) != 0
        from_block, blocks, clear, whole = query_blocks(first, q_rows, causal, BLOCK_M)
        columns = first + half * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
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
                phase = counter // STAGES & 1
                mbarrier.wait(q_full.index(stage), phase)
                s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(dout_full.index(stage), phase)
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
                    mbarrier.wait(row_full.index(stage), phase)
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
                    mbarrier.wait(row_full.index(stage), phase)
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
        mbarrier.arrive(info_empty.index(slot), count=1)
        mbarrier.wait(sums_empty.index(half), (number & 1) ^ 1)
        dk_smem.index(half).store(dk)
        dv_smem.index(half).store(dv)
        mbarrier.arrive(sums_full.index(half), count=1)
        number += 1


@gluon.jit
def _finish_dkv(
    results, tables, families, items, group, sizes, scale, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    PART_DK, PART_DV, DK, DV = results
    M, G, parts = sizes
    sums_full, sums_empty = bars[7], bars[8]
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, heads, own_sample, sample, tile, starts, _q_rows, k_rows, stride, _causal = find_item(
            tables[0], families, item, group, True
        )
        position = starts[1] + gl.load(row + 17).to(gl.int32)
        head = heads[1]
        for half in gl.static_range(2):
            begin = first + half * 64
            mbarrier.wait(sums_full.index(half), number & 1)
            if FINAL:  # these tiles have all rows: the stride is 1
                start = ((sample.to(gl.int64) * M + starts[1] + begin) * G + head) * D
                step = G * D
                dk_at, dv_at = DK, DV
            else:
                start = (own_part_row(row, own_sample, head, G, tile) + begin) * D
                step = D
                dk_at, dv_at = PART_DK, PART_DV
            _finish_rows(
                smem[6].index(half), scale, PART_DK, dk_at, start, step, row, tables, parts, own_sample, (head, head), G, G,
                position, stride, begin, k_rows, D, BLOCK_D,
            )  # fmt: skip
            _finish_rows(
                smem[7].index(half), 1.0, PART_DV, dv_at, start, step, row, tables, parts, own_sample, (head, head), G, G,
                position, stride, begin, k_rows, D, BLOCK_D,
            )  # fmt: skip
            mbarrier.arrive(sums_empty.index(half), count=1)  # after the stores: only then the sums are loaded for sure
        number += 1


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
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINES),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINES),
        gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_D], SUMS),
        gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_D], SUMS),
        gl.allocate_shared_memory(gl.int32, [2, 8], LINES),
    )
    bars = (
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 32),
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 2),
        allocate_barriers(2, 1),
        allocate_barriers(2, 1),
        allocate_barriers(2, 1),
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
        (_compute_dkv, (gl.constexpr(0), items, group, scale_log2, smem, bars, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP)),
        (_compute_dkv, (gl.constexpr(1), items, group, scale_log2, smem, bars, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP)),
        (_finish_dkv, (results, tables, families, items, group, (M, G, parts), scale, smem, bars, D, BLOCK_D, FINAL)),
        (_produce_dkv, ((Q, K, V, DOUT), statistics, TABLE, families, items, group, (N, H), q_strides, k_strides, v_strides, dout_strides, smem, bars, D, BLOCK_D, BLOCK_M, STAGES)),
    ], [4, 4, 1], [208, 64, 32])  # fmt: skip
