"""The backward kernel for Hopper by key rows: dk and dv. See pieces.py for how the work is shared out, dq.py for why two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.hopper.pieces import (
    CAUSAL,
    CHILDREN,
    FIRST,
    GROUP_ROWS,
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
    item_positions,
    known,
    leave,
    leave_parts,
    let_next_begin,
    load_part,
    load_rows,
    look_up_parts,
    product_layout,
    result_row,
    row_descriptor,
    store_part,
    store_rows,
    wait_for_last_launch,
)
from dilated_attention_pytorch.backends.hopper.products import (
    as_weights,
    hold,
    no_sums,
    start_scores,
    start_sums,
    wait_both_sums,
    wait_scores,
    whole_rows,
)
from dilated_attention_pytorch.backends.triton.primitives import LAST, LOG2_E


@gluon.jit
def load_kv(
    at, steps, first, k_rows, number, smem, bars, D: gl.constexpr, BLOCK_D: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Ask for the keys and values of all groups of an item."""
    k_desc = row_descriptor(at[0], k_rows, steps[0], D, 64, BLOCK_D)
    v_desc = row_descriptor(at[1], k_rows, steps[1], D, 64, BLOCK_D)
    for which in gl.static_range(GROUPS):
        mbarrier.wait(bars[1].index(which), number & 1 ^ 1)
        load_rows(k_desc, first + which * 64, bars[0], smem[0], which)
        load_rows(v_desc, first + which * 64, bars[0], smem[1], which)


