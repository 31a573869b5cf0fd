"""What the Hopper kernels share: which rows a program computes, loading rows of a tile, and partial results.

A program is persistent. It stays on its multiprocessor and takes every ``num_programs``-th block of rows (an *item*) of a
launch table, in an order that gives all programs about as many rows; in joint.py it takes the next item that no program has taken. One producer warp loads rows of a tile into shared
memory. Two warp groups of four warps compute 64 rows of the item each. The tensor memory accelerator loads rows through
descriptors, which the producer makes for each tile: a base, a number of rows, a stride. So every rate, offset and ragged end
is served, and rows behind the end are 0. Making them takes as long as an item of one block. So where the tiles of a launch
have consecutive rows and whole blocks only, the forward makes one descriptor for each tensor (``whole_descriptor``).

The accelerator reads a descriptor from global memory when it loads. So each descriptor has two slots, for even and odd items.
A barrier says when an item is done and its slot may be written again.

Only the producer reads the tables; in the forward a further warp does, one item ahead. So no warp group waits for these loads
and divisions. They read the properties of an item (FACTS, PART_FACTS) from shared memory, which has two slots as well.

The programs of a later launch of a call begin as multiprocessors become free, before the launch before it is done
(programmatic dependent launch). They read nothing that it writes except the partial results they add, and dq in joint.py, and
they wait for it before that. Every launch has items, and a warp group that computes an item waits. So when a launch is done,
all launches before it are done.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_BATCH_SLICE,
    FAMILY_CHILDREN,
    FAMILY_FIRST_CHILD,
    FAMILY_FIRST_SAMPLE,
    FAMILY_TO_POSITION,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import (
    find_family,
    locate,
    own_part_row,
    part_facts,
    part_places,
)
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, MOST_LINES


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    """An instruction that Triton 3.6 has, but without a name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", _tma_add)
# Triton 3.9 renamed them.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
reshaped = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
GROUPS = gl.constexpr(2)  # warp groups that compute 64 rows each
ROWS = gl.constexpr(ITEM_ROWS)
# What the producer writes for an item, and for each partial result to be added (see primitives.part_facts).
FACTS = gl.constexpr(14)
FIRST, Q_ROWS, K_ROWS, CAUSAL, ZERO_KEYS, PLACE, LSE_PLACE, POSITION, STRIDE, CHILDREN = map(gl.constexpr, range(10))
Q_AT, K_AT, V_AT, K_STRIDE = map(gl.constexpr, range(10, 14))
PART_FACTS = gl.constexpr(7)
DESCRIPTOR_LINES = gl.constexpr(MOST_LINES)


@gluon.jit
def item_at(ORDER, ordered, index):
    """The item that comes at an index of a launch: see balance.py. Without an order, items are computed as they count."""
    return gl.load(ORDER + index, mask=index < ordered, other=index).to(gl.int32)


@gluon.jit
def find_item(TABLE, families, item, group, BY_KEYS: gl.constexpr):
    """The row of the table and the tile and rows of an item: see primitives.locate."""
    row = find_family(TABLE, families, item)
    block, member, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, k_stride, causal = locate(
        row, item, group, ROWS, BY_KEYS, gl.num_programs(0)
    )
    # 32 bits are enough for row numbers, and half the registers; addresses are computed with 64.
    key_head = key_head.to(gl.int32)
    sample = (gl.load(row + FAMILY_FIRST_SAMPLE) + own_sample).to(gl.int32)
    heads = key_head * group + member, key_head
    starts = q_start.to(gl.int32), k_start.to(gl.int32)
    strides = stride.to(gl.int32), k_stride.to(gl.int32)
    return row, block * ROWS, heads, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal


@gluon.jit
def let_next_begin():
    """Let programs of the next launch of this call start on multiprocessors that this one leaves; called by one warp."""
    gdc_launch_dependents()


@gluon.jit
def end_together():
    """Synchronise the threads of a warp at the end of its work.

    The forward's producer ends with it. Triton 3.6 then assembles the producer without loops over diverged threads, and the
    forward is faster: docs/kernels_history.md has the measurements, and says what they do not explain.
    """
    x = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_last_launch():
    """Wait until the launch before this one is done: its partial results are added next, or its sums are added to."""
    gdc_wait()


@gluon.jit
def address(BASE, strides, sample, start, head):
    """The address of row ``start`` of a head of a sample."""
    return BASE + element(strides, sample, start, head)


@gluon.jit
def element(strides, sample, start, head):
    """The number of the first element of row ``start`` of a head of a sample."""
    return sample.to(gl.int64) * strides[0] + start.to(gl.int64) * strides[1] + head.to(gl.int64) * strides[2]


