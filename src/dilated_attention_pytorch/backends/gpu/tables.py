"""What launch tables and block tables have in common: the names of columns, and how long they live.

``kernels/columns.py`` has the names of columns for kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# One row of a launch table is a family of tiles, see launch_plan.py. Starts are rows of tensors. A row of the result plus
# ``to_position`` is its position. ``own_segment`` and ``own_number`` are those of the first row of the family, counted from
# the first ones of the layout. The partial results of ``children`` bundles are added, from ``first_child`` on. Keys have a
# stride and a step between heads of their own, because those of a message are packed. Dropout does not count the rows of
# ``padding`` in front of a sample. If each branch has its own delta, ``own_delta`` is the distance of that of this branch
# from the first one, in numbers. Otherwise it is 0.
FAMILY_COLUMNS = (
    "first_program", "first_sample", "tiles", "tile_step", "heads", "first_head", "head_step", "head_row_step",
    "q_start", "q_rows", "k_start", "k_rows", "row_stride", "causal", "zero_keys", "branch", "batch_slice", "to_position",
    "partial_base", "segments", "capacity", "own_segment", "own_number", "first_child", "children",
    "k_row_stride", "k_head_row_step", "padding", "own_delta",
)  # fmt: skip
# One entry of the layout of partial results is a bundle of tiles in a slice of the batch, see launch_plan.py.
LAYOUT_COLUMNS = ("base", "segments", "capacity", "w", "r", "first_segment", "first_number", "w_inverse", "r_inverse")
# One row of a table of blocks is a query block, or for dk and dv a key block, see block_tables.py. ``number`` counts the
# blocks of the sequence. ``q_row`` and ``k_row`` are the rows of the tensors at position 0. The first query is at position
# ``q_first``, so ``q_row`` may be negative. Queries end at position ``q_length`` and keys at ``k_length``. Both are the
# length of the sequence, unless the keys are those of a message. ``dropout_row`` is the number of position 0 in dropout.
BLOCK_COLUMNS = (
    "sample", "number", "q_row", "q_first", "k_row", "q_length", "first_list", "list_step", "k_length", "dropout_row",
)  # fmt: skip
# Owners of the tables that captured graphs read when they are replayed. They live as long as the process.
_CAPTURED: list[object] = []


def keep_for_device(owner: object, tensors: Iterable[Tensor]) -> None:
    """Note that the current stream reads these tensors of ``owner``; those that are not on a GPU are skipped."""
    # The indices of an adaptive pattern are a meta tensor: each call has its own.
    tensors = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    if not tensors:
        return
    # Tables may leave the cache while the GPU still reads them, on another stream than they were made on.
    stream = torch.cuda.current_stream(tensors[0].device)
    for tensor in tensors:
        tensor.record_stream(stream)
    if torch.cuda.is_current_stream_capturing() and not any(owner is captured for captured in _CAPTURED):
        _CAPTURED.append(owner)
