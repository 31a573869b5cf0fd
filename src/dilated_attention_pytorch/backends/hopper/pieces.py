"""What the Hopper kernels share: which rows a program works on, loading rows of a tile, and partial results.

A program is persistent: it stays on its multiprocessor and takes every ``num_programs``-th block of rows (an *item*) of a
launch table. One producer warp loads rows of a tile into shared memory; two *groups* of four warps compute 64 of the item's
rows each. Rows are loaded by the tensor memory accelerator through descriptors that the producer makes for the tile at
hand: a base, a number of rows, a stride. So every rate, offset and ragged end is served, and rows behind the end are 0.

A descriptor lies in memory that belongs to its place in the program, and the accelerator reads it when it loads. Hence two
places, for even and odd items, and a barrier that says when an item is done and its place may be written again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from dilated_attention_pytorch.backends.triton.primitives import find_family, locate, part_rows

# Triton 3.9 renamed it.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
ROWS = gl.constexpr(128)  # of an item: two groups of 64


@gluon.jit
def find_item(TABLE, families, item, group, BY_KEYS: gl.constexpr):
    """The row of the table and the place of an item: see primitives.locate."""
    row = find_family(TABLE, families, item)
    block, member, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, causal = locate(
        row, item, group, ROWS, BY_KEYS, True
    )
    # 32 bits are enough for row numbers, and half the registers; addresses are computed with 64.
    key_head = key_head.to(gl.int32)
    sample = (gl.load(row + 1) + own_sample).to(gl.int32)
    heads = key_head * group + member, key_head
    starts = q_start.to(gl.int32), k_start.to(gl.int32)
    return row, block * ROWS, heads, own_sample, sample, tile, starts, q_rows, k_rows, stride.to(gl.int32), causal


@gluon.jit
def address(BASE, strides, sample, start, head):
    """Where row ``start`` of a head of a sample lies."""
    return BASE + sample.to(gl.int64) * strides[0] + start.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]


@gluon.jit
def key_blocks(first, k_rows, causal, BLOCK_N: gl.constexpr):
    """How many blocks of keys the rows from ``first`` on see, and how many of these need no mask."""
    seen = gl.where(causal, gl.minimum(first + ROWS, k_rows), k_rows)
    clear = gl.where(causal, gl.minimum(first, k_rows), k_rows)
    return (seen + BLOCK_N - 1) // BLOCK_N, clear // BLOCK_N


@gluon.jit
def seen_keys(rows, k_rows, causal):
    """How many keys of its tile each query row sees. Causal tiles are square: rows behind the end see nothing new."""
    return gl.where(causal, gl.minimum(rows + 1, k_rows), k_rows)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that complete a phase after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def allocate_rows(dtype: gl.constexpr, BUFFERS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """Shared memory for blocks of rows, in the layout that the tensor cores read."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK_D], dtype)
    return gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, BLOCK_D], layout)


@gluon.jit
def row_descriptor(pointer, rows, step, D: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """``rows`` rows of D elements, ``step`` elements apart, to be loaded in blocks."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK_D], pointer.dtype.element_ty)
    return tma.make_tensor_descriptor(pointer, [rows, D], [step.to(gl.int64), 1], [BLOCK, BLOCK_D], layout)


@gluon.jit
def load_rows(desc, first, full, smem, index):
    """Start to load a block of rows; the barrier ``full`` says when it is there."""
    mbarrier.expect(full.index(index), desc.block_type.nbytes)
    tma_load(desc, [first, 0], full.index(index), smem.index(index))


@gluon.jit
def hold(smem, layout: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """The left side of a product: read from shared memory once, or by each product."""
    if IN_REGISTERS:
        return smem.load(layout)
    else:
        return smem


@gluon.jit
def wait_held(pending: gl.constexpr, product, left, IN_REGISTERS: gl.constexpr):
    """Wait for a product; a left side in registers is named, and so lasts.

    The assembler of Triton 3.6 gives the registers of a left side that does not change in a loop to other values inside
    of the loop. A value that comes out of the wait changes, for all it knows.
    """
    if IN_REGISTERS:
        return warpgroup_mma_wait(pending, deps=(product, left))
    else:
        return warpgroup_mma_wait(pending, deps=(product,)), left


@gluon.jit
def tile_positions(row, start, first, stride, numbers):
    """Where rows of a tile lie in their sequence."""
    return start + first * stride + gl.load(row + 17).to(gl.int32) + numbers * stride


@gluon.jit
def element_mask(inside, d, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Which elements of a block of rows exist."""
    mask = inside[:, None] & (d >= 0)[None, :]
    if D < BLOCK_D:
        mask = inside[:, None] & (d < D)[None, :]
    return mask


@gluon.jit
def find_part(LAYOUT, OFFSETS, row, child, parts, own_sample, heads, result_heads, G, positions, inside):
    """Where a child of the item's group keeps these positions, and which of them it has."""
    there_are = child < gl.load(row + 24)
    part = gl.load(row + 23) + gl.where(there_are, child, 0)
    sequence = gl.load(row + 16)
    head = heads[0]
    places, there = part_rows(
        LAYOUT, OFFSETS, part, parts, sequence, own_sample, head, result_heads, heads[1], G, positions
    )
    return places, there & inside & there_are


@gluon.jit
def load_part(PARTS, places, there, d, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Rows of parts, 0 where there is none."""
    return gl.load(PARTS + places[:, None] * D + d[None, :], mask=element_mask(there, d, D, BLOCK_D), other=0.0)


@gluon.jit
def store_rows(OUT, x, start, step, numbers, inside, d, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Write rows that lie ``step`` elements apart from element ``start`` on."""
    pointers = OUT + start + (numbers * step)[:, None] + d[None, :]
    gl.store(pointers, x.to(OUT.dtype.element_ty), mask=element_mask(inside, d, D, BLOCK_D))
