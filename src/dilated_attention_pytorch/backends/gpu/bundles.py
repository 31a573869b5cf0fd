"""Bundles: the tiles of one branch and kind, and the tree by which their partial results are added.

A bundle holds the rectangular tiles of one branch, or its triangular ones. So within a bundle, every row of the result
belongs to one tile. The densest bundle has all rows if its rate is 1: it is the root of the tree, which writes the result.
All other bundles write partial results. A bundle is the *child* of a denser one that has all its rows, as rate 4 is of rate
2. The parent adds the partial result of the child to its own before it writes that. Bundles without a parent are children
of the root. If no bundle has all rows, a kernel that only adds is the root.

A denser bundle has all rows of a sparser one only if segments of both begin at multiples of the denser rate. Then the rows
of a head have the same remainder in all segments. Segments of 16384 begin at even rows but not at multiples of 6. So a
bundle of rate 6 with this segment length is a child of one of rate 2, and has no children.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import cast

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import TileFamily

# The families of a bundle, by the number of their sequence.
Bundle = dict[int, list[TileFamily]]


def _bundles(problem: Problem) -> list[Bundle]:
    """Sparse branches first."""
    found: dict[tuple[int, int, bool], Bundle] = defaultdict(lambda: defaultdict(list))
    for sequence, (_, plan) in enumerate(problem.plans()):
        for family in plan.families:
            found[-family.row_stride, family.branch, family.causal][sequence].append(family)
    return [found[key] for key in sorted(found)]


def _example(bundle: Bundle) -> TileFamily:
    """One of the families of a bundle, which have branch and rate in common."""
    return next(iter(bundle.values()))[0]


class BundleTree:
    """The bundles of a problem by number, sparse ones first, and the children of each.

    Rates 12, 4, 2 and 1 are the bundles 0 to 3. Bundle 3 is the root, and ``children`` is ``[[], [0], [1], [2]]``.
    """

    def __init__(self, problem: Problem, by_keys: bool) -> None:
        self.problem = problem
        self.pattern = cast(Dilated, problem.pattern)
        self.bundles = _bundles(problem)
        self.square = all(len(plan.queries) == len(plan.keys) for _, plan in problem.plans())
        dense = bool(self.bundles) and _example(self.bundles[-1]).row_stride == 1
        self.root_attends = dense and (self.square or not by_keys)
        self.root = len(self.bundles) - self.root_attends  # also the number of bundles that write partial results
        self.children = self._children()

    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(self.root + 1)]
        for child in range(self.root):
            # If a result has only some of the rows, a denser bundle may lack rows: then the root adds all bundles.
            denser = range(child + 1, self.root) if self.square else range(0)
            parents = (parent for parent in denser if self._covers(parent, child))
            children[next(parents, self.root)].append(child)
        return children

    def _covers(self, dense: int, sparse: int) -> bool:
        """Whether a bundle has every row that a sparser one has, for every head."""
        both = [_example(self.bundles[number]) for number in (dense, sparse)]
        rate, length = both[0].row_stride, max((plan.keys.stop for _, plan in self.problem.plans()), default=0)
        segment_lengths = [self.pattern.branches[family.branch][0] for family in both]
        if both[1].row_stride % rate or any(w % rate and w < length for w in segment_lengths):
            return False
        offsets = [self._offsets(family.row_stride) for family in both]
        return all(s % rate == d for d, s in zip(*offsets, strict=True))

    def _offsets(self, rate: int) -> list[int]:
        key_heads = self.problem.key_heads
        return [self.pattern.offset(g, key_heads, rate) for g in range(key_heads)]

    @cached_property
    def order(self) -> list[int]:
        """The bundles that write partial results; the children of a bundle follow one another."""
        return [child for siblings in reversed(self.children) for child in siblings]

    def levels(self) -> list[list[int]]:
        """The bundles below the root; those of a level have all their children in earlier levels."""
        level = [0] * (self.root + 1)
        for number, siblings in enumerate(self.children):
            level[number] = 1 + max((level[child] for child in siblings), default=-1)
        return [[number for number in range(self.root) if level[number] == i] for i in range(level[self.root])]

    def branch(self, number: int) -> tuple[int, int]:
        """Segment length and rate of a bundle."""
        return self.pattern.branches[_example(self.bundles[number]).branch]

    def offsets(self) -> list[list[int]]:
        """The offset of every key head, by bundle in their order. One behind the longest sequence is cut: no row has it."""
        longest = max((plan.keys.stop for _, plan in self.problem.plans()), default=0)
        return [
            [min(x, longest) for x in self._offsets(_example(self.bundles[number]).row_stride)] for number in self.order
        ]
