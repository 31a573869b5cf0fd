"""What the Hopper kernels over block lists share: items of a table of blocks, and which listed rows are masked.

The tables are those of the portable kernels (backends/gpu/block_tables.py). Listed rows are counted one after the other:
with blocks of 128 and the list 3, 7, listed row 130 is row 7 * 128 + 2 of the sequence. Lists ascend, so only the first and
the last entry may need a mask. An empty list of keys is computed as one block of which no key is seen.

Only the producer reads the tables. It writes the facts of an item to shared memory for the warp groups, as in common.py.

Lists differ in length. So programs take the next item by a counter in memory, while the dilated kernels distribute items
beforehand. Tables begin with long lists, so all programs end at about the same time. The result of an item does not depend
on the program that computes it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dilated_attention_pytorch.backends.gpu.kernels.columns import (
    BLOCK_FIRST_LIST,
    BLOCK_K_LENGTH,
    BLOCK_K_ROW,
    BLOCK_LIST_STEP,
    BLOCK_NUMBER,
    BLOCK_Q_LENGTH,
    BLOCK_Q_ROW,
    BLOCK_SAMPLE,
    BLOCK_WIDTH,
)
from dilated_attention_pytorch.backends.hopper.kernels.common import ROWS, known, leave, load_rows

# What the producer writes for an item; not every kernel reads all of it. PLACE is the number of its first row in a tensor
# (B, rows, heads), STATISTICS_PLACE that in statistics (B, heads, rows). LENGTH is that of the rows of items, LISTED_LENGTH that
# of the rows that are listed.
FIRST, LENGTH, PLACE, STATISTICS_PLACE, COUNT, FIRST_ENTRY, LAST_ENTRY, LIST_AT, LISTED_LENGTH = map(gl.constexpr, range(9))


@gluon.jit
def take_item(TAKEN, items):
    """The next item that no program has taken, or -1."""
    item = gl.atomic_add(TAKEN, 1, sem="relaxed")
    return gl.where(item < items, item, -1)


@gluon.jit
def find_block_item(TABLE, rows, item, BLOCK_SIZE: gl.constexpr):
    """The table row of an item, its head, the first of its 128 rows, its sample, and its sequence: rows of the tensors of
    queries and of keys where it starts, and how many of each it has."""
    PARTS: gl.constexpr = BLOCK_SIZE // ROWS
    tile = item % (rows * PARTS)
    head = item // (rows * PARTS)
    row = TABLE + tile // PARTS * BLOCK_WIDTH
    sample = gl.load(row + BLOCK_SAMPLE).to(gl.int32)
    first = gl.load(row + BLOCK_NUMBER).to(gl.int32) * BLOCK_SIZE + tile % PARTS * ROWS
    starts = gl.load(row + BLOCK_Q_ROW).to(gl.int32), gl.load(row + BLOCK_K_ROW).to(gl.int32)
    lengths = gl.load(row + BLOCK_Q_LENGTH).to(gl.int32), gl.load(row + BLOCK_K_LENGTH).to(gl.int32)
    return row, head, first, sample, starts, lengths


@gluon.jit
def find_list(tables, row, head, first, length):
    """The entries of a head's list: how many (none for rows behind the sequence), where, the first and the last."""
    COUNTS, STARTS, INDICES = tables[1:4]
    number = gl.load(row + BLOCK_FIRST_LIST) + head.to(gl.int64) * gl.load(row + BLOCK_LIST_STEP)
    at = gl.load(STARTS + number)
    LIST = INDICES + at
    count = gl.where(first < length, gl.load(COUNTS + number), 0)
    some = count > 0
    first_entry = gl.load(LIST, mask=some, other=0)
    return count, at, first_entry, gl.load(LIST + gl.maximum(count - 1, 0), mask=some, other=0)


@gluon.jit
def leave_item(facts, slot, first, length, listed_length, sample, start, head, rows, heads):
    """Write which rows an item has, and where its results go. Its sequence starts at row ``start`` of (B, rows, heads)."""
    row = start + first
    leave(facts, slot, FIRST, first)
    leave(facts, slot, LENGTH, length)
    leave(facts, slot, LISTED_LENGTH, listed_length)
    leave(facts, slot, PLACE, (sample.to(gl.int64) * rows + row) * heads + head)
    leave(facts, slot, STATISTICS_PLACE, (sample.to(gl.int64) * heads + head) * rows + row)


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_rows(RESULT, place, rows, heads, D: gl.constexpr):
    """Bring the rows to which the warp groups will add an item into the L2 cache. Called by the producer.

    ``place`` is the number of the first row in a tensor (B, rows, heads) of float32. ``rows`` remain in its sequence. The last
    row of the sequence stands for the rows behind it.
    """
    LINES: gl.constexpr = D * 4 // 128
    numbers = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    elements = (place + gl.minimum(numbers, rows - 1) * heads) * D
    for line in gl.static_range(LINES):
        _prefetch(RESULT + elements + line * 32)


