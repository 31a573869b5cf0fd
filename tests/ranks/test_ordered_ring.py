"""Orders across ranks over gloo on a CPU: every rank's rows are those of the definition, gradients included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    Hilbert,
    Identity,
    MultiheadDilatedAttention,
    Order,
    RingDilatedAttention,
    Sharding,
    SparsePatternConfig,
    Striped,
    ZigZag,
    attention,
)
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.sequence import rows_of
from oracle import assert_same, with_grads
from ring_cases import Received, by_world, sharded

WIDE = Dilated([8, 20, 100], [1, 3, 4])
NARROW = Dilated([6], [2])


@dataclass
class Case:
    order: Any  # a function of the length
    pattern: Dilated
    rows: tuple[int, ...] | int  # of the shards, or of the sequence and evenly spread
    layout: str = "contiguous"
    heads: int = 4
    key_heads: int = 2
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.order.__name__}-{self.layout}"


def scattered(n: int) -> Order:
    return Order.from_permutation(torch.randperm(n))


def one_for_each_sample(n: int) -> Order:
    return Order.from_permutation(torch.stack([torch.randperm(n) for _ in range(2)]))


def grid(n: int) -> Order:
    return Hilbert.grid(n // 5, 5)


def zigzag(n: int) -> Order:
    return ZigZag(n, 2)


def striped(n: int) -> Order:
    return Striped(n, 3)


# By the number of ranks; each causal and not.
CASES: dict[int, list[Case]] = {
    1: [
        Case(scattered, WIDE, 23),
        Case(one_for_each_sample, WIDE, 23, "zigzag", more={"transport": "allgather"}),
        Case(Hilbert.line, Dilated([64], [1]), 23, more={"transport": "ulysses"}),
    ],
    2: [
        Case(grid, WIDE, 35, more={"bucket_size": 3}),
        Case(one_for_each_sample, WIDE, (14, 21), "zigzag", more={"bucket_size": 4}),
        Case(zigzag, WIDE, 33, more={"transport": "allgather"}),
        Case(one_for_each_sample, Dilated([64], [1]), (14, 21), "zigzag", 6, 3, {"transport": "ulysses"}),
    ],
    3: [
        Case(scattered, WIDE, (17, 0, 16), "zigzag", more={"transport": "ring", "bucket_size": 1}),
        Case(striped, NARROW, (5, 9, 15), heads=2),
        Case(Hilbert.line, WIDE, 0),
        Case(Identity, WIDE, 31, "zigzag"),
    ],
    5: [
        Case(Hilbert.line, WIDE, (9, 12, 0, 7, 3), heads=2, key_heads=1, more={"bucket_size": 2}),
        Case(scattered, Dilated([16, 64], [1, 2], [1, 0]), 34, "zigzag", more={"transport": "ring"}),
        Case(one_for_each_sample, WIDE, 3),
    ],
}


def inputs_of(n: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    shapes = ((2, n, heads, 4), (2, n, key_heads, 4), (2, n, key_heads, 4))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check_case(group, case: Case, is_causal: bool) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shards = Shards.even(case.rows, world, case.layout) if isinstance(case.rows, int) else Shards.of(case.rows, case.layout)
    n = shards.length
    torch.manual_seed(n)
    order, inputs = case.order(n), inputs_of(n, case.heads, case.key_heads)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, case.heads, n, dtype=torch.float64)
    expected = with_grads(lambda *x: oracle.ordered_attention(*x, case.pattern, order, is_causal), inputs, dout, dlse)
    # By the order's own numbers: shard_sequence has a test of its own.
    mine = rows_of(shards, rank, torch.device("cpu"))
    index = order.positions[..., mine].expand(2, -1)
    rows = torch.arange(2)[:, None], index

    def by_head(x):
        return x.transpose(1, 2)[rows].transpose(1, 2)

    call = lambda *x: attention(  # noqa: E731
        *x,
        case.pattern,
        is_causal=is_causal,
        order=order,
        return_lse=True,
        **sharded(group, layout=case.layout, **case.more),
    )
    local = [x.detach()[rows].requires_grad_() for x in inputs]
    actual = with_grads(call, local, dout[rows], by_head(dlse))
    assert_same(actual, [by_head(x) if name == 1 else x[rows] for name, x in enumerate(expected)])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("world", "number", "case"), by_world(CASES))
def test_rows_are_those_of_the_definition(on_ranks, world, number, case, is_causal):
    """In the default group, and in a group whose ranks have other numbers there."""
    on_ranks(world, check_case, case, is_causal, spare=number % 2)


def check_sequences(group, kind: str, pattern: Dilated | BlockSparse, is_causal: bool) -> None:
    """Padded samples or packed documents with orders of their own, next to one device."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(3)
    orders = [scattered(length) for length in ((45, 20) if kind == "lengths" else (20, 0, 25))]
    order = Order.padded(orders) if kind == "lengths" else Order.packed(orders)
    inputs, dout, dlse = inputs_of(45, 4, 2), torch.randn(2, 45, 4, 4).double(), torch.randn(2, 4, 45).double()
    options = {"is_causal": is_causal, "order": order, kind: getattr(order, kind), "return_lse": True}
    expected = with_grads(lambda *x: attention(*x, pattern, **options, backend="reference"), inputs, dout, dlse)
    shards = Shards.even(45, world, "zigzag")
    rows = torch.arange(2)[:, None], order.positions[..., rows_of(shards, rank, torch.device("cpu"))].expand(2, -1)

    def by_head(x):
        return x.transpose(1, 2)[rows].transpose(1, 2)

    call = lambda *x: attention(*x, pattern, **options, **sharded(group, layout="zigzag"))  # noqa: E731
    actual = with_grads(call, [x.detach()[rows].requires_grad_() for x in inputs], dout[rows], by_head(dlse))
    assert_same(actual, [by_head(x) if name == 1 else x[rows] for name, x in enumerate(expected)])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "cu_seqlens"])
