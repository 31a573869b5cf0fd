"""The kernels that put partial results of stock operators together: every row of a result is written once.

A part is what one kernel call returned for a piece (pieces.py): rows of a tensor (B, N, H, ...) in tiles. For each head of
the result there is a list of entries, one for every part that has rows of this head (columns in parts.py). Parts lie where
their operators put them: entries name them by number, and their addresses come in a vector of int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(22)  # of an entry, see parts.COLUMNS
BATCH = tl.constexpr(32)  # addresses that one launch writes


@triton.jit
def addresses_kernel(TABLE, VALUES):
    """Write a tuple of BATCH integers: arguments need no copy from the host, and captured graphs keep them."""
    for i in tl.static_range(BATCH):
        tl.store(TABLE + i, VALUES[i])


@triton.jit
def _divided(x, magic, shift):
    """x // divisor for x from 0 to 2**31 - 1, see parts.division; other x give any number."""
    product = x.to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)
    return (product >> shift.to(tl.uint64)).to(tl.int32)


@triton.jit
def _touches(entry, sample, first, BLOCK: tl.constexpr):
    """Whether a part may have some of the rows ``first`` to ``first + BLOCK`` of a sample."""
    own_sample = sample - tl.load(entry + 2).to(tl.int32)
    near = (first < tl.load(entry + 1).to(tl.int32)) & (first + BLOCK > tl.load(entry).to(tl.int32))
    return near & (own_sample >= 0) & (own_sample < tl.load(entry + 3).to(tl.int32))


@triton.jit
def _locate(entry, sample, n):
    """Unit and row within it of the rows ``n``, and whether the part has them. All in 32 bits, for speed.

    Two tiles of 4 rows with stride 2 from row 1 on, 8 rows apart: row 13 is x = 12, tile 1, and there x = 4, row 2.
    """
    x = n - tl.load(entry).to(tl.int32)
    there = (x >= 0) & (n < tl.load(entry + 1).to(tl.int32))
    tile = _divided(x, tl.load(entry + 6), tl.load(entry + 7))
    x -= tile * tl.load(entry + 5).to(tl.int32)
    number = _divided(x, tl.load(entry + 9), tl.load(entry + 10))
    there &= (x == number * tl.load(entry + 8).to(tl.int32)) & (number < tl.load(entry + 11).to(tl.int32))
    own_sample = sample - tl.load(entry + 2).to(tl.int32)
    unit = own_sample * tl.load(entry + 4).to(tl.int32) - tl.load(entry + 12).to(tl.int32) + tile
    there &= (unit >= 0) & (unit < tl.load(entry + 13).to(tl.int32))
    return unit, number, there


@triton.jit
def _load_rows(ADDRESSES, entry, unit, number, there, LIKE, D: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of a part in float32; 0 where it has none. They begin at multiples of ALIGNED elements."""
    d = tl.arange(0, BLOCK_D)
    address = tl.load(ADDRESSES + tl.load(entry + 14)).to(tl.pointer_type(LIKE.dtype.element_ty))
    offsets = tl.load(entry + 15) + unit * tl.load(entry + 16) + number * tl.load(entry + 17)
    # Without this promise, elements are loaded one by one.
    rows = tl.multiple_of(address + offsets, ALIGNED * (LIKE.dtype.element_ty.primitive_bitwidth // 8))
    pointers = rows[:, None] + d[None, :]
    return tl.load(pointers, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _own_rows(N, H, BLOCK: tl.constexpr):
    """Head, sample and first row of a program. Heads go first: rows of all heads lie side by side."""
    program = tl.program_id(0)
    blocks = (N + BLOCK - 1) // BLOCK
    return program % H, program // H // blocks, program // H % blocks * BLOCK


@triton.jit
def _store_rows(OUT, x, head, sample, n, N, H, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    rows = ((sample.to(tl.int64) * N + n) * H + head) * D
    tl.store(OUT + rows[:, None] + d[None, :], x.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    ADDRESSES,  # of the parts' rows (by part), then of their lse
    ENTRIES,  # (entries, COLUMNS) int64
    FIRST,  # (H + 1,) int64: the entries of each head
    OUT,  # (B, N, H, D), contiguous
    LSE,  # (B, H, N) float32, contiguous
    parts,
    N,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The softmax over the keys of all parts, for a block of rows of one head.

    A row with two parts of lse 1 and 3 is ``(exp(1 - 3) * part0 + part1) / (exp(1 - 3) + 1)`` and its lse
    ``3 + log(exp(1 - 3) + 1)``. A row without parts is 0 and -inf.
    """
    head, sample, first = _own_rows(N, H, BLOCK)
    n = first + tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32) - float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for number_of_entry in range(tl.load(FIRST + head), tl.load(FIRST + head + 1)):
        entry = ENTRIES + number_of_entry * COLUMNS
        if _touches(entry, sample, first, BLOCK):
            unit, number, there = _locate(entry, sample, n)
            part_lse = tl.load(ADDRESSES + parts + tl.load(entry + 14)).to(tl.pointer_type(tl.float32))
            places = tl.load(entry + 18) + unit * tl.load(entry + 19) + number * tl.load(entry + 20)
            part_lse = tl.load(part_lse + places, mask=there, other=-float("inf"))
            part = _load_rows(ADDRESSES, entry, unit, number, there, OUT, D, BLOCK_D, ALIGNED)
            # Zero keys have logit 0 and value 0: they only add to the denominator.
            zero_keys = tl.where(there, tl.load(entry + 21).to(tl.float32), 0.0)
            new = tl.maximum(tl.maximum(largest, part_lse), tl.where(zero_keys > 0, 0.0, -float("inf")))
            safe = tl.where(new == -float("inf"), 0.0, new)
            alpha, weight = tl.exp(largest - safe), tl.exp(part_lse - safe)
            acc = acc * alpha[:, None] + part * weight[:, None]
            total = total * alpha + weight + zero_keys * tl.exp(-safe)
            largest = new
    share = tl.where(total > 0, 1.0 / total, 0.0)
    _store_rows(OUT, acc * share[:, None], head, sample, n, N, H, D, BLOCK_D)
    lse = tl.where(total > 0, largest + tl.log(total), -float("inf"))
    tl.store(LSE + (sample.to(tl.int64) * H + head) * N + n, lse, mask=n < N)


@triton.jit
def sum_kernel(
    ADDRESSES,
    ENTRIES,
    FIRST,
    OUT,  # (B, N, H, D), contiguous
    factor,
    N,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """``factor`` times the sum of all parts, for a block of rows of one head."""
    head, sample, first = _own_rows(N, H, BLOCK)
    n = first + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for number_of_entry in range(tl.load(FIRST + head), tl.load(FIRST + head + 1)):
        entry = ENTRIES + number_of_entry * COLUMNS
        if _touches(entry, sample, first, BLOCK):
            unit, number, there = _locate(entry, sample, n)
            acc += _load_rows(ADDRESSES, entry, unit, number, there, OUT, D, BLOCK_D, ALIGNED)
    _store_rows(OUT, acc * factor, head, sample, n, N, H, D, BLOCK_D)
