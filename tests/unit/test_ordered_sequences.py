"""Orders of padded samples and of packed documents: each sequence is what it is alone, with its own order."""

from __future__ import annotations

import copy
import io
from itertools import accumulate, pairwise, product

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import oracle
from block_cases import config
from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    DilatedAttention,
    Hilbert,
    Identity,
    Order,
    Striped,
    ZigZag,
    attention,
)
from oracle import assert_same, random_inputs, with_grads

PATTERN = Dilated([8, 12, 100], [1, 3, 4])
LENGTHS = (30, 0, 17, 1)


def own_orders(lengths):
    return [Order.from_permutation(torch.randperm(n)) for n in lengths]


def one_by_one(q, k, v, cuts, orders, causal):
    """The definition of every sequence: samples and rows ``cuts``, each with its own order; 0 and -inf elsewhere."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=q.dtype)
    for (sample, rows), order in zip(cuts, orders, strict=True):
        own, own_lse = oracle.ordered_attention(*(x[sample, rows] for x in (q, k, v)), PATTERN, order, causal)
        out, lse = out.index_put(where(sample, rows), own), lse.transpose(1, 2).index_put(
            where(sample, rows), own_lse.transpose(1, 2)
        ).transpose(1, 2)  # fmt: skip
    return out, lse


def where(sample, rows):
    return torch.arange(sample.start, sample.stop)[:, None], torch.arange(rows.start, rows.stop)[None]


@pytest.mark.parametrize(("backend", "causal"), [("sdpa", False), *product(["reference", "eager", "auto"], [False, True])])
@pytest.mark.parametrize("in_order", [False, True])
def test_padded_samples(backend, causal, in_order):
    orders = own_orders(LENGTHS)
    order, inputs = Order.padded(orders), random_inputs(4, 30, 30, 4, 2, 5)
    with torch.no_grad():  # rows behind the length are never read
        for b, n in enumerate(LENGTHS):
            for x in inputs:
                x[b, n:] = torch.nan
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, 4, 30, dtype=torch.float64)
    cuts = [(slice(b, b + 1), slice(0, n)) for b, n in enumerate(LENGTHS)]
    expected = with_grads(lambda *x: one_by_one(*x, cuts, orders, causal), inputs, dout, dlse)
    options = {"is_causal": causal, "order": order, "lengths": LENGTHS, "backend": backend, "return_lse": True}

    def call(*x):
        if not in_order:
            return attention(*x, PATTERN, **options)
        out, lse = attention(*map(order.permute, x), PATTERN, **options, ordered=True)
        return order.unpermute(out), order.unpermute(lse, dim=2)

    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize(("backend", "causal"), [("sdpa", False), *product(["reference", "eager", "auto"], [False, True])])
def test_packed_documents(backend, causal):
    orders = own_orders((11, 0, 18, 1))
    order, inputs = Order.packed(orders), random_inputs(2, 30, 30, 4, 2, 5)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 30, dtype=torch.float64)
    cuts = [(slice(0, 2), slice(*ends)) for ends in pairwise(accumulate(map(len, orders), initial=0))]
    expected = with_grads(lambda *x: one_by_one(*x, cuts, orders, causal), inputs, dout, dlse)
    options = {"is_causal": causal, "order": order, "cu_seqlens": order.cu_seqlens, "backend": backend}
    call = lambda *x: attention(*x, PATTERN, **options, return_lse=True)  # noqa: E731
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_and_detached_mixing_agree_with_the_reference(causal):
    order, inputs = Order.padded(own_orders(LENGTHS)), random_inputs(4, 30, 30, 4, 2, 5)
    for more in ({"dropout_p": 0.3, "seed": 5}, {"mixing_gradient": "detached"}):
        results = []
        for backend in ("reference", "eager"):
            out = attention(*inputs, PATTERN, is_causal=causal, order=order, lengths=LENGTHS, backend=backend, **more)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["hierarchical", "local_window", "adaptive"])
@pytest.mark.parametrize("causal", [False, True])
def test_block_lists(kind, causal):
    """Block-sparse patterns, where one call for each sequence has tests of its own against the definition."""
    pattern = BlockSparse.from_config(config(kind))
    orders, inputs = own_orders((75, 0, 41)), random_inputs(3, 75, 75, 4, 2, 4)
    out = attention(*inputs, pattern, is_causal=causal, order=Order.padded(orders), lengths=(75, 0, 41))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    for b, order in enumerate(orders):
        own = [x[b : b + 1, : len(order)].detach().requires_grad_() for x in inputs]
        expected = attention(*own, pattern, is_causal=causal, order=order)
        torch.testing.assert_close(out[b : b + 1, : len(order)], expected)
        for actual, grad in zip(grads, torch.autograd.grad(expected.square().sum(), own), strict=True):
            torch.testing.assert_close(actual[b : b + 1, : len(order)], grad)
            assert (actual[b, len(order) :] == 0).all()
    orders, inputs = own_orders((30, 45)), [x.detach() for x in inputs]
    packed = attention(*inputs, pattern, is_causal=causal, order=Order.packed(orders), cu_seqlens=(0, 30, 75))
    for order, rows in zip(orders, (slice(0, 30), slice(30, 75)), strict=True):
        expected = attention(*(x[:, rows] for x in inputs), pattern, is_causal=causal, order=order)
        torch.testing.assert_close(packed[:, rows], expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_coordinates_of_padded_slides_are_those_of_each_slide(dtype):
    slides = [(torch.rand(n, 2) * 300).to(dtype) for n in (40, 1, 0, 25)]
    wrong = torch.nan if dtype == torch.float32 else -5
    padded = torch.full((4, 40, 2), wrong, dtype=dtype)
    for row, slide in zip(padded, slides, strict=True):
        row[: len(slide)] = slide
    lengths = torch.tensor([len(slide) for slide in slides])
    order = Hilbert.coordinates(padded, lengths=lengths)
    assert order.lengths == (40, 1, 0, 25)
    for positions, slide in zip(order.positions, slides, strict=True):
        n = len(slide)
        assert positions[:n].equal(Hilbert.coordinates(slide).positions)
        assert positions[n:].equal(torch.arange(n, 40))
    assert order == Order.padded([Hilbert.coordinates(slide) for slide in slides])
    with pytest.raises(ValueError, match=r"coordinates must (be finite|not be negative), got (nan|-5)"):
        Hilbert.coordinates(padded)


def test_within_keeps_the_relative_order():
    order, lengths, ends = Order.from_permutation(torch.randperm(12)), [12, 0, 5], [0, 4, 4, 12]
    for row, n in zip(order.within(lengths=lengths).positions.tolist(), lengths, strict=True):
        given = order.positions.tolist()
        assert row == [i for i in given if i < n] + [i for i in given if i >= n]
    expected = [i for start, stop in pairwise(ends) for i in order.positions.tolist() if start <= i < stop]
    assert order.within(cu_seqlens=torch.tensor(ends)).positions.tolist() == expected
    assert order.within(lengths=lengths).inverse.lengths == (12, 0, 5)
    assert order.within(lengths=lengths).then(order.within(lengths=lengths).inverse).lengths == (12, 0, 5)
    assert order.within(lengths=lengths).then(order).lengths is None
    both = Order.from_permutation(torch.stack([torch.randperm(12) for _ in range(2)])).within(lengths=[3, 7])
    assert both.positions[0, :3].sort().values.tolist() == [0, 1, 2]


def test_an_order_and_lengths_that_do_not_belong_together():
    x = torch.randn(2, 6, 1, 4)
    order = Order.padded(own_orders((6, 4)))
    call = lambda **more: attention(x, x, x, Dilated([4], [1]), **{"order": order, **more})  # noqa: E731
    with pytest.raises(ValueError, match=r"the order was made for lengths=\[6, 4\], got \[6, 5\]; make one for these"):
        call(lengths=[6, 5])
    with pytest.raises(ValueError, match=r"keeps the padding or the documents of lengths=\[6, 4\]: pass them as lengths"):
        call()
    with pytest.raises(
        ValueError, match=r"cu_seqlens says that samples or documents end inside; use order\.within\(cu_seq"
    ):
        call(order=Hilbert.line(6), cu_seqlens=[0, 2, 6])
    with pytest.raises(ValueError, match="within takes either lengths"):
        Hilbert.line(6).within()
    with pytest.raises(ValueError, match="the order is for 2 samples, got 3 lengths"):
        order.within(lengths=[6, 4, 2])
    with pytest.raises(ValueError, match="expected a list of orders, at least one, each over the positions of one"):
        Order.packed([order])
    with pytest.raises(ValueError, match=r"one entry for each sample of coordinates \(batch, n, 2 or 3\), got \(1,\) for"):
        Hilbert.coordinates(torch.zeros(6, 2), lengths=[6])
    whole = attention(x, x, x, Dilated([4], [1]), order=Hilbert.line(6))  # nothing ends inside
    assert call(order=Hilbert.line(6), lengths=[6, 6]).equal(whole)
    assert call(order=Hilbert.line(6), cu_seqlens=[0, 0, 6]).equal(whole)
    full = Order.padded(own_orders((6, 6)))
    assert call(order=full).equal(call(order=full, lengths=[6, 6]))
    identity = call(order=Identity(6), lengths=[6, 4])  # it moves nothing
    assert identity.equal(attention(x, x, x, Dilated([4], [1]), lengths=[6, 4]))


def test_compiled():
    order, lengths = Order.padded(own_orders((30, 17))), torch.tensor([30, 17])
    inputs = random_inputs(2, 30, 30, 2, 2, 4)
    call = lambda *x: attention(*x, PATTERN, is_causal=True, order=order, lengths=lengths)  # noqa: E731
    expected, actual = call(*inputs), torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))
    wrong = lambda *x: attention(*x, PATTERN, order=order, lengths=lengths - 1)  # noqa: E731
    with pytest.raises(RuntimeError, match="the order was made for other lengths"):
        torch.compile(wrong, backend="aot_eager", fullgraph=True)(*inputs)


class _Slides(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return Hilbert.coordinates(torch.tensor([[0, 0], [5, 5], [5, 0], [0, 5]]) * (i + 1))


ORDERS = {
    "hilbert": Hilbert.grid(3, 4),
    "zigzag": ZigZag(7, 2),
    "striped": Striped(7, 2),
    "identity": Identity(5),
    "own": Order.from_permutation([2, 0, 1]),
    "padded": Order.padded(own_orders((4, 2))),
    "packed": Order.packed(own_orders((4, 2))),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_survive_files_and_copies(name):
    order, file = ORDERS[name], io.BytesIO()
    torch.save({"order": order}, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=True)["order"], copy.deepcopy(order)):
        assert type(other) is type(order)
        assert other == order
        assert other.places.equal(order.places)
        assert (other.lengths, other.cu_seqlens, repr(other)) == (order.lengths, order.cu_seqlens, repr(order))
        assert other.positions.data_ptr() != order.positions.data_ptr()
        x = torch.arange(float(len(order))).expand(2, -1)
        assert other.permute(x).equal(order.permute(x))


def test_orders_survive_workers():
    loader = DataLoader(_Slides(), batch_size=3, num_workers=1, collate_fn=Order.padded)
    (order,) = loader
    assert order == Order.padded([_Slides()[i] for i in range(3)])
    assert order.lengths == (4, 4, 4)


def test_modules_take_lengths_with_the_order_of_the_call():
    x, order = torch.randn(2, 30, 4, 8), Order.padded(own_orders((30, 17)))
    module = DilatedAttention([8, 12], [1, 3], order=order)
    expected = attention(x, x, x, Dilated([8, 12], [1, 3]), order=order, lengths=(30, 17))
    assert module(x, lengths=torch.tensor([30, 17])).equal(expected)
