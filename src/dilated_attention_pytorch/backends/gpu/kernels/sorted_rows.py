"""Kernels that copy rows into slots, and that merge the results of slots by row. ``sorted_rows.py`` says what slots are."""

from __future__ import annotations

import triton
import triton.language as tl

from dilated_attention_pytorch.backends.gpu.kernels.forward import merge
from dilated_attention_pytorch.backends.gpu.kernels.primitives import LN_2, LOG2_E


@triton.jit
def _own_rows(H, blocks, BLOCK: tl.constexpr):
    """The sample, the head and the rows of a program. Heads of the same rows follow one another.

    Sample and head have 64 bits, because they are multiplied by strides.
    """
    program = tl.program_id(0)
    head = (program % H).to(tl.int64)
    block = program // H % blocks
    sample = (program // H // blocks).to(tl.int64)
    return sample, head, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def move_kernel(
    X,  # (B, N, H, D), rows of consecutive elements
    Y,  # (B, slots, H, D), rows of consecutive elements
    ROW_LISTS,  # (B or 1, lists, slots) int32: the row of X in each slot, or -1
    LISTS,  # (G,) int32: the list of each head
    x_stride_b,
    x_stride_n,
    x_stride_h,
    y_stride_b,
    y_stride_n,
    y_stride_h,
    rows_stride_b,  # 0 if all samples share the lists
    slots,
    H,
    group,
    blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows into slots. Slots without a row are 0."""
    sample, head, slot = _own_rows(H, blocks, BLOCK)
    inside = slot < slots
    listed = sample * rows_stride_b + tl.load(LISTS + head // group).to(tl.int64) * slots + slot
    row = tl.load(ROW_LISTS + listed, mask=inside, other=-1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    x_rows = sample * x_stride_b + tl.maximum(row, 0) * x_stride_n + head * x_stride_h
    x = tl.load(X + x_rows[:, None] + d, mask=inside[:, None] & (d < D), other=0.0)
    x = tl.where((row >= 0)[:, None], x, 0.0).to(Y.dtype.element_ty)
    y_rows = sample * y_stride_b + slot.to(tl.int64) * y_stride_n + head * y_stride_h
    tl.store(Y + y_rows[:, None] + d, x, mask=inside[:, None] & (d < D))


@triton.jit
def merge_kernel(
    PARTS,  # the results (B, slots, H, D) of each branch, one branch after the other
    PARTS_LSE,  # (B, H, slots) float32 in the same way, if HAS_LSE
    OUT,  # (B, N, H, D)
    LSE,  # (B, H, N) float32, if HAS_LSE
    SIZES,  # (branches, 2) int64: the slots of all samples in branches before, and the slots of the branch
    SLOTS,  # (branches, B or 1, N) int32: the slot of each row
    OWNERS,  # like SLOTS: the list that has the row, or -1
    LISTS,  # (branches, G) int32: the list of each head
    list_stride,  # of SLOTS and OWNERS between branches
    list_stride_b,  # and between samples, 0 if all share the lists
    N,
    H,
    group,
    blocks,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BRANCHES: tl.constexpr,
    HAS_LSE: tl.constexpr,  # merge softmaxes, else add
):
    """Merge the results of all branches for each row. A row that no branch has is 0, and its lse -inf."""
    sample, head, rows = _own_rows(H, blocks, BLOCK)
    inside = rows < N
    d = tl.arange(0, BLOCK_D)[None, :]
    sums = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    lse2 = tl.zeros([BLOCK], tl.float32) - float("inf")
    for branch in tl.static_range(BRANCHES):
        listed = branch * list_stride + sample * list_stride_b + rows
        slot = tl.load(SLOTS + listed, mask=inside, other=0)
        owner = tl.load(OWNERS + listed, mask=inside, other=-1)
        own = owner == tl.load(LISTS + branch * (H // group) + head // group)
        before = tl.load(SIZES + 2 * branch)
        slots = tl.load(SIZES + 2 * branch + 1)
        places = (before + sample * slots + slot) * H + head
        part = tl.load(PARTS + places[:, None] * D + d, mask=own[:, None] & (d < D), other=0.0).to(tl.float32)
        if HAS_LSE:
            lse_places = (before + sample * slots) * H + head * slots + slot
            part_lse2 = tl.load(PARTS_LSE + lse_places, mask=own, other=-float("inf")) * LOG2_E
            sums, lse2 = merge(sums, lse2, part, part_lse2)
        else:
            sums += part
    out_rows = (sample * N + rows) * H + head
    tl.store(OUT + out_rows[:, None] * D + d, sums.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < D))
    if HAS_LSE:
        tl.store(LSE + (sample * H + head) * N + rows, lse2 * LN_2, mask=inside)
