"""Plans of block lists for packed documents and many ranks: a rank plans what it holds, and reads what it would alone."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from block_cases import SIZE, config
from dilated_attention_pytorch import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.distributed import Shards, listed_shards
from dilated_attention_pytorch.distributed.cost import block_traffic
from dilated_attention_pytorch.distributed.listed_shards import listed_sequences
from dilated_attention_pytorch.distributed.rank_plans import static_block_plan
from dilated_attention_pytorch.plan.problem import BlockRule, Problem


def positions(shards: Shards, rank: int) -> list[int]:
    return [i for chunk in shards.chunks[rank] for i in chunk]


@pytest.mark.parametrize("kind", ["local_window", "global_local", "hierarchical", "dilated_sparse"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_plans_the_documents_it_holds(kind, is_causal, layout, monkeypatch):
    """Of packed documents, a rank has those that it holds, read as each alone. Bounds are the same on all ranks."""
    monkeypatch.setattr(listed_shards, "_ENTRIES", 20)  # lists are made in several calls
    shards, cuts = Shards.of([33, 20, 0, 64, 31, 5], layout), (0, 40, 40, 50, 140, 153)
    pattern = BlockSparse.from_config(config(kind, 0.3))
    rule, world = BlockRule(SIZE, pattern.config), shards.world_size
    problem = Problem(rule, is_causal, 2, 153, 153, 2, 2, None, cuts)
    alone = {}
    for start, stop in pairwise(cuts):
        if stop > start:
            own = Problem(rule, is_causal, 2, stop - start, stop - start, 2, 2)
            (alone[start],) = listed_sequences(own, shards.within(range(start, stop)), 0)
    plans = [static_block_plan(problem, shards, rank, torch.device("cpu")) for rank in range(world)]
    received = [sum(x.schedule.received_rows(rank) for x in alone.values()) * 2 * 2 for rank in range(world)]
    for rank, plan in enumerate(plans):
        mine = set(positions(shards, rank))
        assert [x.first_row for x in plan.sequences] == [
            start for start, x in alone.items() if mine & set(range(start, start + x.schedule.shards.length))
        ]
        for x in plan.sequences:
            assert list(x.schedule.receives(rank)) == list(alone[x.first_row].schedule.receives(rank))
            assert list(x.schedule.sends(rank)) == list(alone[x.first_row].schedule.sends(rank))
        assert (len(plan.ticks), plan.most_received) == (len(plans[0].ticks), plans[0].most_received)
        for tick, (sent, arrived) in enumerate(plan.ticks):
            if sent is not None:
                assert (sent.target, sent.tick) == (plans[sent.target].ticks[tick][1].target, tick)
            if arrived is not None:
                assert plans[arrived.source].ticks[tick][0].target == rank
        elements = sum(m.numel(1) // 2 for _, m in plan.ticks if m is not None)
        assert elements == received[rank] <= plan.most_received
    assert block_traffic(problem, shards, plans[0]).received == tuple(received)


def test_ticks_reach_as_far_as_blocks_are_read():
    """A window on 64 ranks has two ticks, not 63, and the most that a rank receives is exact."""
    shards = Shards.of([64] * 64, "contiguous")
    pattern = BlockSparse.from_config(config("local_window", 5 / 256))
    plan = static_block_plan(
        Problem(BlockRule(SIZE, pattern.config), False, 1, 64 * 64, 64 * 64, 2, 2), shards, 3, torch.device("cpu")
    )
    assert len(plan.ticks) == 2
    assert plan.most_received == 4 * SIZE * 2  # two blocks from each side, two heads


def test_packed_documents_of_thousands_of_ranks():
    """2,000 documents: a rank plans those that it holds."""
    world = 4096
    n = 8192 * world
    cuts = (0, *sorted(random.Random(0).sample(range(1, n), 1999)), n)
    rule = BlockRule(128, SparsePatternConfig("local_window", 0.1))
    problem, shards = Problem(rule, True, 1, n, n, 8, 8, None, cuts), Shards.even(n, world, "contiguous")
    plan = static_block_plan(problem, shards, world // 2, torch.device("cpu"))
    assert len(plan.sequences) < 9
