"""What the kernels share: finding a program's tile, dropout, block loads, listed blocks.

Names: ``m`` counts query rows and ``n`` key rows of a tile, ``d`` the head size; ``lse2`` is in base 2. Row numbers of
tensors and pointers are int64, row numbers within a tile int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_CAPACITY,
    FAMILY_CAUSAL,
    FAMILY_FIRST_HEAD,
    FAMILY_FIRST_PROGRAM,
    FAMILY_HEAD_ROW_STEP,
    FAMILY_HEAD_STEP,
    FAMILY_HEADS,
    FAMILY_K_HEAD_ROW_STEP,
    FAMILY_K_ROW_STRIDE,
    FAMILY_K_ROWS,
    FAMILY_K_START,
    FAMILY_OWN_NUMBER,
    FAMILY_OWN_SEGMENT,
    FAMILY_PARTIAL_BASE,
    FAMILY_Q_ROWS,
    FAMILY_Q_START,
    FAMILY_ROW_STRIDE,
    FAMILY_SEGMENTS,
    FAMILY_TILE_STEP,
    FAMILY_TILES,
    FAMILY_WIDTH,
    LAYOUT_BASE,
    LAYOUT_CAPACITY,
    LAYOUT_FIRST_NUMBER,
    LAYOUT_FIRST_SEGMENT,
    LAYOUT_R,
    LAYOUT_R_INVERSE,
    LAYOUT_SEGMENTS,
    LAYOUT_W,
    LAYOUT_W_INVERSE,
    LAYOUT_WIDTH,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LAST = tl.constexpr(2**31 - 1)  # behind every position


@triton.jit
def find_family(table, families, program):
    """The row of the table whose programs contain this one: the last whose first program is not larger."""
    low = families * 0
    high = families - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(table + middle * FAMILY_WIDTH + FAMILY_FIRST_PROGRAM)
        low = tl.where(first <= program, middle, low)
        high = tl.where(first <= program, high, middle - 1)
    return table + low * FAMILY_WIDTH


@triton.jit
def locate(row, program, group, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr, together=None):
    """Which block of which head, tile and sample a program computes.

    A family of 2 samples, 3 tiles, 4 heads and 5 blocks has 120 programs; program 119 is the last block counted (blocks of
    queries count backwards: under causality the last one is the longest) of head 3 of tile 2 of sample 1.

    A persistent program computes every ``together``-th item. The count of blocks then starts one block later in every
    tile, so that each program computes long and short blocks. If a round of ``together`` items has a multiple of ``blocks``
    tiles, each program would compute the same block in every round. Then the count starts one further block later in every
    round.
    """
    # 32 bits: programs are fewer than 2**31, and 64-bit division is slow.
    index = (program - tl.load(row + FAMILY_FIRST_PROGRAM)).to(tl.int32)
    rows = tl.load(row + (FAMILY_K_ROWS if BY_KEYS else FAMILY_Q_ROWS)).to(tl.int32)
    blocks = (rows + BLOCK - 1) // BLOCK
    count = index % blocks
    index = index // blocks
    if together is not None:
        round_tiles = tl.maximum(together // blocks, 1)
        rounds = tl.where(round_tiles % blocks == 0, index // round_tiles, 0)
        count = (count + index + rounds) % blocks
    block = count if BY_KEYS else blocks - 1 - count
    member = index * 0
    if not BY_KEYS:
        member = index % group
        index = index // group
    heads = tl.load(row + FAMILY_HEADS).to(tl.int32)
    a = index % heads
    index = index // heads
    tiles = tl.load(row + FAMILY_TILES).to(tl.int32)
    tile = index % tiles
    own_sample = index // tiles  # within its sequence
    key_head = tl.load(row + FAMILY_FIRST_HEAD) + a * tl.load(row + FAMILY_HEAD_STEP)
    shift = tile * tl.load(row + FAMILY_TILE_STEP)
    q_start = tl.load(row + FAMILY_Q_START) + shift + a * tl.load(row + FAMILY_HEAD_ROW_STEP)
    k_start = tl.load(row + FAMILY_K_START) + shift + a * tl.load(row + FAMILY_K_HEAD_ROW_STEP)
    q_rows = tl.load(row + FAMILY_Q_ROWS).to(tl.int32)
    k_rows = tl.load(row + FAMILY_K_ROWS).to(tl.int32)
    stride = tl.load(row + FAMILY_ROW_STRIDE)
    k_stride = tl.load(row + FAMILY_K_ROW_STRIDE)
    causal = tl.load(row + FAMILY_CAUSAL) != 0
    return block, member, key_head, own_sample, tile, q_start, q_rows, k_start, k_rows, stride, k_stride, causal


@triton.jit
def own_part_row(row, own_sample, head, heads, tile):
    """The row of the first row of a tile in the partial results; its rows follow one another."""
    segment = (own_sample * heads + head) * tl.load(row + FAMILY_SEGMENTS) + tl.load(row + FAMILY_OWN_SEGMENT) + tile
    return tl.load(row + FAMILY_PARTIAL_BASE) + segment * tl.load(row + FAMILY_CAPACITY) + tl.load(row + FAMILY_OWN_NUMBER)


@triton.jit
def part_facts(LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, head, heads, key_head, key_heads):
    """What is the same for all rows of a head of a sample in the layout of a bundle's partial results: see launch_plan.py.

    Returns the row of row number 0 of segment 0, capacity, segment length, rate, offset, inverses of length and rate.
    """
    entry = LAYOUT + (batch_slice * parts + part) * LAYOUT_WIDTH
    capacity = tl.load(entry + LAYOUT_CAPACITY)
    base = tl.load(entry + LAYOUT_BASE)
    segment = (own_sample * heads + head) * tl.load(entry + LAYOUT_SEGMENTS) - tl.load(entry + LAYOUT_FIRST_SEGMENT)
    first = base + segment * capacity
    first -= tl.load(entry + LAYOUT_FIRST_NUMBER)
    offset = tl.load(OFFSETS + part * key_heads + key_head).to(tl.int32)
    w = tl.load(entry + LAYOUT_W).to(tl.int32)
    r = tl.load(entry + LAYOUT_R).to(tl.int32)
    return first, capacity.to(tl.int32), w, r, offset, tl.load(entry + LAYOUT_W_INVERSE), tl.load(entry + LAYOUT_R_INVERSE)


@triton.jit
def quotient(x, inverse):
    """``x // divisor`` for x >= 0, by ``launch_plan.inverse(divisor)``: three instructions instead of twenty."""
    factor = (inverse & 0xFFFFFFFF).to(tl.uint64)
    shift = (inverse >> 32).to(tl.uint32)
    return ((((x.to(tl.uint32) * 2).to(tl.uint64) * factor) >> 32).to(tl.uint32) >> shift).to(tl.int32)


