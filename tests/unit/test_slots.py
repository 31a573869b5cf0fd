"""The lists by which causal calls under an order sort their rows, next to sorting in Python."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from dilated_attention_pytorch import Dilated, clear_caches
from dilated_attention_pytorch.backends.gpu import slots
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import RowOrder

N, B, HEADS, KEY_HEADS = 53, 2, 6, 3
PATTERNS = [
    Dilated([8, 20, 64], [1, 2, 3]),
    Dilated([7], [4], offsets="blocked"),
    Dilated([5, 30], [9, 2], offsets=[8, 1, 1]),  # in segments of 5 rows, the first head has none
    Dilated([10**6], [10**5]),
]


def segments_of_head(pattern, branch, key_head, sequences, positions):
    """For each segment the places of a head, by position, and how many slots the segment has."""
    w, r = pattern.branches[branch]
    offset = pattern.offset(key_head, KEY_HEADS, r)
    for begin, length in sequences:
        for first in range(0, length, w):
            inner = range(first, min(first + w, length))
            own = [begin + i for i in inner if i % w % r == offset]
            yield sorted(own, key=lambda place: positions[place]), -(-len(inner) // r)


def permutation(sequences):
    """Positions that stay within their sequence."""
    found = torch.arange(N)
    for begin, length in sequences:
        found[begin : begin + length] = begin + torch.randperm(length)
    return found


def check(pattern, options, sequences, positions, moved):
    """``sequences`` and ``positions`` by sample."""
    problem = Problem(pattern, True, B, N, N, HEADS, KEY_HEADS, **options)
    found = slots.make_slots(problem, RowOrder(positions, moved))
    rows_of_all = positions.expand(B, N) if positions.dim() == 1 else positions
    before = 0
    for i, branch in enumerate(found.branches):
        count = branch.problem.queries
        assert found.sizes[i].tolist() == [before, count]
        before += B * count
        assert torch.equal(found.lists[i], branch.lists)
        for b in range(B):
            own = [x[b % len(x)] for x in (branch.rows, branch.places)]
            slot_of, owner_of = (x[i][b % x.shape[1]] for x in (found.slots, found.owners))
            for g in range(KEY_HEADS):
                rows, places = (x[branch.lists[g]].tolist() for x in own)
                expected = []
                for inside, size in segments_of_head(pattern, i, g, sequences[b], rows_of_all[b].tolist()):
                    expected += inside + [None] * (size - len(inside))
                expected += [None] * (count - len(expected))
                assert places == [0 if place is None else place for place in expected]
                input_rows = [place if place is None or not moved else int(rows_of_all[b, place]) for place in expected]
                assert rows == [-1 if row is None else row for row in input_rows]
                has = {row: slot for slot, row in enumerate(input_rows) if row is not None}
                owned = (owner_of == branch.lists[g]).nonzero().flatten().tolist()
                assert {row: int(slot_of[row]) for row in owned} == has
    return found


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_whole_sequences(pattern, each, moved):
    sequences = [[(0, N)]] * B
    positions = torch.stack([permutation(own) for own in sequences]) if each else permutation(sequences[0])
    check(pattern, {}, sequences, positions, moved)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lengths(pattern):
    sequences = [[(0, 41)], [(0, 0)]]
    positions = torch.stack([permutation([*own, (own[0][1], N - own[0][1])]) for own in sequences])
    found = check(pattern, {"lengths": (41, 0)}, sequences, positions, moved=True)
    # The plan over slots has the segments that the slots were made for.
    for (w, r), branch in zip(pattern.branches, found.branches, strict=True):
        assert branch.problem.lengths == (41 // min(w, N) * -(-min(w, N) // r) + -(-(41 % min(w, N)) // r), 0)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("bounds", [(0, 11, 11, N), (0, 3, 50), (0,)])
def test_documents(pattern, bounds):
    own = [(start, stop - start) for start, stop in pairwise(bounds)]
    check(pattern, {"cu_seqlens": bounds}, [own] * B, permutation(own), moved=False)


def test_tiles_over_slots():
    """Every tile of the plan is a segment, whose rows are those of the slots: 4 rows of 7, then 2 of 4."""
    problem = Problem(Dilated([7], [2]), True, 1, 11, 11, 2, 2)
    (branch,) = slots.make_slots(problem, RowOrder(torch.arange(11).flip(0), False)).branches
    assert branch.rows.tolist() == [[[6, 4, 2, 0, 9, 7], [5, 3, 1, -1, 10, 8]]]
    ((_, plan),) = branch.problem.plans()
    tiles = [(f.q_start + i * f.tile_step, f.q_rows, f.causal) for f in plan.families for i in range(f.tiles)]
    assert sorted(tiles) == [(0, 4, True), (4, 2, True)]


def test_lists_live_as_long_as_the_positions():
    positions, problem = torch.randperm(N), Problem(PATTERNS[0], True, B, N, N, HEADS, KEY_HEADS)
    found = slots.find_slots(problem, RowOrder(positions, True))
    assert slots.find_slots(problem, RowOrder(positions, True)) is found
    assert slots.find_slots(problem, RowOrder(positions, False)) is not found
    positions.copy_(positions.flip(0))
    assert slots.find_slots(problem, RowOrder(positions, True)) is not found
    lists = weakref.ref(found.slots)
    del found, positions
    gc.collect()
    assert lists() is None


def test_an_order_keeps_the_lists_of_its_last_problems():
    positions, held = torch.randperm(N), len(slots.kept_slots)
    order = RowOrder(positions, True)
    problems = [Problem(PATTERNS[0], True, batch, N, N, HEADS, KEY_HEADS) for batch in range(1, 7)]
    first, *_, last = [slots.find_slots(problem, order) for problem in problems]
    assert len(slots.kept_slots) - held == slots.kept_slots.per_order == 4
    assert slots.find_slots(problems[-1], order) is last
    assert slots.find_slots(problems[0], order) is not first
    for _ in range(3):
        positions.copy_(positions.flip(0))
        slots.find_slots(problems[0], order)
    assert len(slots.kept_slots) - held == 4
    clear_caches()
    assert len(slots.kept_slots) == 0
    assert slots.find_slots(problems[-1], order) is not last
