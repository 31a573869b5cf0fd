"""Orders and block-sparse patterns across ranks over gloo: every rank's rows are those of the definition, gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from block_cases import SIZE, assert_same, config, ordered_attention, pattern_of, random_inputs, random_order, with_grads
from dilated_attention_pytorch import (
    Attention,
    BlockSparse,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    DistributedSparseConfig,
    Hilbert,
    MultiheadDilatedAttention,
    Sharding,
    attention,
)
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.sequence import rows_of
from ring_cases import Received

# By the number of ranks: kind, rows of the shards, layout, one order for each sample, transport.
RANKED = {
    2: [
        ("hierarchical", (20, 25), "contiguous", False, "auto"),
        ("masks", (17, 20), "zigzag", True, "ring"),
        ("adaptive", (19, 26), "contiguous", True, "ring"),
    ],
    3: [
        ("dilated_sparse", (30, 0, 21), "zigzag", True, "allgather"),
        ("mask", (9, 29, 7), "contiguous", False, "ring"),
        ("masks", (20, 12, 17), "contiguous", True, "auto"),
        ("adaptive", (20, 12, 21), "zigzag", False, "auto"),
    ],
}


def check_case(group, case, causal: bool) -> None:
    rank = dist.get_rank(group)
    kind, lengths, layout, by_sample, transport = case
    shards = Shards.of(lengths, layout)
    n = shards.length
    torch.manual_seed(n)
    order, (pattern, table) = random_order(n, 2 if by_sample else 0), pattern_of(kind, n, 4)
    inputs = random_inputs(2, n, n, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, n, dtype=torch.float64)
    expected = with_grads(lambda *x: ordered_attention(*x, table, order, causal), inputs, dout, dlse)
    rows = torch.arange(2)[:, None], order.positions[..., rows_of(shards, rank, torch.device("cpu"))].expand(2, -1)

    def by_head(x):
        return x.transpose(1, 2)[rows].transpose(1, 2)

    options = {"group": Sharding(group, layout, transport=transport), "return_lse": True}
    call = lambda *x: attention(*x, pattern, is_causal=causal, order=order, **options)  # noqa: E731
    local = [x.detach()[rows].requires_grad_() for x in inputs]
    actual = with_grads(call, local, dout[rows], by_head(dlse))
    assert_same(actual, [by_head(x) if name == 1 else x[rows] for name, x in enumerate(expected)])


@pytest.mark.parametrize(
    ("number", "case", "causal"),
    [
        (i, case, causal)
        for cases in RANKED.values()
        for i, case in enumerate(cases)
        for causal in ((False, True) if i == 0 else (True,))
    ],
    ids=str,
)
def test_rows_are_those_of_the_definition(on_ranks, number, case, causal):
    """In the default group, and in a group whose ranks have other numbers there."""
    on_ranks(len(case[1]), check_case, case, causal, spare=number % 2)


def check_traffic(group, kind: str) -> None:
    x, order = torch.randn(1, 40, 2, 4), Hilbert.line(40 * dist.get_world_size())
    pattern = BlockSparse.from_config(config(kind, 0.3))
    with pytest.MonkeyPatch.context() as monkeypatch:
        received, counts = Received(monkeypatch), []
        for options in ({}, {"order": order}, {"order": order, "is_causal": True}):
            attention(x, x, x, pattern, group=Sharding(group, transport="ring"), **options)
            counts.append(received.take())
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive"])
def test_traffic(on_ranks, kind):
    """A causal call under an order receives what the call that is not causal does: no positions, and no row less."""
    on_ranks(3, check_traffic, kind)


def check_modules(group) -> None:
    torch.manual_seed(3)
    n, order, world = 90, Hilbert.grid(9, 10), dist.get_world_size()
    sharding = {"group": group, "layout": "zigzag", "order": order}
    q = torch.randn(1, n, 2, 8, dtype=torch.float64)
    one = BlockSparseRingDilatedAttention([40, 96], [1, 2], config("dilated_sparse"), order=order)
    many = BlockSparseRingDilatedAttention([40, 96], [1, 2], config("dilated_sparse"), **sharding)
    whole = gather_sequence(many(shard_sequence(q, **sharding), is_causal=True), **sharding)
    torch.testing.assert_close(whole, one(q, is_causal=True), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="order once, by shard_sequence"):
        BlockSparseRingDilatedAttention(sparse_config=config("local_window"), **sharding, ordered=False)
    settings = DistributedSparseConfig(0.4, "hierarchical", block_size=SIZE, node_size=2)
    head = BlockSparseRingDistributedDilatedAttention(16, 2, None, None, settings, dtype=torch.float64, **sharding)
    x = torch.randn(2, n, 16, dtype=torch.float64)
    pattern = settings.pattern(Shards.even(n, world, "zigzag"))
    one = MultiheadDilatedAttention(16, 2, [32], [1], dtype=torch.float64)
    one.attention = Attention(pattern, order=order, backend="reference")
    one.load_state_dict(head.state_dict())
    part = shard_sequence(x, **sharding)
    out, _ = head(part, part, part, is_causal=True)
    torch.testing.assert_close(gather_sequence(out, **sharding), one(x, x, x, is_causal=True)[0], rtol=1e-10, atol=1e-10)


def test_modules(on_ranks):
    on_ranks(3, check_modules)


def check_refusals(group) -> None:
    rank = dist.get_rank()
    x, order = torch.zeros(1, 16, 1, 4), Hilbert.line(48)
    pattern = BlockSparse.custom(torch.ones(3, 3, dtype=torch.bool), block_size=SIZE)
    options = {"is_causal": True, "order": order, "group": group}
    with pytest.raises(ValueError, match="which this backend cannot; use backend='eager'"):
        attention(x, x, x, pattern, backend="sdpa", **options)
    with pytest.raises(ValueError, match="this BlockMask is causal by places of the ordered sequence"):
        attention(x, x, x, replace(pattern, only_causal=True), **options)
    with pytest.raises(ValueError, match="these differ:\n  order: "):
        attention(x, x, x, pattern, **options | {"order": order if rank else order.inverse})


def test_refusals(on_ranks):
    on_ranks(3, check_refusals)