@triton.jit
def part_places(first, capacity, w, r, offset, w_inverse, r_inverse, positions):
    """Where a bundle keeps its results for these positions, and which of them it has."""
    segment = quotient(positions, w_inverse)
    inside = positions - segment * w - offset
    number = quotient(tl.maximum(inside, 0), r_inverse)
    return first + segment.to(tl.int64) * capacity + number, (inside >= 0) & (inside == number * r)


@triton.jit
def part_rows(LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, head, heads, key_head, key_heads, positions):
    """``part_places`` of a bundle by its number."""
    first, capacity, w, r, offset, w_inverse, r_inverse = part_facts(
        LAYOUT, OFFSETS, part, parts, batch_slice, own_sample, head, heads, key_head, key_heads
    )
    return part_places(first, capacity, w, r, offset, w_inverse, r_inverse, positions)


@triton.jit
def load_parts(PARTS, places, there, D: tl.constexpr, BLOCK_D: tl.constexpr, IN_FOURS: tl.constexpr):
    """Rows of partial results, 0 where there is none.

    ``IN_FOURS``: the Hopper kernels wrote them (``store_part`` in hopper/kernels/common.py). Of every 16 columns, the four
    that a thread has of a product's result are next to one another: 0, 1, 8, 9, then 2, 3, 10, 11, and so on.
    """
    d = tl.arange(0, BLOCK_D)
    elements = places[:, None] * D
    if IN_FOURS:
        elements += (d // 16 * 16 + d // 2 % 4 * 4 + d // 8 % 2 * 2 + d % 2)[None, :]
    else:
        elements += d[None, :]
    return tl.load(PARTS + elements, mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def row_offsets(step, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of consecutive rows of a tile; int32 unless a block may span 2**31 elements (WIDE)."""
    return tl.arange(0, BLOCK) * (step if WIDE else step.to(tl.int32))


@triton.jit
def block_offsets(step, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets (BLOCK, BLOCK_D) of consecutive rows of a tile."""
    return row_offsets(step, BLOCK, WIDE)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_block(pointer, offsets, rows_left, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, CUT: tl.constexpr):
    """A block of rows, zero behind the ``rows_left`` (only if CUT) and behind the head size."""
    if CUT:
        mask = (tl.arange(0, BLOCK) < rows_left)[:, None]
        if D < BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
        return tl.load(pointer + offsets, mask=mask, other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointer + offsets, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        return tl.load(pointer + offsets)


@triton.jit
def store_block(OUT, start, offsets, inside, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the rows of a block that are ``inside``, without what is behind the head size."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(OUT + start + offsets, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def load_sums(SUMS, start, offsets, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows of a result that are ``inside``, as store_block writes them, in float32."""
    mask = inside[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(SUMS + start + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_listed(LIST, place, stop, BLOCK_SIZE: tl.constexpr):
    """The number of the listed block at place ``place``, in rows, of blocks that follow one another; 0 behind the end."""
    return tl.load(LIST + place // BLOCK_SIZE, mask=place < stop, other=0)


@triton.jit
def wait_for_loads():
    """Let all threads end their loads before any thread stores to the same addresses.

    Several threads load the number of a row: a layout repeats it, or Triton loads it again in another layout
    instead of exchanging it. Without a barrier, a thread may load what another warp has stored.
    """
    tl.debug_barrier()


@triton.jit
def load_places(own_places, rows, inside):
    """The places in the ordered sequence of a head's rows, for those that are ``inside``."""
    return tl.load(own_places + rows, mask=inside, other=0)


@triton.jit
def mix(x):
    """The 32-bit finaliser of MurmurHash3, see dropout.mix."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def dropout_stream(seed_pointer, sample, head, branch):
    """The part of the hash that is the same for a whole tile."""
    seed = tl.load(seed_pointer).to(tl.uint64)
    stream = mix(mix(seed.to(tl.uint32)) + (seed >> 32).to(tl.uint32))
    return mix(mix(mix(stream + sample.to(tl.uint32)) + head.to(tl.uint32)) + branch.to(tl.uint32))


@triton.jit
def kept(stream, i, j, threshold):
    """Which pairs dropout keeps, for positions ``i`` and ``j`` that broadcast: see dropout.words."""
    i = i.to(tl.uint32)
    row = mix(stream + i * 0x9E3779B1)
    other = mix(stream ^ 0x7F4A7C15) + i * 0x2C1B3C6D
    x = row ^ (j.to(tl.uint32) * 0x85157AF5)
    x = (x ^ (x >> 16)) * 0x85EBCA6B + other
    x = (x ^ (x >> 15)) * 0xC2B2AE35
    return x >= threshold.to(tl.uint32)
