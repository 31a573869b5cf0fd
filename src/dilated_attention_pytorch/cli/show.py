"""What ``show`` draws: an order over a grid, and what one query sees under a dilated pattern."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.orders.kinds import Hilbert, Identity, Striped, ZigZag, perimeters
from dilated_attention_pytorch.orders.order import Order
from dilated_attention_pytorch.patterns.dilated import Dilated

ORDERS = ("hilbert", "row-major", "zigzag", "striped")
_OF_RANKS = {"zigzag": ZigZag, "striped": Striped}
_DEFAULT_RANKS = 4
_LONGEST_SIDE = 256  # a picture cannot show more cells


@dataclass(frozen=True, slots=True)
class View:
    """A grid, a pattern and a query (row, column), which are shown under several orders."""

    height: int
    width: int
    pattern: Dilated
    query: tuple[int, int]

    def cells(self, order: Order) -> Tensor:
        """The (row, column) of each index of the ordered sequence: (n, 2)."""
        return torch.stack((order.positions // self.width, order.positions % self.width), -1)

    def segments(self, order: Order) -> Tensor:
        """The number of each cell's segment in the first branch: (height, width)."""
        return (order.places // self.pattern.segment_lengths[0]).view(self.height, self.width)

    def perimeter(self, order: Order) -> float:
        """The mean perimeter of the bounding boxes of the segments of the first branch."""
        return perimeters(self.cells(order), self.pattern.segment_lengths[0]).double().mean().item()

    def seen(self, order: Order) -> Tensor:
        """The first branch in which the query meets each cell, or -1: (height, width).

        There are as many heads as the largest rate. The head is the one that has the query in the branch of that rate. It
        has the query in every branch if segment lengths and rates are multiples of the smaller ones.
        """
        row, column = self.query
        index = int(order.places[row * self.width + column])
        length, heads = max(self.pattern.branches, key=lambda branch: branch[1])
        head = index % length % heads
        found = torch.full_like(order.places, -1)
        for branch in reversed(range(len(self.pattern.branches))):
            found[self.pattern.meets(branch, index, order.places, key_head=head, key_heads=heads)] = branch
        return found.view(self.height, self.width)


def make_view(grid: str, segment_lengths: str | None, dilation_rates: str | None, query: str | None) -> View:
    """The view that the options describe. Raise a ValueError if one of them is not valid."""
    height, width = _grid(grid)
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    if segment_lengths is None or dilation_rates is None:
        # There are at most 64, 8 and 1 segments. Lengths are multiples of all rates: one head has the query in each branch.
        first = 16 * math.ceil(height * width / 1024)
        pattern = Dilated([first, 8 * first, 64 * first], [1, 4, 16])
    else:
        pattern = Dilated(_integers("--segment-lengths", segment_lengths), _integers("--dilation-rates", dilation_rates))
    if query is None:
        return View(height, width, pattern, (height // 3, width // 3))
    numbers = _integers("--query", query)
    if len(numbers) != 2 or not (numbers[0] < height and numbers[1] < width):
        raise ValueError(
            f"--query must be ROW,COLUMN with rows from 0 to {height - 1} and columns from 0 to {width - 1}, got {query!r}"
        )
    return View(height, width, pattern, (numbers[0], numbers[1]))


def make_order(name: str, view: View, ranks: int | None) -> Order:
    """The order of this name over the grid. Raise a ValueError if an option is not valid."""
    if name not in ORDERS:
        raise ValueError(f"--order must be one of {', '.join(ORDERS)}, got {name!r}")
    n = view.height * view.width
    if name in _OF_RANKS:
        ranks = min(_DEFAULT_RANKS, n) if ranks is None else ranks
        if not 1 <= ranks <= n:
            raise ValueError(f"--ranks must be from 1 to the number of tokens, {n}, got {ranks}")
        return _OF_RANKS[name](n, ranks)
    if ranks is not None:
        raise ValueError(f"--ranks belongs to the orders {' and '.join(_OF_RANKS)}; leave it out with --order {name}")
    return Hilbert.grid(view.height, view.width) if name == "hilbert" else Identity(n)


def _grid(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
    if match is None:
        raise ValueError(f"--grid must be HEIGHTxWIDTH, two integers such as 64x64, got {text!r}")
    height, width = int(match[1]), int(match[2])
    if not (1 <= height <= _LONGEST_SIDE and 1 <= width <= _LONGEST_SIDE):
        raise ValueError(
            f"--grid must have sides from 1 to {_LONGEST_SIDE}, so that a picture can show every cell, got {text!r}; a "
            "Hilbert curve looks the same at every scale"
        )
    return height, width


def _integers(name: str, text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,13}(,[0-9]{1,13})*", text):
        raise ValueError(f"{name} must be integers separated by commas, such as 64,512, got {text!r}")
    return [int(number) for number in text.split(",")]
