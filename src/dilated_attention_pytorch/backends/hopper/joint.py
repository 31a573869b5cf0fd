"""The backward kernel for Hopper that computes all gradients at once: dk and dv as dkv.py does, dq on the way.

Scores, weights and their gradients are computed once instead of twice: five products for each pair of blocks, where dq.py and
dkv.py need seven. The groups leave the gradients of scores in shared memory (dkv.py); a third group multiplies them
with the item's keys, and a warp of its own adds the result to dq in memory.

Several items add to the same rows of dq. For the same bits in every run they do so in the order of their numbers: each block
of query rows of a tile has a counter that says whose turn it is. Programs take items in that order as they come to them, so
an item only ever waits for items that are being computed. That also keeps waits short: programs that follow one another
are a turn apart, and stay so from tile to tile.
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

from dilated_attention_pytorch.backends.hopper.dkv import _load_unit, dkv_of_head, query_blocks
from dilated_attention_pytorch.backends.hopper.pieces import (
    CAUSAL,
    CHILDREN,
    FIRST,
    K_AT,
    K_ROWS,
    PLACE,
    Q_AT,
    Q_ROWS,
    STRIDE,
    ZERO_KEYS,
    address,
    allocate_barriers,
    allocate_facts,
    allocate_numbers,
    allocate_rows,
    find_part,
    item_positions,
    known,
    leave,
    leave_parts,
    let_next_begin,
    load_part,
    look_up_parts,
    product_layout,
    result_row,
    row_descriptor,
    store_part,
    store_rows,
    tma_add,
    wait_for_last_launch,
)
from dilated_attention_pytorch.backends.hopper.products import hold, no_sums, whole_rows
from dilated_attention_pytorch.backends.triton.primitives import COLUMNS, find_family

GROUPS = gl.constexpr(2)  # that compute dk and dv
PLACES = gl.constexpr(2)  # for gradients of scores, and for dq
TURN, TURNS_AT = ZERO_KEYS, K_AT  # facts of other kernels
TOGETHER = gl.constexpr(264)  # items of a window: twice as many as there are multiprocessors


@gluon.jit
def _take(TAKEN, items):
    item = gl.atomic_add(TAKEN, 1, sem="relaxed")
    return gl.where(item < items, item, -1)


@gluon.jit
def _find_item(TABLE, families, items, item, group):
    """pieces.find_item by keys, and the item's turn, with items of several tiles in turns.

    Items of one tile that follow one another would begin at the same time and then wait for each other's turns. The first
    items of TOGETHER tiles, then their second ones, and so on: programs that come free at the same time take items of
    different tiles, and one that takes the next of a tile comes a turn later.
    """
    row = find_family(TABLE, families, item)
    index = (item - gl.load(row)).to(gl.int32)
    k_rows = gl.load(row + 11).to(gl.int32)
    turns = (k_rows + GROUPS * 64 - 1) // (GROUPS * 64)
    heads = gl.load(row + 4).to(gl.int32)
    tiles = gl.load(row + 2).to(gl.int32)
    # The items of a family end where those of the next begin, or with all.
    more = row.to(gl.int64) < (TABLE + (families - 1) * COLUMNS).to(gl.int64)
    end = gl.load(row + COLUMNS, mask=more, other=0)
    all_tiles = (gl.where(more, end, items) - gl.load(row)).to(gl.int32) // turns
    together = (TOGETHER + turns - 1) // turns
    # Windows of nearly the same width: a last one of a single tile would have nothing to take turns with.
    windows = gl.maximum(all_tiles // together, 1)
    base = all_tiles // windows
    wide = all_tiles - base * windows  # windows that are one tile wider
    split = wide * (base + 1) * turns
    late = index >= split
    width = gl.where(late, base, base + 1)
    index -= gl.where(late, split, 0)
    inside = index % (width * turns)
    turn = inside // width
    index = gl.where(late, wide * (base + 1), 0) + index // (width * turns) * width + inside % width
    a = index % heads
    index = index // heads
    tile = index % tiles
    own_sample = index // tiles
    key_head = (gl.load(row + 5) + a * gl.load(row + 6)).to(gl.int32)
    shift = tile * gl.load(row + 3) + a * gl.load(row + 7)
    starts = (gl.load(row + 8) + shift).to(gl.int32), (gl.load(row + 10) + shift).to(gl.int32)
    sample = (gl.load(row + 1) + own_sample).to(gl.int32)
    q_rows = gl.load(row + 9).to(gl.int32)
    stride = gl.load(row + 12).to(gl.int32)
    causal = gl.load(row + 13) != 0
    both = key_head * group, key_head
    return row, turn * GROUPS * 64, both, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal, turn


@gluon.jit
def _produce(
    tensors, statistics, tables, TAKEN, families, items, all_rows, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem,
    facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    LSE, DELTA = statistics
    N, M, H, G, parts = sizes
    done, facts_full, facts_empty = bars[6], bars[7], bars[8]
    let_next_begin()
    counter = items * 0
    number = items * 0
    unit = items * 0
    item = _take(TAKEN, items)
    while item >= 0:
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride, causal, turn = _find_item(
            tables[0], families, items, item, group
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
        leave(facts, slot, TURN, turn)
        first_row = (sample.to(gl.int64) * H + heads[1] * group) * N + starts[0]
        leave(facts, slot, Q_AT, first_row)
        leave(facts, slot, TURNS_AT, gl.load(row + 15) * all_rows + first_row)
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
        item = _take(TAKEN, items)
    slot = number & 1
    mbarrier.wait(facts_empty.index(slot), (number >> 1 & 1) ^ 1)
    leave(facts, slot, K_ROWS, -1)
    mbarrier.arrive(facts_full.index(slot), count=1)


@gluon.jit
def _next(facts, number, facts_full, WARPS: gl.constexpr):
    """Wait for what is known of the next item; whether there is one."""
    slot = number & 1
    mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
    return known(facts, slot, K_ROWS, WARPS) >= 0


@gluon.jit
def _compute(
    which: gl.constexpr, results, items, group, G, scale_log2, scale, smem, facts, bars, handed,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    PART_DK, PART_DV, DK, DV = results
    k_smem, v_smem = smem[:2]
    rows_full, rows_empty = bars[:2]
    done, facts_full, facts_empty = bars[6:9]
    S: gl.constexpr = product_layout(BLOCK_M)
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers
    counter = items * 0
    number = items * 0
    unit = items * 0
    more = _next(facts, number, facts_full, 4)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS).to(gl.int32)
        k_rows = known(facts, slot, K_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        from_block, blocks, clear, whole = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
        # Keys behind the end have zeros for rows, and may not have infinite weights: dq would be no number.
        ragged = first + (which + 1) * 64 > k_rows
        columns = first + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        mbarrier.wait(rows_full.index(which), number & 1)
        k = hold(k_smem.index(which), S, D, HELD >= 1)
        v = hold(v_smem.index(which), S, D, HELD >= 2)
        dk = no_sums(D, BLOCK_D)
        dv = no_sums(D, BLOCK_D)
        for _member in range(group):
            dk, dv, k, v, counter = dkv_of_head(
                which, k, v, dk, dv, from_block, blocks, clear, whole, 0, 0, 0, q_rows, k_rows, ragged, causal, counter, scale_log2,
                columns, m, none, smem[2:], bars[2:6], handed, D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, S, GROUPS, True,
            )  # fmt: skip
            mbarrier.arrive(done.index(unit & 1), count=1)
            unit += 1
        mbarrier.arrive(rows_empty.index(which), count=1)

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
        mbarrier.arrive(facts_empty.index(slot), count=1)
        number += 1
        more = _next(facts, number, facts_full, 4)


@gluon.jit
def _multiply(items, group, k_smem, dq_smem, facts, bars, handed, dq_bars, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr):
    """dq of the query rows of each block, by the keys of an item, into shared memory."""
    rows_full, rows_empty = bars[:2]
    facts_full, facts_empty = bars[7:]
    ds_smem, full, empty = handed
    dq_full, dq_empty = dq_bars
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([BLOCK_M, BLOCK_D], 0.0, gl.float32, O)
    counter = items * 0
    number = items * 0
    more = _next(facts, number, facts_full, 4)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
        mbarrier.arrive(facts_empty.index(slot), count=1)
        for which in gl.static_range(GROUPS):
            mbarrier.wait(rows_full.index(which), number & 1)
        for _block in range(group * (blocks - begin)):
            place = counter % PLACES
            phase = counter // PLACES & 1
            mbarrier.wait(full.index(place), phase)
            dq = none
            for which in gl.static_range(GROUPS):
                ds = ds_smem.index(place * GROUPS + which).permute((1, 0))
                dq = warpgroup_mma(ds, k_smem.index(which), dq, use_acc=which > 0, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(empty.index(place), count=1)
            mbarrier.wait(dq_empty.index(place), phase ^ 1)
            dq_smem.index(place).store(dq)
            fence_async_shared()
            mbarrier.arrive(dq_full.index(place), count=1)
            counter += 1
        for which in gl.static_range(GROUPS):
            mbarrier.arrive(rows_empty.index(which), count=1)
        number += 1
        more = _next(facts, number, facts_full, 4)


@gluon.jit
def _wait_additions(PENDING: gl.constexpr):
    """Until all but so many additions are done, not only read."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    asm: gl.constexpr = (
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;" if PENDING == 0 else "cp.async.bulk.wait_group 1; mov.b32 $0, $1;"
    )
    x = gl.arange(0, 32, LINE)
    gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _order_proxies():
    """What was read of others comes before additions that begin now, which go another way to memory."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    x = gl.arange(0, 32, LINE)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _stop_if(condition):
    """For the experiment: a turn that never comes is an error, not a GPU that hangs."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    x = gl.full([32], 0, gl.int32, LINE) + condition.to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred stop; setp.ne.s32 stop, $1, 0; @stop trap; mov.b32 $0, $1; }", "=r,r", [x], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(
    DQ, TURNS, items, group, N, dq_smem, facts, bars, dq_bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Add to dq, block by block, when it is this item's turn."""
    facts_full, facts_empty = bars[7:]
    dq_full, dq_empty = dq_bars
    counter = items * 0
    number = items * 0
    more = _next(facts, number, facts_full, 1)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST, 1).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS, 1).to(gl.int32)
        k_rows = known(facts, slot, K_ROWS, 1).to(gl.int32)
        causal = known(facts, slot, CAUSAL, 1) != 0
        stride = known(facts, slot, STRIDE, 1)
        turn = known(facts, slot, TURN, 1).to(gl.int32)
        first_at = known(facts, slot, Q_AT, 1)
        first_turns = TURNS + known(facts, slot, TURNS_AT, 1)
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
        turns = (k_rows + GROUPS * 64 - 1) // (GROUPS * 64)
        after = gl.where(turn == turns - 1, 0, turn + 1)  # the last one leaves the counter as the first found it
        mbarrier.arrive(facts_empty.index(slot), count=1)
        if PARTS > 0:
            wait_for_last_launch()
        for member in range(group):
            at = first_at + member * N.to(gl.int64)
            rows = row_descriptor(DQ + at * D, q_rows, stride * D, D, BLOCK_M, BLOCK_D)
            own_turns = first_turns + member * N.to(gl.int64)
            for block in range(begin, blocks):
                place = counter % PLACES
                mbarrier.wait(dq_full.index(place), counter // PLACES & 1)
                if ORDERED:
                    now = gl.atomic_add(own_turns + block * BLOCK_M * stride, 0, sem="acquire")
                    tries = counter * 0
                    while now != turn:
                        now = gl.atomic_add(own_turns + block * BLOCK_M * stride, 0, sem="acquire")
                        tries += 1
                        _stop_if(tries > 20_000_000)
                    _order_proxies()
                tma_add(rows, [block * BLOCK_M, 0], dq_smem.index(place))
                # The one before is done: the next item may add to its rows, and its place is free.
                _wait_additions(1)
                other = (counter + 1) % PLACES
                mbarrier.arrive(dq_empty.index(other), count=1, pred=block > begin)
                if ORDERED:
                    before = gl.maximum(block - 1, begin) * BLOCK_M * stride
                    gl.atomic_xchg(own_turns + before, after, mask=block > begin, sem="release")
                counter += 1
            _wait_additions(0)
            mbarrier.arrive(dq_empty.index((counter + 1) % PLACES), count=1)
            if ORDERED:
                gl.atomic_xchg(own_turns + (blocks - 1) * BLOCK_M * stride, after, sem="release")
        number += 1
        more = _next(facts, number, facts_full, 1)


@gluon.jit(do_not_specialize=["families", "items", "number", "rows", "N", "M", "H", "G", "parts"])
def joint_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DK,  # (rows, D) float32, columns as store_part leaves them
    PART_DV, DK, DV,
    DQ,  # (B, H, N, D) float32, added to
    TURNS,  # (branches, B, H, N) int32, zeros: whose turn it is to add to the block of a tile's rows that begins here
    TAKEN,  # (launches,) int32, zeros: how many items are taken
    TABLE, LAYOUT, OFFSETS, families, items,
    number,  # of the launch
    rows,  # B * H * N
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr, PARTS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """dk and dv of the items of a table, as dkv_kernel, and dq without ``scale`` of all rows that see them."""
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
        allocate_barriers(GROUPS, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 32),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(2, GROUPS),
        allocate_barriers(2, 1),
        allocate_barriers(2, GROUPS + 2),
    )
    dq_smem = allocate_rows(gl.float32, PLACES, BLOCK_M, BLOCK_D)
    dq_bars = allocate_barriers(PLACES, 1), allocate_barriers(PLACES, 1)
    handed = (
        allocate_rows(dtype, PLACES * GROUPS, 64, BLOCK_M),
        allocate_barriers(PLACES, GROUPS),
        allocate_barriers(PLACES, 1),
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
    gl.warp_specialize([
        (_compute, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS)),
        (_compute, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS)),
        (_multiply, (items, group, smem[0], dq_smem, facts, bars, handed, dq_bars, BLOCK_D, BLOCK_M)),
        (_add, (DQ, TURNS, items, group, N, dq_smem, facts, bars, dq_bars, D, BLOCK_D, BLOCK_M, PARTS, ORDERED)),
        (_produce, ((Q, K, V, DOUT), statistics, tables, TAKEN + number, families, items, rows, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS)),
    ], [4, 4, 1, 1], [208, 64, 32, 32])  # fmt: skip
