"""The backward kernel for Hopper by key rows: dk and dv. See common.py for how items are distributed. joint.py
computes dq as well, with the same warp groups and the same producer (JOINT).

A weight is exp2(scale_log2 * s - lse2), and the gradient of its score p * (dp - delta): for each pair of a query row and a
key, a number of the row is subtracted from a product. In the registers of a warp group, query rows are columns here. Each
thread would have to load 32 such numbers for each block, more than it loads of anything else. Instead they are part of the
products (products.start_shifted_scores), as *shifts*: -lse / scale and -delta of each row, each as a sum of three bfloat16,
which has the 24 bits of a float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from dilated_attention_pytorch.backends.gpu.kernels.columns import FAMILY_OWN_DELTA
from dilated_attention_pytorch.backends.gpu.kernels.primitives import LAST
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    CAUSAL,
    CHILDREN,
    FIRST,
    GROUPS,
    K_ROWS,
    PLACE,
    Q_AT,
    Q_ROWS,
    ROWS,
    STRIDE,
    address,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    find_item,
    find_part,
    item_at,
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
    tma_load,
    wait_for_last_launch,
)
from dilated_attention_pytorch.backends.hopper.kernels.products import (
    as_weights,
    hold,
    no_sums,
    start_shifted_scores,
    start_sums,
    wait_both_sums,
    wait_dq,
    wait_scores,
    wait_sums,
    whole_rows,
)
from dilated_attention_pytorch.backends.hopper.kernels.turns import find_turn

SHIFT_COLUMNS = gl.constexpr(16)  # 8 for scores, of which 3 are used, and 8 for their gradients


@gluon.jit
def load_kv(at, steps, first, k_rows, number, smem, bars, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Load the keys and values of an item for all warp groups."""
    k_desc = row_descriptor(at[0], k_rows, steps[0], D, 64, BLOCK_D)
    v_desc = row_descriptor(at[1], k_rows, steps[1], D, 64, BLOCK_D)
    for which in gl.static_range(GROUPS):
        mbarrier.wait(bars[1].index(which), number & 1 ^ 1)
        load_rows(k_desc, first + which * 64, bars[0], smem[0], which)
        load_rows(v_desc, first + which * 64, bars[0], smem[1], which)


@gluon.jit
def shift_descriptor(at, rows, stride, BLOCK_M: gl.constexpr):
    """For load_shifts: blocks with twice the columns, which add zeros on both sides."""
    return row_descriptor(at, rows, stride * SHIFT_COLUMNS, SHIFT_COLUMNS, BLOCK_M, 2 * SHIFT_COLUMNS)


@gluon.jit
def load_shifts(desc, first, full, smem, stage):
    """Start to load the shifts of rows: 8 columns of zeros, those of scores, those of their gradients, and 8 of zeros.

    So products, which take 16 columns, have zeros beside the shift they need, and not the other shift. A 0 in the marks
    would not remove the other one if it is infinite.
    """
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [first, -8], full.index(stage), smem.index(stage))


