"""The backward kernel for Hopper by query rows: dq. See common.py for how items are distributed.

Each of dq and dk/dv computes the scores again: seven matrix products instead of five, but no sums across programs, so no
atomics, no scratch for dq, the same bits every time, and weights that go from the registers of one product straight into the
next. joint.py has five products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.gpu.kernels.columns import FAMILY_OWN_DELTA
from dilated_attention_pytorch.backends.gpu.kernels.primitives import LOG2_E
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    CAUSAL,
    CHILDREN,
    FIRST,
    GROUPS,
    K_ROWS,
    PLACE,
    Q_ROWS,
    STRIDE,
    address,
    allocate_barriers,
    allocate_facts,
    allocate_numbers,
    allocate_rows,
    copy_statistics,
    find_item,
    find_part,
    item_at,
    item_positions,
    key_blocks,
    known,
    leave,
    leave_parts,
    let_next_begin,
    load_keys,
    load_part,
    load_rows,
    look_up_parts,
    product_layout,
    result_row,
    row_descriptor,
    seen_keys,
    store_part,
    store_rows,
    wait_for_last_launch,
)
from dilated_attention_pytorch.backends.hopper.kernels.products import (
    as_weights,
    hold,
    no_sums,
    start_scores,
    start_sums,
    wait_scores,
    wait_sums,
    whole_rows,
)


@gluon.jit
def _load_dq_item(
    at, steps, statistics, stride, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem = smem
    rows_full, rows_empty = bars[:2]
    q_desc = row_descriptor(at[0], q_rows, steps[0], D, 64, BLOCK_D)
    k_desc = row_descriptor(at[1], k_rows, steps[1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(at[2], k_rows, steps[2], D, BLOCK_N, BLOCK_D)
    dout_desc = row_descriptor(at[3], q_rows, steps[3], D, 64, BLOCK_D)
    for which in gl.static_range(GROUPS):
        mbarrier.wait(rows_empty.index(which), number & 1 ^ 1)
        load_rows(q_desc, first + which * 64, rows_full, q_smem, which)
        load_rows(dout_desc, first + which * 64, rows_full, dout_smem, which)
        # Rows behind the end of the tile are not stored, so any statistics may be loaded for them.
        copy_statistics(
            statistics,
            first + which * 64,
            q_rows,
            stride,
            lse_smem.index(which),
            delta_smem.index(which),
            rows_full.index(which),
            64,
        )
    return load_keys(k_desc, v_desc, blocks, counter, (k_smem, v_smem), bars[2:6], (0, 0), (0, 0), BLOCK_N, STAGES)


@gluon.jit
def _produce_dq(
    tensors, statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    LSE, DELTA = statistics
    N, H, G, parts = sizes
    facts_full, done = bars[6], bars[7]
    let_next_begin()
    counter = 0
    number = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_at(tables[3], tables[4], index)
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal = find_item(
            tables[0], families, item, group, False
        )
        stride, k_stride = strides
        place = result_row(row, own_sample, sample, heads[0], tile, starts[0], first, N, H, FINAL)
        if PARTS > 0:
            found = look_up_parts(tables, row, own_sample, heads[0], H, heads[1], G, parts, PARTS)
        parity = number & 1
        mbarrier.wait(done.index(parity), (number >> 1 & 1) ^ 1)
        leave(facts, parity, FIRST, first)
        leave(facts, parity, Q_ROWS, q_rows)
        leave(facts, parity, K_ROWS, k_rows)
        leave(facts, parity, CAUSAL, causal)
        leave(facts, parity, PLACE, place)
        leave(facts, parity, STRIDE, stride)
        if PARTS > 0:
            leave_parts(facts, parity, row, starts[0], first, stride, found)
        mbarrier.arrive(facts_full.index(parity), count=1)
        blocks, _ = key_blocks(first, k_rows, causal, BLOCK_N)
        at = (
            address(Q, q_strides, sample, starts[0], heads[0]),
            address(K, k_strides, sample, starts[1], heads[1]),
            address(V, v_strides, sample, starts[1], heads[1]),
            address(DOUT, dout_strides, sample, starts[0], heads[0]),
        )
        stride64 = stride.to(gl.int64)
        k_stride64 = k_stride.to(gl.int64)
        steps = stride64 * q_strides[1], k_stride64 * k_strides[1], k_stride64 * v_strides[1], stride64 * dout_strides[1]
        rows_at = (sample.to(gl.int64) * H + heads[0]) * N + starts[0]
        own_statistics = LSE + rows_at, DELTA + gl.load(row + FAMILY_OWN_DELTA) + rows_at
        if parity == 0:
            counter = _load_dq_item(
                at, steps, own_statistics, stride, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            counter = _load_dq_item(
                at, steps, own_statistics, stride, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
        number += 1


@gluon.jit
def _score_gradient(s, dp, lse2, delta, scale_log2, n, masked, columns, seen):
    """ds = p (dp - delta) for query rows by keys."""
    p = gl.exp2(s * scale_log2 - lse2[:, None])
    if masked:
        p = gl.where(columns[None, :] < (seen - n)[:, None], p, 0.0)
    return p * (dp - delta[:, None])


@gluon.jit
def dq_of_item(
    which: gl.constexpr, q, dout, dq, lse2, delta, seen, blocks, clear_blocks, counter, scale_log2, columns, none, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """dq over all blocks of keys of an item, for the rows of one group, up to the start of the last product.

    Returns the sums, that product's left side, the stage of the last block, and the blocks so far.
    """
    k_smem, v_smem = smem
    rows_empty, k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = k_smem.dtype
    # The scores of a block are computed while dq of the block before is still being added up.
    stage = counter % STAGES
    phase = counter // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = start_scores(q, k_smem.index(stage), none, D)
    mbarrier.wait(v_full.index(stage), phase)
    dp = start_scores(dout, v_smem.index(stage), none, D)
    s, q = wait_scores(1, s, q, D, BLOCK_D, HELD >= 1)
    dp, dout = wait_scores(0, dp, dout, D, BLOCK_D, HELD >= 2)
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = _score_gradient(s, dp, lse2, delta, scale_log2, 0, clear_blocks <= 0, columns, seen)
    ds = as_weights(ds, dtype, D, BLOCK_D)
    if HELD == 2:  # after all loaded values have been used: only then the loads are complete
        mbarrier.arrive(rows_empty.index(which), count=1)
    for block in range(1, blocks):
        counter += 1
        last = stage
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = start_scores(q, k_smem.index(stage), none, D)
        mbarrier.wait(v_full.index(stage), phase)
        dp = start_scores(dout, v_smem.index(stage), none, D)
        last_ds = ds
        dq = start_sums(last_ds, k_smem.index(last), dq, D)
        s, q = wait_scores(2, s, q, D, BLOCK_D, HELD >= 1)
        dp, dout = wait_scores(1, dp, dout, D, BLOCK_D, HELD >= 2)
        mbarrier.arrive(v_empty.index(stage), count=1)
        n = block * BLOCK_N
        ds = _score_gradient(s, dp, lse2, delta, scale_log2, n, block >= clear_blocks, columns, seen)
        ds = as_weights(ds, dtype, D, BLOCK_D)
        dq = wait_sums(dq, last_ds, D, BLOCK_D)
        mbarrier.arrive(k_empty.index(last), count=1)
    counter += 1
    if HELD < 2:
        mbarrier.arrive(rows_empty.index(which), count=1)
    dq = start_sums(ds, k_smem.index(stage), dq, D)
    return dq, ds, stage, counter


@gluon.jit
def _compute_dq(
    which: gl.constexpr, results, items, H, scale_log2, scale, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    PART_DQ, DQ = results
    q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem = smem
    rows_full, k_empty, facts_full, done = bars[0], bars[3], bars[6], bars[7]
    S: gl.constexpr = product_layout(BLOCK_N)
    O: gl.constexpr = product_layout(BLOCK_D)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    counter = 0
    number = 0
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
        first = known(facts, slot, FIRST).to(gl.int32)
        k_rows = known(facts, slot, K_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        blocks, clear_blocks = key_blocks(first, k_rows, causal, BLOCK_N)
        seen = seen_keys(first + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S)), k_rows, causal)
        mbarrier.wait(rows_full.index(which), number & 1)
        lse2 = lse_smem.index(which).load(gl.SliceLayout(1, S)) * LOG2_E
        delta = delta_smem.index(which).load(gl.SliceLayout(1, S))
        q = hold(q_smem.index(which), S, D, HELD >= 1)
        dout = hold(dout_smem.index(which), S, D, HELD >= 2)

        dq, ds, stage, counter = dq_of_item(
            which, q, dout, no_sums(D, BLOCK_D), lse2, delta, seen, blocks, clear_blocks, counter, scale_log2, columns, none,
            (k_smem, v_smem), bars[1:6], D, BLOCK_D, BLOCK_N, STAGES, HELD,
        )  # fmt: skip
        # While the last product runs: the first partial result to be added.
        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, Q_ROWS).to(gl.int32)
        if PARTS > 0:
            wait_for_last_launch()
            positions = item_positions(facts, slot, own)
            places, there = find_part(facts, slot, 0, positions, inside, PARTS)
            part = load_part(PART_DQ, places, there, D, BLOCK_D)
        dq_sum = whole_rows(wait_sums(dq, ds, D, BLOCK_D), D, BLOCK_D)
        mbarrier.arrive(k_empty.index(stage), count=1)

        dq_sum = dq_sum * scale
        if PARTS > 0:
            for child in range(1, known(facts, slot, CHILDREN).to(gl.int32)):
                # The next partial result is loaded before the last one is added.
                places, there = find_part(facts, slot, child, positions, inside, PARTS)
                next_part = load_part(PART_DQ, places, there, D, BLOCK_D)
                dq_sum += part
                part = next_part
            dq_sum += part
        place = known(facts, slot, PLACE)
        if FINAL:
            store_rows(DQ, dq_sum, (place + which * 64 * H) * D, H * D, numbers, inside, D, BLOCK_D)
        else:
            store_part(PART_DQ, dq_sum, place + which * 64, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(done.index(slot), count=1)  # after the stores: only then all facts have been loaded
        number += 1


@gluon.jit(do_not_specialize=["families", "items", "ordered", "N", "H", "G", "parts"])
def dq_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DQ,  # (rows, D) float32, columns in the order of store_part
    DQ, TABLE, LAYOUT, OFFSETS, ORDER, families, items, ordered,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,  # how many of q and dout stay in registers
    PARTS: gl.constexpr,  # at most so many partial results are added to each result, a power of 2; or none
):  # fmt: skip
    """dq of the items of a table: ``scale * sum_j p_ij (dp_ij - delta_i) k_j``."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem = (
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_numbers(GROUPS, 64),
        allocate_numbers(GROUPS, 64),
    )
    bars = (
        allocate_barriers(GROUPS, 2 + 32),  # two blocks of rows, and statistics by all threads of the producer
        allocate_barriers(GROUPS, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(2, 1),
        allocate_barriers(2, GROUPS),
    )
    facts = allocate_facts(PARTS)
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DQ, DQ
    statistics = LSE, DELTA
    tables = TABLE, LAYOUT, OFFSETS, ORDER, ordered
    sizes = N, H, G, parts
    gl.warp_specialize([
        (_compute_dq, (gl.constexpr(0), results, items, H, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS)),
        (_compute_dq, (gl.constexpr(1), results, items, H, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS)),
        (_produce_dq, ((Q, K, V, DOUT), statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_N, STAGES, FINAL, PARTS)),
    ], [4, 1], [232, 40])  # fmt: skip
