"""The order in which persistent programs take the items of a launch."""

from __future__ import annotations

import heapq

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

import triton
import triton.language as tl

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.gpu.balance import MOST_ITEMS, balanced_order, item_rows
from dilated_attention_pytorch.backends.gpu.kernels.primitives import find_family, locate
from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
from dilated_attention_pytorch.plan.problem import Problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
GIGAPATH = Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


@triton.jit
def locate_kernel(TABLE, FOUND, families, group, programs, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr):
    item = tl.program_id(0)
    row = find_family(TABLE, families, item)
    block, _, _, _, _, _, q_rows, _, k_rows, _, _, causal = locate(row, item, group, BLOCK, BY_KEYS, programs)
    tl.store(FOUND + item * 4, block)
    tl.store(FOUND + item * 4 + 1, q_rows)
    tl.store(FOUND + item * 4 + 2, k_rows)
    tl.store(FOUND + item * 4 + 3, causal)


def plan_of(problem, by_keys, programs, block=128, device=None):
    return find_launch_plan(
        problem, block=block, by_keys=by_keys, head_dim=64, device=device or torch.device("cpu"), persistent=programs
    )


@pytest.mark.parametrize("programs", [4, 16])
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_those_of_the_items_that_kernels_locate(by_keys, causal, programs):
    """Two samples of different lengths, grouped heads, and segments that rates do not divide.

    A round of 16 programs has 4 tiles of 4 blocks.
    """
    problem = Problem(Dilated([60, 200], [1, 3]), causal, 2, 150, 150, 4, 2, (150, 70))
    launches = [one for one in plan_of(problem, by_keys, programs, 16, DEVICE).launches if one.attends]
    assert len(launches) == 2
    for one in launches:
        found = torch.zeros(one.programs, 4, dtype=torch.int32, device=DEVICE)
        locate_kernel[(one.programs,)](one.table, found, len(one.table), 2, programs, 16, by_keys)
        expected = []
        for block, q_rows, k_rows, masked in found.tolist():
            others, own = (q_rows, k_rows) if by_keys else (k_rows, q_rows)
            rows = range(block * 16, min(block * 16 + 16, own))
            sees = (lambda i, j: j >= i) if by_keys else (lambda i, j: j <= i)
            # The last block of rows is as long as the others to the kernel, but causal tiles have no further keys.
            expected.append(sum(not masked or any(sees(i, j) for i in rows) for j in range(others)) + 16)
        assert item_rows(one.table.cpu(), one.programs, 16, by_keys, programs).tolist() == expected


def longest_first(rows, programs):
    """The rows of the program that has most, if programs take items when they are done with others."""
    loads = [0] * programs
    for own in sorted(rows, reverse=True):
        heapq.heapreplace(loads, loads[0] + own)
    return max(loads)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    ("pattern", "tokens", "heads"), [(PAPER, 65536, 12), (GIGAPATH, 16384, 16), (GIGAPATH, 131072, 16)]
)
def test_programs_have_as_many_rows(pattern, tokens, heads, by_keys):
    """Every item once. No program reads 3 % more than if each took the longest item that is left when it is done."""
    worst = 1.0
    for one in plan_of(Problem(pattern, True, 1, tokens, tokens, heads, heads), by_keys, 132).launches:
        if not 132 < one.programs <= MOST_ITEMS:
            assert len(one.order) == 0
            continue
        rows = item_rows(one.table, one.programs, 128, by_keys, 132)
        order = one.order if len(one.order) else torch.arange(one.programs)
        assert sorted(order.tolist()) == list(range(one.programs))
        read = [int(rows[order[program::132]].sum()) for program in range(132)]
        assert max(read) < 1.03 * longest_first(rows.tolist(), 132)
        unordered = [int(rows[program::132].sum()) for program in range(132)]
        worst = max(worst, max(unordered) * 132 / sum(unordered))
    assert worst > 1.4


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("rows", [256, 512, 1024, 2048, 8192])
def test_long_launches_need_no_order(rows, by_keys):
    """A round of 132 programs has 66 tiles of 256 rows, so without further turns a program would meet one block only."""
    problem = Problem(Dilated([rows], [1]), True, 1, 2**18, 2**18, 16, 16)
    (one,) = plan_of(problem, by_keys, 132).launches
    assert one.programs > MOST_ITEMS
    assert len(one.order) == 0
    read = item_rows(one.table, one.programs, 128, by_keys, 132)
    by_program = [int(read[program::132].sum()) for program in range(132)]
    assert max(by_program) * 132 < 1.04 * sum(by_program)


def test_orders_that_do_not_pay():
    """Tiles that are not causal have items of one length, and each item has a program of its own in other kernels."""
    assert balanced_order(torch.full((1000,), 7), 132) is None
    for problem, programs in (
        (Problem(PAPER, False, 1, 16384, 16384, 12, 12), 132),
        (Problem(PAPER, True, 1, 16384, 16384, 12, 12), 0),
    ):
        assert all(len(one.order) == 0 for one in plan_of(problem, False, programs).launches)
