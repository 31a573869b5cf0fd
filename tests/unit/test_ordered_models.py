"""Models that apply an order once: rows that are in it already, and modules."""

from __future__ import annotations

import pytest
import torch

import oracle
from dilated_attention_pytorch import (
    Dilated,
    DilatedAttention,
    Hilbert,
    Identity,
    MultiheadDilatedAttention,
    Order,
    attention,
    dilated_attention,
)
from oracle import M32, assert_same, plain_word, with_grads

PATTERN = Dilated([8, 12, 100], [1, 3, 4])


def random_inputs(n=30, heads=6, key_heads=3):
    shapes = ((2, n, heads, 5), (2, n, key_heads, 5), (2, n, key_heads, 5))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def random_orders(n=30):
    each = torch.stack([torch.randperm(n) for _ in range(2)])
    return Hilbert.line(n), Order.from_permutation(each[0]), Order.from_permutation(each)


def by_place(x, order, dim=1):
    """Rows in order, by the order's numbers alone."""
    rows = torch.arange(2)[:, None], order.positions.expand(2, -1)
    return x[rows] if dim == 1 else x.transpose(1, dim)[rows].transpose(1, dim)


@pytest.mark.parametrize("backend", ["reference", "eager", "auto"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_already_lie_in_order(backend, causal):
    for order in random_orders():
        inputs = random_inputs()
        dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 6, 30, dtype=torch.float64)
        expected = with_grads(lambda *x: oracle.ordered_attention(*x, PATTERN, order, causal), inputs, dout, dlse)  # noqa: B023
        options = {"is_causal": causal, "order": order, "ordered": True, "backend": backend, "return_lse": True}
        call = lambda *x: attention(*x, PATTERN, **options)  # noqa: B023, E731
        there = [by_place(x.detach(), order).requires_grad_() for x in inputs]
        actual = with_grads(call, there, by_place(dout, order), by_place(dlse, order, 2))
        assert_same(actual, [by_place(x, order, 2 if name == 1 else 1) for name, x in enumerate(expected)])


def test_modules_and_functions_say_the_same():
    order = Hilbert.grid(5, 6)
    q, k, v = (x.detach() for x in random_inputs())
    ordered = [order.permute(x) for x in (q, k, v)]
    for causal in (False, True):
        options = {"is_causal": causal, "order": order}
        expected, _ = oracle.ordered_attention(q, k, v, PATTERN, order, causal)
        branches = PATTERN.segment_lengths, PATTERN.dilation_rates
        for result in (
            dilated_attention(*ordered, *branches, ordered=True, **options),
            DilatedAttention(*branches, order=order, ordered=True)(*ordered, is_causal=causal),
        ):
            torch.testing.assert_close(order.unpermute(result), expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(dilated_attention(q, k, v, *branches, ordered=False, **options), expected)
        plain = attention(q, k, v, PATTERN, is_causal=causal)
        assert torch.equal(attention(q, k, v, PATTERN, is_causal=causal, order=Identity(30), ordered=True), plain)
    assert "order=Hilbert.grid(5, 6), ordered=True" in repr(DilatedAttention(*branches, order=order, ordered=True))
    with pytest.raises(ValueError, match="ordered=True says that rows are in an order already: pass that order as order"):
        DilatedAttention([8], [1], ordered=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead(batch_first):
    order = Hilbert.grid(5, 6)
    torch.manual_seed(1)
    per_call = MultiheadDilatedAttention(16, 2, [8, 30], [1, 2], order=order, batch_first=batch_first, dtype=torch.float64)
    once = MultiheadDilatedAttention(
        16, 2, [8, 30], [1, 2], order=order, ordered=True, batch_first=batch_first, dtype=torch.float64
    )
    once.load_state_dict(per_call.state_dict())
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    q, k, v = ((x @ weight.T).unflatten(-1, (2, 8)) for weight in per_call.in_proj_weight.chunk(3))
    attended, _ = oracle.ordered_attention(q, k, v, per_call.attention.pattern, order, True)
    expected, place = per_call.out_proj(attended.flatten(-2)), 1 if batch_first else 0
    given = x if batch_first else x.transpose(0, 1)
    out, weights = per_call(given, given, given, is_causal=True)
    assert weights is None
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected, rtol=1e-11, atol=1e-11)
    there = order.permute(given, dim=place)
    torch.testing.assert_close(order.unpermute(once(there, there, there, is_causal=True)[0], dim=place), out)
    for ask in (lambda: once(given, given, given, need_weights=True), lambda: once.attention_map(given, given, [0])):
        with pytest.raises(ValueError, match="is not available with an order; attention_weights of tensors that"):
            ask()


def test_order_of_a_call_replaces_that_of_the_constructor():
    """Each slide has its own order, and a model that ordered its rows says so in the call."""
    q, k, v = (x.detach() for x in random_inputs())
    branches = PATTERN.segment_lengths, PATTERN.dilation_rates
    own, other = Hilbert.grid(5, 6), random_orders()[2]
    for made in ({}, {"order": own}, {"order": own, "ordered": True}):
        module = DilatedAttention(*branches, **made)
        for causal in (False, True):
            expected, _ = oracle.ordered_attention(q, k, v, PATTERN, other, causal)
            out = module(q, k, v, causal, order=other, ordered=False)
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
            there = module(*(by_place(x, other) for x in (q, k, v)), causal, order=other, ordered=True)
            torch.testing.assert_close(there, by_place(expected, other), rtol=1e-11, atol=1e-11)
        assert module.order is made.get("order")
    # Each of the two replaces that of the constructor, and None does not.
    ordered = DilatedAttention(*branches, order=own, ordered=True)
    rows = [by_place(x, other) for x in (q, k, v)]
    assert torch.equal(ordered(*rows, order=other), ordered(*rows, order=other, ordered=True))
    assert torch.equal(ordered(q, k, v, ordered=False), DilatedAttention(*branches, order=own)(q, k, v))
    with pytest.raises(ValueError, match="ordered=True says that rows are in an order already: pass that order as order"):
        DilatedAttention(*branches)(q, k, v, ordered=True)
    with pytest.raises(TypeError, match="order must be an Order, got Tensor"):
        DilatedAttention(*branches)(q, k, v, order=own.positions)


def test_order_of_a_call_of_a_multihead_module():
    module = MultiheadDilatedAttention(16, 2, [8, 30], [1, 2], dtype=torch.float64)
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    for order in random_orders():
        made = MultiheadDilatedAttention(16, 2, [8, 30], [1, 2], order=order, dtype=torch.float64)
        made.load_state_dict(module.state_dict())
        for causal in (False, True):
            expected = made(x, x, x, is_causal=causal)[0]
            assert torch.equal(module(x, x, x, is_causal=causal, order=order)[0], expected)
            there = by_place(x, order)
            out = module(there, there, there, is_causal=causal, order=order, ordered=True)[0]
            torch.testing.assert_close(out, by_place(expected, order))
        assert not torch.allclose(expected, module(x, x, x, is_causal=True)[0])
        with pytest.raises(ValueError, match="need_weights=True is not available with an order; attention_weights of"):
            module(x, x, x, need_weights=True, order=order)


def test_slides_of_different_sizes_in_one_batch():
    """Padded or nested, each slide with its own order: as if computed by itself."""
    module = MultiheadDilatedAttention(16, 2, [8, 30], [1, 2], dtype=torch.float64)
    x, coords, lengths = torch.randn(2, 30, 16, dtype=torch.float64), torch.rand(2, 30, 2), (30, 17)
    orders = [Hilbert.coordinates(coords[b, :n]) for b, n in enumerate(lengths)]
    padded = Hilbert.coordinates(coords, lengths=lengths)
    mask = torch.arange(30) >= torch.tensor(lengths)[:, None]
    nested = torch.nested.as_nested_tensor([x[b, :n] for b, n in enumerate(lengths)], layout=torch.jagged)
    for causal in (False, True):
        options = {"is_causal": causal, "order": padded}
        one, other = module(x, x, x, lengths=lengths, **options)[0], module(x, x, x, key_padding_mask=mask, **options)[0]
        packed = module(nested, nested, nested, is_causal=causal, order=Order.packed(orders))[0].unbind()
        for b, (n, order) in enumerate(zip(lengths, orders, strict=True)):
            expected = module(*[x[b, :n]] * 3, is_causal=causal, order=order)[0]
            for actual in (one[b, :n], other[b, :n], packed[b]):
                torch.testing.assert_close(actual, expected)


def dropped(q, k, v, pattern, order, p, seed, causal):
    """Dropout from the definition: whether a weight is kept goes by the places of its pair, and by its branch."""
    batch, _, heads, d = q.shape
    _, lse = oracle.ordered_attention(q, k, v, pattern, order, causal)
    out = torch.zeros_like(q)
    for b in range(batch):
        positions = order.positions.expand(batch, -1)[b].tolist()
        for h in range(heads):
            for a, i in enumerate(positions):
                for c, j in enumerate(positions):
                    if causal and j > i:
                        continue
                    for branch, (w, r) in enumerate(pattern.branches):
                        met = oracle.met_in((w, r), oracle.offset(pattern.offsets, h, heads, r), a, c)
                        if met and plain_word(seed, b, h, branch, a, c) >= int(p * M32):
                            s = q[b, i, h] @ k[b, j, h] * d**-0.5
                            out[b, i, h] += torch.exp(s - lse[b, h, i]) / (1 - p) * v[b, j, h]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_counts_places(causal):
    pattern = Dilated([8, 16], [1, 2])
    for order in random_orders(20)[1:]:
        q, k, v = (x.detach() for x in random_inputs(20, 2, 2))
        expected = dropped(q, k, v, pattern, order, 0.3, 7, causal)
        options = {"is_causal": causal, "order": order, "dropout_p": 0.3, "seed": 7}
        for backend in ("reference", "eager"):
            torch.testing.assert_close(attention(q, k, v, pattern, backend=backend, **options), expected)
            once = attention(*(by_place(x, order) for x in (q, k, v)), pattern, backend=backend, ordered=True, **options)
            torch.testing.assert_close(once, by_place(expected, order))
