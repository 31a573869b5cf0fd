"""The rules by which block-sparse patterns choose key blocks: vectorised over query blocks, in closed form.

Letters: n is the number of key blocks of the sequence, and i a query block. It sees v key blocks: all n, or i + 1 if
causal. Its budget is ``c = max(1, ceil(ratio * v))`` blocks. Every rule takes the block itself first. "Nearest first" is
by distance; of two blocks at the same distance, the earlier one comes first. When one side has no blocks left, the other
side supplies all.

A list consists of a few runs, each an arithmetic progression of blocks. No table of n x n blocks is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The query blocks whose lists are made; every tensor is (Q,)."""

    i: Tensor
    visible: Tensor
    budget: Tensor
    blocks: int  # n

    @staticmethod
    def of(
        ratio: Fraction,
        first: int,
        blocks: int,
        is_causal: bool,
        device: torch.device | str = "cpu",
        stop: int | None = None,
    ) -> Rows:
        """The query blocks ``first .. stop - 1`` of a sequence of ``blocks`` blocks; ``stop`` defaults to ``blocks``."""
        i = torch.arange(first, blocks if stop is None else stop, dtype=torch.int32, device=device)
        visible = i + 1 if is_causal else torch.full_like(i, blocks)
        # Integer arithmetic is exact; in floating point, 0.07 * 100 is more than 7.
        budget = -(-visible.long() * ratio.numerator // ratio.denominator)
        return Rows(i, visible, budget.clamp_(min=1).to(torch.int32), blocks)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.i[rows], self.visible[rows], self.budget[rows], self.blocks)

    @property
    def right(self) -> Tensor:
        """How many visible blocks come after the query block."""
        return self.visible - 1 - self.i


@dataclass(frozen=True, slots=True)
class Run:
    """For every query block, ``count`` blocks from ``start`` on in steps of ``stride``. The tensors are (Q,)."""

    start: Tensor
    count: Tensor
    stride: int = 1


