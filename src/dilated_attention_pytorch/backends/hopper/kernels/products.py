"""Products of the Hopper kernels: rows with rows, over the head size, and weights with rows.

A product takes powers of 2. A head size between two of them is computed as two *pieces*: 48 columns as 32 and 16. Values in
registers with the head size as columns are tuples of the pieces. Every product, of rows with rows and of weights with rows,
is then two; ``pending`` counts whole products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from dilated_attention_pytorch.backends.hopper.kernels.common import load_result, product_layout


@gluon.constexpr_function
def first_piece(D, BLOCK_D):
    """Columns of the first piece: all, if a second piece would not reduce their number."""
    return BLOCK_D // 2 if D <= 3 * BLOCK_D // 4 and BLOCK_D > 32 else BLOCK_D


@gluon.constexpr_function
def second_piece(D, BLOCK_D):
    """Columns of the second piece, a multiple of 16; or 0."""
    first = first_piece(D, BLOCK_D)
    return 0 if first == BLOCK_D else 16 if first + 16 >= D else first // 2


@gluon.jit
def _pieces(rows, D: gl.constexpr):
    """The columns of rows in shared memory, by piece."""
    BLOCK_D: gl.constexpr = rows.shape[1]
    FIRST: gl.constexpr = first_piece(D, BLOCK_D)
    SECOND: gl.constexpr = second_piece(D, BLOCK_D)
    if SECOND == 0:
        return (rows,)
    else:
        return rows.slice(0, FIRST, dim=1), rows.slice(FIRST, SECOND, dim=1)


@gluon.jit
def hold(smem, S: gl.constexpr, D: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """The left side of products with rows, in pieces: read from shared memory once, or by each product."""
    L: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    pieces = _pieces(smem, D)
    if not IN_REGISTERS:
        return pieces
    elif second_piece(D, smem.shape[1]) == 0:
        return (pieces[0].load(L),)
    else:
        return pieces[0].load(L), pieces[1].load(L)


@gluon.jit
def start_scores(left, block, none, D: gl.constexpr):
    """Start the product of rows (``hold``) with rows of a block in shared memory, over the head size."""
    right = _pieces(block, D)
    s = warpgroup_mma(left[0], right[0].permute((1, 0)), none, use_acc=False, is_async=True)
    if second_piece(D, block.shape[1]) > 0:
        s = warpgroup_mma(left[1], right[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_shifted_scores(left, block, mark, shifts, none, D: gl.constexpr):
    """``start_scores``, plus a number for each row of the block: a product, so that no thread has to load it.

    The number is the sum of those of the row's ``shifts`` that have a one in ``mark``, 16 columns each.
    """
    s = warpgroup_mma(mark, shifts.permute((1, 0)), none, use_acc=False, is_async=True)
    right = _pieces(block, D)
    s = warpgroup_mma(left[0], right[0].permute((1, 0)), s, is_async=True)
    if second_piece(D, block.shape[1]) > 0:
        s = warpgroup_mma(left[1], right[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def wait_scores(
    pending: gl.constexpr, s, left, D: gl.constexpr, BLOCK_D: gl.constexpr, IN_REGISTERS: gl.constexpr,
    SHIFTS: gl.constexpr = 0,
):  # fmt: skip
    """Wait for scores, until so many later products, and ``SHIFTS`` single ones of shifts, are left.

    A left side in registers is an operand of the wait, so that it is kept.

    The assembler of Triton 3.6 reuses the registers of a left side that does not change in a loop for other values
    inside of the loop. To it, a value that the wait returns may have changed.
    """
    LEFT: gl.constexpr = pending * (1 if second_piece(D, BLOCK_D) == 0 else 2) + SHIFTS
    if not IN_REGISTERS:
        return warpgroup_mma_wait(LEFT, deps=(s,)), left
    elif second_piece(D, BLOCK_D) == 0:
        s, first = warpgroup_mma_wait(LEFT, deps=(s, left[0]))
        return s, (first,)
    else:
        s, first, second = warpgroup_mma_wait(LEFT, deps=(s, left[0], left[1]))
        return s, (first, second)


@gluon.jit
def no_sums(D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Sums of rows, in pieces, before anything is added."""
    FIRST: gl.constexpr = first_piece(D, BLOCK_D)
    SECOND: gl.constexpr = second_piece(D, BLOCK_D)
    first = gl.full([64, FIRST], 0.0, gl.float32, product_layout(FIRST))
    if SECOND == 0:
        return (first,)
    else:
        return first, gl.full([64, SECOND], 0.0, gl.float32, product_layout(SECOND))


