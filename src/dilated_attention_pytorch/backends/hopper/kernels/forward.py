"""The forward kernel for Hopper: see common.py for how items are distributed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_ZERO_KEYS,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import LN_2
from dilated_attention_pytorch.backends.hopper.kernels.common import (
    CAUSAL,
    CHILDREN,
    FIRST,
    GROUPS,
    K_AT,
    K_ROWS,
    K_STRIDE,
    LSE_PLACE,
    PLACE,
    Q_AT,
    Q_ROWS,
    ROWS,
    STRIDE,
    V_AT,
    ZERO_KEYS,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    element,
    end_together,
    find_item,
    find_part,
    item_at,
    item_positions,
    key_blocks,
    known,
    leave,
    leave_parts,
    let_next_begin,
    line_and_column,
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
    whole_descriptor,
)
from dilated_attention_pytorch.backends.hopper.kernels.products import wait_sums, whole_rows
from dilated_attention_pytorch.backends.hopper.kernels.softmax import (
    again,
    allocate_flags,
    attend_item,
    is_online,
    overflows,
    raise_flag,
    release_blocks,
)


@gluon.jit
def _own_half(which: gl.constexpr, number, BLOCK_N: gl.constexpr):
    """Which half of an item a group computes. Where the second half of a causal item has more blocks, they take turns.

    The number of the item decides, and it depends on the other sequences of the batch. So the bits of a row are independent
    of these only because both groups execute the same floating-point operations.
    """
    return which ^ number & 1 if BLOCK_N < ROWS else which


@gluon.jit
def _load_item(
    descs, places, blocks, number, counter, smem, bars, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the query rows of both warp groups, then keys and values, block by block as buffers become free."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty = bars[:2]
    q_at, k_at, v_at = places
    for i in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(i), number & 1 ^ 1)
        load_rows(descs[0], q_at[0] + _own_half(i, number, BLOCK_N) * 64, q_full, q_smem, i, q_at[1])
    return load_keys(descs[1], descs[2], blocks, counter, (k_smem, v_smem), bars[2:6], k_at, v_at, BLOCK_N, STAGES)


@gluon.jit
def _load_tile(
    q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same through descriptors of the tile."""
    descs = (
        row_descriptor(q_at, q_rows, steps[0], D, 64, BLOCK_D),
        row_descriptor(k_at, k_rows, steps[1], D, BLOCK_N, BLOCK_D),
        row_descriptor(v_at, k_rows, steps[2], D, BLOCK_N, BLOCK_D),
    )
    return _load_item(
        descs, ((first, 0), (0, 0), (0, 0)), blocks, number, counter, smem, bars, BLOCK_N, STAGES
    )  # fmt: skip


@gluon.jit
def _place(facts, slot, which: gl.constexpr):
    """The line and the column that ``line_and_column`` has found."""
    at = known(facts, slot, which, 1)
    return (at & 0xFFFFFFFF).to(gl.int32), (at >> 32).to(gl.int32)


