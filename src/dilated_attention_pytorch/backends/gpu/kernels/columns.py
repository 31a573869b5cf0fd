"""Names for the columns of tables, as in ``tl.load(row + FAMILY_Q_START)``. ``gpu/tables.py`` explains them."""

from __future__ import annotations

import triton.language as tl

from dilated_attention_pytorch.backends.gpu.tables import BLOCK_COLUMNS, FAMILY_COLUMNS, LAYOUT_COLUMNS

FAMILY_WIDTH, LAYOUT_WIDTH, BLOCK_WIDTH = (tl.constexpr(len(x)) for x in (FAMILY_COLUMNS, LAYOUT_COLUMNS, BLOCK_COLUMNS))

(
    FAMILY_FIRST_PROGRAM,
    FAMILY_FIRST_SAMPLE,
    FAMILY_TILES,
    FAMILY_TILE_STEP,
    FAMILY_HEADS,
    FAMILY_FIRST_HEAD,
    FAMILY_HEAD_STEP,
    FAMILY_HEAD_ROW_STEP,
    FAMILY_Q_START,
    FAMILY_Q_ROWS,
    FAMILY_K_START,
    FAMILY_K_ROWS,
    FAMILY_ROW_STRIDE,
    FAMILY_CAUSAL,
    FAMILY_ZERO_KEYS,
    FAMILY_BRANCH,
    FAMILY_BATCH_SLICE,
    FAMILY_TO_POSITION,
    FAMILY_PARTIAL_BASE,
    FAMILY_SEGMENTS,
    FAMILY_CAPACITY,
    FAMILY_OWN_SEGMENT,
    FAMILY_OWN_NUMBER,
    FAMILY_FIRST_CHILD,
    FAMILY_CHILDREN,
) = map(tl.constexpr, range(len(FAMILY_COLUMNS)))

(
    LAYOUT_BASE,
    LAYOUT_SEGMENTS,
    LAYOUT_CAPACITY,
    LAYOUT_W,
    LAYOUT_R,
    LAYOUT_FIRST_SEGMENT,
    LAYOUT_FIRST_NUMBER,
    LAYOUT_W_INVERSE,
    LAYOUT_R_INVERSE,
) = map(tl.constexpr, range(len(LAYOUT_COLUMNS)))

(
    BLOCK_SAMPLE,
    BLOCK_NUMBER,
    BLOCK_Q_ROW,
    BLOCK_Q_FIRST,
    BLOCK_K_ROW,
    BLOCK_SEQUENCE_LENGTH,
    BLOCK_FIRST_LIST,
    BLOCK_LIST_STEP,
) = map(tl.constexpr, range(len(BLOCK_COLUMNS)))
