"""The pool of rank processes that the tests of this folder run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import ranks


def check_sum(group, world: int) -> None:
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [world, world]
    assert dist.get_world_size(group) == world


def fail_alone(group) -> None:
    assert dist.get_rank() != 1, "of one rank"
    dist.all_reduce(torch.ones(2))  # waits for the rank that failed


def leave(group, code: int) -> None:
    if dist.get_rank() == 1:
        os._exit(code)


def leave_state(group) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)


def check_state(group) -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.initial_seed() == 0
    assert torch.empty(3).isnan().all()


def report_of(pool: ranks.Pool, *arguments, **options) -> str:
    with pytest.raises(pytest.fail.Exception) as raised:
        pool.run(*arguments, **options)
    return str(raised.value)


def test_groups_of_all_sizes(own_ranks):
    for world, spare in ((1, 0), (3, 0), (2, 1), (3, 2)):
        own_ranks.run(world, check_sum, world, spare=spare)


def test_a_failure_shows_the_traceback_and_the_pool_works_on(own_ranks, monkeypatch):
    own_ranks.run(2, check_sum, 2)
    text = report_of(own_ranks, 3, fail_alone)
    assert "rank 1 of 3: Traceback" in text
    assert "in fail_alone" in text
    assert "AssertionError: of one rank" in text
    own_ranks.run(3, check_sum, 3)


def test_a_process_that_ends(own_ranks):
    # Rank 0 may fail as well, because it loses its connection.
    assert "rank 1 of 2: the process ended with code 0" in report_of(own_ranks, 2, leave, 0).splitlines()
    assert "rank 1 of 2: the process ended with code 3" in report_of(own_ranks, 2, leave, 3, leaving=[1]).splitlines()
    own_ranks.run(2, leave, 0, leaving=[1])
    own_ranks.run(2, check_sum, 2)
    assert "rank 1 of 2: the process did not end" in report_of(own_ranks, 2, check_sum, 2, leaving=[1])


def test_ranks_that_hang(own_ranks, monkeypatch):
    monkeypatch.setattr(ranks, "LIMIT_S", 0.5)
    assert report_of(own_ranks, 2, sleep) == "ranks 0, 1 did not finish"


def sleep(group) -> None:
    time.sleep(60)


def test_calls_do_not_see_one_another(own_ranks):
    own_ranks.run(2, leave_state)
    own_ranks.run(2, check_state)