@pytest.mark.parametrize(
    "pattern", [WIDE, BlockSparse.from_config(SparsePatternConfig("hierarchical", 0.4, block_size=16))]
)
def test_several_sequences(on_ranks, kind, pattern, is_causal):
    on_ranks(3, check_sequences, kind, pattern, is_causal)


def check_options(group, make_order, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    pattern, n = Dilated([8, 20], [1, 3]), 41
    order, inputs = make_order(n), inputs_of(n, 4, 2)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, n, dtype=torch.float64)
    common = {"is_causal": True, "order": order, "return_lse": True, **options}
    one = with_grads(lambda *x: attention(*x, pattern, backend="reference", **common), inputs, dout, dlse)
    shard = lambda x, dim=1: shard_sequence(x, group, layout="zigzag", order=order, dim=dim)  # noqa: E731
    call = lambda *x: attention(*x, pattern, group=Sharding(group, "zigzag", 3), **common)  # noqa: E731
    local = [shard(x.detach()).requires_grad_() for x in inputs]
    many = with_grads(call, local, shard(dout), shard(dlse, 2))
    assert_same(many, [shard(x, 2) if name == 1 else shard(x) for name, x in enumerate(one)])


@pytest.mark.parametrize(
    "options", [{"mixing_gradient": "detached"}, {"dropout_p": 0.3, "seed": 7}, {"scale": -0.4}], ids=str
)
@pytest.mark.parametrize("make_order", [scattered, one_for_each_sample])
def test_options(on_ranks, make_order, options):
    """What the oracle has not: as on one device by the reference, where dropout counts places of the ordered sequence."""
    on_ranks(3, check_options, make_order, options)


def check_traffic(group) -> None:
    x, order = torch.randn(1, 8, 2, 4), Hilbert.line(8 * dist.get_world_size())
    with pytest.MonkeyPatch.context() as monkeypatch:
        received = Received(monkeypatch)
        counts = []
        for options in ({}, {"order": order}, {"order": order, "is_causal": True}):
            attention(x, x, x, WIDE, group=Sharding(group, transport="ring"), **options)
            counts.append(received.take())
    assert counts[0] == counts[1] == counts[2] > 0


def test_traffic(on_ranks):
    """A causal call under an order receives what the call that is not causal does: no positions, and no row less."""
    on_ranks(5, check_traffic)