@gluon.jit
def key_blocks(first, k_rows, causal, BLOCK_N: gl.constexpr, OWN_ROWS: gl.constexpr = ITEM_ROWS):
    """How many blocks of keys the rows of an item from ``first`` on see, and how many of these need no mask."""
    seen = gl.where(causal, gl.minimum(first + OWN_ROWS, k_rows), k_rows)
    clear = gl.where(causal, gl.minimum(first, k_rows), k_rows)
    return (seen + BLOCK_N - 1) // BLOCK_N, clear // BLOCK_N


@gluon.jit
def seen_keys(rows, k_rows, causal):
    """How many keys of its tile each query row sees. Causal tiles are square: rows behind the end see no further keys."""
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


@gluon.constexpr_function
def product_layout(COLUMNS):
    """The layout of the result of a product of 64 rows in the registers of a warp group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])


@gluon.jit
def row_descriptor(pointer, rows, step, D: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """``rows`` rows of D elements, ``step`` elements apart, to be loaded in blocks."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK_D], pointer.dtype.element_ty)
    return tma.make_tensor_descriptor(pointer, [rows, D], [step.to(gl.int64), 1], [BLOCK, BLOCK_D], layout)


@gluon.jit
def whole_descriptor(BASE, stride, D: gl.constexpr, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr):
    """All rows of a tensor, with the columns of all heads, for blocks that are wholly inside of their tiles."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK_D], BASE.dtype.element_ty)
    gl.static_assert(D == BLOCK_D, "columns behind the head size would be those of the next head")
    return tma.make_tensor_descriptor(BASE, [DESCRIPTOR_LINES, stride], [stride.to(gl.int64), 1], [BLOCK, BLOCK_D], layout)


@gluon.jit
def line_and_column(strides, sample, start, head):
    """Where a row of a head is under ``whole_descriptor``: the line, and above 32 bits the column."""
    line = sample * (strides[0] // strides[1]).to(gl.int32) + start
    return line.to(gl.int64) + (head.to(gl.int64) * strides[2] << 32)


@gluon.jit
def load_rows(desc, first, full, smem, index, column=0):
    """Start to load a block of rows; the barrier ``full`` completes when it is loaded."""
    mbarrier.expect(full.index(index), desc.block_type.nbytes)
    tma_load(desc, [first, column], full.index(index), smem.index(index))


@gluon.jit
def allocate_numbers(BUFFERS: gl.constexpr, BLOCK: gl.constexpr):
    """Shared memory for a number per row."""
    return gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copy_statistics(statistics, first, rows, stride, lse_smem, delta_smem, full, BLOCK: gl.constexpr):
    """Start to load lse and delta of rows from ``first`` on, the last row again behind the end. All producer threads arrive."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers = gl.minimum(first + gl.arange(0, BLOCK, LINE), rows - 1) * stride
    copy_elements(lse_smem, statistics[0] + numbers)
    copy_elements(delta_smem, statistics[1] + numbers)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def load_keys(
    k_desc, v_desc, blocks, counter, smem, bars, k_at, v_at, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Load keys and values, block by block as buffers become free. Returns the number of blocks so far.

    ``k_at`` and ``v_at`` are the line and the column where the first block begins.
    """
    k_smem, v_smem = smem
    k_full, k_empty, v_full, v_empty = bars
    for block in range(blocks):
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        load_rows(k_desc, k_at[0] + block * BLOCK_N, k_full, k_smem, stage, k_at[1])
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        load_rows(v_desc, v_at[0] + block * BLOCK_N, v_full, v_smem, stage, v_at[1])
        counter += 1
    return counter


@gluon.jit
def element_mask(inside, d, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Which elements of a block of rows exist."""
    mask = inside[:, None] & (d >= 0)[None, :]
    if D < BLOCK_D:
        mask = inside[:, None] & (d < D)[None, :]
    return mask


@gluon.jit
def allocate_facts(PARTS: gl.constexpr):
    """Shared memory for the facts of an item and of each partial result to be added, for even and odd items."""
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int64, [2 * FACTS, 1], LINES),
        gl.allocate_shared_memory(gl.int64, [2 * PART_FACTS, PARTS if PARTS > 0 else 1], LINES),
    )


@gluon.jit
def leave(facts, slot, which: gl.constexpr, value):
    """Write one of the facts of an item; called by the warp that reads the tables."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    facts[0].index(slot * FACTS + which).store(gl.full([1], 0, gl.int64, ONE) + value)


@gluon.jit
def known(facts, slot, which: gl.constexpr, WARPS: gl.constexpr = 4):
    """Read one of the facts of an item; called by a warp group of four warps, or by one warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(facts[0].index(slot * FACTS + which).load(ONE), 0)