@gluon.jit
def _load_unit(
    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, statistics, steps, stride, q_rows, begin_block, blocks,
    counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Ask for an item's keys and values, if this is its first unit, then for rows of q and dout, and their statistics."""
    if member == 0:
        load_kv(kv_at, kv_steps, first, k_rows, number, smem, bars, D, BLOCK_D, GROUPS)
    _, _, q_smem, dout_smem, lse_smem, delta_smem = smem
    _, _, q_full, dout_full, row_full, empty, _, _, _ = bars
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, BLOCK_M, BLOCK_D)
    dout_desc = row_descriptor(dout_at, q_rows, steps[1], D, BLOCK_M, BLOCK_D)
    for block in range(begin_block, blocks):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), (counter // STAGES & 1) ^ 1)
        load_rows(q_desc, block * BLOCK_M, q_full, q_smem, stage)
        load_rows(dout_desc, block * BLOCK_M, dout_full, dout_smem, stage)
        # Rows behind the tile's end are masked; any statistics do.
        copy_statistics(
            statistics, block * BLOCK_M, q_rows, stride, lse_smem.index(stage), delta_smem.index(stage), row_full.index(stage),
            BLOCK_M,
        )  # fmt: skip
        counter += 1
    return counter


@gluon.jit
def query_blocks(first, q_rows, causal, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr):
    """Which blocks of query rows see the keys of an item from ``first`` on: from, to; the first that needs no causal mask, and the end
    of the whole ones."""
    begin = gl.where(causal, first // BLOCK_M, 0)
    clear = gl.where(causal, (first + GROUPS * GROUP_ROWS + BLOCK_M - 1) // BLOCK_M, 0)
    return begin, (q_rows + BLOCK_M - 1) // BLOCK_M, clear, q_rows // BLOCK_M


@gluon.jit
def _produce_dkv(
    tensors, statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    PARTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    LSE, DELTA = statistics
    N, M, H, G, parts = sizes
    done, facts_full, facts_empty = bars[6], bars[7], bars[8]
    let_next_begin()
    counter = 0
    number = 0
    unit = 0  # a query head of an item
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal = find_item(
            tables[0], families, item, group, True, GROUPS
        )
        result = result_row(row, own_sample, sample, heads[1], tile, starts[1], first, M, G, FINAL)
        if PARTS > 0:
            found = look_up_parts(tables, row, own_sample, heads[1], G, heads[1], G, parts, PARTS)
        slot = number & 1
        mbarrier.wait(facts_empty.index(slot), (number >> 1 & 1) ^ 1)
        leave(facts, slot, FIRST, first)
        leave(facts, slot, Q_ROWS, q_rows)
        leave(facts, slot, K_ROWS, k_rows)
        leave(facts, slot, CAUSAL, causal)
        leave(facts, slot, PLACE, result)
        leave(facts, slot, STRIDE, stride)
        if PARTS > 0:
            leave_parts(facts, slot, row, starts[1], first, stride, found)
        mbarrier.arrive(facts_full.index(slot), count=1)
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
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
            own_statistics = LSE + place, DELTA + place
            parity = unit & 1
            mbarrier.wait(done.index(parity), (unit >> 1 & 1) ^ 1)
            # Keys are loaded inside of the branches as well: two branches that only made descriptors would be merged
            # into one by the compiler, and with them their two places into one.
            if parity == 0:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, own_statistics, steps, stride, q_rows,
                    begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, GROUPS,
                )  # fmt: skip
            else:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, own_statistics, steps, stride, q_rows,
                    begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, GROUPS,
                )  # fmt: skip
            unit += 1
        number += 1


@gluon.jit
def _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, causal):
    """The weights of keys by query rows. Keys behind the end have any: their rows of dk and dv are not stored."""
    p = gl.exp2(s * scale_log2 - lse2[None, :])
    if masked:
        seen = gl.where(rows < q_rows, gl.where(causal, rows + 1, LAST), 0)
        p = gl.where(columns[:, None] < seen[None, :], p, 0.0)
    return p


@gluon.jit
def dkv_of_head(
    k, v, dk, dv, from_block, blocks, clear, whole, edge, near, far, q_rows, causal, counter, scale_log2, columns, m, none,
    smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    OVERLAP: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Add to dk and dv what blocks of query rows of one head give, for the keys of one group.

    Blocks before ``clear`` and from ``whole`` on are masked. Row 0 of block ``b`` is ``b * BLOCK_M`` rows behind ``near``,
    from block ``edge`` on behind ``far``; right at least for those that are masked. Returns dk, dv, k, v, and the blocks
    so far.
    """
    q_smem, dout_smem, lse_smem, delta_smem = smem
    q_full, dout_full, row_full, empty = bars
    dtype: gl.constexpr = q_smem.dtype
    if OVERLAP:
        p = as_weights(none, dtype, D, BLOCK_D)
        ds = p
        # The first block is added up with weights 0 and then once more with its own: it stays until then.
        last = counter % STAGES
    for block in range(from_block, blocks):
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(q_full.index(stage), phase)
        s = start_scores(k, q_smem.index(stage), none, D)
        mbarrier.wait(dout_full.index(stage), phase)
        dp = start_scores(v, dout_smem.index(stage), none, D)
        rows = gl.where(block < edge, near, far) + block * BLOCK_M + m
        masked = (block < clear) | (block >= whole)
        if OVERLAP:
            last_p, last_ds = p, ds
            dv = start_sums(last_p, dout_smem.index(last), dv, D)
            dk = start_sums(last_ds, q_smem.index(last), dk, D)
            s, k = wait_scores(3, s, k, D, BLOCK_D, HELD >= 1)
            dp, v = wait_scores(2, dp, v, D, BLOCK_D, HELD >= 2)
            mbarrier.wait(row_full.index(stage), phase)
            lse2 = lse_smem.index(stage).load(gl.SliceLayout(0, S)) * LOG2_E
            delta = delta_smem.index(stage).load(gl.SliceLayout(0, S))
            weights = _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, causal)
            p = as_weights(weights, dtype, D, BLOCK_D)
            ds = as_weights(weights * (dp - delta[None, :]), dtype, D, BLOCK_D)
            dv, dk = wait_both_sums(dv, last_p, dk, last_ds, D, BLOCK_D)
            mbarrier.arrive(empty.index(last), count=1, pred=block > from_block)
            last = stage
        else:
            mbarrier.wait(row_full.index(stage), phase)
            s, k = wait_scores(1, s, k, D, BLOCK_D, HELD >= 1)
            lse2 = lse_smem.index(stage).load(gl.SliceLayout(0, S)) * LOG2_E
            weights = _weights(s, lse2, scale_log2, rows, columns, masked, q_rows, causal)
            p = as_weights(weights, dtype, D, BLOCK_D)
            dv = start_sums(p, dout_smem.index(stage), dv, D)
            dp, v = wait_scores(1, dp, v, D, BLOCK_D, HELD >= 2)
            delta = delta_smem.index(stage).load(gl.SliceLayout(0, S))
            ds = as_weights(weights * (dp - delta[None, :]), dtype, D, BLOCK_D)
            dk = start_sums(ds, q_smem.index(stage), dk, D)
            dv, dk = wait_both_sums(dv, p, dk, ds, D, BLOCK_D)
            mbarrier.arrive(empty.index(stage), count=1)
        counter += 1
    if OVERLAP:
        dv = start_sums(p, dout_smem.index(last), dv, D)
        dk = start_sums(ds, q_smem.index(last), dk, D)
        dv, dk = wait_both_sums(dv, p, dk, ds, D, BLOCK_D)
        mbarrier.arrive(empty.index(last), count=1)
    return dk, dv, k, v, counter


@gluon.jit
def _compute_dkv(
    which: gl.constexpr, results, items, group, G, scale_log2, scale, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    PART_DK, PART_DV, DK, DV = results
    k_smem, v_smem = smem[:2]
    rows_full, rows_empty = bars[:2]
    done, facts_full, facts_empty = bars[6:]
    S: gl.constexpr = product_layout(BLOCK_M)
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    counter = 0
    number = 0
    unit = 0
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
        first = known(facts, slot, FIRST).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        from_block, blocks, clear, whole = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
        columns = first + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        mbarrier.wait(rows_full.index(which), number & 1)
        k = hold(k_smem.index(which), S, D, HELD >= 1)
        v = hold(v_smem.index(which), S, D, HELD >= 2)
        dk = no_sums(D, BLOCK_D)
        dv = no_sums(D, BLOCK_D)
        for _member in range(group):
            dk, dv, k, v, counter = dkv_of_head(
                k, v, dk, dv, from_block, blocks, clear, whole, 0, 0, 0, q_rows, causal, counter, scale_log2,
                columns, m, none, smem[2:], bars[2:6], D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, S,
            )  # fmt: skip
            mbarrier.arrive(done.index(unit & 1), count=1)
            unit += 1
        mbarrier.arrive(rows_empty.index(which), count=1)
        number += 1

        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, K_ROWS).to(gl.int32)
        dk = whole_rows(dk, D, BLOCK_D) * scale
        dv = whole_rows(dv, D, BLOCK_D)
        if PARTS > 0:
            wait_for_last_launch()
            positions = item_positions(facts, slot, own)
            for child in range(known(facts, slot, CHILDREN).to(gl.int32)):
                places, there = find_part(facts, slot, child, positions, inside, PARTS)
                dk += load_part(PART_DK, places, there, D, BLOCK_D)
                dv += load_part(PART_DV, places, there, D, BLOCK_D)
        place = known(facts, slot, PLACE)
        if FINAL:
            start = (place + which * 64 * G) * D
            store_rows(DK, dk, start, G * D, numbers, inside, D, BLOCK_D)
            store_rows(DV, dv, start, G * D, numbers, inside, D, BLOCK_D)
        else:
            store_part(PART_DK, dk, place + which * 64, numbers, inside, D, BLOCK_D)
            store_part(PART_DV, dv, place + which * 64, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(facts_empty.index(slot), count=1)  # after the stores: only then the facts are loaded for sure


@gluon.jit(do_not_specialize=["families", "items", "N", "M", "H", "G", "parts"])
def dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DK,  # (rows, D) float32, columns as store_part leaves them
    PART_DV, DK, DV, TABLE, LAYOUT, OFFSETS, families, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,  # how many of k and v stay in registers
    OVERLAP: gl.constexpr,  # compute scores while the block before is still being added up
    PARTS: gl.constexpr,  # at most so many parts are added to each result, a power of 2; or none
    GROUPS: gl.constexpr,  # of four warps: 64 keys each
):  # fmt: skip
    """dk and dv of the items of a table, summed over the query rows that see them and the query heads of their group."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem = (
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_numbers(STAGES, BLOCK_M),
        allocate_numbers(STAGES, BLOCK_M),
    )
    bars = (
        allocate_barriers(GROUPS, 2),
        allocate_barriers(GROUPS, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 32),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(2, GROUPS),
        allocate_barriers(2, 1),
        allocate_barriers(2, GROUPS),
    )
    facts = allocate_facts(PARTS)
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DK, PART_DV, DK, DV
    statistics = LSE, DELTA
    tables = TABLE, LAYOUT, OFFSETS
    sizes = N, M, H, G, parts
    if GROUPS == 2:
        gl.warp_specialize([
            (_compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS)),
            (_compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS)),
            (_produce_dkv, ((Q, K, V, DOUT), statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, GROUPS)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS)),
            (_compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS)),
            (_compute_dkv, (gl.constexpr(2), results, items, group, G, scale_log2, scale, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS)),
            (_produce_dkv, ((Q, K, V, DOUT), statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, GROUPS)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
