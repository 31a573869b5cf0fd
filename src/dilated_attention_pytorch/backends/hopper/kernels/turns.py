"""Programs that add to the same rows in memory do so in a fixed order, so that sums have the same bits in every run.

Several items, which have the same query rows and different keys, add to the same rows of dq. They do so in turns, the item of
the last keys first. A counter in memory for each chunk of query rows of a tile says whose turn it is. Programs take items in
that order, so an item waits only for items that are being computed, and no wait is endless. Waits are short: consecutive
programs have a distance of one turn, and keep it from tile to tile.

The last keys come first because of causal tiles. There an item begins with the chunk of rows at the positions of its keys, and
it is the first that adds to that chunk. The item behind it has begun with the next chunk. So items that begin at the same
time hardly wait:

    chunk of rows     0   1   2   3
    keys of item 0    0   1   2   3     when it is computed by each, from the begin of the item on
    keys of item 1        0   1   2
    keys of item 2            0   1
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    FAMILY_CAUSAL,
    FAMILY_FIRST_HEAD,
    FAMILY_FIRST_PROGRAM,
    FAMILY_FIRST_SAMPLE,
    FAMILY_HEAD_ROW_STEP,
    FAMILY_HEAD_STEP,
    FAMILY_HEADS,
    FAMILY_K_HEAD_ROW_STEP,
    FAMILY_K_ROW_STRIDE,
    FAMILY_K_ROWS,
    FAMILY_K_START,
    FAMILY_Q_ROWS,
    FAMILY_Q_START,
    FAMILY_ROW_STRIDE,
    FAMILY_TILE_STEP,
    FAMILY_TILES,
    FAMILY_WIDTH,
)
from dilated_attention_pytorch.backends.gpu.kernels.primitives import find_family
from dilated_attention_pytorch.backends.hopper.kernels.common import ROWS

# The least items of a window: one and a half times the number of multiprocessors. With more tiles at a time, or more distance
# between items, their inputs no longer stay in the L2 cache.
TOGETHER = gl.constexpr(198)


@gluon.jit
def find_turn(TABLE, families, items, item, group):
    """common.find_item by keys, with the last items of a tile first, and items of several tiles in turns.

    Consecutive items of one tile would begin at the same time and then wait for each other. Here the last items of several
    tiles (a window) come first, then those before, and so on. Programs that become free at the same time take items of
    different tiles, and the next item of a tile is taken a turn later.

    Worked example: 5 tiles of 2 items in windows of 3 and 2 tiles. Tiles 0 1 2 0 1 2 3 4 3 4, items 1 1 1 0 0 0 1 1 0 0.
    """
    row = find_family(TABLE, families, item)
    index = (item - gl.load(row + FAMILY_FIRST_PROGRAM)).to(gl.int32)
    k_rows = gl.load(row + FAMILY_K_ROWS).to(gl.int32)
    turns = (k_rows + ROWS - 1) // ROWS
    heads = gl.load(row + FAMILY_HEADS).to(gl.int32)
    tiles = gl.load(row + FAMILY_TILES).to(gl.int32)
    # The items of a family end where those of the next begin, or with all.
    more = row.to(gl.int64) < (TABLE + (families - 1) * FAMILY_WIDTH).to(gl.int64)
    end = gl.load(row + FAMILY_WIDTH + FAMILY_FIRST_PROGRAM, mask=more, other=0)
    all_tiles = (gl.where(more, end, items) - gl.load(row + FAMILY_FIRST_PROGRAM)).to(gl.int32) // turns
    together = (TOGETHER + turns - 1) // turns
    # Windows of nearly the same width: a last one of a single tile would have nothing to take turns with.
    windows = gl.maximum(all_tiles // together, 1)
    base = all_tiles // windows
    wide = all_tiles - base * windows  # windows that are one tile wider, the first ones
    split = wide * (base + 1) * turns
    late = index >= split
    width = gl.where(late, base, base + 1)
    index -= gl.where(late, split, 0)
    inside = index % (width * turns)
    own = turns - 1 - inside // width
    index = gl.where(late, wide * (base + 1), 0) + index // (width * turns) * width + inside % width
    a = index % heads
    index = index // heads
    tile = index % tiles
    own_sample = index // tiles
    key_head = (gl.load(row + FAMILY_FIRST_HEAD) + a * gl.load(row + FAMILY_HEAD_STEP)).to(gl.int32)
    shift = tile * gl.load(row + FAMILY_TILE_STEP)
    q_start = gl.load(row + FAMILY_Q_START) + shift + a * gl.load(row + FAMILY_HEAD_ROW_STEP)
    k_start = gl.load(row + FAMILY_K_START) + shift + a * gl.load(row + FAMILY_K_HEAD_ROW_STEP)
    starts = q_start.to(gl.int32), k_start.to(gl.int32)
    sample = (gl.load(row + FAMILY_FIRST_SAMPLE) + own_sample).to(gl.int32)
    q_rows = gl.load(row + FAMILY_Q_ROWS).to(gl.int32)
    strides = gl.load(row + FAMILY_ROW_STRIDE).to(gl.int32), gl.load(row + FAMILY_K_ROW_STRIDE).to(gl.int32)
    causal = gl.load(row + FAMILY_CAUSAL) != 0
    both = key_head * group, key_head
    return row, own * ROWS, both, own_sample, sample, tile, starts, q_rows, k_rows, strides, causal


@gluon.constexpr_function
def _wait_instruction(PENDING, READ):
    return f"cp.async.bulk.wait_group{'.read' if READ else ''} {PENDING}; mov.b32 $0, $1;"


@gluon.jit
def wait_additions(PENDING: gl.constexpr, READ: gl.constexpr):
    """Wait until all but so many of this warp's additions are done, or (READ) have at least been read; for one warp.

    The assemblers of Triton 3.6 and 3.9 make the same instruction of both.
    """
    x = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(_wait_instruction(PENDING, READ), "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_turn(COUNTER, turn):
    """Wait until the counter says that it is this turn; for one warp that then adds."""
    now = gl.atomic_add(COUNTER, 0, sem="acquire")
    while now != turn:
        now = gl.atomic_add(COUNTER, 0, sem="acquire")
    # Additions take another path to memory than the counter: this orders them after what was just read.
    x = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def pass_turn(COUNTER, turn, own):
    """Let the next item add, after additions that are done. The last one, item 0, leaves the counter as the first one found
    it."""
    gl.atomic_xchg(COUNTER, gl.where(own == 0, 0, turn + 1), sem="release")
