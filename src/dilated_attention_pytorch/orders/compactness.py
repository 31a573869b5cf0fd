"""A measure of how compact the segments of an ordered sequence are in space."""

from __future__ import annotations

import torch
from torch import Tensor


def perimeters(points: Tensor, segment_length: int) -> Tensor:
    """The perimeter of the bounding box of each segment, in cells: (segments,). The cells (n, 2) are in order.

    >>> row_by_row = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    >>> perimeters(row_by_row, 4)  # every segment is a row of 1 x 4
    tensor([10, 10, 10, 10])
    >>> perimeters(row_by_row, 7)  # the last one has two cells
    tensor([12, 14,  6])
    """
    n = points.shape[0]
    if n == 0:
        return points.new_zeros(0)
    segment_length = min(segment_length, n)
    # Copies of the last point complete the last segment without enlarging its box.
    whole = torch.cat((points, points[-1:].expand(-n % segment_length, -1))).view(-1, segment_length, 2)
    return 2 * (whole.amax(1) - whole.amin(1) + 1).sum(-1)