@gluon.jit
def result_row(row, own_sample, sample, head, tile, start, first, length, heads, FINAL: gl.constexpr):
    """Where the first row of an item is written: a row of the result (B, length, heads), or a row of the partial results."""
    if FINAL:  # these tiles have all rows: the stride is 1
        return (sample.to(gl.int64) * length + start + first) * heads + head
    else:
        return own_part_row(row, own_sample, head, heads, tile) + first


@gluon.jit
def look_up_parts(tables, row, own_sample, head, heads, key_head, G, parts, PARTS: gl.constexpr):
    """The part_facts of all partial results to be added to an item, each computed by one thread of a warp."""
    LAYOUT, OFFSETS = tables[1], tables[2]
    child = gl.arange(0, PARTS, gl.BlockedLayout([1], [32], [1], [0]))
    part = gl.load(row + FAMILY_FIRST_CHILD) + gl.minimum(
        child, gl.load(row + FAMILY_CHILDREN) - 1
    )  # the last one again where there are no more
    return part_facts(LAYOUT, OFFSETS, part, parts, gl.load(row + FAMILY_BATCH_SLICE), own_sample, head, heads, key_head, G)


@gluon.jit
def leave_parts(facts, slot, row, start, first, stride, found):
    """Write what look_up_parts has found, and the position of the item's first row; STRIDE is written separately."""
    leave(facts, slot, POSITION, start + first * stride + gl.load(row + FAMILY_TO_POSITION))
    leave(facts, slot, CHILDREN, gl.load(row + FAMILY_CHILDREN))
    for i in gl.static_range(PART_FACTS):
        facts[1].index(slot * PART_FACTS + i).store(found[i].to(gl.int64))


@gluon.jit
def _known_of_part(flat, slot, which: gl.constexpr, child, PARTS: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(flat.index((slot * PART_FACTS + which) * PARTS + child).load(ONE), 0)


@gluon.jit
def find_part(facts, slot, child, positions, inside, PARTS: gl.constexpr):
    """Where a partial result to be added has these positions, and which of them it has."""
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = reshaped(facts[1], gl.int64, [2 * PART_FACTS * PARTS, 1], LINES)
    first = _known_of_part(flat, slot, 0, child, PARTS)
    capacity = _known_of_part(flat, slot, 1, child, PARTS).to(gl.int32)
    w = _known_of_part(flat, slot, 2, child, PARTS).to(gl.int32)
    r = _known_of_part(flat, slot, 3, child, PARTS).to(gl.int32)
    offset = _known_of_part(flat, slot, 4, child, PARTS).to(gl.int32)
    w_inverse = _known_of_part(flat, slot, 5, child, PARTS)
    r_inverse = _known_of_part(flat, slot, 6, child, PARTS)
    places, there = part_places(first, capacity, w, r, offset, w_inverse, r_inverse, positions)
    return places, there & inside


@gluon.jit
def item_positions(facts, slot, numbers):
    """The positions in their sequence of rows of an item, given by their numbers in it."""
    return known(facts, slot, POSITION).to(gl.int32) + numbers * known(facts, slot, STRIDE).to(gl.int32)


@gluon.constexpr_function
def in_fours(head_dim):
    """Whether partial results have the order of columns that ``store_part`` describes: if columns are a multiple of 16."""
    return head_dim % 16 == 0


@gluon.constexpr_function
def whole_vectors(COLUMNS):
    """The same rows in the same threads as ``product_layout``, but 4 neighbouring columns in each thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]] + [[0, c] for c in (16, 32, 64) if c < COLUMNS],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, COLUMNS],
    )


@gluon.jit
def _by_row(x, L: gl.constexpr):
    """A number per row, for rows in another layout that has them in the same threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)


@gluon.constexpr_function
def _part_layout(D, BLOCK_D):
    return whole_vectors(BLOCK_D) if in_fours(D) else product_layout(BLOCK_D)


