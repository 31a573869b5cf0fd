"""The Hilbert curve in 2-D and 3-D, vectorised over points: codes of scattered points, and whole grids.

The curve is Skilling's (AIP Conference Proceedings 707, 2004). Its top level does not depend on how many levels follow:
``codes(x << s, bits + s) >> (dims * s) == codes(x, bits)``. A curve of ``bits + 1`` levels therefore consists of
``2**dims`` rotated and shifted copies of the curve of ``bits`` levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isqrt, prod

import torch
from torch import Tensor

from dilated_attention_pytorch.dispatch import define_operator

Device = torch.device | str | None

LONGEST_SIDE = 2**31  # coordinates on a grid are int32
# Floating-point coordinates are rounded to this many bits. That is finer than any image, and 3-D codes fit 63 bits.
_FLOAT_BITS = 21


def codes(coords: Tensor, bits: int) -> Tensor:
    """The distance along the curve of points (..., dims) with integer coordinates below ``2**bits``, int64.

    >>> codes(torch.tensor([[0, 0], [0, 1], [1, 1], [1, 0]]), 1)
    tensor([0, 1, 2, 3])
    """
    axes = list(coords.to(torch.int64).unbind(-1))
    for level in range(bits - 1, 0, -1):
        low = (1 << level) - 1
        for i in range(len(axes)):
            high = (axes[i] >> level & 1).to(torch.bool)
            flip = torch.where(high, low, (axes[0] ^ axes[i]) & low)
            axes[i] = axes[i] ^ flip.masked_fill(high, 0)
            axes[0] = axes[0] ^ flip
    # Decode the Gray code.
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    flips = torch.zeros_like(axes[0])
    for level in range(bits - 1, 0, -1):
        flips = torch.where((axes[-1] >> level & 1).to(torch.bool), flips ^ ((1 << level) - 1), flips)
    result = torch.zeros_like(flips)
    for level in range(bits - 1, -1, -1):
        for axis in axes:
            result = result << 1 | (axis ^ flips) >> level & 1
    return result


@cache
def _copies(dims: int) -> tuple[tuple[tuple[int, int, bool], ...], ...]:
    """How a curve consists of ``2**dims`` smaller ones: for each copy and axis (corner, axis of the smaller one, mirrored).

    >>> _copies(2)[0]  # the first quarter is the smaller curve with its axes exchanged
    ((0, 1, False), (0, 0, False))
    """

    def points(bits: int) -> list[tuple[int, ...]]:
        every = torch.cartesian_prod(*[torch.arange(1 << bits, device="cpu")] * dims)
        return [tuple(point) for point in every[codes(every, bits).argsort()].tolist()]

    corners, fine = points(1), points(2)
    columns = list(enumerate(zip(*corners, strict=True)))
    axis_of = {tuple(x ^ mirrored for x in column): (j, mirrored) for mirrored in (False, True) for j, column in columns}
    result = []
    for copy, corner in enumerate(corners):
        inside = zip(*fine[copy << dims : (copy + 1) << dims], strict=True)
        result.append(tuple((c, *axis_of[tuple(x & 1 for x in axis)]) for c, axis in zip(corner, inside, strict=True)))
    return tuple(result)


def cube(dims: int, bits: int, device: Device) -> Tensor:
    """All points of a cube of side ``2**bits`` in the order of the curve: (dims, points), int32.

    >>> cube(2, 1, None)
    tensor([[0, 0, 1, 1],
            [0, 1, 1, 0]], dtype=torch.int32)
    """
    small = torch.zeros((dims, 1), dtype=torch.int32, device=device)
    for bit in range(bits):
        n, side = small.shape[1], 1 << bit
        large = torch.empty((dims, n << dims), dtype=torch.int32, device=device)
        for copy, axes in enumerate(_copies(dims)):
            for i, (corner, axis, mirrored) in enumerate(axes):
                block = large[i, copy * n : (copy + 1) * n]
                # The corner is a multiple of the side, and x ^ (side - 1) mirrors x.
                torch.bitwise_xor(small[axis], corner * side + mirrored * (side - 1), out=block)
        small = large
    return small


def _blocks(shape: tuple[int, ...], bits: int, leaf_bits: int, device: Device) -> tuple[Tensor, Tensor]:
    """The cubes of side ``2**leaf_bits`` that touch a grid, along the curve of the cube of side ``2**bits``.

    Return ``axes`` and ``flips``, both (blocks, dims). Coordinate ``i`` in block ``b`` is axis ``axes[b, i]`` of the small
    curve with the bits ``flips[b, i]`` flipped, which mirrors and shifts it.
    """
    dims = len(shape)
    tables = torch.tensor(_copies(dims), dtype=torch.int64, device=device).permute(2, 0, 1)  # each (copies, dims)
    sizes = torch.tensor(shape, device=device)
    corners = torch.zeros((1, dims), dtype=torch.int64, device=device)
    axes, mirrored = torch.arange(dims, device=device).unsqueeze(0), torch.zeros_like(corners)
    for bit in range(bits - 1, leaf_bits - 1, -1):
        # (blocks, copies, dims): the entries of the table for the axes of every block
        corner, axis, mirror = tables[:, :, axes].transpose(1, 2)
        corners = corners.unsqueeze(1) + ((corner ^ mirrored.unsqueeze(1)) << bit)
        touching = (corners < sizes).all(-1)
        corners, axes, mirrored = (x[touching] for x in (corners, axis, mirror ^ mirrored.unsqueeze(1)))
    return axes, corners + mirrored * ((1 << leaf_bits) - 1)


def _leaf_bits(shape: tuple[int, ...]) -> int:
    """The size of the cubes from which a grid is assembled: a compromise of few points outside, and few cubes."""
    bits, shortest_bits = (max(shape) - 1).bit_length(), (min(shape) - 1).bit_length()
    return min(bits, max(2, shortest_bits - 2))


def grid_points(shape: tuple[int, ...]) -> int:
    """The points that ``grid`` computes, those outside the grid included."""
    if prod(shape) == 0:
        return 0
    side = 1 << _leaf_bits(shape)
    return prod(-(-size // side) * side for size in shape)


def grid(shape: tuple[int, ...], device: Device) -> Tensor:
    """The row-major numbers of the points of a grid, in the order of the curve of the enclosing cube.

    >>> grid((2, 3), None)  # rows 0 1 2 and 3 4 5
    tensor([0, 3, 4, 1, 2, 5])
    """
    if prod(shape) == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    bits, leaf_bits = (max(shape) - 1).bit_length(), _leaf_bits(shape)
    axes, flips = _blocks(shape, bits, leaf_bits, device)
    small = cube(len(shape), leaf_bits, device)
    numbers = torch.zeros((len(axes), small.shape[1]), dtype=torch.int64, device=device)
    inside = None
    for i, size in enumerate(shape):
        coordinate = small[axes[:, i]].bitwise_xor_(flips[:, i, None].to(torch.int32))
        numbers.mul_(size).add_(coordinate)
        if size % (1 << leaf_bits):
            inside = coordinate < size if inside is None else inside.logical_and_(coordinate < size)
    return numbers.flatten() if inside is None else numbers[inside]


def _cells(coords: Tensor) -> tuple[Tensor, int]:
    """Map coordinates to cells (..., dims) of a cube of side ``2**bits``, the largest of each sample to the upper half."""
    # PyTorch has no comparisons for unsigned and 8-bit floating-point types.
    exact = coords.to(torch.float64 if coords.is_floating_point() else torch.int64)
    if coords.numel() == 0:
        return exact.to(torch.int64), 1
    if not bool(exact.isfinite().all()):
        bad = (~exact.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"coordinates must be finite, got {coords[tuple(bad)].item()} at {bad}; drop such points first")
    if bool((exact < 0).any()):
        bad = (exact < 0).nonzero()[0].tolist()
        got = f"{coords[tuple(bad)].item()} at {bad}"
        raise ValueError(f"coordinates must not be negative, got {got}; subtract the smallest of each axis first")
    if coords.is_floating_point():
        low, high = exact.amin(-2, keepdim=True), exact.amax(-2, keepdim=True)
        longest, last = (high - low).amax(-1, keepdim=True), 2**_FLOAT_BITS - 1
        scaled = (exact - low) / longest.masked_fill(longest == 0, 1.0) * last
        return scaled.to(torch.int64).clamp_(max=last), _FLOAT_BITS
    # Each sample has its own number of bits, so that its order does not depend on the other samples.
    largest = exact.amax((-2, -1), keepdim=True)
    own_bits = torch.frexp(largest.to(torch.float64)).exponent.clamp(min=1)
    dims, bits = exact.shape[-1], int(own_bits.max())
    if bits > 63 // dims:  # the codes are int64
        raise ValueError(
            f"integer coordinates in {dims}-D must be below 2**{63 // dims}, got {int(largest.max())}; subtract the "
            "smallest of each axis, or pass floating-point coordinates, which are scaled"
        )
    return exact << (bits - own_bits), bits


# These are operators so that compilers see one opaque node: the blocks of a grid and errors of points depend on data.
# ``on`` is a tensor on the device of the result.


def _grid_of(on: Tensor, shape: Sequence[int]) -> Tensor:
    return grid(tuple(shape), on.device)


def _line_of(on: Tensor, n: int) -> Tensor:
    side = 1 + isqrt(n - 1) if n else 0
    positions = grid((side, side), on.device)
    return positions if n == side * side else positions[positions < n]


def _order_of(coords: Tensor, lengths: Tensor | None = None) -> Tensor:
    if lengths is None:
        return codes(*_cells(coords)).argsort(dim=-1, stable=True)
    padding = torch.arange(coords.shape[1], device=coords.device) >= lengths.unsqueeze(1)
    # The first point stands for padding, so that it decides neither the bounding box nor the number of bits.
    first = coords[:, :1].masked_fill((lengths == 0)[:, None, None], 0)
    distance = codes(*_cells(torch.where(padding.unsqueeze(-1), first, coords)))
    return distance.masked_fill(padding, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)


grid_of = define_operator("hilbert_grid", _grid_of, lambda on, shape: on.new_empty(prod(shape), dtype=torch.int64))
line_of = define_operator("hilbert_line", _line_of, lambda on, n: on.new_empty(n, dtype=torch.int64))
order_of = define_operator("hilbert_order", _order_of, lambda x, lengths=None: x.new_empty(x.shape[:-1], dtype=torch.int64))
