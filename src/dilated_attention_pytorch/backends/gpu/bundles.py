"""Bundles: the tiles of one branch and kind, and the tree by which their partial results are added.

A bundle holds the rectangular tiles of one branch, or its triangular ones. So within a bundle, every row of the result
belongs to one tile. The densest bundle is the *root* if it has all rows: it writes the result. All other bundles write
partial results. A bundle is the *child* of a denser one that has all its rows, as rate 4 is of rate 2. The parent adds the
partial result of the child to its own before it writes that. Bundles without a parent are children of the root. If no
bundle has all rows, the root is a launch that only adds.

A denser bundle has all rows of a sparser one only if segments of both begin at multiples of the denser rate: then the rows
of a head have the same remainder in all segments. Segments of 16384 begin at even rows but not at multiples of 6. So a
bundle of rate 6 with this segment length is a child of one of rate 2, and has no children.
"""

from __future__ import annotations

from collections import defaultdict

from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import TileFamily


def _bundles(problem: Problem) -> list[dict[int, list[TileFamily]]]:
    found: dict[tuple[int, int, bool], dict[int, list[TileFamily]]] = defaultdict(lambda: defaultdict(list))
    for sequence, (_, plan) in enumerate(problem.plans()):
        for family in plan.families:
            found[-family.row_stride, family.branch, family.causal][sequence].append(family)
    return [found[key] for key in sorted(found)]


class BundleTree:
    """The bundles of a problem by number, sparse ones first, and the children of each.

    Rates 12, 4, 2 and 1 are the bundles 0 to 3. Bundle 3 is the root, and ``children`` is ``[[], [0], [1], [2]]``.
    """

    def __init__(self, problem: Problem, by_keys: bool) -> None:
        self.bundles = _bundles(problem)  # families by the number of their sequence
        self.pattern, self.key_heads = problem.dilated, problem.key_heads
        self.square = all(len(plan.queries) == len(plan.keys) for _, plan in problem.plans())
        self.longest = max((plan.keys.stop for _, plan in problem.plans()), default=0)
        dense = bool(self.bundles) and self._example(-1).row_stride == 1
        self.root_attends = dense and (self.square or not by_keys)
        self.root = len(self.bundles) - self.root_attends  # also the number of bundles that write partial results
        self.children: list[list[int]] = [[] for _ in range(self.root + 1)]
        for child in range(self.root):
            # If the result has only some of the rows, a denser bundle may lack rows: then the root adds all bundles.
            denser = range(child + 1, self.root) if self.square else range(0)
            self.children[next((parent for parent in denser if self._covers(parent, child)), self.root)].append(child)
        # The order in the layout of partial results: the children of a bundle follow one another.
        self.order = [child for siblings in reversed(self.children) for child in siblings]

    def _example(self, number: int) -> TileFamily:
        """One of the families of a bundle, which have branch and rate in common."""
        return next(iter(self.bundles[number].values()))[0]

    def _offsets(self, number: int) -> list[int]:
        rate = self._example(number).row_stride
        return [self.pattern.offset(g, self.key_heads, rate) for g in range(self.key_heads)]

    def _covers(self, dense: int, sparse: int) -> bool:
        """Whether a bundle has every row that a sparser one has, for every head."""
        rate = self._example(dense).row_stride
        lengths = self.branch(dense)[0], self.branch(sparse)[0]
        if self._example(sparse).row_stride % rate or any(w % rate and w < self.longest for w in lengths):
            return False
        return all(s % rate == d for d, s in zip(self._offsets(dense), self._offsets(sparse), strict=True))

    def branch(self, number: int) -> tuple[int, int]:
        """Segment length and rate of a bundle."""
        return self.pattern.branches[self._example(number).branch]

    def offsets(self) -> list[list[int]]:
        """The offset of every key head, by bundle in their order; a large one is cut to one that no row has."""
        return [[min(offset, self.longest) for offset in self._offsets(number)] for number in self.order]

    def levels(self) -> list[list[int]]:
        """The bundles below the root; those of a level have all their children in earlier levels."""
        level = [0] * (self.root + 1)
        for number, siblings in enumerate(self.children):
            level[number] = 1 + max((level[child] for child in siblings), default=-1)
        return [[number for number in range(self.root) if level[number] == i] for i in range(level[self.root])]
