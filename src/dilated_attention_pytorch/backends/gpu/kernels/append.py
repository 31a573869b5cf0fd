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
def append_kernel(
    NEW_K, NEW_V,  # (B, n, G, D)
    K, V,  # (B, G, rows, D)
    SEEN,  # (B,) int64
    COUNTS,  # (B,) int64, the tokens of each sample
    TABLE,  # (5 + G, branches) int64
    BRANCH,  # (rows,) int32
    branches, rows, G,
    new_k_stride_b, new_k_stride_n, new_k_stride_h, new_v_stride_b, new_v_stride_n, new_v_stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """For every slot, find the newest row that belongs there, and copy it if it is in the chunk."""
    blocks = tl.cdiv(rows, BLOCK_R)
    row = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    own = (tl.program_id(0) // blocks).to(tl.int64)
    head = own % G
    sample = own // G
    seen = tl.load(SEEN + sample)
    count = tl.load(COUNTS + sample)
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