def _sides(turns: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``turns`` blocks, nearest first, into those before and after, given how many exist on each side."""
    turns = torch.minimum(turns, left + right)
    taken = torch.minimum(left, torch.maximum((turns + 1) >> 1, turns - right))
    return taken, turns - taken


def local_window(rows: Rows) -> list[Run]:
    """The c nearest blocks: a window around i, shifted to stay inside the sequence.

    >>> [x.tolist() for x in _lists(local_window, Fraction(1, 2), 6)]
    [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]
    """
    left, right = _sides(rows.budget - 1, rows.i, rows.right)
    return [Run(rows.i - left, left + right + 1)]


def global_local(rows: Rows, global_blocks: int) -> list[Run]:
    """The block itself, the first blocks of the sequence (earliest first), then the nearest of the remaining blocks.

    The first ``global_blocks`` query blocks read everything that is visible. They are the only exception to the budget.

    >>> [x.tolist() for x in _lists(lambda rows: global_local(rows, 1), Fraction(1, 2), 6)]
    [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    """
    inside = rows.i < global_blocks
    columns = torch.where(inside, rows.visible, (rows.budget - 1).clamp(max=global_blocks))
    left, right = _sides(rows.budget - columns - 1, rows.i - global_blocks, rows.right)
    window = torch.where(inside, 0, left + right + 1)
    return [Run(torch.zeros_like(rows.i), columns), Run(rows.i - left, window)]


@dataclass(frozen=True, slots=True)
class Comb:
    """Candidates at multiples of ``rate`` blocks beyond the distance ``inner``: their numbers before and after, (Q,)."""

    rate: int
    inner: int
    left: Tensor
    right: Tensor

    def __getitem__(self, rows: slice) -> Comb:
        return Comb(self.rate, self.inner, self.left[rows], self.right[rows])


def dilated_sparse(rows: Rows, branches: tuple[tuple[int, int], ...]) -> list[Run]:
    """Alternate over the branches (segment W, rate r), both in blocks, in the order given.

    The candidates of a branch are the blocks j with ``j // W == i // W`` (the same segment) and ``(j - i) % r == 0``. The
    nearest ones come first. In turn t, each branch takes its t-th candidate. A candidate that another branch has taken
    does not count against the budget. When no branch has candidates left, the nearest of the remaining blocks follow. The
    sorted rates must divide one another.

    >>> [x.tolist() for x in _lists(lambda rows: dilated_sparse(rows, ((2, 1), (8, 2))), Fraction(1, 2), 8)][:4]
    [[0, 1, 2, 4], [0, 1, 3, 5], [0, 2, 3, 4], [1, 2, 3, 5]]
    """
    # A rate larger than the sequence reaches only the query block itself, which is taken in any case.
    reaching = [(segment, rate) for segment, rate in branches if rate < rows.blocks]
    combs = []
    for segment, rate in reaching or [(rows.blocks, rows.blocks)]:
        before = rows.i % segment
        after = torch.minimum(segment - 1 - before, rows.right)
        combs.append(Comb(rate, 0, before // rate, after // rate))
    return _in_turns(rows, combs)


def hierarchical(rows: Rows, window: int) -> list[Run]:
    """Alternate over levels of doubling distance and stride, the inner level first.

    Level 0 has every block at a distance below ``window`` blocks. Level l > 0 has every block at a distance from
    ``window * 2**(l - 1)`` to below ``window * 2**l`` that is a multiple of ``2**l``. In turn t, each level takes its t-th
    block, nearest first. When no level has blocks left, the nearest of the remaining blocks follow. ``window`` is at least
    2, because levels would be empty with 1.

    >>> [x.tolist() for x in _lists(lambda rows: hierarchical(rows, 2), Fraction(1, 4), 16)][::8]
    [[0, 1, 2, 4], [4, 6, 7, 8]]
    """
    combs, inner, outer, rate = [], 0, window - 1, 1
    while inner < rows.blocks:
        first = inner // rate
        left, right = ((side.clamp(max=outer) // rate - first).clamp_(min=0) for side in (rows.i, rows.right))
        combs.append(Comb(rate, inner, left, right))
        inner, outer, rate = outer, 2 * outer + 1, 2 * rate
    return _in_turns(rows, combs)


_AT_A_TIME = 2**16  # elements of one vector operation: PyTorch splits larger ones over threads, which is slower here


def _in_turns(rows: Rows, combs: list[Comb]) -> list[Run]:
    """Take blocks alternately from the combs, then from the window of all blocks, until the budgets are reached."""
    size = max(1, _AT_A_TIME // len(combs))
    starts = range(0, max(1, len(rows.i)), size)
    taken = [_take_in_turns(rows[x : x + size], [comb[x : x + size] for comb in combs]) for x in starts]
    joined = zip(*taken, strict=True)
    return [Run(torch.cat([x.start for x in run]), torch.cat([x.count for x in run]), run[0].stride) for run in joined]


def _take_in_turns(rows: Rows, combs: list[Comb]) -> list[Run]:
    """Choose the blocks of all query blocks at once.

    After t turns, a comb has given its t nearest blocks, so the choice is a union of combs of known reach. The rates divide
    one another: within the reach of a finer comb, it contains all blocks of a coarser one. The size of a union therefore
    follows from the reaches, and bisection finds the number of turns.
    """
    order = sorted(range(len(combs)), key=lambda x: combs[x].rate)
    combs = [combs[x] for x in order]
    turn_of = torch.tensor([[x] for x in order], dtype=torch.int32, device="cpu")
    rate = torch.tensor([[comb.rate] for comb in combs], dtype=torch.int32, device="cpu")
    inner = torch.tensor([[comb.inner] for comb in combs], dtype=torch.int32, device="cpu")
    skipped = inner // rate
    disjoint = all(comb.inner > 0 for comb in combs[1:])  # levels, not branches
    left, right = torch.stack([comb.left for comb in combs]), torch.stack([comb.right for comb in combs])
    all_turns = (left + right).amax(0) * len(combs)

    def side(taken: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks a comb adds on one side to finer combs and the window, and beyond which distance: (combs, Q)."""
        seen = torch.maximum(window, inner)
        if not disjoint:
            reach = (skipped + taken) * rate
            for x in range(1, len(combs)):
                seen[x] = torch.maximum(seen[x], torch.maximum(seen[x - 1], reach[x - 1]))
        covered = torch.div(seen, rate, rounding_mode="trunc")
        return (skipped + taken - covered).clamp_(min=0), covered * rate

    def count(turns: Tensor, window: Tensor) -> Tensor:
        in_window, taken = _sides(window, rows.i, rows.right), _sides(turns, left, right)
        sides = [w + side(t, w)[0].sum(0, dtype=torch.int32) for t, w in zip(taken, in_window, strict=True)]
        return 1 + sides[0] + sides[1]

    def state(step: Tensor) -> tuple[Tensor, Tensor]:
        """The turns of each comb and the blocks of the window after this many steps. In a step, one comb takes a block."""
        in_turns = torch.minimum(step, all_turns)
        turns = in_turns // len(combs)
        return turns + (turn_of < in_turns - turns * len(combs)), (step - all_turns).clamp_(min=0)

    # A step takes at most one block. A turn of the longest comb takes at least one, and so does a step of the window.
    low, high = rows.budget - 1, (rows.budget - 1) * len(combs)
    high = torch.where(high <= all_turns, high, all_turns + rows.budget - 1)
    for _ in range(int((high - low).max()).bit_length() if high.numel() else 0):
        middle = (low + high + 1) >> 1
        fits = count(*state(middle)) <= rows.budget
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    turns, window = state(low)
    (window_left, window_right), (taken_left, taken_right) = _sides(window, rows.i, rows.right), _sides(turns, left, right)
    (lefts, behind_left), (rights, behind_right) = side(taken_left, window_left), side(taken_right, window_right)
    runs = [Run(rows.i - window_left, window_left + window_right + 1)]
    for x, comb in enumerate(combs):  # outwards
        outermost = Run(rows.i - behind_left[x] - lefts[x] * comb.rate, lefts[x], comb.rate)
        runs = [outermost, *runs, Run(rows.i + behind_right[x] + comb.rate, rights[x], comb.rate)]
    return runs


def expand(runs: list[Run]) -> tuple[Tensor, Tensor]:
    """Return counts (Q,) and indices of the lists that concatenate these runs."""
    counts = torch.stack([run.count for run in runs]).sum(0)
    runs = [run for run in runs if bool(run.count.any())] or runs[:1]
    start, count = (torch.stack(x, 1).flatten() for x in zip(*((run.start, run.count) for run in runs), strict=True))
    stride = torch.tensor([run.stride for run in runs], dtype=torch.int32, device="cpu").repeat(len(counts))
    taken = count.nonzero().squeeze(1)
    start, count, stride = (x.index_select(0, taken) for x in (start, count, stride))
    # The indices are running sums of steps: the stride inside a run, and a jump at its start.
    strided = bool((stride > 1).any())
    ones = torch.ones(0 if strided else int(count.sum()), dtype=torch.int32, device="cpu")
    steps = torch.repeat_interleave(stride, count) if strided else ones
    last = start + (count - 1) * stride
    steps[(count.cumsum(0) - count).long()] = torch.cat((start[:1], start[1:] - last[:-1])).to(torch.int32)
    return counts, steps.cumsum_(0)


def _lists(rule: Callable[[Rows], list[Run]], ratio: Fraction, blocks: int) -> tuple[Tensor, ...]:
    """The lists of a rule that is not causal, for the examples above."""
    counts, indices = expand(rule(Rows.of(ratio, 0, blocks, False)))
    return torch.split(indices, counts.tolist())