@gluon.jit
def _look_ahead_pass(
    number, tables, families, items, group, sizes, q_strides, k_strides, v_strides, facts, bars,
    FINAL: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    N, H, G, parts = sizes
    facts_full, done = bars[6], bars[7]
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_at(tables[3], tables[4], index)
        row, first, heads, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal = find_item(
            tables[0], families, item, group, False
        )
        zero_keys = gl.load(row + FAMILY_ZERO_KEYS)
        place = result_row(row, own_sample, sample, heads[0], tile, starts[0], first, N, H, FINAL)
        lse_place = place
        if FINAL:
            lse_place = (sample.to(gl.int64) * H + heads[0]) * N + starts[0] + first
        if PARTS > 0:
            found = look_up_parts(tables, row, own_sample, heads[0], H, heads[1], G, parts, PARTS)
        slot = number & 1
        mbarrier.wait(done.index(slot), (number >> 1 & 1) ^ 1)
        leave(facts, slot, FIRST, first)
        leave(facts, slot, Q_ROWS, q_rows)
        leave(facts, slot, K_ROWS, k_rows)
        leave(facts, slot, STRIDE, strides[0])
        leave(facts, slot, K_STRIDE, strides[1])
        leave(facts, slot, CAUSAL, causal)
        leave(facts, slot, ZERO_KEYS, zero_keys)
        leave(facts, slot, PLACE, place)
        leave(facts, slot, LSE_PLACE, lse_place)
        if WHOLE:
            leave(facts, slot, Q_AT, line_and_column(q_strides, sample, starts[0], heads[0]))
            leave(facts, slot, K_AT, line_and_column(k_strides, sample, starts[1], heads[1]))
            leave(facts, slot, V_AT, line_and_column(v_strides, sample, starts[1], heads[1]))
        else:
            leave(facts, slot, Q_AT, element(q_strides, sample, starts[0], heads[0]))
            leave(facts, slot, K_AT, element(k_strides, sample, starts[1], heads[1]))
            leave(facts, slot, V_AT, element(v_strides, sample, starts[1], heads[1]))
        if PARTS > 0:
            leave_parts(facts, slot, row, starts[0], first, strides[0], found)
        mbarrier.arrive(facts_full.index(slot), count=1)
        number += 1
    return number


@gluon.jit
def _look_ahead(
    tables, families, items, group, sizes, q_strides, k_strides, v_strides, facts, bars, flags,
    FINAL: gl.constexpr, PARTS: gl.constexpr, WHOLE: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    """Find items and write their facts. A further warp does this, so that the producer does not wait for it."""
    let_next_begin()
    number = _look_ahead_pass(
        items * 0, tables, families, items, group, sizes, q_strides, k_strides, v_strides, facts, bars, FINAL, PARTS, WHOLE
    )
    if not ONLINE:
        _look_ahead_pass(
            number, tables, families, again(items, flags, 1), group, sizes, q_strides, k_strides, v_strides, facts, bars,
            FINAL, PARTS, WHOLE,
        )  # fmt: skip


@gluon.jit
def _produce_pass(
    number, counter, tensors, descs, items, row_strides, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    Q, K, V = tensors
    facts_full = bars[6]
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
        first = known(facts, slot, FIRST, 1).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS, 1).to(gl.int32)
        k_rows = known(facts, slot, K_ROWS, 1).to(gl.int32)
        causal = known(facts, slot, CAUSAL, 1) != 0
        stride = known(facts, slot, STRIDE, 1)
        k_stride = known(facts, slot, K_STRIDE, 1)
        blocks, _ = key_blocks(first, k_rows, causal, BLOCK_N)
        if WHOLE:
            q_line, q_column = _place(facts, slot, Q_AT)
            places = (q_line + first, q_column), _place(facts, slot, K_AT), _place(facts, slot, V_AT)
            counter = _load_item(descs, places, blocks, number, counter, smem, bars, BLOCK_N, STAGES)
        else:
            q_at = Q + known(facts, slot, Q_AT, 1)
            k_at = K + known(facts, slot, K_AT, 1)
            v_at = V + known(facts, slot, V_AT, 1)
            steps = stride * row_strides[0], k_stride * row_strides[1], k_stride * row_strides[2]
            if slot == 0:
                counter = _load_tile(
                    q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                    D, BLOCK_D, BLOCK_N, STAGES,
                )  # fmt: skip
            else:
                counter = _load_tile(
                    q_at, k_at, v_at, steps, first, q_rows, k_rows, blocks, number, counter, smem, bars,
                    D, BLOCK_D, BLOCK_N, STAGES,
                )  # fmt: skip
        number += 1
    return number, counter


@gluon.jit
def _whole_descriptors(tensors, strides, D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr):
    """One descriptor for each tensor, for a launch whose tiles have consecutive rows."""
    return (
        whole_descriptor(tensors[0], strides[0], D, 64, BLOCK_D),
        whole_descriptor(tensors[1], strides[1], D, BLOCK_N, BLOCK_D),
        whole_descriptor(tensors[2], strides[2], D, BLOCK_N, BLOCK_D),
    )


@gluon.jit
def _produce(
    tensors, items, row_strides, smem, facts, bars, flags,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    ONLINE: gl.constexpr,
):  # fmt: skip
    descs = _whole_descriptors(tensors, row_strides, D, BLOCK_D, BLOCK_N) if WHOLE else ()
    # Items and blocks of keys so far.
    number, counter = _produce_pass(
        items * 0, items * 0, tensors, descs, items, row_strides, smem, facts, bars, D, BLOCK_D, BLOCK_N, STAGES, WHOLE
    )
    if not ONLINE:
        _produce_pass(
            number, counter, tensors, descs, again(items, flags, 1), row_strides, smem, facts, bars,
            D, BLOCK_D, BLOCK_N, STAGES, WHOLE,
        )  # fmt: skip
    end_together()


@gluon.jit
def merge(out, factor, lse2, part_out, part_lse2):
    """Merge the result of a row, ``factor * out``, which is never empty, with a partial result, which may be."""
    larger2 = gl.maximum(lse2, part_lse2)
    weight = gl.exp2(lse2 - larger2)
    part_weight = gl.exp2(part_lse2 - larger2)
    share = 1.0 / (weight + part_weight)
    out = out * (weight * share * factor)[:, None] + part_out * (part_weight * share)[:, None]
    return out, larger2 + gl.log2(weight + part_weight)


@gluon.jit
def _compute_pass(
    number, counter, which: gl.constexpr, results, items, H, scale_log2, smem, facts, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, PARTS: gl.constexpr, ONLINE: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    PART_OUT, PART_LSE2, OUT, LSE = results
    v_empty, facts_full, done = bars[5], bars[6], bars[7]
    S: gl.constexpr = product_layout(BLOCK_N)
    O: gl.constexpr = product_layout(BLOCK_D)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    numbers = gl.arange(0, 64, gl.SliceLayout(1, O))
    overflow = gl.full([64], 0, gl.int32, gl.SliceLayout(1, O))
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
        first = known(facts, slot, FIRST).to(gl.int32)
        k_rows = known(facts, slot, K_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        half = _own_half(which, number, BLOCK_N)
        own = half * 64 + numbers  # in an item
        begin = first + half * 64
        blocks, clear_blocks = key_blocks(begin, k_rows, causal, BLOCK_N, 64)
        seen = seen_keys(begin + gl.arange(0, 64, gl.SliceLayout(1, S)), k_rows, causal)
        # Zero keys have logit 0 and value 0: they only start the denominator.
        zero_keys = known(facts, slot, ZERO_KEYS).to(gl.float32)
        m2 = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + gl.where(zero_keys > 0, 0.0, float("-inf"))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + zero_keys
        sums, p, m2, total, divisor, stage, counter = attend_item(
            which, m2, total, (), seen, blocks, clear_blocks, number, counter, scale_log2, columns, none, smem, bars[:6],
            D, BLOCK_D, BLOCK_N, STAGES, HELD, ONLINE, S,
        )  # fmt: skip
        # While the last product runs: the first partial result to be added.
        inside = (known(facts, slot, FIRST).to(gl.int32) + own) < known(facts, slot, Q_ROWS).to(gl.int32)
        if PARTS > 0:
            wait_for_last_launch()
            positions = item_positions(facts, slot, own)
            places, there = find_part(facts, slot, 0, positions, inside, PARTS)
            part_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
            part_out = load_part(PART_OUT, places, there, D, BLOCK_D)
        acc = whole_rows(wait_sums(sums, p, D, BLOCK_D), D, BLOCK_D)
        mbarrier.arrive(v_empty.index(stage), count=1)
        if BLOCK_N < ROWS:  # in a causal item the first half may see one block less
            loaded, _ = key_blocks(first, k_rows, causal, BLOCK_N)
            counter = release_blocks(loaded - blocks, counter, bars[2:6], STAGES)

        total_o = gl.convert_layout(total, gl.SliceLayout(1, O))
        if not ONLINE:
            own_overflow = overflows(acc, total_o)
            overflow |= own_overflow
        factor = 1.0 / gl.convert_layout(divisor, gl.SliceLayout(1, O))
        lse2 = gl.convert_layout(m2, gl.SliceLayout(1, O)) + gl.log2(total_o)
        if PARTS > 0:
            for child in range(1, known(facts, slot, CHILDREN).to(gl.int32)):
                # The next partial result is loaded before the last one is added, if the registers have room for both.
                places, there = find_part(facts, slot, child, positions, inside, PARTS)
                next_lse2 = gl.load(PART_LSE2 + places, mask=there, other=float("-inf"))
                if BLOCK_D == 128:
                    acc, lse2 = merge(acc, factor, lse2, part_out, part_lse2)
                next_out = load_part(PART_OUT, places, there, D, BLOCK_D)
                if BLOCK_D < 128:
                    acc, lse2 = merge(acc, factor, lse2, part_out, part_lse2)
                part_lse2, part_out = next_lse2, next_out
                factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, O))
            out, lse2 = merge(acc, factor, lse2, part_out, part_lse2)
        else:
            out = acc * factor[:, None]
        place = known(facts, slot, PLACE)
        lse_at = (LSE if FINAL else PART_LSE2) + known(facts, slot, LSE_PLACE) + own
        lse = lse2 * LN_2 if FINAL else lse2
        # Rows that overflow are marked, and the second pass stores only these: the bits of a row depend on no other row.
        if AGAIN:
            marked = gl.load(lse_at, mask=inside, other=0.0)
            inside = inside & (marked != marked)
        elif not ONLINE:
            lse = gl.where(own_overflow > 0, float("nan"), lse)
        gl.store(lse_at, lse, mask=inside)
        if FINAL:
            store_rows(OUT, out, (place + half * 64 * H) * D, H * D, numbers, inside, D, BLOCK_D)
        else:
            store_part(PART_OUT, out, place + half * 64, numbers, inside, D, BLOCK_D)
        mbarrier.arrive(done.index(slot), count=1)  # after the stores: only then all facts have been loaded
        number += 1
    return number, counter, overflow


@gluon.jit
def _compute(
    which: gl.constexpr, results, items, H, scale_log2, smem, facts, bars, flags,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, PARTS: gl.constexpr, ONLINE: gl.constexpr,
):  # fmt: skip
    number, counter, overflow = _compute_pass(
        items * 0, items * 0, which, results, items, H, scale_log2, smem, facts, bars,
        D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS, ONLINE, False,
    )  # fmt: skip
    if not ONLINE:
        raise_flag(flags, which, overflow)
        _compute_pass(
            number, counter, which, results, again(items, flags, 4), H, scale_log2, smem, facts, bars,
            D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS, True, True,
        )  # fmt: skip


@gluon.constexpr_function
def _registers(PROGRAMS):
    """Registers of a thread of the second group, of the producer, and of the look-ahead warp."""
    return [232, 40, 40] if PROGRAMS == 1 else [104, 24, 24]


@gluon.jit(do_not_specialize=["families", "items", "ordered", "N", "H", "G", "parts"])
def forward_kernel(
    Q, K, V,
    PART_OUT,  # (rows, D) float32, columns in the order of store_part
    PART_LSE2,  # (rows,) float32
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, natural logarithm
    TABLE, LAYOUT, OFFSETS, ORDER, families, items, ordered,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    N, H, G, group, parts, scale_log2,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FINAL: gl.constexpr,  # write OUT, else partial results
    HELD: gl.constexpr,  # q stays in registers
    PARTS: gl.constexpr,  # at most so many partial results are added to each result, a power of 2; or none
    WHOLE: gl.constexpr,  # tiles have consecutive rows and whole blocks only: one descriptor serves each tensor
    PROGRAMS: gl.constexpr,  # on each multiprocessor: one or two
):  # fmt: skip
    """Attention of the items of a table: blocks of 128 query rows over all keys of their tiles."""
    dtype: gl.constexpr = Q.dtype.element_ty
    ONLINE: gl.constexpr = is_online(dtype)
    smem = (
        allocate_rows(dtype, GROUPS, 64, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
        allocate_rows(dtype, STAGES, BLOCK_N, BLOCK_D),
    )
    bars = (
        allocate_barriers(GROUPS, 1),
        allocate_barriers(GROUPS, 1),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, GROUPS),
        allocate_barriers(2, 1),
        allocate_barriers(2, GROUPS),
    )
    facts = allocate_facts(PARTS)
    flags = allocate_flags()
    fence_async_shared()
    strides = (
        (q_stride_b, q_stride_n, q_stride_h),
        (k_stride_b, k_stride_n, k_stride_h),
        (v_stride_b, v_stride_n, v_stride_h),
    )
    results = PART_OUT, PART_LSE2, OUT, LSE
    tables = TABLE, LAYOUT, OFFSETS, ORDER, ordered
    sizes = N, H, G, parts
    gl.warp_specialize([
        (_compute, (gl.constexpr(0), results, items, H, scale_log2, smem, facts, bars, flags, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS, ONLINE)),
        (_compute, (gl.constexpr(1), results, items, H, scale_log2, smem, facts, bars, flags, D, BLOCK_D, BLOCK_N, STAGES, FINAL, HELD, PARTS, ONLINE)),
        (_produce, ((Q, K, V), items, (q_stride_n, k_stride_n, v_stride_n), smem, facts, bars, flags, D, BLOCK_D, BLOCK_N, STAGES, WHOLE, ONLINE)),
        (_look_ahead, (tables, families, items, group, sizes, strides[0], strides[1], strides[2], facts, bars, flags, FINAL, PARTS, WHOLE, ONLINE)),
    ], [4, 1, 1], _registers(PROGRAMS))  # fmt: skip
