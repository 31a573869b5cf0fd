"""The rules by which patterns choose blocks, against the same rules one block at a time."""

from __future__ import annotations

import random
import re

import pytest
import torch

import block_oracle
from block_cases import KINDS, SIZE, config, table_of
from dilated_attention_pytorch import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns import rules
from dilated_attention_pytorch.patterns.lists import BlockLists, entries_of, transposed_entries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_by_enumeration(kind, causal):
    """Every list of every short sequence: the documented rule, the budget, the own block, ascending, the same again."""
    for ratio in ("0.01", "0.07", "0.2", "0.5", "0.9", "1.0"):
        for n in (1, 2, 3, 4, 5, 7, 12, 29, 50):
            for first in {0, n // 2, n - 1}:
                lists = config(kind, float(ratio)).lists(first, n, causal)
                assert torch.equal(lists.mask()[0, 0], table_of(kind, ratio, first, n, causal)), (ratio, n, first)
                again = config(kind, float(ratio)).lists(first, n, causal)
                assert torch.equal(lists.indices, again.indices)
                for q, entries in enumerate(lists.indices.split(lists.counts.flatten().tolist())):
                    i = first + q
                    assert i in entries
                    assert (entries.diff() > 0).all()
                    if kind != "global_local" or i >= 2:
                        assert len(entries) == block_oracle.budget(ratio, i + 1 if causal else n)


@pytest.mark.parametrize("causal", [False, True])
def test_branches_in_any_order_and_of_any_reach(causal):
    rng = random.Random(0)
    for _ in range(60):
        rates = [rng.choice([1, 2, 4, 12, 12 * 2**31]) for _ in range(rng.randint(1, 4))]
        lengths = [rng.randint(1, 40 * SIZE) for _ in rates]
        ratio, n = rng.choice(["0.05", "0.3", "0.7"]), rng.randint(1, 40)
        made = config("dilated_sparse", float(ratio), segment_lengths=lengths, dilation_rates=rates).lists(0, n, causal)
        branches = [(min(n, -(-w // SIZE)), r) for w, r in zip(lengths, rates, strict=True)]
        for i, entries in enumerate(made.indices.split(made.counts.flatten().tolist())):
            chosen = block_oracle.choose("dilated_sparse", ratio, i, n, causal, branches=branches)
            assert entries.tolist() == sorted(chosen), (branches, n, i)


def test_levels_of_any_window():
    for window in (1, 16, 17, 48, 80, 400, 69 * SIZE, 70 * SIZE, 71 * SIZE, 10**12):
        for ratio in ("0.1", "0.35", "0.8"):
            made = config("hierarchical", float(ratio), local_window_size=window).lists(0, 70, False)
            for i, entries in enumerate(made.indices.split(made.counts.flatten().tolist())):
                chosen = block_oracle.choose("hierarchical", ratio, i, 70, False, window=max(2, -(-window // SIZE)))
                assert entries.tolist() == sorted(chosen), (window, ratio, i)


def test_worked_on_in_groups_of_query_blocks(monkeypatch):
    whole = {kind: config(kind).lists(3, 40, True) for kind in KINDS}
    monkeypatch.setattr(rules, "_AT_A_TIME", 7)
    for kind in KINDS:
        assert torch.equal(config(kind).lists(3, 40, True).indices, whole[kind].indices)


def transposed(lists: BlockLists) -> BlockLists:
    """The query blocks that read each key block, ascending: backward kernels sum over them.

    >>> lists = transposed(BlockLists.from_mask(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool(), 64))
    >>> lists.counts.tolist(), lists.indices.tolist()
    ([[[2, 1, 0]]], [0, 1, 1])
    """
    samples, heads, query_blocks = lists.counts.shape
    row, entry = entries_of(lists.counts.flatten(), lists.starts.flatten(), int(lists.counts.sum()))
    columns = row // query_blocks * lists.key_blocks + lists.indices[entry]
    readers = (row % query_blocks + lists.first).to(torch.int32)
    counts, _, readers = transposed_entries(columns, readers, samples * heads * lists.key_blocks)
    counts = counts.view(samples, heads, lists.key_blocks)
    return BlockLists.packed(counts, readers, lists.block_size, lists.first + query_blocks)


def test_transposed_lists():
    mask = torch.rand(2, 3, 5, 7) < 0.4
    lists = BlockLists.from_mask(mask, 64)
    assert torch.equal(transposed(lists).mask(), mask.transpose(-1, -2))
    assert torch.equal(transposed(transposed(lists)).indices, lists.indices)


def test_patterns_are_equal_by_what_they_say():
    assert BlockSparse.from_config(config("adaptive")) == BlockSparse.from_config(config("adaptive"))
    assert len({BlockSparse.from_config(config(kind)) for kind in KINDS * 2}) == len(KINDS)
    mask = BlockSparse.custom(torch.eye(3).bool(), block_size=16)
    assert hash(mask) == hash(mask)
    for kind in KINDS:
        assert SparsePatternConfig.from_spec(config(kind).spec) == config(kind)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pattern_type": "spiral"},
            "one of 'local_window', 'global_local', 'dilated_sparse', 'hierarchical', 'adaptive', got 's",
        ),
        ({"pattern_type": "custom"}, "use BlockSparse.custom(mask, block_size=...)"),
        ({"sparsity_ratio": 0.0}, "0 < ratio <= 1, got 0.0"),
        ({"sparsity_ratio": 1.5}, "0 < ratio <= 1, got 1.5"),
        ({"sparsity_ratio": float("nan")}, "0 < ratio <= 1, got nan"),
        ({"sparsity_ratio": "0.1"}, "0 < ratio <= 1, got '0.1'"),
        ({"block_size": 100}, "a power of two from 16 to 256, got 100"),
        ({"block_size": 512}, "a power of two from 16 to 256, got 512"),
        ({"block_size": 8}, "a power of two from 16 to 256, got 8"),
        ({"local_window_size": 256}, "local_window_size is read by 'hierarchical' only"),
        ({"pattern_type": "global_local", "global_tokens": 0}, "at least 1, got 0"),
        ({"pattern_type": "dilated_sparse"}, "needs segment_lengths and dilation_rates, got none"),
        (
            {"pattern_type": "dilated_sparse", "segment_lengths": [64, 128], "dilation_rates": [2, 3]},
            "must divide one another, got (2, 3)",
        ),
        ({"pattern_type": "dilated_sparse", "segment_lengths": [64], "dilation_rates": [1, 2]}, "got 1 segment lengths"),
    ],
)
def test_bad_configurations(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockSparse.from_config(SparsePatternConfig(**{"pattern_type": "local_window", "sparsity_ratio": 0.1, **arguments}))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(3, 3), TypeError, "must be a boolean tensor, got a tensor of torch.float32"),
        ([[True]], TypeError, "must be a boolean tensor, got list"),
        (torch.ones(3).bool(), ValueError, "(query heads, query blocks, key blocks), with at most"),
        (torch.ones(3, 2).bool(), ValueError, "got (3, 2)"),
        (torch.ones(0, 2).bool(), ValueError, "got (0, 2)"),
        (torch.ones(3, 3, device="meta").bool(), ValueError, "got one on the meta device; make it on the CPU"),
    ],
)
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BlockSparse.custom(mask, block_size=16)