@gluon.jit
def _load_unit(
    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, shifts_at, steps, stride, q_rows, begin_block, blocks,
    counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of an item, if this is its first unit, then rows of q and dout, and their shifts."""
    if member == 0:
        load_kv(kv_at, kv_steps, first, k_rows, number, smem, bars, D, BLOCK_D)
    q_smem, dout_smem, shift_smem = smem[2:5]
    full, empty = bars[2:4]
    q_desc = row_descriptor(q_at, q_rows, steps[0], D, BLOCK_M, BLOCK_D)
    dout_desc = row_descriptor(dout_at, q_rows, steps[1], D, BLOCK_M, BLOCK_D)
    shift_desc = shift_descriptor(shifts_at, q_rows, stride, BLOCK_M)
    for block in range(begin_block, blocks):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), (counter // STAGES & 1) ^ 1)
        load_rows(q_desc, block * BLOCK_M, full, q_smem, stage)
        load_rows(dout_desc, block * BLOCK_M, full, dout_smem, stage)
        load_shifts(shift_desc, block * BLOCK_M, full, shift_smem, stage)
        counter += 1
    return counter


@gluon.jit
def query_blocks(first, q_rows, causal, BLOCK_M: gl.constexpr):
    """Which blocks of query rows see the keys of an item from ``first`` on: from, to; the first that needs no causal mask, and the end
    of the whole ones."""
    begin = gl.where(causal, first // BLOCK_M, 0)
    clear = gl.where(causal, (first + ROWS + BLOCK_M - 1) // BLOCK_M, 0)
    return begin, (q_rows + BLOCK_M - 1) // BLOCK_M, clear, q_rows // BLOCK_M


@gluon.jit
def produce_dkv(
    tensors, SHIFTS, tables, TAKEN, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts,
    bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    PARTS: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """Find items, write their facts, and load their rows.

    Items are distributed beforehand, or (JOINT) taken in turns, see turns.py.
    """
    Q, K, V, DOUT = tensors
    N, M, H, G, parts = sizes
    done, facts_full, facts_empty = bars[4:]
    let_next_begin()
    counter = items * 0
    number = items * 0
    unit = items * 0  # a query head of an item
    item = gl.atomic_add(TAKEN, 1, sem="relaxed") if JOINT else gl.program_id(0)
    while item < items:
        if JOINT:
            row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal = find_turn(
                tables[0], families, items, item, group
            )
        else:
            row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal = find_item(
                tables[0], families, item_at(tables[3], tables[4], item), group, True
            )
        stride, k_stride = strides
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
        if JOINT:
            leave(facts, slot, Q_AT, (sample.to(gl.int64) * N + starts[0]) * H + heads[1] * group)
        if PARTS > 0:
            leave_parts(facts, slot, row, starts[1], first, stride, found)
        mbarrier.arrive(facts_full.index(slot), count=1)
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M)
        kv_at = (
            address(K, k_strides, sample, starts[1], heads[1]),
            address(V, v_strides, sample, starts[1], heads[1]),
        )
        stride64 = stride.to(gl.int64)
        k_stride64 = k_stride.to(gl.int64)
        kv_steps = k_stride64 * k_strides[1], k_stride64 * v_strides[1]
        steps = stride64 * q_strides[1], stride64 * dout_strides[1]
        own_delta = gl.load(row + FAMILY_OWN_DELTA)
        for member in range(group):
            head = heads[1] * group + member
            q_at = address(Q, q_strides, sample, starts[0], head)
            dout_at = address(DOUT, dout_strides, sample, starts[0], head)
            shifts_at = SHIFTS + (own_delta + (sample.to(gl.int64) * H + head) * N + starts[0]) * SHIFT_COLUMNS
            parity = unit & 1
            mbarrier.wait(done.index(parity), (unit >> 1 & 1) ^ 1)
            # Keys are loaded inside of the branches as well: the compiler would merge two branches that only make
            # descriptors, and with them their two slots.
            if parity == 0:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, shifts_at, steps, stride, q_rows,
                    begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
            else:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, k_rows, number, q_at, dout_at, shifts_at, steps, stride, q_rows,
                    begin, blocks, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES,
                )  # fmt: skip
            unit += 1
        number += 1
        if JOINT:
            item = gl.atomic_add(TAKEN, 1, sem="relaxed")
        else:
            item += gl.num_programs(0)
    slot = number & 1
    mbarrier.wait(facts_empty.index(slot), (number >> 1 & 1) ^ 1)
    leave(facts, slot, K_ROWS, -1)
    mbarrier.arrive(facts_full.index(slot), count=1)


@gluon.jit
def next_item(facts, number, full, WARPS: gl.constexpr):
    """Wait for the facts of the next item; returns whether there is one."""
    slot = number & 1
    mbarrier.wait(full.index(slot), number >> 1 & 1)
    return known(facts, slot, K_ROWS, WARPS) >= 0


@gluon.jit
def _weights(s, scale_log2, rows, columns, masked, q_rows, keys, causal):
    """The weights of the first ``keys`` keys by query rows."""
    p = gl.exp2(s * scale_log2)
    if masked:
        seen = gl.where(rows < q_rows, gl.where(causal, rows + 1, keys), 0)
        p = gl.where(columns[:, None] < seen[None, :], p, 0.0)
    return p


@gluon.constexpr_function
def shares_dq(BLOCK_D):
    """Whether the two warp groups of the joint backward also compute dq, half of its columns each.

    dk and dv of larger heads leave no registers to a third group.
    """
    return BLOCK_D > 64


@gluon.jit
def _hand_over(ds, which: gl.constexpr, counter, handed):
    """Write the gradients of a block's scores, keys by queries, for the warp groups that multiply for dq."""
    ds_smem, full, empty = handed[:3]
    PLACES: gl.constexpr = ds_smem.shape[0] // GROUPS
    place = counter % PLACES
    mbarrier.wait(empty.index(place), (counter // PLACES & 1) ^ 1)
    ds_smem.index(place * GROUPS + which).store(ds)
    fence_async_shared()
    mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def _start_dq(which: gl.constexpr, counter, handed, none):
    """Start the product of the gradients of a block's scores with all keys of the item, for 64 columns of dq.

    It is transposed, so that the threads of a warp write to different banks of shared memory.
    """
    ds_smem, full, _, k_smem = handed[:4]
    PLACES: gl.constexpr = ds_smem.shape[0] // GROUPS
    place = counter % PLACES
    mbarrier.wait(full.index(place), counter // PLACES & 1)
    # The compiler would compute addresses that no block changes before the loop, spill them, and load them again for each
    # block (docs/kernels_history.md). A program has fewer than 2**30 blocks, so this number is 0. The compiler does not know.
    zero = counter >> 30
    dq = none
    for group in gl.static_range(GROUPS):
        k = k_smem.index(zero + group).slice(which * 64, 64, dim=1).permute((1, 0))
        dq = warpgroup_mma(k, ds_smem.index(zero + place * GROUPS + group), dq, use_acc=group > 0, is_async=True)
    return dq


@gluon.jit
def _finish_dq(dq, which: gl.constexpr, counter, handed):
    """Write 64 columns of dq of a block to shared memory, for the warp that adds them to dq in memory."""
    ds_smem, _, empty, _, dq_smem, dq_full, dq_empty, scale, SCALED = handed
    mbarrier.arrive(empty.index(counter % (ds_smem.shape[0] // GROUPS)), count=1)
    if SCALED:
        dq = dq * scale
    PLACES: gl.constexpr = dq_smem.shape[0]
    place = counter % PLACES
    mbarrier.wait(dq_empty.index(place), (counter // PLACES & 1) ^ 1)
    dq_smem.index(place).slice(which * 64, 64, dim=1).permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(place), count=1)


@gluon.jit
def dkv_of_head(
    which: gl.constexpr, k, v, dk, dv, from_block, blocks, clear, whole, edge, near, far, q_rows, keys, ragged, causal, counter, scale_log2,
    columns, m, none, smem, bars, handed,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    OVERLAP: gl.constexpr, S: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """Add the contribution of blocks of query rows of one head to dk and dv, for the keys of one warp group.

    Blocks before ``clear`` and from ``whole`` on are masked. Row 0 of block ``b`` is ``b * BLOCK_M`` rows behind ``near``,
    from block ``edge`` on behind ``far``; right at least for those that are masked. Returns dk, dv, k, v, and the blocks
    so far.
    """
    q_smem, dout_smem, shift_smem, marks = smem
    full, empty = bars
    dtype: gl.constexpr = q_smem.dtype
    if OVERLAP:
        p = as_weights(none, dtype, D, BLOCK_D)
        ds = p
        # The first block is added up with weights 0 and then once more with its own: it stays until then.
        last = counter % STAGES
    for block in range(from_block, blocks):
        stage = counter % STAGES
        mbarrier.wait(full.index(stage), counter // STAGES & 1)
        shifts = shift_smem.index(stage)
        s = start_shifted_scores(k, q_smem.index(stage), marks.index(0), shifts.slice(0, 16, dim=1), none, D)
        dp = start_shifted_scores(v, dout_smem.index(stage), marks.index(1), shifts.slice(16, 16, dim=1), none, D)
        rows = gl.where(block < edge, near, far) + block * BLOCK_M + m
        masked = (block < clear) | (block >= whole) | ragged
        if OVERLAP:
            last_p, last_ds = p, ds
            dv = start_sums(last_p, dout_smem.index(last), dv, D)
            dk = start_sums(last_ds, q_smem.index(last), dk, D)
            s, k = wait_scores(3, s, k, D, BLOCK_D, HELD >= 1, 1)
            dp, v = wait_scores(2, dp, v, D, BLOCK_D, HELD >= 2)
            weights = _weights(s, scale_log2, rows, columns, masked, q_rows, keys, causal)
            p = as_weights(weights, dtype, D, BLOCK_D)
            ds = as_weights(weights * dp, dtype, D, BLOCK_D)
            dv, dk = wait_both_sums(dv, last_p, dk, last_ds, D, BLOCK_D)
            mbarrier.arrive(empty.index(last), count=1, pred=block > from_block)
            last = stage
        elif JOINT and shares_dq(BLOCK_D):
            s, k = wait_scores(1, s, k, D, BLOCK_D, HELD >= 1, 1)
            weights = _weights(s, scale_log2, rows, columns, masked, q_rows, keys, causal)
            dp, v = wait_scores(0, dp, v, D, BLOCK_D, HELD >= 2)
            p = as_weights(weights, dtype, D, BLOCK_D)
            rounded = (weights * dp).to(dtype)
            ds = as_weights(rounded, dtype, D, BLOCK_D)
            _hand_over(rounded, which, counter, handed)
            dv = start_sums(p, dout_smem.index(stage), dv, D)
            dq = _start_dq(which, counter, handed, none)
            dk = start_sums(ds, q_smem.index(stage), dk, D)
            dq, dv = wait_dq(dq, dv, p, D, BLOCK_D)
            _finish_dq(dq, which, counter, handed)
            dk = wait_sums(dk, ds, D, BLOCK_D)
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            s, k = wait_scores(1, s, k, D, BLOCK_D, HELD >= 1, 1)
            weights = _weights(s, scale_log2, rows, columns, masked, q_rows, keys, causal)
            p = as_weights(weights, dtype, D, BLOCK_D)
            dv = start_sums(p, dout_smem.index(stage), dv, D)
            dp, v = wait_scores(1, dp, v, D, BLOCK_D, HELD >= 2)
            rounded = (weights * dp).to(dtype)
            ds = as_weights(rounded, dtype, D, BLOCK_D)
            dk = start_sums(ds, q_smem.index(stage), dk, D)
            if JOINT:
                _hand_over(rounded, which, counter, handed)
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
def compute_dkv(
    which: gl.constexpr, results, items, group, G, scale_log2, scale, smem, facts, bars, handed,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr, PARTS: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """dk and dv of all items, for the rows of one warp group."""
    SHARES: gl.constexpr = JOINT and shares_dq(BLOCK_D)
    PART_DK, PART_DV, DK, DV = results
    k_smem, v_smem = smem[:2]
    rows_full, rows_empty = bars[:2]
    done, facts_full, facts_empty = bars[4:]
    S: gl.constexpr = product_layout(BLOCK_M)
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    counter = items * 0
    number = items * 0
    unit = items * 0
    more = next_item(facts, number, facts_full, 4)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        from_block, blocks, clear, whole = query_blocks(first, q_rows, causal, BLOCK_M)
        columns = first + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        if JOINT:
            # Keys behind the end have zeros for rows, and may not have infinite weights: dq would be no number.
            keys = known(facts, slot, K_ROWS).to(gl.int32)
            ragged = first + (which + 1) * 64 > keys
        else:
            keys = LAST  # dk and dv of those behind the end are not stored
            ragged = False
        for group_keys in gl.static_range(GROUPS):
            if group_keys == which or SHARES:
                mbarrier.wait(rows_full.index(group_keys), number & 1)
        k = hold(k_smem.index(which), S, D, HELD >= 1)
        v = hold(v_smem.index(which), S, D, HELD >= 2)
        dk = no_sums(D, BLOCK_D)
        dv = no_sums(D, BLOCK_D)
        for _member in range(group):
            dk, dv, k, v, counter = dkv_of_head(
                which, k, v, dk, dv, from_block, blocks, clear, whole, 0, 0, 0, q_rows, keys, ragged, causal, counter, scale_log2,
                columns, m, none, smem[2:], bars[2:4], handed, D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, S, JOINT,
            )  # fmt: skip
            mbarrier.arrive(done.index(unit & 1), count=1)
            unit += 1
        for group_keys in gl.static_range(GROUPS):
            if group_keys == which or SHARES:
                mbarrier.arrive(rows_empty.index(group_keys), count=1)

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
        mbarrier.arrive(facts_empty.index(slot), count=1)  # after the stores: only then all facts have been loaded
        number += 1
        more = next_item(facts, number, facts_full, 4)


@gluon.jit
def _make_marks():
    """Ones for the three columns that a shift has of the first 16 of load_shifts, and of the others."""
    marks = allocate_rows(gl.bfloat16, 2, 64, SHIFT_COLUMNS)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    column = gl.full([64, SHIFT_COLUMNS], 0, gl.int32, L) + gl.arange(0, SHIFT_COLUMNS, gl.SliceLayout(0, L))[None, :]
    marks.index(0).store(gl.where((column >= 8) & (column < 11), 1.0, 0.0).to(gl.bfloat16))
    marks.index(1).store(gl.where(column < 3, 1.0, 0.0).to(gl.bfloat16))
    return marks


@gluon.jit
def allocate_dkv(
    dtype: gl.constexpr, OTHER_KEYS: gl.constexpr, OTHER_FACTS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Shared memory and barriers; how many warps besides the warp groups read the keys and the facts of an item."""
    smem = (
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_M, BLOCK_D),
        allocate_rows(gl.bfloat16, STAGES, BLOCK_M, 2 * SHIFT_COLUMNS),
        _make_marks(),
    )
    bars = (
        allocate_barriers(GROUPS, 2),
        allocate_barriers(GROUPS, 1 + OTHER_KEYS),
        allocate_barriers(STAGES, 3),  # rows of q, of dout, of shifts
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(2, GROUPS),
        allocate_barriers(2, 1),
        allocate_barriers(2, GROUPS + OTHER_FACTS),
    )
    return smem, bars


@gluon.jit(do_not_specialize=["families", "items", "ordered", "N", "M", "H", "G", "parts"])
def dkv_kernel(
    Q, K, V, DOUT,
    SHIFTS,  # (B, H, N, 16) bfloat16
    PART_DK,  # (rows, D) float32, columns in the order of store_part
    PART_DV, DK, DV, TABLE, LAYOUT, OFFSETS, ORDER, families, items, ordered,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr,  # how many of k and v stay in registers
    OVERLAP: gl.constexpr,  # compute scores while the block before is still being added up
    PARTS: gl.constexpr,  # at most so many partial results are added to each result, a power of 2; or none
):  # fmt: skip
    """dk and dv of the items of a table, summed over the query rows that see them and the query heads of their key head."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem, bars = allocate_dkv(dtype, 0, 0, STAGES, BLOCK_M, BLOCK_D)
    facts = allocate_facts(PARTS)
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DK, PART_DV, DK, DV
    tables = TABLE, LAYOUT, OFFSETS, ORDER, ordered
    sizes = N, M, H, G, parts
    gl.warp_specialize([
        (compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, (), D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, False)),
        (compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, (), D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, False)),
        (produce_dkv, ((Q, K, V, DOUT), SHIFTS, tables, (), families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, False)),
    ], [4, 1], [232, 40])  # fmt: skip
