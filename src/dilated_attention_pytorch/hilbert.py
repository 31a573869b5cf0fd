"""The Hilbert curve in 2-D and 3-D, vectorised over points: codes of scattered points, and whole grids.

The curve is Skilling's (AIP Conference Proceedings 707, 2004). Its top level does not depend on how many levels follow:
``codes(x << s, bits + s) >> (dims * s) == codes(x, bits)``. So a curve of ``bits + 1`` levels is made of ``2**dims`` copies
of the one of ``bits`` levels, turned and moved.
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch
from torch import Tensor

# Grids are cut out of the enclosing cube up to this many times their points; beyond, their points are sorted by code.
_MOST_CELLS_PER_POINT = 8


def most_bits(dims: int) -> int:
    """The largest coordinates have so many bits: codes are int64."""
    return 63 // dims


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
    # Gray decoding
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
    """How a curve is made of ``2**dims`` smaller ones: for each copy and axis (corner, axis of the smaller one, mirrored).

    >>> _copies(2)[0]  # the first quarter is the curve with its axes exchanged
    ((0, 1, False), (0, 0, False))
    """

    def points(bits: int) -> list[tuple[int, ...]]:
        every = torch.cartesian_prod(*[torch.arange(1 << bits, device="cpu")] * dims)
        found: list[tuple[int, ...]] = [tuple(point) for point in every[codes(every, bits).argsort()].tolist()]
        return found

    corners, fine = points(1), points(2)
    columns = list(zip(*corners, strict=True))
    result = []
    for copy, corner in enumerate(corners):
        part = [[x & 1 for x in axis] for axis in zip(*fine[copy << dims : (copy + 1) << dims], strict=True)]
        result.append(
            tuple(
                next(
                    (corner[i], j, mirrored)
                    for j, column in enumerate(columns)
                    for mirrored in (False, True)
                    if part[i] == [x ^ mirrored for x in column]
                )
                for i in range(dims)
            )
        )
    return tuple(result)


def cube(dims: int, bits: int, device: torch.device | str | None) -> Tensor:
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
                start = torch.tensor(corner * side + mirrored * (side - 1), dtype=torch.int32, device="cpu")  # a scalar
                torch.add(start, small[axis], alpha=-1 if mirrored else 1, out=block)
        small = large
    return small


def grid(shape: tuple[int, ...], device: torch.device | str | None) -> Tensor:
    """The row-major numbers of the points of a grid, in the order of the curve of the enclosing cube.

    >>> grid((2, 3), None)  # rows 0 1 2 and 3 4 5
    tensor([0, 3, 4, 1, 2, 5])
    """
    n, bits = prod(shape), (max(shape) - 1).bit_length()
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    if 1 << (bits * len(shape)) > _MOST_CELLS_PER_POINT * n:
        points = torch.stack(torch.meshgrid(*(torch.arange(size, device=device) for size in shape), indexing="ij"), -1)
        return codes(points.flatten(0, -2), bits).argsort()
    axes = cube(len(shape), bits, device)
    numbers = axes[0].to(torch.int64)
    for size, axis in zip(shape[1:], axes[1:], strict=True):
        numbers.mul_(size).add_(axis)
    cut = [axis < size for size, axis in zip(shape, axes, strict=True) if size < 1 << bits]
    if not cut:
        return numbers
    inside = cut[0]
    for other in cut[1:]:
        inside &= other
    return numbers[inside]