@gluon.jit
def prefetch_numbers(NUMBERS, place, rows):
    """``prefetch_rows`` for one float32 number of each row, which follow one another from ``place`` on."""
    numbers = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    _prefetch(NUMBERS + place + gl.minimum(numbers, rows - 1))


@gluon.jit
def leave_list(facts, slot, count, first_entry, last_entry):
    """Write the facts of a list for the warp groups: not its entries, which only the producer loads."""
    leave(facts, slot, COUNT, count)
    leave(facts, slot, FIRST_ENTRY, first_entry)
    leave(facts, slot, LAST_ENTRY, last_entry)


@gluon.jit
def leave_end(facts, number, full, empty):
    """Write that no item follows."""
    slot = number & 1
    mbarrier.wait(empty.index(slot), (number >> 1 & 1) ^ 1)
    leave(facts, slot, COUNT, -1)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def wait_for_item(facts, number, full):
    """Wait for the facts of the next item; returns whether there is one. Called by the warp groups."""
    slot = number & 1
    mbarrier.wait(full.index(slot), number >> 1 & 1)
    return known(facts, slot, COUNT) >= 0


@gluon.jit
def known_list(facts, slot, WARPS: gl.constexpr = 4):
    """How many entries a list has, its first and its last."""
    return (
        known(facts, slot, COUNT, WARPS).to(gl.int32),
        known(facts, slot, FIRST_ENTRY, WARPS).to(gl.int32),
        known(facts, slot, LAST_ENTRY, WARPS).to(gl.int32),
    )


@gluon.jit
def listed_row(LIST, place, count, BLOCK_SIZE: gl.constexpr):
    """The row of the sequence of a listed row; behind the list, where no row is loaded, row 0 of a block."""
    entry = place // BLOCK_SIZE
    return gl.load(LIST + entry, mask=entry < count, other=0) * BLOCK_SIZE + place % BLOCK_SIZE


@gluon.jit
def load_listed_keys(
    k_desc, v_desc, LIST, count, k_row, begin, end, counter, smem, bars,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """common.load_keys for blocks ``begin`` to ``end`` of listed keys, of which ``k_row`` is the first row.

    The next block is looked up while the last one is loaded. Returns the number of blocks so far, and the row of block ``end``.
    """
    k_smem, v_smem = smem
    k_full, k_empty, v_full, v_empty = bars
    for block in range(begin, end):
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        load_rows(k_desc, k_row, k_full, k_smem, stage)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        load_rows(v_desc, k_row, v_full, v_smem, stage)
        k_row = listed_row(LIST, (block + 1) * BLOCK_N, count, BLOCK_SIZE)
        counter += 1
    return counter, k_row


@gluon.jit
def listed_keys(
    count, last, first, length, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Of the keys listed for the query rows from ``first`` on: blocks of BLOCK_N, and how many of these need no mask.

    Worked example: blocks of 128, causal, length 300. Rows 128 to 255 with the list 0, 1 have 2 blocks, 1 of them clear.
    """
    before = gl.maximum(count - 1, 0) * BLOCK_SIZE
    seen = gl.minimum(length - last * BLOCK_SIZE, BLOCK_SIZE)
    clear = seen
    if CAUSAL:
        clear = gl.maximum(gl.minimum(clear, first + 1 - last * BLOCK_SIZE), 0)
        seen = gl.maximum(gl.minimum(seen, first + ROWS - last * BLOCK_SIZE), 0)
    clear = gl.where(count > 0, before + clear, 0)
    seen = gl.where(count > 0, before + seen, 0)
    return gl.maximum((seen + BLOCK_N - 1) // BLOCK_N, 1), clear // BLOCK_N


@gluon.jit
def seen_listed(rows, count, last, length, CAUSAL: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """How many listed keys each query row sees: all before the last entry, and some of that."""
    seen = rows * 0 + gl.minimum(length - last * BLOCK_SIZE, BLOCK_SIZE)
    if CAUSAL:
        seen = gl.minimum(gl.maximum(rows + 1 - last * BLOCK_SIZE, 0), seen)
    return gl.where(count > 0, (count - 1) * BLOCK_SIZE + seen, 0)
