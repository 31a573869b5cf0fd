"""An experiment: the forward kernel with a third group of warps that adds parts and stores, while the others go on.

The trace of the kernel (docs/kernels.md) shows 6,500 cycles between the blocks of two items, 11,000 where parts are added,
of 40,000 to 44,000 per item. Here a computing group only writes its sums to shared memory, and reads what it has to know about the
next item from there, where the producer has put it. Predicted: 3,000 cycles, 1.09 x for one branch, 1.14 x for the paper's pattern.
Compiled for sm_90, not run yet.
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
from dilated_attention_pytorch.backends.triton.primitives import LN_2, own_part_row


@gluon.jit
def _load_item(
    q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the query rows of both groups, then for keys and values, block by block as room comes free."""
    q_smem, k_smem, v_smem, _, _, _, _ = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _, _, _, _ = bars
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, 64, BLOCK_D)
    k_desc = row_descriptor(k_at, k_rows, steps[1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(v_at, k_rows, steps[2], D, BLOCK_N, BLOCK_D)
    for i in gl.static_range(2):
        mbarrier.wait(q_empty.index(i), number & 1 ^ 1)
        load_rows(q_desc, first + i * 64, q_full, q_smem, i)
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
def _produce(
    tensors, TABLE, families, items, group, q_strides, k_strides, v_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V = tensors
    done, info_full, info_empty = bars[6], bars[9], bars[10]
    lane = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    counter = 0  # blocks of keys so far
    number = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, heads, _own_sample, sample, _tile, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, False
        )
        blocks, clear_blocks = key_blocks(first, k_rows, causal, BLOCK_N)
        slot = number & 1
        zero_keys = gl.load(row + 14).to(gl.int32)
        mbarrier.wait(info_empty.index(slot), (number >> 1 & 1) ^ 1)
        facts = gl.where(lane == 0, blocks, gl.where(lane == 1, clear_blocks, gl.where(lane == 2, first, k_rows)))
        more = gl.where(lane == 4, causal.to(gl.int32), zero_keys)
        smem[6].index(slot).store(gl.where(lane < 4, facts, more))
        mbarrier.arrive(info_full.index(slot), count=1)
        q_at = address(Q, q_strides, sample, starts[0], heads[0])
        k_at = address(K, k_strides, sample, starts[1], heads[1])
        v_at = address(V, v_strides, sample, starts[1], heads[1])
        stride64 = stride.to(gl.int64)
        steps = stride64 * q_strides[1], stride64 * k_strides[1], stride64 * v_strides[1]
        parity = number & 1
        mbarrier.wait(done.index(parity), (number >> 1 & 1) ^ 1)
        if parity == 0:
            counter = _load_item(
                q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            counter = _load_item(
                q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
        number += 1


@gluon.jit
def _softmax(s, m2, total, scale_log2, n, masked, columns, seen):
    """One step of the online softmax: weights, new maximum and sum, and the factor for what came before."""
    if masked:
        s = gl.where(columns[None, :] < (seen - n)[:, None], s, float("-inf"))
    m2_new = gl.maximum(m2, gl.max(s, 1) * scale_log2)
    alpha = gl.exp2(m2 - m2_new)
    p = gl.exp2(s * scale_log2 - m2_new[:, None])
    return p, m2_new, total * alpha + gl.sum(p, 1), alpha


@gluon.jit
def merge(out, lse2, part_out, part_lse2):
    """A row's result, which is never empty, and a part, which may be."""
    larger2 = gl.maximum(lse2, part_lse2)
    weight = gl.exp2(lse2 - larger2)
    part_weight = gl.exp2(part_lse2 - larger2)
    share = 1.0 / (weight + part_weight)
    out = out * (weight * share)[:, None] + part_out * (part_weight * share)[:, None]
    return out, larger2 + gl.log2(weight + part_weight)


@gluon.jit
def _number(facts, columns, which: gl.constexpr):
    """One of the numbers that the producer has left."""
    return gl.sum(gl.where(columns == which, facts, 0), 0)


@gluon.jit
def _compute(
    which: gl.constexpr, items, scale_log2, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem, acc_smem, m2_smem, total_smem, info_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, done, sums_full, sums_empty, info_full, info_empty = bars
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
        begin = _number(facts, eight, 2) + which * 64
        k_rows = _number(facts, eight, 3)
        causal = _number(facts, eight, 4) != 0
        # Zero keys have logit 0 and value 0: they only start the denominator.
        zero_keys = _number(facts, eight, 5).to(gl.float32)
        seen = seen_keys(begin + gl.arange(0, 64, gl.SliceLayout(1, S)), k_rows, causal)
        m2 = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + gl.where(zero_keys > 0, 0.0, float("-inf"))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + zero_keys
        acc = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
        mbarrier.wait(q_full.index(which), number & 1)
        q = hold(q_smem.index(which), gl.DotOperandLayout(0, S, 2), HELD)

        # The scores of a block are computed while the values of the block before are still being added up.
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(info_empty.index(slot), count=1)
        if HELD:  # not before a product has read the registers: only then they are loaded for sure
            mbarrier.arrive(q_empty.index(which), count=1)
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, m2, total, alpha = _softmax(s, m2, total, scale_log2, 0, clear_blocks <= 0, columns, seen)
        p = gl.convert_layout(p.to(dtype), P)
        for block in range(1, blocks):
            counter += 1
            last, last_phase = stage, phase
            stage = counter % STAGES
            phase = counter // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), last_phase)
            last_p = p
            acc = warpgroup_mma(last_p, v_smem.index(last), acc, is_async=True)
            s, q = wait_held(1, s, q, HELD)
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, m2, total, alpha = _softmax(s, m2, total, scale_log2, block * BLOCK_N, block >= clear_blocks, columns, seen)
            p = gl.convert_layout(p.to(dtype), P)
            # The product reads its left side from registers until it is done: they are named here, so that they last.
            acc, last_p = warpgroup_mma_wait(0, deps=(acc, last_p))
            mbarrier.arrive(v_empty.index(last), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        counter += 1
        if not HELD:
            mbarrier.arrive(q_empty.index(which), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        mbarrier.wait(sums_empty.index(which), (number & 1) ^ 1)
        m2_smem.index(which).store(m2)
        total_smem.index(which).store(total)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(stage), count=1)
        mbarrier.arrive(done.index(slot), count=1)
        acc_smem.index(which).store(acc)
        mbarrier.arrive(sums_full.index(which), count=1)
        number += 1


@gluon.jit
def _finish(
    results, tables, families, items, group, sizes, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    """Divide the sums of both groups, add the parts of sparser branches, store."""
    PART_OUT, PART_LSE2, OUT, LSE = results
    TABLE, LAYOUT, OFFSETS = tables
    N, H, G, parts = sizes
    acc_smem, m2_smem, total_smem = smem[3], smem[4], smem[5]
    sums_full, sums_empty = bars[7], bars[8]
    # Rows of float32 in pieces of 16 bytes: a warp reads whole rows of parts.
    LANES: gl.constexpr = BLOCK_D // 4 if BLOCK_D < 128 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    numbers = gl.arange(0, 32, gl.SliceLayout(1, L))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L))
    number = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, heads, own_sample, sample, tile, starts, q_rows, _k_rows, stride, _causal = find_item(
            TABLE, families, item, group, False
        )
        head = heads[0]
        children = gl.load(row + 24)
        for g in gl.static_range(2):
            mbarrier.wait(sums_full.index(g), number & 1)
            for half in gl.static_range(2):  # 32 rows at a time: the registers are needed elsewhere
                begin = first + g * 64 + half * 32
                total = total_smem.index(g).slice(half * 32, 32).load(gl.SliceLayout(1, L))
                lse2 = m2_smem.index(g).slice(half * 32, 32).load(gl.SliceLayout(1, L)) + gl.log2(total)
                out = acc_smem.index(g).slice(half * 32, 32, 0).load(L) * (1.0 / total)[:, None]
                inside = (begin + numbers) < q_rows
                positions = tile_positions(row, starts[0], begin, stride, numbers)
                for child in range(children):
                    places, there = find_part(
                        LAYOUT, OFFSETS, row, child, parts, own_sample, heads, H, G, positions, inside
                    )
                    part_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
                    out, lse2 = merge(out, lse2, load_part(PART_OUT, places, there, d, D, BLOCK_D), part_lse2)
                if FINAL:  # these tiles have all rows: the stride is 1
                    first_row = starts[0] + begin
                    gl.store(LSE + (sample.to(gl.int64) * H + head) * N + first_row + numbers, lse2 * LN_2, mask=inside)
                    start = ((sample.to(gl.int64) * N + first_row) * H + head) * D
                    store_rows(OUT, out, start, H * D, numbers, inside, d, D, BLOCK_D)
                else:
                    place = own_part_row(row, own_sample, head, H, tile) + begin
                    gl.store(PART_LSE2 + place + numbers, lse2, mask=inside)
                    store_rows(PART_OUT, out, place * D, D, numbers, inside, d, D, BLOCK_D)
            mbarrier.arrive(sums_empty.index(g), count=1)  # after the stores: only then the sums are loaded for sure
        number += 1


@gluon.jit(do_not_specialize=["families", "items", "N", "H", "G", "parts"])
def forward_kernel(
    Q, K, V,
    PART_OUT,  # (rows, D) float32
    PART_LSE2,  # (rows,) float32
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
    TABLE, LAYOUT, OFFSETS, families, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    N, H, G, group, parts, scale_log2,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FINAL: gl.constexpr,  # write OUT, else parts
    HELD: gl.constexpr,  # q stays in registers
):  # fmt: skip
    """Attention of the items of a table: blocks of 128 query rows over all keys of their tiles."""
    dtype: gl.constexpr = Q.dtype.element_ty
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        gl.allocate_shared_memory(gl.float32, [2, 64, BLOCK_D], SUMS),
        gl.allocate_shared_memory(gl.float32, [2, 64], LINES),
        gl.allocate_shared_memory(gl.float32, [2, 64], LINES),
        gl.allocate_shared_memory(gl.int32, [2, 8], LINES),
    )
    bars = (
        allocate_barriers(2, 1),
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
    )
    fence_async_shared()
    strides = (
        (q_stride_b, q_stride_n, q_stride_h),
        (k_stride_b, k_stride_n, k_stride_h),
        (v_stride_b, v_stride_n, v_stride_h),
    )
    results = PART_OUT, PART_LSE2, OUT, LSE
    tables = TABLE, LAYOUT, OFFSETS
    sizes = N, H, G, parts
    gl.warp_specialize([
        (_compute, (gl.constexpr(0), items, scale_log2, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, HELD)),
        (_compute, (gl.constexpr(1), items, scale_log2, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, HELD)),
        (_finish, (results, tables, families, items, group, sizes, smem, bars, D, BLOCK_D, FINAL)),
        (_produce, ((Q, K, V), TABLE, families, items, group, strides[0], strides[1], strides[2], smem, bars, D, BLOCK_D, BLOCK_N, STAGES)),
    ], [4, 4, 1], [200, 80, 32] if BLOCK_D <= 64 else [208, 64, 32])  # fmt: skip
