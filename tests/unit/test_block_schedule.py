"""Schedules of block lists and patterns by rank, by enumeration: positions one by one, all ranks in one process."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import block_oracle
from block_cases import SIZE, config
from dilated_attention_pytorch import BlockSparse, DistributedSparseConfig, SparsePatternConfig, attention
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.listed_shards import listed_sequences
from dilated_attention_pytorch.plan.problem import BlockRule, Problem

LAYOUTS = st.sampled_from(["contiguous", "zigzag"])


def problem_of(pattern: BlockSparse, length: int, is_causal: bool) -> Problem:
    given = pattern.given_causal if is_causal else pattern.given
    return Problem(BlockRule(pattern.block_size, pattern.config, given), is_causal, 1, length, length, 2, 2)


def positions(shards: Shards, rank: int) -> list[int]:
    return [i for chunk in shards.chunks[rank] for i in chunk]


@st.composite
def cases(draw):
    shards = Shards.of(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)), draw(LAYOUTS))
    blocks = math.ceil(shards.length / SIZE)
    bits = draw(st.lists(st.booleans(), min_size=2 * blocks * blocks, max_size=2 * blocks * blocks))
    return shards, torch.tensor(bits, dtype=torch.bool).view(2, blocks, blocks), draw(st.booleans())


@given(cases())
@settings(max_examples=60)
def test_what_is_read_travels_and_nothing_else(case):
    """Every position that a query of another rank meets, for its key head; sends match receives; bytes count them."""
    shards, mask, is_causal = case
    if not shards.length:
        return
    pattern = BlockSparse.custom(mask, block_size=SIZE)
    problem, world = problem_of(pattern, shards.length, is_causal), shards.world_size
    block = torch.arange(shards.length) // SIZE
    seen = torch.ones(shards.length, shards.length, dtype=torch.bool).tril()
    for rank in range(world):
        sequences = listed_sequences(problem, shards, rank)
        assert [sequence.key_heads for sequence in sequences] == [slice(0, 1), slice(1, 2)]
        for head, sequence in enumerate(sequences):
            mine = positions(shards, rank)
            met = mask[head][block][:, block] & (seen if is_causal else True)
            wanted = set(met[mine].any(0).nonzero().flatten().tolist()) - set(mine)
            received = [(x.source, j) for x in sequence.schedule.receives(rank) for run in x.ranges for j in run]
            assert len(received) == len(set(received))
            assert {j for _, j in received} == wanted
            assert all(j in positions(shards, source) for source, j in received)
            assert sequence.schedule.received_rows(rank) == len(wanted)
            assert sequence.bytes(rank, head_dim=8, element_size=4) == len(wanted) * 8 * 2 * 4
            for source in range(world):
                both = list(sequence.schedule.transfers(source, rank))
                assert both == [x for x in sequence.schedule.sends(source) if x.target == rank]


def test_a_local_window_reads_neighbours_only():
    """Bytes per rank do not depend on the number of ranks, where the window does not."""
    for world in (8, 64):
        shards = Shards.of([256] * world, "contiguous")
        blocks = world * 256 // SIZE
        pattern = BlockSparse.from_config(SparsePatternConfig("local_window", 5 / blocks, block_size=SIZE))
        (sequence,) = listed_sequences(problem_of(pattern, shards.length, False), shards, 1)
        assert [sequence.schedule.received_rows(rank) for rank in range(world)] == [32, *[64] * (world - 2), 32]


# Patterns by rank and node.


def in_a_branch(settings: DistributedSparseConfig, i: int, j: int) -> bool:
    """Whether block ``i`` sees block ``j``: always without branches."""
    segments = [math.ceil(w / settings.block_size) for w in settings.segment_lengths]
    branches = list(zip(segments, settings.dilation_rates, strict=True))
    return not branches or any(i // w == j // w and abs(i - j) % r == 0 for w, r in branches)


def slow_rows(settings: DistributedSparseConfig, shards: Shards, is_causal: bool, fetched=None):
    """For each query block: budget and, by tier, visible blocks nearest first and how many of them it wants."""
    n, size = math.ceil(shards.length / settings.block_size), settings.block_size
    rank_of = {i: p for p in range(shards.world_size) for i in positions(shards, p)}
    owner = [rank_of[b * size] for b in range(n)]
    for i in range(n):
        visible = [j for j in (range(i + 1) if is_causal else range(n)) if in_a_branch(settings, i, j)]
        tiers: list[list[int]] = [[], [], []]
        for j in block_oracle.nearest(i, visible):
            same_node = owner[i] // settings.node_size == owner[j] // settings.node_size
            tier = 0 if owner[i] == owner[j] else 1 if same_node else 2
            if tier == 0 or fetched is None or j in fetched[owner[i]]:
                tiers[tier].append(j)
        wanted = [math.ceil(d * len(t)) for d, t in zip(settings.densities, tiers, strict=True)]
        yield owner[i], block_oracle.budget(repr(settings.sparsity_ratio), len(visible)), tiers, wanted


def slow_table(settings, shards, is_causal, fetched=None) -> torch.Tensor:
    """By the documented rule, one block at a time."""
    rows = list(slow_rows(settings, shards, is_causal, fetched))
    table = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for i, (_, budget, tiers, wanted) in enumerate(rows):
        if fetched is not None:
            wanted = [wanted[0], len(tiers[1]), len(tiers[2])]
        wanted[0] = max(1, wanted[0])
        taken = list(wanted)
        if sum(wanted) > budget:
            taken = [budget * w // sum(wanted) for w in wanted]
            taken[0] = max(1, taken[0])
            for tier in range(3):
                taken[tier] += min(wanted[tier] - taken[tier], budget - sum(taken))
        for tier, count in zip(tiers, taken, strict=True):
            table[i, tier[:count]] = True
    return table


@st.composite
def tier_cases(draw):
    density = st.sampled_from([None, 0.1, 0.3, 0.75, 1.0])
    kind = draw(st.sampled_from(["hierarchical", "node_local"]))
    between = None if kind == "node_local" else draw(density)
    settings = DistributedSparseConfig(
        draw(st.sampled_from([0.05, 0.3, 1.0])), kind, draw(density), draw(density), between,
        block_size=SIZE, node_size=draw(st.integers(1, 3)),
    )  # fmt: skip
    branches = draw(st.sampled_from([((), ()), ((40, 100), (1, 3)), ((4096,), (2,))]))
    settings = replace(settings, segment_lengths=branches[0], dilation_rates=branches[1])
    shards = Shards.of(draw(st.lists(st.integers(0, 70), min_size=1, max_size=6)), draw(LAYOUTS))
    return settings, shards, draw(st.booleans())


@given(tier_cases())
@settings(max_examples=60)
def test_tiers_by_the_slow_rule(case):
    settings, shards, is_causal = case
    pattern = settings.pattern(shards)
    lists = pattern.given_causal if is_causal else pattern.given
    if shards.length:
        assert torch.equal(lists.mask()[0, 0], slow_table(settings, shards, is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_bandwidth_aware_fills_its_budgets(is_causal):
    """Shards of whole blocks: what a rank receives of a tier stays within the bytes, and uses them where it can."""
    shards, token_bytes = Shards.of([64] * 6, "contiguous"), 100
    settings = DistributedSparseConfig(
        1.0, "bandwidth_aware", 0.5, block_size=SIZE, node_size=2, node_bytes=2 * SIZE * 100 + 99,
        inter_node_bytes=3 * SIZE * 100,
    )  # fmt: skip
    pattern = settings.pattern(shards, token_bytes=token_bytes)
    lists = pattern.given_causal if is_causal else pattern.given
    table, owner = lists.mask()[0, 0], torch.arange(24) // 4
    fetched = []
    for rank in range(6):
        read = table[owner == rank].any(0)
        node = read & (owner // 2 == rank // 2) & (owner != rank)
        between = read & (owner // 2 != rank // 2)
        seen = owner < rank if is_causal else owner != rank
        assert int(node.sum()) == min(2, int((seen & (owner // 2 == rank // 2)).sum()))
        assert int(between.sum()) == min(3, int((seen & (owner // 2 != rank // 2)).sum()))
        fetched.append(set((node | between).nonzero().flatten().tolist()))
    assert torch.equal(table, slow_table(settings, shards, is_causal, fetched))
    # Rank 2 holds the blocks 8 to 11: the nearest to them.
    assert fetched[2] == ({7, 6, 5} if is_causal else {12, 13, 7, 6, 5})
    (sequence,) = listed_sequences(problem_of(pattern, shards.length, is_causal), shards, 0)
    assert [sequence.schedule.received_rows(rank) for rank in range(6)] == [SIZE * len(x) for x in fetched]


def nearest_to_rank(owner: list[int], node_size: int, rank: int, is_causal: bool, node: int, between: int) -> set[int]:
    """The blocks of other ranks nearest to any of its own, so many of its node and of other nodes."""
    own = [j for j, p in enumerate(owner) if p == rank]
    seen = [j for j, p in enumerate(owner) if p != rank and (j < own[-1] or not is_causal)]
    seen.sort(key=lambda j: (min(abs(j - i) for i in own), j))
    inside = [j for j in seen if owner[j] // node_size == rank // node_size]
    return {*inside[:node], *[j for j in seen if j not in inside][:between]}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("rows", "node_size"), [([16] * 16, 8), ([100, 31, 5, 0, 16, 48], 4), ([40, 70, 33], 2)])
def test_bandwidth_aware_fetches_the_nearest(rows, node_size, layout, is_causal):
    """Shards of any length, and tiers that begin far away: of 16 ranks of a block, the last one fetches 7, 6 and 5."""
    shards = Shards.of(rows, layout)
    settings = DistributedSparseConfig(
        1.0, "bandwidth_aware", block_size=SIZE, node_size=node_size, node_bytes=2 * SIZE, inter_node_bytes=3 * SIZE
    )
    pattern = settings.pattern(shards, token_bytes=1)
    lists = pattern.given_causal if is_causal else pattern.given
    rank_of = {i: p for p in range(shards.world_size) for i in positions(shards, p)}
    owner = [rank_of[b] for b in range(0, shards.length, SIZE)]
    fetched = {p: nearest_to_rank(owner, node_size, p, is_causal, 2, 3) for p in set(owner)}
    assert torch.equal(lists.mask()[0, 0], slow_table(settings, shards, is_causal, fetched))


@pytest.mark.parametrize("is_causal", [False, True])
def test_bandwidth_aware_fetches_blocks_of_branches(is_causal):
    """Segments of 8 blocks, every second one: ranks 1 and 2 of 4 blocks each fetch nothing of other segments."""
    shards, branches = Shards.of([64] * 4, "contiguous"), {"segment_lengths": [128], "dilation_rates": [2]}
    settings = DistributedSparseConfig(
        1.0, "bandwidth_aware", block_size=SIZE, node_size=1, inter_node_bytes=100 * SIZE, **branches
    )
    pattern = settings.pattern(shards, token_bytes=1)
    table = (pattern.given_causal if is_causal else pattern.given).mask()[0, 0]
    expected = torch.tensor(
        [[in_a_branch(settings, i, j) and (j <= i or not is_causal) for j in range(16)] for i in range(16)]
    )
    assert torch.equal(table, expected)


def test_load_balanced_with_branches():
    """The sum of the budgets, which count the blocks of branches, and no other blocks."""
    shards = Shards.of([48, 100, 70], "contiguous")
    settings = DistributedSparseConfig(
        0.5, "adaptive_load_balanced", block_size=SIZE, segment_lengths=[64, 218], dilation_rates=[1, 4]
    )
    table, n = settings.pattern(shards).given.mask()[0, 0], 14
    seen = torch.tensor([[in_a_branch(settings, i, j) for j in range(n)] for i in range(n)])
    assert not (table & ~seen).any()
    assert int(table.sum()) == sum(math.ceil(0.5 * int(row.sum())) for row in seen)


@pytest.mark.parametrize("is_causal", [False, True])
def test_load_balanced_has_the_sum_of_the_budgets(is_causal):
    """Uneven shards: a rank whose query blocks have one block each already leaves less to the others."""
    shards = Shards.of([48, 100, 70, 48, 70, 1], "contiguous")
    owner = [next(p for p in range(6) if b in shards.chunks[p][0]) for b in range(0, shards.length, SIZE)]
    for ratio in ("0.01", "0.1", "0.5", "1.0"):
        settings = DistributedSparseConfig(float(ratio), "adaptive_load_balanced", block_size=SIZE, node_size=2)
        lists = settings.pattern(shards).given_causal if is_causal else settings.pattern(shards).given
        counts, n = lists.counts.flatten().tolist(), len(owner)
        seen = [i + 1 if is_causal else n for i in range(n)]
        assert sum(counts) == sum(block_oracle.budget(ratio, v) for v in seen)
        total = {p: sum(c for c, q in zip(counts, owner, strict=True) if q == p) for p in set(owner)}
        gives = {p for p in total if total[p] > owner.count(p)}
        takes = {p for p in total if total[p] < sum(v for v, q in zip(seen, owner, strict=True) if q == p)}
        assert all(total[p] <= total[q] + 1 for p in gives for q in takes), (ratio, total)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_load_balanced_evens_the_blocks(is_causal, layout):
    shards = Shards.of([160] * 5, layout)
    ratio = 0.2
    settings = DistributedSparseConfig(ratio, "adaptive_load_balanced", block_size=SIZE, node_size=2)
    pattern = settings.pattern(shards)
    lists = pattern.given_causal if is_causal else pattern.given
    counts = lists.counts.flatten()
    n = len(counts)
    total = sum(block_oracle.budget(str(ratio), i + 1 if is_causal else n) for i in range(n))
    by_rank = [
        sum(int(counts[b]) for b in range(n) if b * SIZE in positions(shards, rank)) for rank in range(shards.world_size)
    ]
    assert int(counts.sum()) == total
    assert max(by_rank) - min(by_rank) <= 1
    table = lists.mask()[0, 0]
    assert table.diagonal().all()
    assert not is_causal or not table.triu(1).any()
    # Plain budgets under a causal mask are far from even.
    if is_causal and layout == "contiguous":
        plain = [sum(block_oracle.budget(str(ratio), b + 1) for b in range(10 * p, 10 * p + 10)) for p in range(5)]
        assert max(plain) > 4 * min(plain)


def test_one_device_gets_the_ratio():
    """Without other ranks, the budget is what every configuration has: ceil(ratio * visible)."""
    pattern = DistributedSparseConfig(0.3, block_size=SIZE).pattern(Shards.of([320], "contiguous"))
    expected = BlockSparse.from_config(config("local_window", 0.3))
    x = torch.randn(1, 320, 2, 8, dtype=torch.float64)
    for is_causal in (False, True):
        assert torch.equal(
            attention(x, x, x, pattern, is_causal=is_causal), attention(x, x, x, expected, is_causal=is_causal)
        )
    assert Fraction(3, 10) * 20 == int(pattern.given.counts.max())


def test_node_size_from_torchrun(monkeypatch):
    shards, settings = (
        Shards.of([32] * 4, "contiguous"),
        DistributedSparseConfig(1.0, "node_local", 1.0, 1.0, block_size=SIZE),
    )
    for given_size, expected in ((None, 1), ("2", 2), ("4", 4)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if given_size:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", given_size)
        assert int(settings.pattern(shards).given.counts[0, 0, 0]) == 2 * expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity_ratio": 0.0}, "sparsity_ratio is the fraction of blocks computed, 0 < ratio <= 1, got 0.0"),
        ({"sparsity_ratio": 1.5}, "sparsity_ratio is the fraction of blocks computed, 0 < ratio <= 1, got 1.5"),
        ({"local_sparsity": -0.1}, "local_sparsity is the fraction of blocks computed"),
        ({"global_sparsity": 2}, "global_sparsity is the fraction of blocks computed"),
        ({"inter_node_sparsity": 0}, "inter_node_sparsity is the fraction of blocks computed"),
        (
            {"pattern_type": "ring"},
            "one of 'hierarchical', 'node_local', 'bandwidth_aware', 'adaptive_load_balanced', got 'ring'",
        ),
        ({"block_size": 48}, "block_size must be a power of two from 16 to 256, got 48"),
        ({"block_size": 16.0}, "block_size must be a power of two from 16 to 256, got 16.0"),
        ({"node_size": 0}, "node_size must be an integer, at least 1, or None, got 0"),
        ({"node_bytes": 5}, "node_bytes is read by 'bandwidth_aware' only, got 5 for 'hierarchical'"),
        ({"pattern_type": "node_local", "inter_node_sparsity": 0.1}, "reads nothing of other nodes"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DistributedSparseConfig(**options)


def test_patterns_for_another_length_or_without_bytes():
    pattern = DistributedSparseConfig(block_size=SIZE).pattern(Shards.of([64, 64], "contiguous"))
    x = torch.zeros(1, 160, 2, 8)
    with pytest.raises(ValueError, match="has 8 x 8 blocks of 16: got 160 queries and 160 keys, which are 10 x 10 blocks"):
        attention(x, x, x, pattern)
    with pytest.raises(ValueError, match="need token_bytes, the bytes of the keys and values of one position"):
        DistributedSparseConfig(0.1, "bandwidth_aware", node_bytes=7).pattern(Shards.of([64], "contiguous"))


def test_module_without_a_group():
    """Under its long name, as under its short one; ``test_printed_examples.py`` runs it in a group."""
    from dilated_attention_pytorch import BlockSparseRingDistributedDilatedAttention
    from dilated_attention_pytorch import block_sparse_ring_distributed_dilated_attention as long_name

    assert long_name.BlockSparseRingDistributedDilatedAttention is BlockSparseRingDistributedDilatedAttention
    assert long_name.DistributedSparseConfig is DistributedSparseConfig
    model = BlockSparseRingDistributedDilatedAttention(512, 8, None, None, DistributedSparseConfig(0.05), dropout_p=0.2)
    assert "sparsity_ratio=0.05, pattern_type='hierarchical'" in repr(model)
    assert "dropout_p=0.2" in repr(model)
    x = torch.zeros(1, 10, 512)
    with pytest.raises(RuntimeError, match=r"needs a process group: .* or BlockSparseRingDilatedAttention on one device"):
        model(x, x, x)
    with pytest.raises(ValueError, match="needs the whole sequence, of which a rank has a shard"):
        model.attention_map(x, x, [0])
    with pytest.raises(TypeError, match="distributed_config must be a DistributedSparseConfig, got dict"):
        BlockSparseRingDistributedDilatedAttention(512, 8, distributed_config={"sparsity_ratio": 0.1})
