"""What a block-sparse call would do, and its ranks in one process: counted pair by pair, compared with one device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import block_oracle
from block_cases import SIZE, config, pattern_of, random_order, table_of
from dilated_attention_pytorch import BlockSparse, DistributedSparseConfig, attention, explain
from dilated_attention_pytorch.distributed import Shards, simulate_ring
from dilated_attention_pytorch.distributed.means import MeanBytes, mean_bytes
from dilated_attention_pytorch.plan.problem import BlockRule, Problem


def met_pairs(table, n, m, causal):
    """Boolean (H or 1, n, m) of a table (query blocks, key blocks) or with heads, whose last row is the last block."""
    i, j = torch.arange(m - n, m)[:, None], torch.arange(m)[None, :]
    table = table.reshape(-1, *table.shape[-2:])
    first = table.shape[-1] - table.shape[-2]
    return table[:, i // SIZE - first, j // SIZE] & ((j <= i) if causal else True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(75, 75), (64, 64), (30, 75), (1, 64)])
def test_counts_are_those_of_the_oracle(n, m, causal):
    q, k = torch.randn(2, n, 4, 8), torch.randn(2, m, 2, 8)
    blocks, first = -(-m // SIZE), (m - n) // SIZE
    by_head = torch.rand(4, blocks - first, blocks) < 0.5
    adaptive = block_oracle.adaptive(q, k, "0.4", SIZE, 8**-0.5, causal)
    cases = [
        (BlockSparse.from_config(config("hierarchical")), table_of("hierarchical", "0.4", first, blocks, causal), 8),
        (BlockSparse.custom(by_head, block_size=SIZE), by_head, 2),
        (BlockSparse.from_config(config("adaptive")), adaptive, 1),
    ]
    visible = torch.ones(blocks - first, blocks, dtype=torch.bool)
    visible = visible.tril(first) if causal else visible
    for pattern, table, copies in cases:
        told = explain(q, k, k, pattern, is_causal=causal)
        assert told.blocks.computed == told.tiles == copies * int((table & visible).sum())
        assert told.blocks.visible == 8 * int(visible.sum())
        assert told.blocks.density == told.blocks.computed / told.blocks.visible
        assert told.pairs == copies * int(met_pairs(table, n, m, causal).sum())
        assert told.dense_pairs == 8 * int(met_pairs(visible, n, m, causal).sum())
        assert told.forward_flops == 4 * 8 * told.pairs
        assert (told.backend, told.kernel, told.sequences, told.families) == ("sdpa", "CPU flash", 2, 0)


def test_sequences_of_their_own():
    q, pattern = torch.randn(2, 75, 2, 8), BlockSparse.from_config(config("local_window"))
    alone = [explain(q[:1, :n], q[:1, :n], q[:1, :n], pattern).pairs for n in (75, 20, 55)]
    assert explain(q, q, q, pattern, lengths=torch.tensor([75, 20])).pairs == alone[0] + alone[1]
    assert explain(q, q, q, pattern, cu_seqlens=torch.tensor([0, 20, 75])).pairs == 2 * (alone[1] + alone[2])


def test_orders_and_backends():
    q = torch.randn(1, 75, 2, 8)
    pattern, order = BlockSparse.from_config(config("local_window")), random_order(75)
    told = explain(q, q, q, pattern, is_causal=True, order=order)
    assert told.backend == "eager"
    assert told.pairs == explain(q, q, q, pattern).pairs  # all are computed, causality hides some of them
    assert told.dense_pairs == 2 * 75 * 76 // 2
    assert "not       sdpa: is_causal under an order" in str(told)
    # On another device: what this machine cannot run is still explained.
    far = torch.empty(1, 1024, 2, 64, device="meta", dtype=torch.bfloat16)
    told = explain(far, far, far, pattern)
    assert told.backend == "eager"
    assert told.pairs == explain(*(torch.empty(1, 1024, 2, 64),) * 3, pattern).pairs
    assert str(explain(q, q, q, pattern)).splitlines()[1] == (
        f"plan      1 sequence(s), {2 * 5 * 2} blocks of 16 x 16, 40.000% of those visible"
    )


@pytest.mark.parametrize(
    ("kind", "causal", "layout"),
    [
        ("global_local", False, "contiguous"),
        ("global_local", False, "zigzag"),
        ("global_local", True, "contiguous"),
        ("global_local", True, "zigzag"),
        ("masks", False, "zigzag"),
        ("masks", True, "contiguous"),
        ("adaptive", False, "contiguous"),
        ("adaptive", True, "zigzag"),
    ],
)
def test_simulated_ranks(kind, causal, layout):
    """The result of one device; bytes counted position by position, and the same in ``explain``."""
    q = torch.randn(2, 117, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 117, 2, 8, dtype=torch.float64).unbind(0)
    pattern, table = pattern_of(kind, 117, 4)
    if kind == "global_local" and causal:
        table = table_of(kind, "0.4", 0, 8, True)
    if kind == "adaptive":
        table = block_oracle.adaptive(q, k, "0.4", SIZE, 8**-0.5, causal)
    met = torch.stack([met_pairs(some, 117, 117, causal).expand(4, -1, -1) for some in table.expand(2, 4, 8, 8)])
    met = met.unflatten(1, (2, 2)).any(2)  # by sample and key head
    shards = Shards.even(117, 3, layout)
    out, lse, memory = simulate_ring(q, k, v, pattern, 3, is_causal=causal, layout=layout)
    torch.testing.assert_close(
        (out, lse), attention(q, k, v, pattern, is_causal=causal, return_lse=True), rtol=1e-10, atol=1e-10
    )
    for told in memory:
        mine = [i for chunk in shards.chunks[told.rank] for i in chunk]
        read = met[:, :, mine].any(2)
        read[:, :, mine] = False
        row = 8 * 8 * 2  # numbers, bytes, key and value
        # An adaptive pattern receives means as well. tests/ranks/test_adaptive_scale.py counts them.
        chosen = MeanBytes(0, 0, 0)
        if kind == "adaptive":
            rule = BlockRule(SIZE, config("adaptive", 0.4))
            chosen = mean_bytes(Problem(rule, causal, 2, 117, 117, 4, 2), shards, told.rank, 8, 8)
        assert told.received == int(read.sum()) * row + chosen.received
        assert told.means == chosen.held
        assert told.rows == len(mine)
        assert told.query == 2 * len(mine) * 4 * 8 * 8
        assert told.key_value == 2 * 2 * len(mine) * 2 * 8 * 8
        assert told.partials >= 2 * len(mine) * 4 * 9 * 8  # output and lse
        assert told.buffers > 0
    sharding = explain(q, k, v, pattern, is_causal=causal, world_size=3, layout=layout).sharding
    assert sharding.bytes == max(told.received for told in memory)
    if kind == "adaptive":
        assert sharding.transport == "ring"  # as in a call, where no rank knows how much the others receive
    assert (sharding.world_size, sharding.layout) == (3, layout)


def test_memory_follows_what_is_read():
    """Two messages each way: a window has them from its neighbours only, however long the sequence."""
    q, k, v = torch.randn(3, 1, 8192, 2, 16).unbind(0)
    pattern = BlockSparse.from_config(config("local_window", 5 / 512))
    _, _, memory = simulate_ring(q, k, v, pattern, 8)
    row = 2 * 16 * 4 * 2
    assert [told.received // row for told in memory] == [2 * SIZE, *[4 * SIZE] * 6, 2 * SIZE]
    assert all(told.buffers <= 4 * 2 * SIZE * row for told in memory)
    shards = Shards.even(8192, 8, "contiguous")
    local = DistributedSparseConfig(0.1, "node_local", block_size=SIZE, node_size=1).pattern(shards)
    assert all(told.received == 0 for told in simulate_ring(q, k, v, local, 8)[2])
    assert "nothing is sent" in str(explain(q, k, v, local, world_size=8))


def test_page(capsys):
    """The code of docs/block_sparse.md as it stands, up to what needs ranks, and what it prints."""
    page = (Path(__file__).parents[2] / "docs" / "block_sparse.md").read_text().split("## Across ranks")[0]
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    (printed,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert capsys.readouterr().out == printed


def test_bad_arguments():
    q = torch.zeros(1, 75, 2, 8)
    pattern, adaptive = (BlockSparse.from_config(config(kind)) for kind in ("local_window", "adaptive"))
    mask = BlockSparse.custom(torch.ones(4, 4).bool(), block_size=SIZE)
    for call in (explain, lambda *x: simulate_ring(*x, 2)):
        with pytest.raises(ValueError, match="75 keys, which are 5 x 5 blocks; build a mask for this length"):
            call(q, q, q, mask)
        with pytest.raises(TypeError, match=r"or a BlockSparse, got SparsePatternConfig; .*BlockSparse.from_config"):
            call(q, q, q, config("adaptive"))
    with pytest.raises(ValueError, match="as many queries as keys, got 5 and 75; leave out world_size"):
        explain(q[:, :5], q, q, pattern, world_size=2)
    with pytest.raises(ValueError, match="explain one sequence at a time"):
        explain(q, q, q, adaptive, lengths=torch.tensor([75]), world_size=2)
    with pytest.raises(ValueError, match="hopper: Hopper kernels run on CUDA tensors, got cpu"):
        explain(q, q, q, pattern, backend="hopper")
    with pytest.raises(ValueError, match="so it has no bucket_size: got 7; leave it out"):
        simulate_ring(q, q, q, pattern, 2, bucket_size=7)
    with pytest.raises(ValueError, match="as many queries as keys as rows of shards"):
        simulate_ring(q, q, q, pattern, 2, layout=Shards.of([1, 2], "contiguous"))
