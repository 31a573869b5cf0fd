"""Schedules by enumeration, all ranks in one process: every pair once, sends match receives, nothing too much."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan
from dilated_attention_pytorch.distributed.schedules import make_schedule
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards


@st.composite
def cases(draw):
    branches = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 5)), min_size=1, max_size=3))
    key_heads = draw(st.integers(1, 4))
    offsets = draw(st.sampled_from(["interleaved", "blocked"]))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    return (
        Dilated([w for w, _ in branches], [r for _, r in branches], offsets),
        Shards.of(lengths, draw(st.sampled_from(["contiguous", "zigzag"]))),
        key_heads,
        draw(st.booleans()),
    )


def met(plan) -> Counter:
    """(key head, query position, key position): how often."""
    pairs: Counter = Counter()
    for f in plan.families:
        for a, g in enumerate(f.key_heads):
            for t in range(f.tiles):
                shift = a * f.head_row_step + t * f.tile_step
                for x in range(f.q_rows):
                    for y in range(x + 1 if f.causal else f.k_rows):
                        pairs[g, f.q_start + shift + x * f.row_stride, f.k_start + shift + y * f.row_stride] += 1
    return pairs


@given(cases())
@settings(max_examples=400)
def test_every_pair_is_computed_once_where_its_query_lives(case):
    pattern, shards, key_heads, is_causal = case
    schedule = make_schedule(pattern, shards, key_heads, is_causal=is_causal)
    found: Counter = Counter()
    for rank, chunks in enumerate(shards.chunks):
        for plan in schedule.own_plans(rank):
            assert {plan.queries, plan.keys} <= set(chunks)
            for (g, i, j), count in met(plan).items():
                assert i in plan.queries
                assert j in plan.keys
                found[g, i, j] += count
        for transfer in schedule.receives(rank):
            for plan in schedule.plans(transfer):
                assert plan.queries in chunks
                assert plan.keys == transfer.positions
                for (g, i, j), count in met(plan).items():
                    assert i in plan.queries
                    assert j in plan.keys
                    found[g, i, j] += count
    n = shards.length
    expected = oracle.multiplicities(pattern, n, n, key_heads, key_heads, is_causal)
    assert found == Counter({tuple(index): int(expected[tuple(index)]) for index in expected.nonzero().tolist()})


@given(cases())
@settings(max_examples=400)
def test_sends_match_receives_and_nothing_travels_for_nothing(case):
    pattern, shards, key_heads, is_causal = case
    schedule = make_schedule(pattern, shards, key_heads, is_causal=is_causal)
    world = shards.world_size
    for rank in range(world):
        received = list(schedule.receives(rank))
        for source in range(world):
            # The same transfers in the same order at both ends.
            assert [x for x in schedule.sends(source) if x.target == rank] == [x for x in received if x.source == source]
        assert rank not in {transfer.source for transfer in received}
        assert len(set(map(str, received))) == len(received)
        for transfer in received:
            assert any(set(transfer.positions) <= set(chunk) for chunk in shards.chunks[transfer.source])
            assert any(plan.pairs for plan in schedule.plans(transfer))
            # The message has room for the head that reads most of the positions, and no more.
            w, r = pattern.branches[transfer.branch]
            offsets = [oracle.offset(pattern.offsets, g, key_heads, r) for g in range(key_heads)]
            assert transfer.rows == max(sum(i % w % r == o for i in transfer.positions) for o in offsets)
        assert schedule.received_rows(rank) == sum(transfer.rows for transfer in received)


def test_traffic_of_a_branch_does_not_grow_with_the_ranks():
    """w = 2048 * 4**i, r = 4**i, 8192 tokens per rank: what a rank receives of a branch, whatever the number of ranks."""
    for i in range(2, 8):
        w, r = 2048 * 4**i, 4**i
        for world in (w // 8192, 4 * w // 8192, 4096):
            schedule = make_schedule(Dilated([w], [r]), Shards.of([8192] * world, "contiguous"), 8, is_causal=False)
            received = {schedule.received_rows(rank) for rank in range(0, world, max(1, world // 7))}
            # With rates above 8192, only some ranks have rows at all.
            rows = {(w - 8192) // r} if r <= 8192 else {0, w // r - 1}
            assert received <= rows
            assert received != {0}


def test_a_branch_inside_of_the_shards_sends_nothing():
    schedule = make_schedule(Dilated([16, 32], [1, 2]), Shards.of([64] * 5, "contiguous"), 4, is_causal=True)
    assert schedule.segments == ()
    assert all(schedule.received_rows(rank) == 0 for rank in range(5))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards_hold_every_position_once(layout):
    shards = Shards.of([5, 0, 3, 8, 1], layout)
    assert sorted(i for chunks in shards.chunks for chunk in chunks for i in chunk) == list(range(17))
    assert [sum(map(len, chunks)) for chunks in shards.chunks] == [5, 0, 3, 8, 1]


def test_zigzag_evens_causal_work():
    def work(layout):
        schedule = make_schedule(Dilated([4096], [1]), Shards.of([512] * 8, layout), 1, is_causal=True)
        pairs = []
        for rank in range(8):
            own = sum(plan.pairs for plan in schedule.own_plans(rank))
            pairs.append(own + sum(p.pairs for t in schedule.receives(rank) for p in schedule.plans(t)))
        return max(pairs) / (sum(pairs) / 8)

    assert work("zigzag") < 1.01
    assert work("contiguous") > 1.8


def test_bad_shards():
    with pytest.raises(ValueError, match="layout must be one of 'contiguous', 'zigzag', got 'round'"):
        Shards.of([1, 2], "round")
    with pytest.raises(ValueError, match="no negative length, got \\[1, -2\\]"):
        Shards.of([1, -2], "contiguous")
    for wrong in (
        ((range(4),), (range(4),)),  # twice
        ((range(4),), (range(5, 8),)),  # a gap
        ((range(-2, 0),), (range(2),)),
        ((range(0, 4, 2),), (range(1, 4, 2),)),
    ):
        with pytest.raises(ValueError, match="hold every position from 0 once, in ranges of step 1: got range"):
            Shards(wrong)
    striped = Shards(((range(6, 8), range(2)), (range(3, 3), range(2, 6))))  # in any order, some empty
    assert striped.length == 8


@given(cases(), st.integers(1, 9))
@settings(max_examples=300)
def test_messages_match_in_one_common_order(case, bucket_size):
    """A tick is the same message at both ends, and all rows of a transfer travel once, in buckets of the given size."""
    pattern, shards, key_heads, is_causal = case
    world = shards.world_size
    problem = Problem(pattern, is_causal, 1, shards.length, shards.length, key_heads, key_heads)
    plans = [dilated_plan(problem, shards, rank, bucket_size) for rank in range(world)]
    assert len({len(plan.ticks) for plan in plans}) == 1
    schedule = make_schedule(pattern, shards, key_heads, is_causal=is_causal)
    for rank, plan in enumerate(plans):
        positions: dict = {}
        rows: Counter = Counter()
        for tick, (sent, received) in enumerate(plan.ticks):
            if sent is not None:
                assert sent == plans[sent.target].ticks[tick][1]
            if received is None:
                continue
            assert (received.tick, received.target) == (tick, rank)
            assert received == plans[received.source].ticks[tick][0]
            assert 0 < sum(section.transfer.rows for section in received.sections) <= bucket_size
            assert received.numel(5) == 2 * sum(s.transfer.rows for s in received.sections) * key_heads * 5
            for section in received.sections:
                transfer = section.transfer
                # The packed rows of every head fit.
                assert max((f.k_rows for f in section.packing().families), default=0) <= transfer.rows
                key = transfer.source, transfer.branch
                positions.setdefault(key, []).extend(transfer.positions)
                rows[key] += transfer.rows
        expected: dict = {}
        expected_rows: Counter = Counter()
        for transfer in schedule.receives(rank):
            expected.setdefault((transfer.source, transfer.branch), []).extend(transfer.positions)
            expected_rows[transfer.source, transfer.branch] += transfer.rows
        assert rows == expected_rows
        assert {key: sorted(x) for key, x in positions.items()} == {key: sorted(x) for key, x in expected.items()}


def test_thousands_of_ranks_in_seconds():
    """The plan and the schedules of 4,096 ranks with 8,192 tokens each, LongNet's pattern up to the whole sequence."""
    rates = [4**i for i in range(9)]
    pattern = Dilated([2048 * r for r in rates], rates)
    for layout in ("contiguous", "zigzag"):
        shards = Shards.of([8192] * 4096, layout)
        start = time.perf_counter()
        schedule = make_schedule(pattern, shards, 8, is_causal=True)
        total = sum(schedule.received_rows(rank) for rank in range(4096))
        assert total > 0
        assert time.perf_counter() - start < 5
