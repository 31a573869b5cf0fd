"""The next forward kernel for Hopper: fewer barriers per block, and more done while products run.

**An experiment, not part of the library**: it compiles for sm_90 and has not been run yet. `benchmarks/tune_hopper.py
--experiment` compares it with the portable kernels and times it. Against `backends/hopper/forward.py`:

* A stage holds the keys of block i and the values of block i - 1, which are used together: one wait and one release per
  block instead of two of each. Predicted: 100 to 150 of about 2,240 cycles per block at D = 64.
* The sums so far are rescaled while the next scores are computed, not before. Predicted: 50 to 100 cycles.
* Two parts are loaded before the last product is waited for, not one. Predicted: 1,300 of about 41,000 cycles per item.
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
    tma_load,
    wait_held,
)
from dilated_attention_pytorch.backends.triton.primitives import LN_2, own_part_row


@gluon.jit
def _load_item(
    q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the query rows of both groups, then for keys and values, block by block as room comes free."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, full, empty, _ = bars
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, 64, BLOCK_D)
    k_desc = row_descriptor(k_at, k_rows, steps[1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(v_at, k_rows, steps[2], D, BLOCK_N, BLOCK_D)
    for i in gl.static_range(2):
        mbarrier.wait(q_empty.index(i), number & 1 ^ 1)
        load_rows(q_desc, first + i * 64, q_full, q_smem, i)
    # Keys alone, then keys of a block with the values of the block before, then values alone.
    stage = counter % STAGES
    mbarrier.wait(empty.index(stage), counter // STAGES & 1 ^ 1)
    load_rows(k_desc, 0, full, k_smem, stage)
    counter += 1
    for block in range(1, blocks):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), counter // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [block * BLOCK_N, 0], full.index(stage), k_smem.index(stage))
        tma_load(v_desc, [(block - 1) * BLOCK_N, 0], full.index(stage), v_smem.index(stage))
        counter += 1
    stage = counter % STAGES
    mbarrier.wait(empty.index(stage), counter // STAGES & 1 ^ 1)
    load_rows(v_desc, (blocks - 1) * BLOCK_N, full, v_smem, stage)
    return counter + 1


@gluon.jit
def _produce(
    tensors, TABLE, families, items, group, q_strides, k_strides, v_strides, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    Q, K, V = tensors
    done = bars[4]
    counter = 0  # stages so far
    number = 0  # items so far
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, first, heads, _, sample, _, starts, q_rows, k_rows, stride, causal = find_item(
            TABLE, families, item, group, False
        )
        blocks, _ = key_blocks(first, k_rows, causal, BLOCK_N)
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
def _compute(
    which: gl.constexpr, results, tables, families, items, group, sizes, scale_log2, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    PART_OUT, PART_LSE2, OUT, LSE = results
    TABLE, LAYOUT, OFFSETS = tables
    N, H, G, parts = sizes
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, full, empty, done = bars
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
        begin = first + which * 64
        seen = seen_keys(begin + gl.arange(0, 64, gl.SliceLayout(1, S)), k_rows, causal)
        # Zero keys have logit 0 and value 0: they only start the denominator.
        zero_keys = gl.load(row + 14).to(gl.float32)
        m2 = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + gl.where(zero_keys > 0, 0.0, float("-inf"))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + zero_keys
        acc = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
        mbarrier.wait(q_full.index(which), number & 1)
        q = hold(q_smem.index(which), gl.DotOperandLayout(0, S, 2), HELD)

        # The scores of a block are computed while the values of the block before are still being added up.
        stage = counter % STAGES
        mbarrier.wait(full.index(stage), counter // STAGES & 1)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if HELD:  # not before a product has read the registers: only then they are loaded for sure
            mbarrier.arrive(q_empty.index(which), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        counter += 1
        p, m2, total, alpha = _softmax(s, m2, total, scale_log2, 0, clear_blocks <= 0, columns, seen)
        p = gl.convert_layout(p.to(dtype), P)
        for block in range(1, blocks):
            stage = counter % STAGES
            mbarrier.wait(full.index(stage), counter // STAGES & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            # While the scores are computed. After the first block the sums are 0 and the factor is finite.
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            last_p = p
            acc = warpgroup_mma(last_p, v_smem.index(stage), acc, is_async=True)
            s, q = wait_held(1, s, q, HELD)
            p, m2, total, alpha = _softmax(s, m2, total, scale_log2, block * BLOCK_N, block >= clear_blocks, columns, seen)
            p = gl.convert_layout(p.to(dtype), P)
            # The product reads its left side from registers until it is done: they are named here, so that they last.
            acc, last_p = warpgroup_mma_wait(0, deps=(acc, last_p))
            mbarrier.arrive(empty.index(stage), count=1)
            counter += 1
        if not HELD:
            mbarrier.arrive(q_empty.index(which), count=1)
        stage = counter % STAGES
        mbarrier.wait(full.index(stage), counter // STAGES & 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        counter += 1
        # While the last product runs: the first parts to be added, and the next item.
        inside = (begin + numbers) < q_rows
        positions = tile_positions(row, starts[0], begin, stride, numbers)
        places, there = find_part(LAYOUT, OFFSETS, row, 0, parts, own_sample, heads, H, G, positions, inside)
        part_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
        part_out = load_part(PART_OUT, places, there, d, D, BLOCK_D)
        if BLOCK_D <= 64:
            places, there = find_part(LAYOUT, OFFSETS, row, 1, parts, own_sample, heads, H, G, positions, inside)
            second_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
            second_out = load_part(PART_OUT, places, there, d, D, BLOCK_D)
        next_item = gl.minimum(item + gl.num_programs(0), items - 1)
        following = find_item(TABLE, families, next_item, group, False)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(done.index(number & 1), count=1)
        number += 1

        total_o = gl.convert_layout(total, gl.SliceLayout(1, O))
        out = acc * (1.0 / total_o)[:, None]
        lse2 = gl.convert_layout(m2, gl.SliceLayout(1, O)) + gl.log2(total_o)
        out, lse2 = merge(out, lse2, part_out, part_lse2)
        if BLOCK_D <= 64:
            out, lse2 = merge(out, lse2, second_out, second_lse2)
        for child in range(2 if BLOCK_D <= 64 else 1, gl.load(row + 24)):
            places, there = find_part(LAYOUT, OFFSETS, row, child, parts, own_sample, heads, H, G, positions, inside)
            part_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
            out, lse2 = merge(out, lse2, load_part(PART_OUT, places, there, d, D, BLOCK_D), part_lse2)
        head = heads[0]
        if FINAL:  # these tiles have all rows: the stride is 1
            first_row = starts[0] + begin
            gl.store(LSE + (sample.to(gl.int64) * H + head) * N + first_row + numbers, lse2 * LN_2, mask=inside)
            store_rows(
                OUT, out, ((sample.to(gl.int64) * N + first_row) * H + head) * D, H * D, numbers, inside, d, D, BLOCK_D
            )
        else:
            place = own_part_row(row, own_sample, head, H, tile) + begin
            gl.store(PART_LSE2 + place + numbers, lse2, mask=inside)
            store_rows(PART_OUT, out, place * D, D, numbers, inside, d, D, BLOCK_D)
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = following


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
    smem = (
        allocate_rows(dtype, 2, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
    )
    bars = (
        allocate_barriers(2, 1),
        allocate_barriers(2, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
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
        (_compute, (gl.constexpr(0), results, tables, families, items, group, sizes, scale_log2, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD)),
        (_compute, (gl.constexpr(1), results, tables, families, items, group, sizes, scale_log2, smem, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD)),
        (_produce, ((Q, K, V), TABLE, families, items, group, strides[0], strides[1], strides[2], smem, bars, D, BLOCK_D, BLOCK_N, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip
