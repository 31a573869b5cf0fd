"""The backward kernel for Hopper over block lists by key rows: dkv.py with query rows that a transposed list names."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.gpu.kernels.primitives import LAST
from dilated_attention_pytorch.backends.hopper.kernels.block_common import (
    FIRST,
    LENGTH,
    LISTED_LENGTH,
    PLACE,
    find_block_item,
    find_list,
    known_list,
    leave_end,
    leave_item,
    leave_list,
    listed_row,
    prefetch_rows,
    take_item,
    wait_for_item,
)
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    address,
    allocate_facts,
    known,
    load_result,
    load_rows,
    product_layout,
    row_descriptor,
    store_rows,
)
from dilated_attention_pytorch.backends.hopper.kernels.dkv import (
    SHIFT_COLUMNS,
    allocate_dkv,
    dkv_of_head,
    load_kv,
    load_shifts,
    shift_descriptor,
)
from dilated_attention_pytorch.backends.hopper.kernels.products import hold, no_sums, whole_rows


@gluon.jit
def _load_unit(
    member, kv_at, kv_steps, first, number, q_at, dout_at, shifts_at, steps, LIST, count, lengths, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of an item, if this is its first unit, then listed rows of q and dout, with shifts."""
    if member == 0:
        load_kv(kv_at, kv_steps, first, lengths[1], number, smem, bars, D, BLOCK_D)
    q_smem, dout_smem, shift_smem = smem[2:5]
    full, empty = bars[2:4]
    q_desc = row_descriptor(q_at, lengths[0], steps[0], D, BLOCK_M, BLOCK_D)
    dout_desc = row_descriptor(dout_at, lengths[0], steps[1], D, BLOCK_M, BLOCK_D)
    shift_desc = shift_descriptor(shifts_at, lengths[0], lengths[0] * 0 + 1, BLOCK_M)
    q_row = listed_row(LIST, 0, count, BLOCK_SIZE)
    for block in range(count * (BLOCK_SIZE // BLOCK_M)):
        stage = counter % STAGES
        mbarrier.wait(empty.index(stage), (counter // STAGES & 1) ^ 1)
        load_rows(q_desc, q_row, full, q_smem, stage)
        load_rows(dout_desc, q_row, full, dout_smem, stage)
        load_shifts(shift_desc, q_row, full, shift_smem, stage)
        q_row = listed_row(LIST, (block + 1) * BLOCK_M, count, BLOCK_SIZE)
        counter += 1
    return counter


@gluon.jit
def _produce_dkv(
    tensors, SHIFTS, results, tables, rows, items, group, sizes, strides, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    N, H, M, G = sizes
    q_strides, k_strides, v_strides, dout_strides = strides
    done, facts_full, facts_empty = bars[4:]
    counter = 0
    number = 0
    unit = 0  # a query head of an item
    item = take_item(tables[4], items)
    while item >= 0:
        row, key_head, first, sample, starts, lengths = find_block_item(tables[0], rows, item, BLOCK_SIZE)
        mbarrier.wait(facts_empty.index(number & 1), (number >> 1 & 1) ^ 1)
        # The facts of items have a slot by the parity of the item, those of lists by that of the unit. One barrier is for both.
        leave_item(facts, number & 1, first, lengths[1], lengths[0], sample, starts[1], key_head, M, G)
        if RUNNING:
            place = known(facts, number & 1, PLACE, 1)
            prefetch_rows(results[0], place, lengths[1] - first, G, D)
            prefetch_rows(results[1], place, lengths[1] - first, G, D)
        kv_at = (
            address(K, k_strides, sample, starts[1], key_head),
            address(V, v_strides, sample, starts[1], key_head),
        )
        kv_steps = k_strides[1], v_strides[1]
        steps = q_strides[1], dout_strides[1]
        for member in range(group):
            head = key_head * group + member
            count, list_at, first_entry, last_entry = find_list(tables, row, head, first, lengths[1])
            LIST = tables[3] + list_at
            q_at = address(Q, q_strides, sample, starts[0], head)
            dout_at = address(DOUT, dout_strides, sample, starts[0], head)
            place = (sample.to(gl.int64) * H + head) * N + starts[0]
            parity = unit & 1
            mbarrier.wait(done.index(parity), (unit >> 1 & 1) ^ 1)
            leave_list(facts, parity, count, first_entry, last_entry)
            mbarrier.arrive(facts_full.index(parity), count=1)
            if parity == 0:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, number, q_at, dout_at, SHIFTS + place * SHIFT_COLUMNS, steps, LIST, count,
                    lengths, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, BLOCK_SIZE,
                )  # fmt: skip
            else:
                counter = _load_unit(
                    member, kv_at, kv_steps, first, number, q_at, dout_at, SHIFTS + place * SHIFT_COLUMNS, steps, LIST, count,
                    lengths, counter, smem, bars, D, BLOCK_D, BLOCK_M, STAGES, BLOCK_SIZE,
                )  # fmt: skip
            unit += 1
        number += 1
        item = take_item(tables[4], items)
    leave_end(facts, unit, facts_full, done)


@gluon.jit
def _masked_blocks(
    count, first_entry, last_entry, first, length, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """The first block of listed query rows that needs no causal mask, and the end of those that end in the sequence.

    For lists that have entries. Only the first entry of a list may be the block of the keys themselves, only the last one
    the end of the sequence.
    """
    EACH: gl.constexpr = BLOCK_SIZE // BLOCK_M
    clear = count * 0
    if CAUSAL:
        clear = gl.where(first_entry == first // BLOCK_SIZE, EACH, 0)
    ending = gl.minimum((length - last_entry * BLOCK_SIZE) // BLOCK_M, EACH)
    return clear, (count - 1) * EACH + ending


@gluon.jit
def _compute_dkv(
    which: gl.constexpr, results, group, G, scale_log2, scale, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    OVERLAP: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    DK, DV = results
    k_smem, v_smem = smem[:2]
    rows_full, rows_empty = bars[:2]
    done, facts_full, facts_empty = bars[4:]
    EACH: gl.constexpr = BLOCK_SIZE // BLOCK_M
    S: gl.constexpr = product_layout(BLOCK_M)
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([64, BLOCK_M], 0.0, gl.float32, S)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    counter = 0
    number = 0
    unit = 0
    # With the list of its first unit, the facts of the item are written as well.
    more = wait_for_item(facts, unit, facts_full)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        length = known(facts, slot, LISTED_LENGTH).to(gl.int32)
        columns = first + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
        mbarrier.wait(rows_full.index(which), number & 1)
        k = hold(k_smem.index(which), S, D, HELD >= 1)
        v = hold(v_smem.index(which), S, D, HELD >= 2)
        dk = no_sums(D, BLOCK_D)
        dv = no_sums(D, BLOCK_D)
        for _member in range(group):
            mbarrier.wait(facts_full.index(unit & 1), unit >> 1 & 1)
            count, first_entry, last_entry = known_list(facts, unit & 1)
            clear, whole = _masked_blocks(count, first_entry, last_entry, first, length, CAUSAL, BLOCK_M, BLOCK_SIZE)
            # Where the first block of listed rows would be, seen from the first and from the last entry.
            from_first = first_entry * BLOCK_SIZE
            from_last = (last_entry - (count - 1)) * BLOCK_SIZE
            # Right for blocks of the first and of the last entry: others are not masked.
            if count > 0:
                dk, dv, k, v, counter = dkv_of_head(
                    which, k, v, dk, dv, 0, count * EACH, clear, whole, EACH, from_first, from_last, length, LAST, False, CAUSAL, counter,
                    scale_log2, columns, m, none, smem[2:], bars[2:4], (), D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, S, False,
                )  # fmt: skip
            mbarrier.arrive(done.index(unit & 1), count=1)
            unit += 1
        mbarrier.arrive(rows_empty.index(which), count=1)
        number += 1

        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, LENGTH).to(gl.int32)
        start = (known(facts, slot, PLACE) + which * 64 * G) * D
        dk_sum = whole_rows(dk, D, BLOCK_D) * scale
        if RUNNING:
            dk_sum += load_result(DK, start, G * D, numbers, inside, D, BLOCK_D)
        store_rows(DK, dk_sum, start, G * D, numbers, inside, D, BLOCK_D)
        dv_sum = whole_rows(dv, D, BLOCK_D)
        if RUNNING:
            dv_sum += load_result(DV, start, G * D, numbers, inside, D, BLOCK_D)
        store_rows(DV, dv_sum, start, G * D, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(facts_empty.index(slot), count=1)  # after the stores: only then all facts have been loaded
        more = wait_for_item(facts, unit, facts_full)


@gluon.jit(do_not_specialize=["rows", "items", "N", "M", "H", "G"])
def block_dkv_kernel(
    Q, K, V, DOUT,
    SHIFTS,  # (B, H, N, 16) bfloat16, see dkv.py
    DK, DV, TABLE, COUNTS, STARTS, INDICES, TAKEN, rows, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,  # how many of k and v stay in registers
    OVERLAP: gl.constexpr,  # compute scores while the block before is still being added up
    BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    RUNNING: gl.constexpr,  # add to what DK and DV hold
):  # fmt: skip
    """dk and dv of blocks of 128 key rows, summed over the query rows that list them and the query heads of their key head."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem, bars = allocate_dkv(dtype, 0, 0, STAGES, BLOCK_M, BLOCK_D)
    facts = allocate_facts(0)
    fence_async_shared()
    strides = (
        (q_stride_b, q_stride_n, q_stride_h),
        (k_stride_b, k_stride_n, k_stride_h),
        (v_stride_b, v_stride_n, v_stride_h),
        (dout_stride_b, dout_stride_n, dout_stride_h),
    )
    results = DK, DV
    tables = TABLE, COUNTS, STARTS, INDICES, TAKEN
    gl.warp_specialize([
        (_compute_dkv, (gl.constexpr(0), results, group, G, scale_log2, scale, smem, facts, bars, CAUSAL, D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, BLOCK_SIZE, RUNNING)),
        (_compute_dkv, (gl.constexpr(1), results, group, G, scale_log2, scale, smem, facts, bars, CAUSAL, D, BLOCK_D, BLOCK_M, STAGES, HELD, OVERLAP, BLOCK_SIZE, RUNNING)),
        (_produce_dkv, ((Q, K, V, DOUT), SHIFTS, results, tables, rows, items, group, (N, H, M, G), strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, BLOCK_SIZE, RUNNING)),
    ], [4, 1], [232, 40])  # fmt: skip
