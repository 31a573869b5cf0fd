"""The columns of the tables that kernels read, in their order. ``kernels/columns.py`` has the names for kernels."""

from __future__ import annotations

# One row of a launch table is a family of tiles, see launch_plan.py. Starts are rows of tensors. A row of the result plus
# ``to_position`` is its position. ``own_segment`` and ``own_number`` are those of the first row of the family, counted from
# the first ones of the layout. The partial results of ``children`` bundles are added, from ``first_child`` on.
FAMILY_COLUMNS = (
    "first_program", "first_sample", "tiles", "tile_step", "heads", "first_head", "head_step", "head_row_step",
    "q_start", "q_rows", "k_start", "k_rows", "row_stride", "causal", "zero_keys", "branch", "batch_slice", "to_position",
    "partial_base", "segments", "capacity", "own_segment", "own_number", "first_child", "children",
)  # fmt: skip
# One entry of the layout of partial results is a bundle of tiles in a slice of the batch, see launch_plan.py.
LAYOUT_COLUMNS = ("base", "segments", "capacity", "w", "r", "first_segment", "first_number", "w_inverse", "r_inverse")
# One row of a table of blocks is a query block, or for dk and dv a key block, see block_tables.py. ``number`` counts the
# blocks of the sequence. ``q_row`` and ``k_row`` are the rows of the tensors at position 0. The first query is at position
# ``q_first``, so ``q_row`` may be negative.
BLOCK_COLUMNS = ("sample", "number", "q_row", "q_first", "k_row", "sequence_length", "first_list", "list_step")
