"""Random sharded calls on 2 to 8 ranks, next to dense attention of the whole sequence in float64, gradients included.

Every case runs over gloo, and again under the rules of NCCL (``support/nccl_rules.py``) with the same bits. Groups with
NCCL only and with gloo beside it alternate. Two cases at a time share a backward. The environment sets how many cases there
are for each number of ranks, and the first seed:

    FUZZ_CASES=100 FUZZ_SEED=1000 python -m pytest tests/ranks/test_fuzz.py -s

The seeds are printed (``-s``, or with a failure). ``FUZZ_CASES=1 FUZZ_SEED=1017`` repeats one case.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from fuzz_cases import draw, one_device, run_together
from nccl_rules import nccl_rules
from ring_cases import NAMES

CASES, SEED = int(os.environ.get("FUZZ_CASES", "4")), int(os.environ.get("FUZZ_SEED", "0"))
TOGETHER = 2  # in one backward
AT_ONCE = 20  # in one group, whose calls have a time limit
WORLDS = (2, 3, 5, 8)


def check_cases(group, seeds: range) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    cases = [draw(seed, world) for seed in seeds]
    # Each rank computes its share of the truth.
    wanted = [one_device(case) if i % world == rank else None for i, case in enumerate(cases)]
    under_rules = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    for first in range(0, len(cases), TOGETHER):
        some = cases[first : first + TOGETHER]
        try:
            plain = run_together(some, group)
            with nccl_rules(under_rules, seeds[first], only_nccl=first // TOGETHER % 2 == 1):
                ruled = run_together(some, under_rules)
            for i, case in enumerate(some):
                truth = [wanted[first + i]]
                source = dist.get_process_group_ranks(group)[(first + i) % world]
                dist.broadcast_object_list(truth, source, group)
                rows = case.rows(rank)
                for name, actual, again, expected in zip(NAMES, plain[i], ruled[i], truth[0], strict=True):
                    if actual is None:
                        continue
                    assert torch.equal(actual, again), f"{name} of seed {case.seed}: other bits under the rules of NCCL"
                    torch.testing.assert_close(
                        actual, expected[rows], rtol=0, atol=1e-10, msg=lambda m, of=(name, case): f"{of[0]}: {m}"
                    )
        except BaseException as error:
            error.add_note(f"on {world} ranks:\n" + "\n".join(map(str, some)))
            raise


@pytest.mark.parametrize("world", WORLDS)
def test_random_calls(on_ranks, world):
    for first in range(SEED, SEED + CASES, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, SEED + CASES))
        print(f"{world} ranks: {len(seeds)} cases, seeds {seeds.start} to {seeds.stop - 1}", flush=True)
        on_ranks(world, check_cases, seeds, spare=world % 2)