@gluon.jit
def load_part(PARTS, places, there, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Rows of partial results in the order of columns of ``store_part``; 0 where there is none."""
    L: gl.constexpr = _part_layout(D, BLOCK_D)
    c = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L))
    pointers = PARTS + _by_row(places, L)[:, None] * D + c[None, :]
    x = gl.load(pointers, mask=element_mask(_by_row(there, L), c, D, BLOCK_D), other=0.0)
    if in_fours(D):
        x = x.reshape([64, BLOCK_D // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([64, BLOCK_D])
    return gl.convert_layout(x, product_layout(BLOCK_D), assert_trivial=True)


@gluon.jit
def store_part(PARTS, x, first, numbers, inside, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Write float32 rows of partial results from row ``first`` on.

    The 4 of every 16 columns that a thread has are adjacent, so that it writes and reads 16 bytes at a time without an
    exchange between threads. Only ``load_part`` and the portable kernels that only add (``IN_FOURS``) read them.
    """
    L: gl.constexpr = _part_layout(D, BLOCK_D)
    c = gl.arange(0, BLOCK_D, gl.SliceLayout(0, L))
    if in_fours(D):
        x = x.reshape([64, BLOCK_D // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, BLOCK_D])
    pointers = PARTS + first * D + (_by_row(numbers, L) * D)[:, None] + c[None, :]
    gl.store(pointers, gl.convert_layout(x, L, assert_trivial=True), mask=element_mask(_by_row(inside, L), c, D, BLOCK_D))


# Four words a, b, c, d of each of four neighbouring threads, transposed: thread 1 gets the four b, in the order of threads.
_TRANSPOSE = gl.constexpr("""{
.reg .u32 lane, one, two, s, t;
.reg .pred odd, high;
mov.u32 lane, %laneid;
and.b32 one, lane, 1;
and.b32 two, lane, 2;
setp.ne.u32 odd, one, 0;
setp.ne.u32 high, two, 0;
.reg .u32 a, b, c, d;
mov.b32 a, $4; mov.b32 b, $5; mov.b32 c, $6; mov.b32 d, $7;
selp.b32 s, a, b, odd;
shfl.sync.bfly.b32 t, s, 1, 31, -1;
selp.b32 a, t, a, odd;
selp.b32 b, b, t, odd;
selp.b32 s, c, d, odd;
shfl.sync.bfly.b32 t, s, 1, 31, -1;
selp.b32 c, t, c, odd;
selp.b32 d, d, t, odd;
selp.b32 s, a, c, high;
shfl.sync.bfly.b32 t, s, 2, 31, -1;
selp.b32 a, t, a, high;
selp.b32 c, c, t, high;
selp.b32 s, b, d, high;
shfl.sync.bfly.b32 t, s, 2, 31, -1;
selp.b32 b, t, b, high;
selp.b32 d, d, t, high;
mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;
}""")


@gluon.jit
def _whole_words(x, BLOCK_D: gl.constexpr):
    """Half-precision rows as 32-bit words, four neighbouring ones in each thread; a product leaves one."""
    PIECES: gl.constexpr = BLOCK_D // 32
    # Dimensions: 32 columns, the columns of 8 that a product has (four threads have two each), and which of these.
    x = x.to(gl.int16, bitcast=True).reshape([64, PIECES, 2, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5))
    low, high = x.split()
    words = gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    even, odd = words.split()
    a, c = even.split()
    b, d = odd.split()
    a, b, c, d = gl.inline_asm_elementwise(
        _TRANSPOSE,
        "=r,=r,=r,=r,r,r,r,r",
        [a, b, c, d],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    words = gl.join(gl.join(a, c), gl.join(b, d))  # (64, groups, 4 threads, second bit, first bit)
    return words.reshape([64, BLOCK_D // 2])


@gluon.jit
def load_result(OUT, start, step, numbers, inside, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Rows as ``store_rows`` writes them, in float32."""
    c = gl.arange(0, BLOCK_D, gl.SliceLayout(0, product_layout(BLOCK_D)))
    pointers = OUT + start + (numbers * step)[:, None] + c[None, :]
    return gl.load(pointers, mask=element_mask(inside, c, D, BLOCK_D), other=0.0).to(gl.float32)


@gluon.jit
def store_rows(OUT, x, start, step, numbers, inside, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Write rows from element ``start`` on, with a stride of ``step`` elements.

    Half precision: four threads exchange their elements of 32 columns. Otherwise each would write 4 bytes at a time.
    """
    if OUT.dtype.element_ty == gl.float32:  # partial results of a ring
        c = gl.arange(0, BLOCK_D, gl.SliceLayout(0, product_layout(BLOCK_D)))
        pointers = OUT + start + (numbers * step)[:, None] + c[None, :]
        gl.store(pointers, x, mask=element_mask(inside, c, D, BLOCK_D))
    else:
        WORDS: gl.constexpr = BLOCK_D // 2
        L: gl.constexpr = whole_vectors(WORDS)
        words = gl.convert_layout(_whole_words(x.to(OUT.dtype.element_ty), BLOCK_D), L, assert_trivial=True)
        c = gl.arange(0, WORDS, gl.SliceLayout(0, L))
        base = (OUT + start).to(gl.pointer_type(gl.int32), bitcast=True)
        pointers = base + (_by_row(numbers, L) * (step // 2))[:, None] + c[None, :]
        gl.store(pointers, words, mask=element_mask(_by_row(inside, L), c, D // 2, WORDS))
