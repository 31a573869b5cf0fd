"""The rules by which block-sparse patterns choose key blocks: vectorised over query blocks, in closed form.

Letters: n key blocks of the sequence, i a query block, v the key blocks it sees (all n, or i + 1 if causal), c its budget:
``max(1, ceil(ratio * v))``. Every rule takes the block itself first. "Nearest first" means by distance, the earlier one of
two at the same distance; a side that ends leaves its turns to the other one.

A list is a few pieces, each an arithmetic progression of blocks: no table of n x n is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dilated_attention_pytorch.execute.merge import accumulate_dtype


@dataclass(frozen=True, slots=True)
class Rows:
    """The query blocks whose lists are made, each entry a vector (Q,)."""

    i: Tensor
    visible: Tensor
    budget: Tensor
    blocks: int  # n

    @staticmethod
    def of(ratio: Fraction, first: int, blocks: int, is_causal: bool) -> Rows:
        """The query blocks ``first .. blocks - 1``."""
        i = torch.arange(first, blocks, dtype=torch.int32)
        visible = i + 1 if is_causal else torch.full_like(i, blocks)
        # in integers: 0.07 * 100 is more than 7 in floating point
        budget = -(-visible.long() * ratio.numerator // ratio.denominator)
        return Rows(i, visible, budget.clamp_(min=1).to(torch.int32), blocks)

    def __getitem__(self, some: slice) -> Rows:
        return Rows(self.i[some], self.visible[some], self.budget[some], self.blocks)

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(self.i.to(device), self.visible.to(device), self.budget.to(device), self.blocks)

    @property
    def right(self) -> Tensor:
        """How many visible blocks lie behind."""
        return self.visible - 1 - self.i


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` blocks from ``start`` on in steps of ``stride``, for every query block: vectors (Q,)."""

    start: Tensor
    count: Tensor
    stride: int = 1

    @staticmethod
    def joined(parts: tuple[Piece, ...]) -> Piece:
        """The piece of several groups of query blocks."""
        return Piece(torch.cat([x.start for x in parts]), torch.cat([x.count for x in parts]), parts[0].stride)


