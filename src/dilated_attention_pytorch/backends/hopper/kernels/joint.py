"""The backward kernel for Hopper that computes all gradients: dk and dv as dkv.py does, and dq from the same scores.

Scores, weights and their gradients are computed once instead of twice: five products for each pair of blocks, where dq.py and
dkv.py need seven. Two warp groups write the gradients of scores to shared memory (dkv.py). A third one multiplies them with
the keys of the item. For head sizes above 64 no registers are left for it (``shares_dq``), and the two groups compute half of
the columns each. A further warp adds the result to dq in memory when it is the turn of the item (turns.py).
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

from dilated_attention_pytorch.backends.hopper.kernels.common import (
    CAUSAL,
    FIRST,
    GROUPS,
    K_ROWS,
    Q_AT,
    Q_ROWS,
    ROWS,
    STRIDE,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    known,
    product_layout,
    row_descriptor,
    tma_add,
    wait_for_last_launch,
)
from dilated_attention_pytorch.backends.hopper.kernels.dkv import (
    allocate_dkv,
    compute_dkv,
    next_item,
    produce_dkv,
    query_blocks,
    shares_dq,
)
from dilated_attention_pytorch.backends.hopper.kernels.turns import pass_turn, wait_additions, wait_turn

CHUNK = gl.constexpr(2)  # blocks of query rows that have one counter, as many rows as an item has keys


@gluon.jit
def _multiply(
    items, group, scale, k_smem, dq_smem, facts, bars, handed, dq_bars,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """dq of the query rows of each block, by the keys of an item, into shared memory."""
    rows_full, rows_empty = bars[:2]
    facts_full, facts_empty = bars[5:]
    ds_smem, full, empty = handed
    dq_full, dq_empty = dq_bars
    DS_PLACES: gl.constexpr = ds_smem.shape[0] // GROUPS
    DQ_PLACES: gl.constexpr = dq_smem.shape[0]
    # Transposed, so that the threads of a warp write to different banks of shared memory.
    none = gl.full([BLOCK_D, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M))
    counter = items * 0
    number = items * 0
    more = next_item(facts, number, facts_full, 4)
    while more:
        slot = number & 1
        begin, blocks, _, _ = query_blocks(
            known(facts, slot, FIRST).to(gl.int32), known(facts, slot, Q_ROWS).to(gl.int32), known(facts, slot, CAUSAL) != 0,
            BLOCK_M,
        )  # fmt: skip
        mbarrier.arrive(facts_empty.index(slot), count=1)
        for which in gl.static_range(GROUPS):
            mbarrier.wait(rows_full.index(which), number & 1)
        for _ in range(group * (blocks - begin)):
            place = counter % DS_PLACES
            mbarrier.wait(full.index(place), counter // DS_PLACES & 1)
            dq = none
            for which in gl.static_range(GROUPS):
                k = k_smem.index(which).permute((1, 0))
                dq = warpgroup_mma(k, ds_smem.index(place * GROUPS + which), dq, use_acc=which > 0, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if SCALED:
                dq = dq * scale
            mbarrier.arrive(empty.index(place), count=1)
            place = counter % DQ_PLACES
            mbarrier.wait(dq_empty.index(place), (counter // DQ_PLACES & 1) ^ 1)
            dq_smem.index(place).permute((1, 0)).store(dq)
            fence_async_shared()
            mbarrier.arrive(dq_full.index(place), count=1)
            counter += 1
        for which in gl.static_range(GROUPS):
            mbarrier.arrive(rows_empty.index(which), count=1)
        number += 1
        more = next_item(facts, number, facts_full, 4)


@gluon.jit
def _turn(own, chunk, last, causal):
    """How many items add to a chunk before this one: those of later keys that its rows see."""
    return gl.where(causal, chunk, last) - own


@gluon.jit
def _add(
    SUMS, TURNS, items, group, H, dq_smem, facts, bars, dq_bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Add to dq, block by block, when it is this item's turn."""
    gl.static_assert(ROWS == CHUNK * BLOCK_M, "the first rows that see an item are a chunk")
    DQ_PLACES: gl.constexpr = dq_smem.shape[0]
    gl.static_assert(DQ_PLACES > 1, "a place is given back when the next block has come")
    facts_full, facts_empty = bars[5:]
    dq_full, dq_empty = dq_bars
    counter = items * 0
    number = items * 0
    more = next_item(facts, number, facts_full, 1)
    while more:
        slot = number & 1
        q_rows = known(facts, slot, Q_ROWS, 1).to(gl.int32)
        first = known(facts, slot, FIRST, 1).to(gl.int32)
        causal = known(facts, slot, CAUSAL, 1) != 0
        last = (known(facts, slot, K_ROWS, 1).to(gl.int32) - 1) // ROWS
        step = known(facts, slot, STRIDE, 1) * H  # from a row of the tile to its next, in rows of (B, N, H)
        q_at = known(facts, slot, Q_AT, 1)
        mbarrier.arrive(facts_empty.index(slot), count=1)
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M)
        own = first // ROWS
        if PARTS > 0:
            wait_for_last_launch()  # it adds to the same rows, and has the same counters
        for member in range(group):
            rows = row_descriptor(SUMS + (q_at + member) * D, q_rows, step * D, D, BLOCK_M, BLOCK_D)
            counters = TURNS + q_at + member
            for block in range(begin, blocks):
                chunk = block // CHUNK
                begins = block % CHUNK == 0
                if begins:
                    wait_turn(counters + chunk * step, _turn(own, chunk, last, causal))
                place = counter % DQ_PLACES
                mbarrier.wait(dq_full.index(place), counter // DQ_PLACES & 1)
                tma_add(rows, [block * BLOCK_M, 0], dq_smem.index(place))
                wait_additions(1, True)
                mbarrier.arrive(dq_empty.index((counter + DQ_PLACES - 1) % DQ_PLACES), count=1, pred=block > begin)
                if begins & (block > begin):
                    wait_additions(1, False)
                    pass_turn(counters + (chunk - 1) * step, _turn(own, chunk - 1, last, causal), own)
                counter += 1
            wait_additions(0, False)
            mbarrier.arrive(dq_empty.index((counter + DQ_PLACES - 1) % DQ_PLACES), count=1, pred=blocks > begin)
            if blocks > begin:
                chunk = (blocks - 1) // CHUNK
                pass_turn(counters + chunk * step, _turn(own, chunk, last, causal), own)
        number += 1
        more = next_item(facts, number, facts_full, 1)


@gluon.jit(do_not_specialize=["families", "items", "number", "N", "M", "H", "G", "parts"])
def joint_kernel(
    Q, K, V, DOUT,
    SHIFTS,  # (B, H, N, 16) bfloat16, see dkv.py
    PART_DK,  # (rows, D) float32, columns in the order of store_part
    PART_DV, DK, DV,
    SUMS,  # (B, N, H, D) float32, added to
    TURNS,  # (B, N, H) int32, zeros; at row c of a tile: whose turn it is to add to its chunk c of rows
    TAKEN,  # (launches,) int32, zeros: how many items are taken
    TABLE, LAYOUT, OFFSETS, families, items,
    number,  # of the launch
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, PARTS: gl.constexpr,
    SCALED: gl.constexpr,  # dq is multiplied by ``scale`` before it is added
):  # fmt: skip
    """dk and dv of the items of a table, as dkv_kernel, and dq of all rows that see them.

    For tables of which no two tiles have the same query row.
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    SHARED: gl.constexpr = shares_dq(BLOCK_D)
    # Blocks of gradients of scores, and of dq. Rows are larger if SHARED, so that fewer places fit.
    DS_PLACES: gl.constexpr = 1 if SHARED else 2
    DQ_PLACES: gl.constexpr = 2 if SHARED else 4
    smem, bars = allocate_dkv(dtype, 1, 1 if SHARED else 2, STAGES, BLOCK_M, BLOCK_D)
    handed = (
        allocate_rows(dtype, DS_PLACES * GROUPS, 64, BLOCK_M),
        allocate_barriers(DS_PLACES, GROUPS),
        allocate_barriers(DS_PLACES, GROUPS if SHARED else 1),
    )
    dq_smem = allocate_rows(gl.float32, DQ_PLACES, BLOCK_M, BLOCK_D)
    dq_bars = allocate_barriers(DQ_PLACES, GROUPS if SHARED else 1), allocate_barriers(DQ_PLACES, 1)
    facts = allocate_facts(PARTS)
    fence_async_shared()
    q_strides = q_stride_b, q_stride_n, q_stride_h
    k_strides = k_stride_b, k_stride_n, k_stride_h
    v_strides = v_stride_b, v_stride_n, v_stride_h
    dout_strides = dout_stride_b, dout_stride_n, dout_stride_h
    results = PART_DK, PART_DV, DK, DV
    tables = TABLE, LAYOUT, OFFSETS
    sizes = N, M, H, G, parts
    if SHARED:
        # Both groups also get the arguments of _multiply. Kernels cannot unpack a tuple inside of another.
        given = handed + (smem[0], dq_smem) + dq_bars + (scale, SCALED)  # noqa: RUF005
        gl.warp_specialize([
            (compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, given, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, False, PARTS, True)),
            (compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, given, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, False, PARTS, True)),
            (_add, (SUMS, TURNS, items, group, H, dq_smem, facts, bars, dq_bars, D, BLOCK_D, BLOCK_M, PARTS)),
            (produce_dkv, ((Q, K, V, DOUT), SHIFTS, tables, TAKEN + number, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, True)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, False, PARTS, True)),
            (compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, False, PARTS, True)),
            (_multiply, (items, group, scale, smem[0], dq_smem, facts, bars, handed, dq_bars, BLOCK_D, BLOCK_M, SCALED)),
            (_add, (SUMS, TURNS, items, group, H, dq_smem, facts, bars, dq_bars, D, BLOCK_D, BLOCK_M, PARTS)),
            (produce_dkv, ((Q, K, V, DOUT), SHIFTS, tables, TAKEN + number, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, True)),
        ], [4, 4, 1, 1], [208, 64, 32, 32])  # fmt: skip
