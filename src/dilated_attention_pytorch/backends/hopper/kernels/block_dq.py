"""The backward kernel for Hopper over block lists by query rows: dq.py with keys that a list names."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.gpu.kernels.primitives import LOG2_E
from dilated_attention_pytorch.backends.hopper.kernels.block_common import (
    FIRST,
    LENGTH,
    LISTED_LENGTH,
    PLACE,
    STATISTICS_PLACE,
    find_block_item,
    find_list,
    known_list,
    leave_end,
    leave_item,
    leave_list,
    listed_keys,
    listed_row,
    load_listed_keys,
    prefetch_rows,
    seen_listed,
    take_item,
    wait_for_item,
)
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    address,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    known,
    load_result,
    load_rows,
    product_layout,
    row_descriptor,
    store_rows,
)
from dilated_attention_pytorch.backends.hopper.kernels.dq import dq_of_item
from dilated_attention_pytorch.backends.hopper.kernels.products import hold, no_sums, wait_sums, whole_rows


@gluon.jit
def _load_dq_item(
    at, steps, LIST, count, first, lengths, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    q_smem, dout_smem, k_smem, v_smem = smem
    rows_full, rows_empty = bars[:2]
    q_desc = row_descriptor(at[0], lengths[0], steps[0], D, 64, BLOCK_D)
    k_desc = row_descriptor(at[1], lengths[1], steps[1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(at[2], lengths[1], steps[2], D, BLOCK_N, BLOCK_D)
    dout_desc = row_descriptor(at[3], lengths[0], steps[3], D, 64, BLOCK_D)
    k_row = listed_row(LIST, 0, count, BLOCK_SIZE)
    for which in gl.static_range(2):
        mbarrier.wait(rows_empty.index(which), number & 1 ^ 1)
        load_rows(q_desc, first + which * 64, rows_full, q_smem, which)
        load_rows(dout_desc, first + which * 64, rows_full, dout_smem, which)
    counter, _ = load_listed_keys(
        k_desc, v_desc, LIST, count, k_row, 0, blocks, counter, (k_smem, v_smem), bars[2:6], BLOCK_N, STAGES, BLOCK_SIZE
    )
    return counter


@gluon.jit
def _produce_dq(
    tensors, DQ, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    Q, K, V, DOUT = tensors
    N, H = sizes
    q_strides, k_strides, v_strides, dout_strides = strides
    facts_full, done = bars[6], bars[7]
    counter = 0
    number = 0
    item = take_item(tables[4], items)
    while item >= 0:
        row, head, first, sample, starts, lengths = find_block_item(tables[0], rows, item, BLOCK_SIZE)
        count, list_at, first_entry, last = find_list(tables, row, head, first, lengths[0])
        LIST = tables[3] + list_at
        blocks, _ = listed_keys(count, last, first, lengths[1], CAUSAL, BLOCK_N, BLOCK_SIZE)
        key_head = head // group
        at = (
            address(Q, q_strides, sample, starts[0], head),
            address(K, k_strides, sample, starts[1], key_head),
            address(V, v_strides, sample, starts[1], key_head),
            address(DOUT, dout_strides, sample, starts[0], head),
        )
        steps = q_strides[1], k_strides[1], v_strides[1], dout_strides[1]
        parity = number & 1
        mbarrier.wait(done.index(parity), (number >> 1 & 1) ^ 1)
        leave_item(facts, parity, first, lengths[0], lengths[1], sample, starts[0], head, N, H)
        leave_list(facts, parity, count, first_entry, last)
        mbarrier.arrive(facts_full.index(parity), count=1)
        if RUNNING:
            prefetch_rows(DQ, known(facts, parity, PLACE, 1), lengths[0] - first, H, D)
        if parity == 0:
            counter = _load_dq_item(
                at, steps, LIST, count, first, lengths, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE,
            )  # fmt: skip
        else:
            counter = _load_dq_item(
                at, steps, LIST, count, first, lengths, blocks, number, counter, smem, bars,
                D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE,
            )  # fmt: skip
        number += 1
        item = take_item(tables[4], items)
    leave_end(facts, number, facts_full, done)


@gluon.jit
def _compute_dq(
    which: gl.constexpr, DQ, statistics, H, scale_log2, scale, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    LSE, DELTA = statistics
    q_smem, dout_smem, k_smem, v_smem = smem
    rows_full, k_empty, facts_full, done = bars[0], bars[3], bars[6], bars[7]
    S: gl.constexpr = product_layout(BLOCK_N)
    O: gl.constexpr = product_layout(BLOCK_D)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    own_s = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    counter = 0
    number = 0
    more = wait_for_item(facts, number, facts_full)
    while more:
        slot = number & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        length = known(facts, slot, LENGTH).to(gl.int32)
        k_length = known(facts, slot, LISTED_LENGTH).to(gl.int32)
        count, _, last_entry = known_list(facts, slot)
        blocks, clear_blocks = listed_keys(count, last_entry, first, k_length, CAUSAL, BLOCK_N, BLOCK_SIZE)
        q_rows = first + own_s
        place = known(facts, slot, STATISTICS_PLACE) + own_s
        # rows behind the sequence: weights exp2(0 - inf) = 0
        lse2 = gl.load(LSE + place, mask=q_rows < length, other=float("inf")) * LOG2_E
        delta = gl.load(DELTA + place, mask=q_rows < length, other=0.0)
        seen = seen_listed(q_rows, count, last_entry, k_length, CAUSAL, BLOCK_SIZE)
        mbarrier.wait(rows_full.index(which), number & 1)
        q = hold(q_smem.index(which), S, D, HELD >= 1)
        dout = hold(dout_smem.index(which), S, D, HELD >= 2)

        dq, ds, stage, counter = dq_of_item(
            which, q, dout, no_sums(D, BLOCK_D), lse2, delta, seen, blocks, clear_blocks, counter, scale_log2, columns, none,
            (k_smem, v_smem), bars[1:6], D, BLOCK_D, BLOCK_N, STAGES, HELD,
        )  # fmt: skip
        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, LENGTH).to(gl.int32)
        start = (known(facts, slot, PLACE) + which * 64 * H) * D
        dq_sum = whole_rows(wait_sums(dq, ds, D, BLOCK_D), D, BLOCK_D)
        mbarrier.arrive(k_empty.index(stage), count=1)
        if count == 0:  # computed as one block with weights 0, whose keys and values are not defined
            dq_sum = gl.full([64, BLOCK_D], 0.0, gl.float32, O)

        dq_sum = dq_sum * scale
        if RUNNING:
            dq_sum += load_result(DQ, start, H * D, numbers, inside, D, BLOCK_D)
        store_rows(DQ, dq_sum, start, H * D, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(done.index(slot), count=1)  # after the stores: only then all facts have been loaded
        number += 1
        more = wait_for_item(facts, number, facts_full)


@gluon.jit(do_not_specialize=["rows", "items", "N", "H"])
def block_dq_kernel(
    Q, K, V, DOUT, LSE, DELTA, DQ, TABLE, COUNTS, STARTS, INDICES, TAKEN, rows, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, H, group, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,  # how many of q and dout stay in registers
    BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    RUNNING: gl.constexpr,  # add to what DQ holds
):  # fmt: skip
    """dq of blocks of 128 query rows: ``scale * sum_j p_ij (dp_ij - delta_i) k_j`` over the listed keys."""
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
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 1),
        allocate_barriers(2, 2),
    )
    facts = allocate_facts(0)
    fence_async_shared()
    strides = (
        (q_stride_b, q_stride_n, q_stride_h),
        (k_stride_b, k_stride_n, k_stride_h),
        (v_stride_b, v_stride_n, v_stride_h),
        (dout_stride_b, dout_stride_n, dout_stride_h),
    )
    statistics = LSE, DELTA
    tables = TABLE, COUNTS, STARTS, INDICES, TAKEN
    sizes = N, H
    gl.warp_specialize([
        (_compute_dq, (gl.constexpr(0), DQ, statistics, H, scale_log2, scale, smem, facts, bars, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, RUNNING)),
        (_compute_dq, (gl.constexpr(1), DQ, statistics, H, scale_log2, scale, smem, facts, bars, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, RUNNING)),
        (_produce_dq, ((Q, K, V, DOUT), DQ, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, RUNNING)),
    ], [4, 1], [232, 40])  # fmt: skip