def _sides(turns: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """How many of ``turns`` blocks, nearest first, lie left and right, where so many are there."""
    turns = torch.minimum(turns, left + right)
    taken = torch.minimum(left, torch.maximum((turns + 1) >> 1, turns - right))
    return taken, turns - taken


def local_window(rows: Rows) -> list[Piece]:
    """The c nearest blocks: a window around i, moved into bounds.

    >>> [x.tolist() for x in _lists(local_window, Fraction(1, 2), 6)]
    [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [3, 4, 5]]
    """
    left, right = _sides(rows.budget - 1, rows.i, rows.right)
    return [Piece(rows.i - left, left + right + 1)]


def global_local(rows: Rows, global_blocks: int) -> list[Piece]:
    """The block itself, the first blocks of the sequence (earliest first), then the nearest of the rest.

    The ``global_blocks`` first query blocks see everything that is visible: the one exception to the budget.

    >>> [x.tolist() for x in _lists(lambda rows: global_local(rows, 1), Fraction(1, 2), 6)]
    [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    """
    inside = rows.i < global_blocks
    columns = torch.where(inside, rows.visible, (rows.budget - 1).clamp(max=global_blocks))
    left, right = _sides(rows.budget - columns - 1, rows.i - global_blocks, rows.right)
    window = torch.where(inside, 0, left + right + 1)
    return [Piece(torch.zeros_like(rows.i), columns), Piece(rows.i - left, window)]


@dataclass(frozen=True, slots=True)
class Comb:
    """Candidates at multiples of ``rate`` blocks, farther than ``inner``: so many to the left and right, vectors (Q,)."""

    rate: int
    inner: int
    left: Tensor
    right: Tensor

    def __getitem__(self, some: slice) -> Comb:
        return Comb(self.rate, self.inner, self.left[some], self.right[some])


def dilated_sparse(rows: Rows, branches: tuple[tuple[int, int], ...]) -> list[Piece]:
    """In turns over the branches (segment W, rate r), both in blocks, in the order given.

    The candidates of a branch are the blocks j of the same segment (``j // W == i // W``) with ``(j - i) % r == 0``,
    nearest first. In turn t each branch takes its t-th candidate; one that is taken already costs nothing. When no branch
    has a candidate left, the nearest blocks of the rest follow. Sorted rates divide one another.

    >>> [x.tolist() for x in _lists(lambda rows: dilated_sparse(rows, ((2, 1), (8, 2))), Fraction(1, 2), 8)][:4]
    [[0, 1, 2, 4], [0, 1, 3, 5], [0, 2, 3, 4], [1, 2, 3, 5]]
    """
    # Beyond the sequence a rate leaves only the own block, which a row has anyway.
    reaching = [(segment, rate) for segment, rate in branches if rate < rows.blocks]
    combs = []
    for segment, rate in reaching or [(rows.blocks, rows.blocks)]:
        before = rows.i % segment
        after = torch.minimum(segment - 1 - before, rows.right)
        combs.append(Comb(rate, 0, before // rate, after // rate))
    return _in_turns(rows, combs)


def hierarchical(rows: Rows, window: int) -> list[Piece]:
    """In turns over levels of doubling distance and stride, the inner level first.

    Level 0 is every block at a distance below ``window`` blocks, level l > 0 every block at a distance from
    ``window * 2**(l - 1)`` to below ``window * 2**l`` that is a multiple of ``2**l``. In turn t each level takes its t-th
    block, nearest first. When no level has one left, the nearest blocks of the rest follow. ``window`` is at least 2: with
    1, levels would be empty.

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


# Elements of a vector operation: larger ones are shared between threads, which costs more here than it gives.
_AT_A_TIME = 2**16


def _in_turns(rows: Rows, combs: list[Comb]) -> list[Piece]:
    """Take blocks from combs in turns, then from the window of all blocks, until the budgets are used up."""
    size = max(1, _AT_A_TIME // len(combs))
    starts = range(0, max(1, len(rows.i)), size)
    parts = [_some_in_turns(rows[x : x + size], [comb[x : x + size] for comb in combs]) for x in starts]
    return [Piece.joined(pieces) for pieces in zip(*parts, strict=True)]


def _some_in_turns(rows: Rows, combs: list[Comb]) -> list[Piece]:
    """The blocks taken from a comb after t turns are its t nearest, so the choice is a union of combs of known reach.

    Their rates divide one another: what a finer comb reaches holds all blocks that a coarser one has there. So the blocks
    of a union are counted by reach alone, and the number of turns is found by bisection.
    """
    order = sorted(range(len(combs)), key=lambda x: combs[x].rate)
    combs = [combs[x] for x in order]
    turn_of = torch.tensor([[x] for x in order], dtype=torch.int32)
    rate = torch.tensor([[comb.rate] for comb in combs], dtype=torch.int32)
    inner = torch.tensor([[comb.inner] for comb in combs], dtype=torch.int32)
    skipped = inner // rate
    disjoint = all(comb.inner > 0 for comb in combs[1:])  # levels, not branches
    left, right = torch.stack([comb.left for comb in combs]), torch.stack([comb.right for comb in combs])
    all_turns = (left + right).amax(0) * len(combs)

    def side(taken: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """(combs, Q) on one side: how many blocks a comb adds to finer ones and the window, and behind which distance."""
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
        """Turns of each comb, and blocks of the window, after so many steps: one comb takes one block in each."""
        in_turns = torch.minimum(step, all_turns)
        turns = in_turns // len(combs)
        return turns + (turn_of < in_turns - turns * len(combs)), (step - all_turns).clamp_(min=0)

    # A step takes one block at most. A turn of the longest comb takes one at least, and so does a step of the window.
    low, high = rows.budget - 1, (rows.budget - 1) * len(combs)
    high = torch.where(high <= all_turns, high, all_turns + rows.budget - 1)
    for _ in range(int((high - low).max()).bit_length() if high.numel() else 0):
        middle = (low + high + 1) >> 1
        fits = count(*state(middle)) <= rows.budget
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    turns, window = state(low)
    (window_left, window_right), (taken_left, taken_right) = _sides(window, rows.i, rows.right), _sides(turns, left, right)
    (lefts, behind_left), (rights, behind_right) = side(taken_left, window_left), side(taken_right, window_right)
    pieces = [Piece(rows.i - window_left, window_left + window_right + 1)]
    for x, comb in enumerate(combs):  # outwards
        outermost = Piece(rows.i - behind_left[x] - lefts[x] * comb.rate, lefts[x], comb.rate)
        pieces = [outermost, *pieces, Piece(rows.i + behind_right[x] + comb.rate, rights[x], comb.rate)]
    return pieces


def expand(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """``(counts (Q,), indices)`` of lists that are these pieces one after the other."""
    counts = torch.stack([p.count for p in pieces]).sum(0)
    pieces = [p for p in pieces if bool(p.count.any())] or pieces[:1]
    start, count = (torch.stack(x, 1).flatten() for x in zip(*((p.start, p.count) for p in pieces), strict=True))
    stride = torch.tensor([p.stride for p in pieces], dtype=torch.int32).repeat(len(counts))
    some = count.nonzero().squeeze(1)
    start, count, stride = (x.index_select(0, some) for x in (start, count, stride))
    # Running sums of steps: the stride inside a piece, a jump at its start.
    if bool((stride > 1).any()):
        steps = torch.repeat_interleave(stride, count)
    else:
        steps = torch.ones(int(count.sum()), dtype=torch.int32)
    last = start + (count - 1) * stride
    steps[(count.cumsum(0) - count).long()] = torch.cat((start[:1], start[1:] - last[:-1])).to(torch.int32)
    return counts, steps.cumsum_(0)


def _lists(rule: Callable[[Rows], list[Piece]], ratio: Fraction, blocks: int) -> tuple[Tensor, ...]:
    """The lists of a rule, not causal, for examples."""
    counts, indices = expand(rule(Rows.of(ratio, 0, blocks, False)))
    return torch.split(indices, counts.tolist())


# Scores of so many pairs of blocks exist at a time.
_MAX_SCORES = 2**24


def adaptive(query: Tensor, key: Tensor, rows: Rows, first: int, block_size: int, scale: float, width: int) -> Tensor:
    """The chosen blocks of every sample and head, (B, H, Q, width), ascending, the first c of each list valid.

    ``rows`` are on the device of the query, from query block ``first`` on: nothing is copied, so nothing is waited for.

    The score of two blocks is ``scale`` times the product of the means of their queries and keys; the block itself comes
    first, then the highest scores, the earlier block of two with the same. Queries are the last positions.
    """
    with torch.no_grad():
        dtype = accumulate_dtype(query.dtype)
        n, length = query.shape[1], key.shape[1]
        q = _means(query, length - n - first * block_size, block_size, dtype)
        return best_blocks(q, _means(key, 0, block_size, dtype), rows, scale, width)


def best_blocks(q: Tensor, k: Tensor, rows: Rows, scale: float, width: int) -> Tensor:
    """The choice of ``adaptive`` from the means of queries (B, H, Q, D) and of keys (B, G, n, D)."""
    (batch, heads, _, _), dtype, device = q.shape, q.dtype, q.device
    k = k.repeat_interleave(heads // k.shape[1], 1)
    i, visible, budget = rows.i, rows.visible, rows.budget
    j = torch.arange(rows.blocks, device=device)
    chosen = torch.full((batch, heads, len(i), width), rows.blocks, dtype=torch.int32, device=device)
    most = min(width, rows.blocks)
    size = max(1, _MAX_SCORES // max(1, batch * heads * rows.blocks))
    for start in range(0, len(i), size):
        some = slice(start, start + size)
        score = torch.matmul(q[:, :, some], k.transpose(-1, -2)).mul_(scale)
        low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
        score = torch.nan_to_num(score, nan=low, posinf=high, neginf=low)
        score.masked_fill_(j == i[some, None], torch.inf).masked_fill_(j >= visible[some, None], -torch.inf)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., :most]
        best = best.masked_fill(j[:most] >= budget[some, None], rows.blocks)
        chosen[:, :, some, :most] = best.sort(-1).values.to(torch.int32)
    return chosen


def _means(x: Tensor, skipped: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """(B, heads, blocks, D): the means of the rows of each block, of whose first one ``skipped`` rows are not there."""
    batch, rows, heads, d = x.shape
    blocks = math.ceil((skipped + rows) / block_size)
    sums = torch.zeros((batch, blocks, heads, d), dtype=dtype, device=x.device)
    add_to_blocks_(sums, x, skipped, block_size)
    block = torch.arange(blocks, device=x.device)
    ends = ((block + 1) * block_size).clamp(max=skipped + rows)
    sizes = (ends - (block * block_size).clamp(min=skipped)).to(dtype)
    return (sums / sizes[:, None, None]).transpose(1, 2)


def add_to_blocks_(sums: Tensor, x: Tensor, first: int, block_size: int) -> None:
    """Add rows, the first of which is position ``first``, to sums (B, blocks, heads, D) by block, in an order of their own.

    Whole blocks at once, and the rows before and after them: index_add_ would add in any order on a GPU.
    """
    rows, block = x.shape[1], first // block_size
    head = min(rows, -first % block_size)
    whole = (rows - head) // block_size
    if head:
        sums[:, block] += x[:, :head].sum(1, dtype=sums.dtype)
        block += 1
    if whole:
        inside = x[:, head : head + whole * block_size].reshape(x.shape[0], whole, block_size, *x.shape[2:])
        sums[:, block : block + whole] += inside.sum(2, dtype=sums.dtype)
    if head + whole * block_size < rows:
        sums[:, block + whole] += x[:, head + whole * block_size :].sum(1, dtype=sums.dtype)
