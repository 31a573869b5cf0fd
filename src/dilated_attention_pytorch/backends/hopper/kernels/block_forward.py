"""The forward kernel for Hopper over block lists: forward.py with keys that a list names. See block_common.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.gpu.kernels.primitives import LN_2, LOG2_E
from dilated_attention_pytorch.backends.hopper.kernels.block_common import (
    FIRST,
    LENGTH,
    LIST_AT,
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
    load_listed_keys,
    prefetch_numbers,
    prefetch_rows,
    seen_listed,
    take_item,
    wait_for_item,
)
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    K_AT,
    Q_AT,
    V_AT,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    element,
    known,
    leave,
    load_rows,
    product_layout,
    row_descriptor,
    store_rows,
)
from dilated_attention_pytorch.backends.hopper.kernels.products import load_sums, wait_sums, whole_rows
from dilated_attention_pytorch.backends.hopper.kernels.softmax import (
    again,
    allocate_flags,
    attend_item,
    is_online,
    overflows,
    raise_flag,
)

# Instead of -inf, so that a row that sees nothing has no inf - inf.
LOWEST = gl.constexpr(-1e38)
# The next item is taken and looked up so many blocks of keys before the end of an item. Later, the warp groups would wait
# for it. Earlier, programs would end at more different times.
AHEAD = gl.constexpr(4)


@gluon.jit
def _next_item(TAKEN, last, items, AGAIN: gl.constexpr):
    """An item for this program, or -1: one that it takes now, after ``last``, or (``AGAIN``) the one it took before that."""
    if AGAIN:
        return gl.atomic_add(TAKEN + 1 + last, 0, sem="relaxed")
    else:
        item = take_item(TAKEN, items)
        gl.atomic_xchg(TAKEN + 1 + gl.maximum(item, 0), last, mask=item >= 0, sem="relaxed")
        return item


@gluon.jit
def _announce(
    item, told, sums, tables, rows, group, sizes, strides, facts, bars, BLOCK_SIZE: gl.constexpr, D: gl.constexpr,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """Write the facts of an item, or that there is none, for the warp groups and for the producer itself.

    ``sums`` are OUT and LAST_LSE. If ``RUNNING``, an item first reads its rows of these, so they are prefetched.
    """
    facts_full, done = bars[6], bars[7]
    if item >= 0:
        N, H = sizes
        row, head, first, sample, starts, lengths = find_block_item(tables[0], rows, item, BLOCK_SIZE)
        count, at, first_entry, last = find_list(tables, row, head, first, lengths[0])
        slot = told & 1
        mbarrier.wait(done.index(slot), (told >> 1 & 1) ^ 1)
        leave_item(facts, slot, first, lengths[0], lengths[1], sample, starts[0], head, N, H)
        leave_list(facts, slot, count, first_entry, last)
        leave(facts, slot, LIST_AT, at)
        leave(facts, slot, Q_AT, element(strides[0], sample, starts[0], head))
        leave(facts, slot, K_AT, element(strides[1], sample, starts[1], head // group))
        leave(facts, slot, V_AT, element(strides[2], sample, starts[1], head // group))
        mbarrier.arrive(facts_full.index(slot), count=1)
        if RUNNING:
            prefetch_rows(sums[0], known(facts, slot, PLACE, 1), lengths[0] - first, H, D)
            prefetch_numbers(sums[1], known(facts, slot, STATISTICS_PLACE, 1), lengths[0] - first)
    else:
        leave_end(facts, told, facts_full, done)


@gluon.jit
def _load_item(
    item, slot, number, counter, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    AGAIN: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """Load the query rows of both warp groups, then listed keys and values, block by block as buffers become free.

    Returns the next item, which is announced while the last blocks are still to be loaded, and the blocks of keys so far.
    """
    q_smem, k_smem, v_smem = smem
    q_full, q_empty = bars[:2]
    first = known(facts, slot, FIRST, 1).to(gl.int32)
    length = known(facts, slot, LENGTH, 1).to(gl.int32)
    k_length = known(facts, slot, LISTED_LENGTH, 1).to(gl.int32)
    count, first_entry, last = known_list(facts, slot, 1)
    LIST = tables[3] + known(facts, slot, LIST_AT, 1)
    blocks, _ = listed_keys(count, last, first, k_length, CAUSAL, BLOCK_N, BLOCK_SIZE)
    q_desc = row_descriptor(tensors[0] + known(facts, slot, Q_AT, 1), length, strides[0][1], D, 64, BLOCK_D)
    k_desc = row_descriptor(tensors[1] + known(facts, slot, K_AT, 1), k_length, strides[1][1], D, BLOCK_N, BLOCK_D)
    v_desc = row_descriptor(tensors[2] + known(facts, slot, V_AT, 1), k_length, strides[2][1], D, BLOCK_N, BLOCK_D)
    k_row = first_entry * BLOCK_SIZE
    for i in gl.static_range(2):
        mbarrier.wait(q_empty.index(i), number & 1 ^ 1)
        load_rows(q_desc, first + i * 64, q_full, q_smem, i)
    early = gl.maximum(blocks - AHEAD, 0)
    counter, k_row = load_listed_keys(
        k_desc, v_desc, LIST, count, k_row, 0, early, counter, (k_smem, v_smem), bars[2:6], BLOCK_N, STAGES, BLOCK_SIZE
    )
    item = _next_item(tables[4], item, items, AGAIN)
    _announce(
        item, number + 1 + AGAIN, tensors[3:], tables, rows, group, sizes, strides, facts, bars, BLOCK_SIZE, D, RUNNING
    )  # fmt: skip
    counter, _ = load_listed_keys(
        k_desc, v_desc, LIST, count, k_row, early, blocks, counter, (k_smem, v_smem), bars[2:6], BLOCK_N, STAGES, BLOCK_SIZE
    )
    return item, counter


@gluon.jit
def _produce_pass(
    item, number, counter, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    AGAIN: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """Load items from ``item`` on. Returns the last one, and items and blocks of keys so far."""
    # Not item: Triton does not carry a value through a loop if it equals another one before the loop and in its first round.
    last_item = item * 0 - 1
    # The end of the first pass was announced as well.
    _announce(item, number + AGAIN, tensors[3:], tables, rows, group, sizes, strides, facts, bars, BLOCK_SIZE, D, RUNNING)
    while item >= 0:
        last_item = item
        slot = number + AGAIN & 1
        if slot == 0:
            item, counter = _load_item(
                item, slot, number, counter, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL,
                D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, AGAIN, RUNNING,
            )  # fmt: skip
        else:
            item, counter = _load_item(
                item, slot, number, counter, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL,
                D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, AGAIN, RUNNING,
            )  # fmt: skip
        number += 1
    return last_item, number, counter


@gluon.jit
def _produce(
    tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, flags, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    ONLINE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    none = items * 0
    first = _next_item(tables[4], none - 1, items, False)
    last, number, counter = _produce_pass(
        first, none, none, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL,
        D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, False, RUNNING,
    )  # fmt: skip
    if not ONLINE:
        first = again(last + 1, flags, 1) - 1  # -1 if nothing overflowed
        _produce_pass(
            first, number, counter, tensors, tables, rows, items, group, sizes, strides, smem, facts, bars, CAUSAL,
            D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, True, RUNNING,
        )  # fmt: skip


@gluon.jit
def _compute_pass(
    number, counter, which: gl.constexpr, results, H, scale_log2, smem, facts, bars, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ONLINE: gl.constexpr, AGAIN: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    OUT, LSE, LAST_LSE = results
    v_empty, facts_full, done = bars[5], bars[6], bars[7]
    S: gl.constexpr = product_layout(BLOCK_N)
    O: gl.constexpr = product_layout(BLOCK_D)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    own = which * 64 + numbers  # in an item
    rows = gl.arange(0, 64, gl.SliceLayout(1, S))  # the same numbers, in the layout of scores
    overflow = gl.full([64], 0, gl.int32, gl.SliceLayout(1, O))
    more = wait_for_item(facts, number + AGAIN, facts_full)
    while more:
        slot = number + AGAIN & 1
        first = known(facts, slot, FIRST).to(gl.int32)
        k_length = known(facts, slot, LISTED_LENGTH).to(gl.int32)
        count, _, last_entry = known_list(facts, slot)
        blocks, clear_blocks = listed_keys(count, last_entry, first, k_length, CAUSAL, BLOCK_N, BLOCK_SIZE)
        seen = seen_listed(first + which * 64 + rows, count, last_entry, k_length, CAUSAL, BLOCK_SIZE)
        m2 = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
        last_sums = ()
        if RUNNING:
            left = known(facts, slot, LENGTH).to(gl.int32) - first - which * 64
            last_sums = load_sums(OUT, (known(facts, slot, PLACE) + which * 64 * H) * D, H * D, left, D, BLOCK_D)
            last_lse = gl.load(
                LAST_LSE + known(facts, slot, STATISTICS_PLACE) + which * 64 + rows, mask=rows < left, other=float("-inf")
            )
            m2 = gl.where(last_lse == float("-inf"), m2, last_lse * LOG2_E)
            total = gl.where(last_lse == float("-inf"), total, 1.0)
        sums, p, m2, total, divisor, stage, counter = attend_item(
            which, m2, total, last_sums, seen, blocks, clear_blocks, number, counter, scale_log2, columns, none, smem, bars[:6],
            D, BLOCK_D, BLOCK_N, STAGES, HELD, ONLINE, S,
        )  # fmt: skip
        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, LENGTH).to(gl.int32)
        if RUNNING:  # rows that see nothing keep what they hold: weights of 0 times values that are not finite are not 0
            inside = inside & (gl.convert_layout(seen, gl.SliceLayout(1, O)) > 0)
        acc = whole_rows(wait_sums(sums, p, D, BLOCK_D), D, BLOCK_D)
        mbarrier.arrive(v_empty.index(stage), count=1)
        total_o = gl.convert_layout(total, gl.SliceLayout(1, O))
        divisor_o = gl.convert_layout(divisor, gl.SliceLayout(1, O))
        if not ONLINE:
            own_overflow = gl.where(inside, overflows(acc, total_o), 0)
            overflow |= own_overflow
        m2_o = gl.convert_layout(m2, gl.SliceLayout(1, O))
        something = total_o != 0.0  # or NaN, which stays
        # An empty list is computed as one block with weights 0, whose values are not defined.
        out = gl.where(something[:, None], acc * (1.0 / divisor_o)[:, None], 0.0)
        lse2 = gl.where(something, m2_o + gl.log2(total_o), float("-inf"))
        lse = lse2 * LN_2
        lse_at = LSE + known(facts, slot, STATISTICS_PLACE) + own
        # Rows that overflow are marked, and the second pass stores only these. Which other rows it computes depends on
        # which items the program happened to take.
        if AGAIN:
            marked = gl.load(lse_at, mask=inside, other=0.0)
            inside = inside & (marked != marked)
        elif not ONLINE:
            lse = gl.where(own_overflow > 0, float("nan"), lse)
        gl.store(lse_at, lse, mask=inside)
        if RUNNING and not ONLINE:  # the second pass starts from what rows that overflow hold
            inside = inside & (own_overflow == 0)
        place = known(facts, slot, PLACE) + which * 64 * H
        store_rows(OUT, out, place * D, H * D, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(done.index(slot), count=1)  # after the stores: only then all facts have been loaded
        number += 1
        more = wait_for_item(facts, number + AGAIN, facts_full)
    mbarrier.arrive(done.index(number + AGAIN & 1), count=1)
    return number, counter, overflow


@gluon.jit
def _compute(
    which: gl.constexpr, results, H, scale_log2, smem, facts, bars, flags, CAUSAL: gl.constexpr,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ONLINE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    none = H * 0
    number, counter, overflow = _compute_pass(
        none, none, which, results, H, scale_log2, smem, facts, bars, CAUSAL,
        D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, ONLINE, False, RUNNING,
    )  # fmt: skip
    if not ONLINE:
        raise_flag(flags, which, overflow)
        _compute_pass(
            number, counter, which, results, H, scale_log2, smem, facts, bars, CAUSAL,
            D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, True, True, RUNNING,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "items", "N", "H"])
def block_forward_kernel(
    Q, K, V,
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
    LAST_LSE,  # (B, H, N) float32, what LSE holds before, if RUNNING
    TABLE, COUNTS, STARTS, INDICES,
    TAKEN,  # (1 + items,) int32, zeros: how many items are taken; for each, the one its program took before it, or -1
    rows, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    N, H, group, scale_log2,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,  # q stays in registers
    BLOCK_SIZE: gl.constexpr, CAUSAL: gl.constexpr,
    RUNNING: gl.constexpr,  # start from what OUT and LAST_LSE hold
):  # fmt: skip
    """Attention of blocks of 128 query rows over the key blocks that their lists name."""
    dtype: gl.constexpr = Q.dtype.element_ty
    ONLINE: gl.constexpr = is_online(dtype)
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
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, 2),
        allocate_barriers(2, 1),
        allocate_barriers(2, 2),
    )
    facts = allocate_facts(0)
    flags = allocate_flags()
    fence_async_shared()
    strides = (
        (q_stride_b, q_stride_n, q_stride_h),
        (k_stride_b, k_stride_n, k_stride_h),
        (v_stride_b, v_stride_n, v_stride_h),
    )
    tables = TABLE, COUNTS, STARTS, INDICES, TAKEN
    results = OUT, LSE, LAST_LSE
    sizes = N, H
    gl.warp_specialize([
        (_compute, (gl.constexpr(0), results, H, scale_log2, smem, facts, bars, flags, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, ONLINE, RUNNING)),
        (_compute, (gl.constexpr(1), results, H, scale_log2, smem, facts, bars, flags, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, HELD, BLOCK_SIZE, ONLINE, RUNNING)),
        (_produce, ((Q, K, V, OUT, LAST_LSE), tables, rows, items, group, sizes, strides, smem, facts, bars, flags, CAUSAL, D, BLOCK_D, BLOCK_N, STAGES, BLOCK_SIZE, ONLINE, RUNNING)),
    ], [4, 1], [232, 40])  # fmt: skip
