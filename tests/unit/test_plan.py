"""Patterns and plans, by enumeration: no tensor, no device."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.plan.tiles import compile_plan


def covered(plan) -> Counter:
    """How often the tiles of a plan let (key head, i, j) meet."""
    pairs: Counter = Counter()
    for f in plan.families:
        for t in range(f.tiles):
            for a, head in enumerate(f.key_heads):
                shift = a * f.head_row_step + t * f.tile_step
                queries = [f.q_start + shift + x * f.row_stride for x in range(f.q_rows)]
                keys = [f.k_start + shift + x * f.row_stride for x in range(f.k_rows)]
                if f.causal:
                    assert queries == keys
                pairs.update((head, i, j) for i in queries for j in keys if not f.causal or j <= i)
    return pairs


@st.composite
def patterns(draw, max_key_heads=6):
    branches = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4))
    key_heads = draw(st.integers(1, max_key_heads))
    rates = [r for _, r in branches]
    explicit = st.lists(st.integers(0, max(rates) - 1), min_size=key_heads, max_size=key_heads)
    rule = draw(st.one_of(st.sampled_from(["interleaved", "blocked"]), explicit))
    return Dilated([w for w, _ in branches], rates, rule), key_heads


@settings(max_examples=500)
@given(data=st.data(), n=st.integers(0, 60), causal=st.booleans())
def test_plan_covers_the_multiplicity_exactly(data, n, causal):
    pattern, key_heads = data.draw(patterns())
    queries = data.draw(st.integers(0, n))
    plan = compile_plan(pattern, n, key_heads, is_causal=causal, queries=range(n - queries, n))
    expected = Counter()
    for g in range(key_heads):
        for i in range(n - queries, n):
            for j in range(n):
                if m := oracle.multiplicity(pattern.branches, pattern.offsets, g, key_heads, i, j, causal):
                    expected[g, i, j] = m
    assert covered(plan) == expected
    assert plan.pairs == expected.total()


@settings(max_examples=500)
@given(data=st.data(), n=st.integers(1, 50), causal=st.booleans())
def test_plan_of_parts_of_the_sequence_covers_their_pairs(data, n, causal):
    """Any range of queries against any range of keys: what a rank that holds parts of a sequence computes."""
    pattern, key_heads = data.draw(patterns())
    q0, q1 = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    k0, k1 = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    plan = compile_plan(pattern, n, key_heads, is_causal=causal, queries=range(q0, q1), keys=range(k0, k1))
    whole = covered(compile_plan(pattern, n, key_heads, is_causal=causal))
    inside = {(g, i, j): c for (g, i, j), c in whole.items() if q0 <= i < q1 and k0 <= j < k1}
    assert covered(plan) == Counter(inside)


@settings(max_examples=300)
@given(data=st.data(), n=st.integers(1, 60))
def test_zero_keys_of_families_are_those_of_the_authors_padding(data, n):
    pattern, key_heads = data.draw(patterns())
    pattern = Dilated(pattern.segment_lengths, pattern.dilation_rates, pattern.offsets, torchscale_padding=True)
    seen = Counter()
    for f in compile_plan(pattern, n, key_heads, is_causal=False).families:
        for t in range(f.tiles):
            for a, head in enumerate(f.key_heads):
                for x in range(f.q_rows):
                    seen[f.branch, head, f.q_start + a * f.head_row_step + t * f.tile_step + x * f.row_stride] = f.zero_keys
    for b, (w, r) in enumerate(pattern.branches):
        for g in range(key_heads):
            o = oracle.offset(pattern.offsets, g, key_heads, r)
            for i in range(n):
                expected = oracle.zero_keys((w, r), o, i, n)
                assert seen[b, g, i] == expected
                assert pattern.zero_keys(b, i, n, key_head=g, key_heads=key_heads) == expected
    causal = compile_plan(pattern, n, key_heads, is_causal=True)
    assert all(f.zero_keys == 0 for f in causal.families)


@settings(max_examples=300)
@given(data=st.data())
def test_pattern_multiplicity_is_the_oracles(data):
    pattern, key_heads = data.draw(patterns())
    i, j, causal = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 300)), data.draw(st.booleans())
    g = data.draw(st.integers(0, key_heads - 1))
    expected = oracle.multiplicity(pattern.branches, pattern.offsets, g, key_heads, i, j, causal)
    assert pattern.multiplicity(i, j, key_head=g, key_heads=key_heads, is_causal=causal) == expected


def test_pattern_is_hashable_and_travels_as_a_string():
    for offsets in ("interleaved", "blocked", [0, 1, 3]):
        for padding in (False, True):
            pattern = Dilated([4, 8], (1, 4), offsets, padding)
            again = Dilated.from_spec(pattern.spec)
            assert again == pattern
            assert hash(again) == hash(pattern)
    assert Dilated([4], [1]) != Dilated([4], [2])


PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


def test_plan_size_does_not_grow_with_the_sequence():
    sizes = [len(compile_plan(PAPER, n, 12, is_causal=True).families) for n in (2**17 + 5, 2**20 + 5, 2**30 + 5)]
    assert max(sizes) <= 80
    assert sizes[2] <= sizes[1] + 8


def test_heads_of_different_offsets_share_families():
    """Few kernel calls: a rate that reaches the number of heads needs one family, not one per offset."""
    for rate, families in ((1, 1), (2, 2), (4, 4), (8, 2), (16, 1), (32, 1)):
        assert len(compile_plan(Dilated([1024], [rate]), 4096, 16, is_causal=False).families) == families
    assert len(compile_plan(Dilated([1024], [16], "blocked"), 4096, 16, is_causal=False).families) == 1


def test_flops_count_each_pair_once_per_query_head():
    dense = compile_plan(Dilated([4096], [1]), 4096, 2, is_causal=False)
    assert dense.flops(64) == 4 * 4096**2 * 64 * 2
    assert dense.flops(64, queries_per_key=3) == 3 * dense.flops(64)
    assert dense.flops(64, backward=True) == dense.flops(64) * 5 // 2
    # each of 2 branches: N / w segments of (w / r)^2 pairs
    plan = compile_plan(Dilated([64, 128], [1, 2]), 1024, 4, is_causal=False)
    assert plan.flops(8) == 4 * 8 * 4 * (16 * 64**2 + 8 * 64**2)
    causal = compile_plan(Dilated([64], [1]), 128, 1, is_causal=True)
    assert causal.pairs == 2 * 64 * 65 // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4, 8], [1]), "same number of entries"),
        (([], []), "at least one"),
        (([0], [1]), "segment_lengths must be positive"),
        (([4], [-1]), "dilation_rates must be positive"),
        (([4], [2], "diagonal"), "'interleaved', 'blocked'"),
        (([4], [2], [0, 2]), "0 <= offset < 2"),
        (([4], [2], [-1]), "0 <= offset < 2"),
    ],
)
def test_bad_patterns_say_the_rule_and_the_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        Dilated(*arguments)


@pytest.mark.parametrize("lengths", [[4.5], "48", 4, {4, 8}, {4: 8}])
def test_bad_types_are_refused(lengths):
    with pytest.raises(TypeError, match="segment_lengths"):
        Dilated(lengths, [1])


def test_explicit_offsets_must_fit_the_key_heads():
    with pytest.raises(ValueError, match="one integer per key head: got 3 offsets"):
        compile_plan(Dilated([8], [4], [0, 1, 2]), 16, 4, is_causal=False)


def test_patterns_and_plans_import_no_torch():
    """Loaded by file, because the package's own __init__ needs torch."""
    code = (
        "import sys, types; package = types.ModuleType('dilated_attention_pytorch');"
        f"package.__path__ = [{str(Path(compile_plan.__wrapped__.__code__.co_filename).parents[1])!r}];"
        "sys.modules['dilated_attention_pytorch'] = package;"
        "import dilated_attention_pytorch.plan.tiles, dilated_attention_pytorch.plan.dropout;"
        "import dilated_attention_pytorch.shards;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
