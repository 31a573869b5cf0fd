"""Schedules by enumeration, all ranks in one process: every pair once, sends match receives, nothing too much."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan
from dilated_attention_pytorch.distributed.schedules import DilatedSchedule
from dilated_attention_pytorch.distributed.traffic import Holdings, dilated_traffic, messages_by_round
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import compile_plan
from dilated_attention_pytorch.shards import Shards


@st.composite
def cases(draw):
    branches = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 5)), min_size=1, max_size=3))
    key_heads = draw(st.integers(1, 4))
    every = st.integers(0, max(r for _, r in branches) - 1)
    own = st.lists(every, min_size=key_heads, max_size=key_heads)
    offsets = draw(st.one_of(st.sampled_from(["interleaved", "blocked"]), own))
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
@settings(max_examples=200)
def test_every_pair_is_computed_once_where_its_query_lives(case):
    pattern, shards, key_heads, is_causal = case
    schedule = DilatedSchedule(pattern, shards, key_heads, is_causal=is_causal)
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
@settings(max_examples=200)
def test_sends_match_receives_and_nothing_travels_for_nothing(case):
    pattern, shards, key_heads, is_causal = case
    schedule = DilatedSchedule(pattern, shards, key_heads, is_causal=is_causal)
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
            schedule = DilatedSchedule(Dilated([w], [r]), Shards.of([8192] * world, "contiguous"), 8, is_causal=False)
            received = {schedule.received_rows(rank) for rank in range(0, world, max(1, world // 7))}
            # With rates above 8192, only some ranks have rows at all.
            rows = {(w - 8192) // r} if r <= 8192 else {0, w // r - 1}
            assert received <= rows
            assert received != {0}


def test_a_branch_inside_of_the_shards_sends_nothing():
    schedule = DilatedSchedule(Dilated([16, 32], [1, 2]), Shards.of([64] * 5, "contiguous"), 4, is_causal=True)
    assert all(list(schedule.segments(rank)) == [] for rank in range(5))
    assert all(schedule.received_rows(rank) == 0 for rank in range(5))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards_hold_every_position_once(layout):
    shards = Shards.of([5, 0, 3, 8, 1], layout)
    assert sorted(i for chunks in shards.chunks for chunk in chunks for i in chunk) == list(range(17))
    assert [sum(map(len, chunks)) for chunks in shards.chunks] == [5, 0, 3, 8, 1]


def test_zigzag_evens_causal_work():
    def work(layout):
        schedule = DilatedSchedule(Dilated([4096], [1]), Shards.of([512] * 8, layout), 1, is_causal=True)
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
@settings(max_examples=150)
def test_messages_match_in_one_common_order(case, bucket_size):
    """A tick is the same message at both ends, and all rows of a transfer travel once, in buckets of the given size."""
    pattern, shards, key_heads, is_causal = case
    world = shards.world_size
    problem = Problem(pattern, is_causal, 1, shards.length, shards.length, key_heads, key_heads)
    plans = [dilated_plan(problem, shards, rank, bucket_size) for rank in range(world)]
    assert len({len(plan.ticks) for plan in plans}) == 1
    schedule = DilatedSchedule(pattern, shards, key_heads, is_causal=is_causal)
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


@st.composite
def batches(draw):
    """A problem with several sequences, and shards."""
    pattern, shards, key_heads, is_causal = draw(cases())
    n, kind = shards.length, draw(st.sampled_from(["one", "lengths", "cu_seqlens"]))
    lengths = cu_seqlens = None
    if kind == "lengths":
        lengths = tuple(draw(st.lists(st.integers(0, n), min_size=1, max_size=4)))
    if kind == "cu_seqlens":
        cu_seqlens = (0, *sorted(draw(st.lists(st.integers(0, n), max_size=6))), n)
    batch = draw(st.integers(1, 3)) if lengths is None else len(lengths)
    branch = draw(st.sampled_from([None, *range(len(pattern.branches))]))
    return Problem(pattern, is_causal, batch, n, n, key_heads, key_heads, lengths, cu_seqlens, branch), shards


def schedules(problem: Problem, shards: Shards) -> list[tuple[int, DilatedSchedule]]:
    """All sequences of a batch, each with its number of samples."""
    return [
        (
            span.samples.stop - span.samples.start,
            DilatedSchedule(
                problem.dilated, shards.within(range(span.keys.start, span.keys.stop)), problem.key_heads,
                problem.is_causal, problem.branch,
            ),
        )
        for span in problem.spans()
    ]  # fmt: skip


@given(batches(), st.integers(1, 5))
@settings(max_examples=120)
def test_all_ranks_count_the_same_traffic(case, bucket_size):
    """The arrays count what the transfers of every rank and sequence add up to, one by one."""
    problem, shards = case
    world, heads = shards.world_size, problem.key_heads
    received, sent, rows = [0] * world, [0] * world, Counter()
    for samples, schedule in schedules(problem, shards):
        for rank in range(world):
            for x in schedule.receives(rank):
                received[rank] += x.rows * samples * heads
                sent[x.source] += x.rows * samples * heads
                rows[rank, x.source] += x.rows
    messages = [sum(-(-rows[rank, p] // bucket_size) for p in range(world)) for rank in range(world)]
    traffic = dilated_traffic(problem, shards, bucket_size)
    assert (traffic.received, traffic.sent, traffic.messages) == (tuple(received), tuple(sent), tuple(messages))
    holdings = Holdings.of(problem, shards)
    counted = holdings.received(world, is_causal=problem.is_causal) * heads
    assert counted.tolist() == received
    # A round has room for the messages of every rank; the number is exact where all ranks hold equally much.
    counts = messages_by_round(holdings, world, bucket_size)
    for (rank, p), count in rows.items():
        assert counts[(rank - p) % world - 1] >= -(-count // bucket_size)
    for rank in range(world):
        plan = dilated_plan(problem, shards, rank, bucket_size)
        assert plan.most_received == max(received)
        assert len(plan.ticks) == sum(counts)
        assert sum(message is not None for _, message in plan.ticks) == messages[rank]
        assert {x.first_row for x in plan.sequences} == {
            span.keys.start
            for span in problem.spans()
            if any(set(chunk) & set(range(span.keys.start, span.keys.stop)) for chunk in shards.chunks[rank])
        }


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.sampled_from(["contiguous", "zigzag"]), st.data())
def test_shards_of_a_document(lengths, layout, data):
    shards = Shards.of(lengths, layout)
    start = data.draw(st.integers(0, shards.length))
    rows = range(start, data.draw(st.integers(start, shards.length)))
    within = shards.within(rows)
    expected = [tuple(i - start for chunk in chunks for i in chunk if i in rows) for chunks in shards.chunks]
    assert [tuple(i for chunk in chunks for i in chunk) for chunks in within.chunks] == expected
    assert [len(chunks) for chunks in within.chunks] == [len(chunks) for chunks in shards.chunks]
    assert within.length == len(rows)
    again = Shards(within.chunks)  # valid
    assert (again, hash(again), again.held) == (within, hash(within), within.held)


def documents(count: int, length: int) -> tuple[int, ...]:
    return (0, *sorted(random.Random(0).sample(range(1, length), count - 1)), length)


def long_net(world: int) -> Dilated:
    rates = [4**i for i in range(99) if 2048 * 4**i < 4 * 8192 * world]
    return Dilated([2048 * r for r in rates], rates)


def test_a_rank_plans_the_documents_it_holds():
    """2,000 documents on 64 ranks: the other ranks' documents are not compiled. Many more ranks take no more time."""
    for world in (64, 4096):
        n = 8192 * world
        problem = Problem(long_net(world), True, 1, n, n, 8, 8, None, documents(2000, n))
        dilated_plan.cache_clear()
        compile_plan.cache_clear()
        plan = dilated_plan(problem, Shards.even(n, world, "contiguous"), world // 2, 512)
        held = len(plan.sequences)
        assert held < 50
        assert compile_plan.cache_info().misses <= held


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_thousands_of_ranks(layout):
    """The plan of a rank and the traffic of 4,096 ranks with 8,192 tokens each, LongNet's pattern up to all tokens."""
    n = 8192 * 4096
    shards, problem = Shards.even(n, 4096, layout), Problem(long_net(4096), True, 1, n, n, 8, 8)
    plan = dilated_plan(problem, shards, 4095, 512)
    assert plan.most_received > 0
    assert len(plan.ticks) > 4000


def test_plans_are_bounded_in_bytes(monkeypatch):
    """A plan of many documents is not held 64 times. The newest one is always held."""
    n, pattern = 500 * 16, Dilated([8, 16], [1, 2])
    shards = Shards.even(n, 2, "contiguous")
    dilated_plan.cache_clear()
    monkeypatch.setattr(dilated_plan, "limit", 2**20)
    for shift in range(1, 6):
        problem = Problem(pattern, False, 1, n, n, 2, 2, None, (0, *range(shift, n, 16), n))
        plan = dilated_plan(problem, shards, 0, 512)
        assert dilated_plan(problem, shards, 0, 512) is plan
        assert 250 * 1024 < plan.bytes < 2**19
    assert plan.bytes < dilated_plan.bytes <= 2**20
    monkeypatch.setattr(dilated_plan, "limit", 1)
    first = dilated_plan(Problem(pattern, True, 1, n, n, 2, 2), shards, 0, 512)
    assert dilated_plan(Problem(pattern, True, 1, n, n, 2, 2), shards, 0, 512) is first
    assert dilated_plan.bytes == first.bytes
    dilated_plan.cache_clear()
    assert dilated_plan.bytes == 0


def test_the_identity_of_shards():
    """Ranks compare it: it is short for thousands of ranks, the same for equal shards, and differs for others."""
    many = Shards.of([32] * 4096, "zigzag")
    assert len(many.identity) < 120
    assert many.identity == Shards(many.chunks).identity
    assert (
        len({x.identity for x in (many, Shards.of([32] * 4096, "contiguous"), Shards.of([31, 33] * 2048, "zigzag"))}) == 3
    )
    assert Shards.of([1, 2], "contiguous").identity == "Shards(chunks=((range(0, 1),), (range(1, 3),)))"
