"""Random rows by a counter, and a checksum of results: ``streaming_rows.py`` has the definitions."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.primitives import mix

# A counter has more than 32 bits. It is passed as high * 2**24 + low, two numbers of the same type at every position. So
# one compiled kernel serves all positions.
NUMBERS = ["high", "low", "a", "b", "count"]


@triton.jit
def words_at(counter, a, b):
    """The words of int64 counters; a and b are scalars in int32."""
    low = counter.to(tl.uint32) + a.to(tl.uint32)
    return mix(mix(low) ^ ((counter >> 32).to(tl.uint32) + b.to(tl.uint32)))


@triton.jit(do_not_specialize=NUMBERS)
def fill_kernel(OUT, high, low, a, b, count, BLOCK: tl.constexpr):
    """Write the four elements of each of ``count`` words."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = words_at(high.to(tl.int64) * (1 << 24) + low + index, a, b)
    byte = tl.arange(0, 4)
    small = ((words[:, None] >> (byte * 8).to(tl.uint32)[None, :]) & 255).to(tl.int32)
    elements = (small * 2 - 255).to(tl.float32) * 0.0078125
    at = OUT + index[:, None] * 4 + byte[None, :]
    tl.store(at, elements.to(OUT.dtype.element_ty), mask=(index < count)[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def sum_kernel(BITS, COLUMNS, SUMS, high, low, a, b, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The weighted sum of the integers of ROWS rows of WIDTH, modulo 2**64."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    bits = tl.load(BITS + row[:, None] * WIDTH + column[None, :], mask=inside, other=0).to(tl.int64)
    weights = tl.load(COLUMNS + column, mask=column < WIDTH, other=0)
    sums = tl.sum(bits * weights[None, :], 1)
    own = words_at(high.to(tl.int64) * (1 << 24) + low + row, a, b) | 1
    tl.store(SUMS + tl.program_id(0), tl.sum(sums * own.to(tl.int64), 0))