def check_shards(group) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for layout in ("contiguous", "zigzag"):
        for order in (scattered(11), one_for_each_sample(11)):
            dist.broadcast(order.positions, 0)
            order = Order.from_permutation(order.positions)
            whole = torch.randn(2, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            whole.requires_grad_()
            part = shard_sequence(whole, group, layout=layout, order=order)
            mine = rows_of(Shards.even(11, world, layout), rank, torch.device("cpu"))
            by_sample = order.positions.expand(2, -1)[:, mine]
            assert torch.equal(part, whole[torch.arange(2)[:, None], by_sample])
            again = gather_sequence(part, group, layout=layout, order=order)
            assert torch.equal(again, whole)
            weights = torch.randn(2, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            (gradient,) = torch.autograd.grad((again * weights).sum() / world, whole)
            dist.all_reduce(gradient)  # a rank's own is that of its rows
            torch.testing.assert_close(gradient, weights)
            last = shard_sequence(whole.transpose(1, 2), group, layout=layout, order=order, dim=-1)
            assert torch.equal(last, part.transpose(1, 2))
            assert torch.equal(gather_sequence(last, group, layout=layout, order=order, dim=-1), whole.transpose(1, 2))
    with pytest.raises(TypeError, match="order must be an Order, got list"):
        shard_sequence(whole, group, order=[0, 1])
    with pytest.raises(TypeError, match="order must be an Order, got list"):
        gather_sequence(part, group, order=[0, 1])
    with pytest.raises(ValueError, match="the order is over 12 positions, got 11 in dimension 1"):
        shard_sequence(whole, group, order=Hilbert.line(12))
    with pytest.raises(ValueError, match="the order is over 12 positions, got 11 in dimension 1"):
        gather_sequence(part, group, layout="zigzag", order=Hilbert.line(12))


def test_there_and_back(on_ranks):
    """In every layout and dimension, gradients included, against indexing."""
    on_ranks(5, check_shards)


def check_modules(group) -> None:
    order, pattern = Hilbert.grid(5, 6), ([8, 30], [1, 2])
    q, k, v = torch.randn(3, 2, 30, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ring = RingDilatedAttention(*pattern, group=group, layout="zigzag", order=order, ordered=True)
    parts = [shard_sequence(x, group, layout="zigzag", order=order) for x in (q, k, v)]
    for causal in (False, True):
        whole = gather_sequence(ring(*parts, is_causal=causal), group, layout="zigzag", order=order)
        expected, _ = oracle.ordered_attention(q, k, v, ring.pattern, order, causal)
        torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-11)
    assert "order=Hilbert.grid(5, 6), ordered=True" in repr(ring)
    assert ring.state_dict() == {}
    assert ring.to("meta").order.device.type == "meta"
    with pytest.raises(ValueError, match="order once, by shard_sequence"):
        RingDilatedAttention(*pattern, group=group, order=order, ordered=False)
    # Multi-head: the sum of the ranks' gradients is that of one device.
    torch.manual_seed(3)
    arguments = (16, 2, *pattern)
    one = MultiheadDilatedAttention(*arguments, dtype=torch.float64, order=order)
    many = MultiheadDilatedAttention(*arguments, dtype=torch.float64, order=order, group=Sharding(group, bucket_size=5))
    many.load_state_dict(one.state_dict())
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    expected, _ = one(x, x, x, is_causal=True)
    expected.square().sum().backward()
    part = shard_sequence(x, group, order=order)
    out, _ = many(part, part, part, is_causal=True)
    out.square().sum().backward()
    torch.testing.assert_close(gather_sequence(out, group, order=order), expected, rtol=1e-11, atol=1e-11)
    for (label, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
        dist.all_reduce(a.grad)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9, msg=lambda m, label=label: f"{label}: {m}")
    with pytest.raises(ValueError, match="needs the whole sequence, of which a rank has a shard"):
        many(part, part, part, need_weights=True)


def test_modules(on_ranks):
    on_ranks(5, check_modules)


def check_mistakes(group) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(2, 4, 2, 4)
    n = 4 * world

    def refused(match: str, order, error=ValueError, **options) -> None:
        with pytest.raises(error, match=match):
            attention(x, x, x, WIDE, **{"group": group, "order": order, **options})

    differ = (
        "these differ:\n  order: '20 positions, [0-9a-f]{12}' on ranks 0, 1, 2, 3, '20 positions, [0-9a-f]{12}' on rank 4$"
    )
    for causal in (False, True):
        refused(differ, Striped(n, 5) if rank == 4 else Hilbert.line(n), is_causal=causal)
    refused("order: None on rank 0, '20 positions, .*' on ranks 1, 2, 3, 4$", Hilbert.line(n) if rank else None)
    refused("order: 'Identity.*' on rank 0, '20 positions, .*", Order.from_permutation(range(n)) if rank else Identity(n))
    each = Hilbert.line(n).positions.expand(2, -1)
    refused(
        "order: '20 positions, .*' on rank 0, '2 samples of 20 pos.*", Order.from_permutation(each[0] if not rank else each)
    )
    # Equal orders agree, whatever made them.
    same = Hilbert.line(n) if rank else Order.from_permutation(Hilbert.line(n).positions.tolist())
    assert attention(x, x, x, WIDE, group=group, order=same).shape == x.shape
    together = "the order is over {} positions, the 5 rank.s. have 20 rows together; "
    refused(together.format(21) + "use shard_sequence", Hilbert.line(21))
    refused(together.format(4) + "these look like whole sequences, not shards; use", Hilbert.line(4))
    refused(together.format(21), Hilbert.line(21), layout=Shards.of([4] * world, "contiguous"))
    refused("but lengths says that samples or documents end inside", Hilbert.line(n), lengths=torch.tensor([20, 3]))
    refused("no rank can move the rows of others: order once", Hilbert.line(n), ordered=False)
    refused("ordered=True says that rows are in an order already", None, ordered=True)
    refused("order must be an Order, got list", [0, 1], error=TypeError)
    refused("which this backend cannot", Hilbert.line(n), is_causal=True, backend="sdpa")
    # A mistake that one rank alone can see is its own error, and the others are told.
    message = "the order is for 3 samples, got a batch of 2"
    wrong = Order.from_permutation(torch.arange(n).expand(3, -1))
    refused(message if rank == 1 else f"rank 1 refused its arguments: {message}", wrong if rank == 1 else Hilbert.line(n))


def test_mistakes(on_ranks):
    """The same sentence on every rank, before anything is sent."""
    on_ranks(5, check_mistakes)


@pytest.mark.parametrize("function", [shard_sequence, gather_sequence])
def test_sequences_that_are_none(function):
    x = torch.zeros(2, 9)
    with pytest.raises(TypeError, match=r"the sequence must be a torch.Tensor, got list"):
        function([1.0], None)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"one of the 2 dimensions of a tensor of shape \(2, 9\), got {dim}"):
            function(x, None, dim=dim)
    with pytest.raises(TypeError, match=r"got None; call torch.distributed.init_process_group\(\) first"):
        function(x, None)
