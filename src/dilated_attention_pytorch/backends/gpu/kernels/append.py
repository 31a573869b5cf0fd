"""Append a chunk of tokens to a cache: ``execute.step.append_`` in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.decode import (
    FIRST_ROW,
    LENGTH,
    OFFSETS,
    RATE,
    SEGMENT_ROWS,
    SLOTS,
)


@triton.jit
def _count(LENGTHS, sample, seen, n, max_tokens, HAS_LENGTHS: tl.constexpr, BOUNDED: tl.constexpr):
    """How many tokens of a chunk a sample takes."""
    count = seen * 0 + n
    if HAS_LENGTHS:
        count = tl.minimum(tl.maximum(tl.load(LENGTHS + sample), 0), count)
    if BOUNDED:
        count = tl.minimum(count, max_tokens - seen)
    return count


@triton.jit(do_not_specialize=["n"])
def advance_kernel(
    SEEN,  # (B,) int64
    ROLLED_BACK,  # (B,) int64
    LENGTHS,  # (B,) int64
    n,  # tokens of the chunk
    max_tokens,
    HAS_LENGTHS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Count the tokens of a chunk that was appended: one program for each sample."""
    sample = tl.program_id(0)
    seen = tl.load(SEEN + sample)
    count = _count(LENGTHS, sample, seen, n, max_tokens, HAS_LENGTHS, BOUNDED)
    tl.store(SEEN + sample, seen + count)
    tl.store(ROLLED_BACK + sample, tl.maximum(tl.load(ROLLED_BACK + sample) - count, 0))


@triton.jit(do_not_specialize=["n"])
def append_kernel(
    NEW_K, NEW_V,  # (B, n, G, D)
    K, V,  # (B, G, rows, D)
    SEEN,  # (B,) int64
    LENGTHS,  # (B,) int64, the tokens of each sample if there are fewer than n
    TABLE,  # (5 + G, branches) int64
    BRANCH,  # (rows,) int32
    n,  # tokens of the chunk
    max_tokens, branches, rows, G,
    new_k_stride_b, new_k_stride_n, new_k_stride_h, new_v_stride_b, new_v_stride_n, new_v_stride_h,
    HAS_LENGTHS: tl.constexpr, BOUNDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """For every slot, find the newest row that belongs there, and copy it if it is in the chunk."""
    blocks = tl.cdiv(rows, BLOCK_R)
    row = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    own = (tl.program_id(0) // blocks).to(tl.int64)
    head = own % G
    sample = own // G
    seen = tl.load(SEEN + sample)
    count = _count(LENGTHS, sample, seen, n, max_tokens, HAS_LENGTHS, BOUNDED)
    if count > 0:
        known = row < rows
        column = TABLE + tl.load(BRANCH + row, mask=known, other=0)
        length = tl.load(column + LENGTH * branches)
        rate = tl.load(column + RATE * branches)
        segment_rows = tl.load(column + SEGMENT_ROWS * branches)
        slots = tl.load(column + SLOTS * branches)
        newest = seen + count - 1
        last = newest // length * segment_rows + newest % length // rate
        behind = (last - (row - tl.load(column + FIRST_ROW * branches))) % slots
        number = last - tl.where(behind < 0, behind + slots, behind)
        inside = number % segment_rows * rate + tl.load(column + (OFFSETS + head) * branches)
        at = number // segment_rows * length + inside - seen  # row of the chunk
        is_new = known & (number >= 0) & (at >= 0) & (at < count) & (inside < length)
        d = tl.arange(0, BLOCK_D)
        mask = is_new[:, None] & (d < D)[None, :]
        to = ((own * rows + row) * D)[:, None] + d[None, :]
        k_at = NEW_K + sample * new_k_stride_b + head * new_k_stride_h + (at * new_k_stride_n)[:, None] + d[None, :]
        v_at = NEW_V + sample * new_v_stride_b + head * new_v_stride_h + (at * new_v_stride_n)[:, None] + d[None, :]
        tl.store(K + to, tl.load(k_at, mask=mask, other=0.0), mask=mask)
        tl.store(V + to, tl.load(v_at, mask=mask, other=0.0), mask=mask)
