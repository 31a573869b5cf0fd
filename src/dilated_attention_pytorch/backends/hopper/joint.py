"""The backward kernel for Hopper that computes all gradients at once: dk and dv as dkv.py does, dq on the way.

Scores, weights and their gradients are computed once instead of twice: five products for each pair of blocks, where dq.py and
dkv.py need seven. The groups leave the gradients of scores in shared memory (dkv.py); a third group multiplies them
with the item's keys and adds the result to dq in memory, as integers, because several programs add to the same rows
and nobody knows in which order: see backends/triton/fixed_point.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dilated_attention_pytorch.backends.hopper.dkv import allocate_dkv, compute_dkv, produce_dkv, query_blocks
from dilated_attention_pytorch.backends.hopper.pieces import (
    CAUSAL,
    FIRST,
    Q_AT,
    Q_ROWS,
    STRIDE,
    allocate_barriers,
    allocate_facts,
    allocate_rows,
    known,
    product_layout,
    row_descriptor,
    tma_add,
)

GROUPS = gl.constexpr(2)  # that compute dk and dv
PLACES = gl.constexpr(2)  # for gradients of scores, and for counts


@gluon.jit
def _add_dq(
    COUNTS, RESOLUTION, items, group, N, k_smem, counts_smem, facts, bars, handed,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Add to dq of the query rows of each block what the keys of an item give."""
    rows_full, rows_empty = bars[:2]
    facts_full, facts_empty = bars[7:]
    ds_smem, full, empty = handed
    O: gl.constexpr = product_layout(BLOCK_D)
    none = gl.full([BLOCK_M, BLOCK_D], 0.0, gl.float32, O)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, O))
    counter = 0
    number = 0
    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        slot = number & 1
        mbarrier.wait(facts_full.index(slot), number >> 1 & 1)
        first = known(facts, slot, FIRST).to(gl.int32)
        q_rows = known(facts, slot, Q_ROWS).to(gl.int32)
        causal = known(facts, slot, CAUSAL) != 0
        stride = known(facts, slot, STRIDE)
        begin, blocks, _, _ = query_blocks(first, q_rows, causal, BLOCK_M, GROUPS)
        for which in gl.static_range(GROUPS):
            mbarrier.wait(rows_full.index(which), number & 1)
        for member in range(group):
            at = known(facts, slot, Q_AT) + member * N.to(gl.int64)
            tma.store_wait(0)  # whoever reads the last descriptor, whose place this one takes
            rows = row_descriptor(COUNTS + at * D, q_rows, stride * D, D, BLOCK_M, BLOCK_D)
            own_resolution = RESOLUTION + at + m * stride
            for block in range(begin, blocks):
                place = counter % PLACES
                row = block * BLOCK_M
                resolution = gl.load(own_resolution + row * stride, mask=m < q_rows - row, other=0.0)
                mbarrier.wait(full.index(place), counter // PLACES & 1)
                dq = none
                for which in gl.static_range(GROUPS):
                    ds = ds_smem.index(place * GROUPS + which).permute((1, 0))
                    dq = warpgroup_mma(ds, k_smem.index(which), dq, use_acc=which > 0, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(empty.index(place), count=1)
                counts = gl.inline_asm_elementwise(
                    "cvt.rni.s32.f32 $0, $1;", "=r,f", [dq * resolution[:, None]], dtype=gl.int32, is_pure=True, pack=1
                )
                tma.store_wait(PLACES - 1)
                counts_smem.index(place).store(counts)
                fence_async_shared()
                tma_add(rows, [row, 0], counts_smem.index(place))
                counter += 1
        for which in gl.static_range(GROUPS):
            mbarrier.arrive(rows_empty.index(which), count=1)
        mbarrier.arrive(facts_empty.index(slot), count=1)
        number += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["families", "items", "N", "M", "H", "G", "parts"])
def joint_kernel(
    Q, K, V, DOUT, LSE, DELTA,
    PART_DK,  # (rows, D) float32, columns as store_part leaves them
    PART_DV, DK, DV,
    COUNTS,  # (B, H, N, D) int32: dq in quanta, added to
    RESOLUTION,  # (B, H, N) float32: quanta of 1
    TABLE, LAYOUT, OFFSETS, families, items,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    dout_stride_b, dout_stride_n, dout_stride_h,
    N, M, H, G, group, parts, scale_log2, scale,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    HELD: gl.constexpr, OVERLAP: gl.constexpr, PARTS: gl.constexpr,  # see dkv_kernel
):  # fmt: skip
    """dk and dv of the items of a table, as dkv_kernel, and dq without ``scale`` of all rows that see them, in quanta."""
    dtype: gl.constexpr = Q.dtype.element_ty
    smem, bars = allocate_dkv(dtype, GROUPS, 1, STAGES, BLOCK_M, BLOCK_D)
    counts_smem = allocate_rows(gl.int32, PLACES, BLOCK_M, BLOCK_D)
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
        (compute_dkv, (gl.constexpr(0), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS, True)),
        (compute_dkv, (gl.constexpr(1), results, items, group, G, scale_log2, scale, smem, facts, bars, handed, D, BLOCK_D, BLOCK_M, STAGES, FINAL, HELD, OVERLAP, PARTS, GROUPS, True)),
        (_add_dq, (COUNTS, RESOLUTION, items, group, N, smem[0], counts_smem, facts, bars, handed, D, BLOCK_D, BLOCK_M)),
        (produce_dkv, ((Q, K, V, DOUT), statistics, tables, families, items, group, sizes, q_strides, k_strides, v_strides, dout_strides, smem, facts, bars, D, BLOCK_D, BLOCK_M, STAGES, FINAL, PARTS, GROUPS, True)),
    ], [4, 4, 1], [200, 80, 32])  # fmt: skip