@gluon.jit
def _load_piece(SUMS, step, rows, D: gl.constexpr, COLUMNS: gl.constexpr):
    numbers = gl.arange(0, 64, gl.SliceLayout(1, product_layout(COLUMNS)))
    return load_result(SUMS, 0, step, numbers, numbers < rows, D, COLUMNS)


@gluon.jit
def load_sums(SUMS, start, step, rows, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """``rows`` rows of sums from memory, in pieces: see ``load_result``."""
    FIRST: gl.constexpr = first_piece(D, BLOCK_D)
    SECOND: gl.constexpr = second_piece(D, BLOCK_D)
    first = _load_piece(SUMS + start, step, rows, D, FIRST)
    if SECOND == 0:
        return (first,)
    else:
        return first, _load_piece(SUMS + start + FIRST, step, rows, D - FIRST, SECOND)


@gluon.jit
def as_weights(x, dtype: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Rounded, as the left side of ``start_sums``."""
    return gl.convert_layout(
        x.to(dtype), gl.DotOperandLayout(0, product_layout(first_piece(D, BLOCK_D)), 2), assert_trivial=True
    )


@gluon.jit
def start_sums(weights, block, sums, D: gl.constexpr):
    """Start to add rows of a block in shared memory, times ``weights``, to ``sums``."""
    right = _pieces(block, D)
    first = warpgroup_mma(weights, right[0], sums[0], is_async=True)
    if second_piece(D, block.shape[1]) == 0:
        return (first,)
    else:
        return first, warpgroup_mma(weights, right[1], sums[1], is_async=True)


@gluon.jit
def wait_sums(sums, weights, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Wait for all products. They read their left sides from registers until then, so these are operands of the wait."""
    if second_piece(D, BLOCK_D) == 0:
        first, _ = warpgroup_mma_wait(0, deps=(sums[0], weights))
        return (first,)
    else:
        first, second, _ = warpgroup_mma_wait(0, deps=(sums[0], sums[1], weights))
        return first, second


@gluon.jit
def wait_both_sums(sums, weights, more_sums, more_weights, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """``wait_sums`` for two."""
    if second_piece(D, BLOCK_D) == 0:
        a, b, _, _ = warpgroup_mma_wait(0, deps=(sums[0], more_sums[0], weights, more_weights))
        return (a,), (b,)
    else:
        a, b, c, d, _, _ = warpgroup_mma_wait(0, deps=(sums[0], sums[1], more_sums[0], more_sums[1], weights, more_weights))
        return (a, b), (c, d)


@gluon.jit
def wait_dq(dq, sums, weights, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Wait for dq of a block and for sums, until one later product is left."""
    gl.static_assert(second_piece(D, BLOCK_D) == 0, "sums of one piece")
    dq, first, _ = warpgroup_mma_wait(1, deps=(dq, sums[0], weights))
    return dq, (first,)


@gluon.jit
def _scaled(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def scale_rows(sums, factor, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """Sums times a factor for each row."""
    if second_piece(D, BLOCK_D) == 0:
        return (_scaled(sums[0], factor),)
    else:
        return _scaled(sums[0], factor), _scaled(sums[1], factor)


@gluon.jit
def whole_rows(sums, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """The pieces as one block of BLOCK_D columns, 0 where there is none."""
    FIRST: gl.constexpr = first_piece(D, BLOCK_D)
    SECOND: gl.constexpr = second_piece(D, BLOCK_D)
    if SECOND == 0:
        return sums[0]
    else:
        second = sums[1]
        if 2 * SECOND < FIRST:
            second = _beside(second, gl.zeros_like(second))
        return _beside(sums[0], _beside(second, gl.zeros_like(second)))


@gluon.jit
def _beside(x, y):
    COLUMNS: gl.constexpr = 2 * x.shape[1]
    both = gl.join(x, y).permute((0, 2, 1)).reshape([64, COLUMNS])
    return gl.convert_layout(both, product_layout(COLUMNS), assert_trivial=True)
