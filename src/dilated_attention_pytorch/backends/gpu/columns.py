"""The columns of the tables that kernels read, in their order. ``kernels/columns.py`` has the names for kernels."""

from __future__ import annotations

# One row of a launch table: a family of tiles, see launch_plan.py.
FAMILY_COLUMNS = (
    "first_program",
    "first_sample",
    "tiles",
    "tile_step",
    "heads",
    "first_head",
    "head_step",
    "head_row_step",
    "q_start",  # rows of the tensors, not positions
    "q_rows",
    "k_start",
    "k_rows",
    "row_stride",
    "causal",
    "zero_keys",
    "branch",
    "batch_slice",
    "to_position",  # of a row of the result: its position in its sequence, less its row in the tensor
    "partial_base",
    "segments",
    "capacity",
    "own_segment",  # of the first tile, counted from the first segment of the layout
    "own_number",  # of the first row, counted from the first row number of the layout
    "first_child",  # bundles whose partial results are added to the result of this one
    "children",
)
# One entry of the layout of partial results: a bundle of tiles in a slice of the batch, see launch_plan.py.
LAYOUT_COLUMNS = ("base", "segments", "capacity", "w", "r", "first_segment", "first_number", "w_inverse", "r_inverse")
# One row of a table of blocks: a query block, or for dk and dv a key block, see block_tables.py.
BLOCK_COLUMNS = (
    "sample",
    "number",  # of the block in its sequence
    "q_row",  # row of the query tensor at position 0; negative if the first positions have no query
    "q_first",  # the first position that has a query
    "k_row",  # row of the key tensor at position 0
    "sequence_length",
    "first_list",
    "list_step",
)
