"""Attention with an order against the definition: loops over positions in float64, every element of every result."""

from __future__ import annotations

import importlib.util
import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import oracle
from dilated_attention_pytorch import (
    Dilated,
    DilatedAttention,
    Hilbert,
    Identity,
    Order,
    Striped,
    ZigZag,
    attention,
    dilated_attention,
    explain,
)
from dilated_attention_pytorch.backends import eager
from oracle import assert_same, with_grads

BACKENDS = ["reference", "eager", "auto"]


definition = oracle.ordered_attention


def random_inputs(b, n, heads, key_heads, d, dtype=torch.float64):
    shapes = ((b, n, heads, d), (b, n, key_heads, d), (b, n, key_heads, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_order(n, batch):
    return Order.from_permutation(torch.stack([torch.randperm(n) for _ in range(batch)]) if batch else torch.randperm(n))


@pytest.mark.parametrize(("backend", "causal"), [("sdpa", False), *product(BACKENDS, [False, True])])
@pytest.mark.parametrize("name", ["grid", "zigzag", "striped", "line", "random", "one for each sample"])
def test_every_order(backend, causal, name):
    order = {
        "grid": Hilbert.grid(5, 6),
        "zigzag": ZigZag(30, 4),
        "striped": Striped(30, 4),
        "line": Hilbert.line(30),
        "random": random_order(30, 0),
        "one for each sample": random_order(30, 2),
    }[name]
    pattern = Dilated([8, 12, 100], [1, 3, 4])
    inputs = random_inputs(2, 30, 6, 3, 5)
    dout, dlse = torch.randn(2, 30, 6, 5), torch.randn(2, 6, 30)
    expected = with_grads(lambda *x: definition(*x, pattern, order, causal), inputs, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, order=order, backend=backend, return_lse=True)  # noqa: E731
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(data=st.data(), causal=st.booleans())
def test_any_order_pattern_and_shape(backend, data, causal):
    draw = data.draw
    branches = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=3))
    n, batch = draw(st.integers(0, 17)), draw(st.integers(1, 3))
    key_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pattern = Dilated(*zip(*branches, strict=True), draw(st.sampled_from(["interleaved", "blocked"])))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    order = random_order(n, draw(st.sampled_from([0, batch])))
    inputs = random_inputs(batch, n, key_heads * group, key_heads, draw(st.integers(1, 6)))
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(batch, key_heads * group, n)
    expected = with_grads(lambda *x: definition(*x, pattern, order, causal), inputs, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, order=order, backend=backend, return_lse=True)  # noqa: E731
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8), (0, 0, 4, 8)])
def test_empty_batches_and_sequences(shape, backend):
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    for order in (Hilbert.line(shape[1]), Order.from_permutation(torch.arange(shape[1]).expand(shape[:2]))):
        out, lse = attention(q, k, v, Dilated([8], [2]), is_causal=True, order=order, backend=backend, return_lse=True)
        assert out.shape == shape
        assert lse.shape == (shape[0], 4, shape[1])
        (out.sum() + lse.sum()).backward()
        assert q.grad.shape == shape


def test_partial_results_cut_into_many_calls(monkeypatch):
    from dilated_attention_pytorch.execute import loop

    monkeypatch.setattr(loop, "partial_limit", lambda query: 40)
    monkeypatch.setattr(eager, "_MAX_SCORES", 30)
    pattern = Dilated([8, 16, 48], [1, 2, 4])
    for order in (Hilbert.grid(6, 8), random_order(48, 2)):
        inputs = random_inputs(2, 48, 8, 4, 4)
        dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 8, 48)
        expected = with_grads(lambda *x: definition(*x, pattern, order, True), inputs, dout, dlse)  # noqa: B023
        call = lambda *x: attention(*x, pattern, is_causal=True, order=order, backend="eager", return_lse=True)  # noqa: B023, E731
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_rows_that_meet_nobody_are_exactly_empty(backend):
    order = random_order(20, 0)
    q, k, v = random_inputs(2, 20, 2, 2, 4)
    out, lse = attention(q, k, v, Dilated([8], [4]), is_causal=True, order=order, backend=backend, return_lse=True)
    for h in range(2):
        mine = order.places % 8 % 4 == h
        assert (out[:, ~mine, h] == 0).all()
        assert (lse[:, h, ~mine] == -torch.inf).all()
        assert lse[:, h, mine].isfinite().all()
    for grad in torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v)):
        assert grad.isfinite().all()
        assert (grad[:, order.places % 4 > 1] == 0).all()


def test_rows_of_a_tile_that_see_nobody():
    """Not in whole sequences, where a row of a tile sees itself, but a tile alone may have such rows."""
    q, k, v, dout = torch.randn(4, 1, 2, 5, 3, dtype=torch.float64).unbind(0)
    positions = torch.tensor([0, 7, 1, 8, 2]).expand(1, 2, 5), torch.tensor([5, 6, 7, 8, 9]).expand(1, 2, 5)
    out, lse = eager.KERNEL.forward(q, k, v, False, 1.0, positions=positions)
    assert (out[:, :, ::2] == 0).all()
    assert (lse[:, :, ::2] == -torch.inf).all()
    seen = positions[1][0, 0, None, :] <= positions[0][0, 0, :, None]
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(out[:, :, 1::2], (scores.softmax(-1) @ v)[:, :, 1::2])
    dq, dk, dv = eager.KERNEL.backward(dout, q, k, v, out, lse, False, 1.0, positions=positions)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert (dq[:, :, ::2] == 0).all()
    assert (dv[:, :, 4] == 0).all()


@pytest.mark.parametrize(
    "options",
    [{"mixing_gradient": "detached"}, {"scale": -0.3}, {"scale": 0.0}, {"padding": True}, {"dropout_p": 0.3, "seed": 5}],
)
@pytest.mark.parametrize("causal", [False, True])
def test_options_are_those_of_the_reference(options, causal):
    pattern = Dilated([8, 20], [1, 3], torchscale_padding="padding" in options)
    options = {name: value for name, value in options.items() if name != "padding"}
    order, inputs = Hilbert.grid(5, 9), random_inputs(2, 45, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 45)
    results = [
        with_grads(
            lambda *x, b=backend: attention(
                *x, pattern, is_causal=causal, order=order, backend=b, return_lse=True, **options
            ),
            inputs,
            dout,
            dlse,
        )
        for backend in ("reference", "eager")
    ]
    assert_same(results[1], results[0])


@pytest.mark.parametrize("causal", [False, True])
def test_identity_is_no_order_at_all(causal):
    inputs = random_inputs(2, 30, 4, 2, 4, torch.float32)
    pattern, options = Dilated([8, 16], [1, 2]), {"is_causal": causal, "dropout_p": 0.2, "seed": 3}
    for more in ({}, {"dropout_p": 0.0, "backend": "sdpa"}):
        plain = attention(*inputs, pattern, **options | more)
        assert torch.equal(attention(*inputs, pattern, order=Identity(30), **options | more), plain)
        named = Order.from_permutation(range(30))
        if not causal:
            assert torch.equal(attention(*inputs, pattern, order=named, **options | more), plain)
    ordered = attention(*inputs, pattern, is_causal=causal, order=named)
    torch.testing.assert_close(ordered, attention(*inputs, pattern, is_causal=causal))


def test_zigzag_and_causal_by_original_position():
    """One dense segment is plain causal attention under every order."""
    q, k, v = (x.detach() for x in random_inputs(2, 33, 4, 2, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for order in (ZigZag(33, 4), Hilbert.line(33), random_order(33, 2)):
        out = dilated_attention(q, k, v, [33], [1], is_causal=True, order=order)
        torch.testing.assert_close(out, expected)


@pytest.mark.slow
def test_gradcheck():
    def call(backend, order):
        def attend(q, k, v):
            out, lse = attention(
                q, k, v, Dilated([4, 9], [1, 2]), is_causal=True, order=order, backend=backend, return_lse=True
            )
            return out, torch.where(lse.isfinite(), lse, 0.0)

        return attend

    assert torch.autograd.gradcheck(call("eager", random_order(9, 2)), random_inputs(2, 9, 2, 1, 2))
    # Its time grows with the square of the number of elements.
    assert torch.autograd.gradgradcheck(call("reference", random_order(5, 2)), random_inputs(2, 5, 2, 1, 1))


def test_module():
    order, inputs = Hilbert.grid(5, 6), random_inputs(2, 30, 4, 2, 4)
    module = DilatedAttention([8, 16], [1, 2], order=order)
    for causal in (False, True):
        expected = attention(*inputs, Dilated([8, 16], [1, 2]), is_causal=causal, order=order)
        assert torch.equal(module(*inputs, is_causal=causal), expected)
    assert "order=Hilbert.grid(5, 6)" in repr(module)
    assert module.state_dict() == {}
    assert module.double().order == order
    assert module.to("meta").order.device.type == "meta"
    with pytest.raises(TypeError, match="order must be an Order, got Tensor"):
        DilatedAttention([8], [1], order=order.positions)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", [Hilbert.grid(5, 6), random_order(30, 2)])
def test_compiled(causal, order):
    module = DilatedAttention([8, 16], [1, 2], order=order)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q, k, v):
        first = dilated_attention(q * 2, k, v, [8, 16], [1, 2], is_causal=causal, order=order)
        return module(first.sin(), k, v, is_causal=causal)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(3):
        inputs = random_inputs(2, 30, 4, 4, 4)
        out, expected, dout = compiled(*inputs), layer(*inputs), torch.randn(2, 30, 4, 4, dtype=torch.float64)
        torch.testing.assert_close(out, expected)
        both = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout)
        for a, e in zip(*both, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = DilatedAttention([8, 16], [1, 2], order=Hilbert.grid(5, 6))

        def forward(self, q):
            return self.attend(q, q, q, is_causal=True)

    model, (q, *_) = Model(), random_inputs(2, 30, 4, 4, 4)
    program = torch.export.export(model, (q,))
    torch.testing.assert_close(program.module()(q), model(q))


def test_explain():
    q = torch.zeros(1, 30, 2, 8)
    order = Hilbert.grid(5, 6)
    assert explain(q, q, q, Dilated([8], [1]), order=order).backend == "sdpa"
    assert explain(q, q, q, Dilated([8], [1]), is_causal=True, order=Identity(30)).backend == "sdpa"
    told = explain(q, q, q, Dilated([8], [1]), is_causal=True, order=order)
    assert told.backend == "eager"
    assert told.pairs == explain(q, q, q, Dilated([8], [1])).pairs
    assert "not       sdpa: is_causal under an order masks pairs by their original positions" in str(told)
    half = q.to(torch.bfloat16).expand(1, 30, 2, 8).repeat(1, 1, 1, 8)
    sorted_rows = explain(half, half, half, Dilated([8], [1]), is_causal=True, order=order, device="cuda:h200")
    if importlib.util.find_spec("triton"):
        assert sorted_rows.backend == "hopper"
        assert sorted_rows.pairs == explain(half, half, half, Dilated([8], [1]), is_causal=True).pairs
    with pytest.raises(ValueError, match="the order is over 30 positions, got a sequence of 29"):
        explain(q[:, 1:], q[:, 1:], q[:, 1:], Dilated([8], [1]), order=order)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"order": [1, 0]}, TypeError, "order must be an Order, got list; write Order.from_permutation(p)"),
        ({"order": Identity(21)}, ValueError, "the order is over 21 positions, got a sequence of 20"),
        ({"n": 5}, ValueError, "an order needs as many queries as keys, got 5 and 20; decode without an order"),
        (
            {"lengths": torch.tensor([20, 3])},
            ValueError,
            "but lengths says that samples or documents end inside; use order.w",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 5, 20])},
            ValueError,
            "use order.within(cu_seqlens=cu_seqlens), Hilbert.coordinates(",
        ),
        ({"order": None, "ordered": True}, ValueError, "ordered=True says that rows are in an order already: pass that"),
        ({"ordered": 1}, TypeError, "ordered must be True, False or None, got 1; pass the order itself as order"),
        ({"order": random_order(20, 3)}, ValueError, "the order is for 3 samples, got a batch of 2"),
        (
            {"order": Striped(20, 2, device="meta")},
            ValueError,
            "the order is on meta and query on cpu; use order.to('cpu')",
        ),
        ({"backend": "sdpa", "is_causal": True}, ValueError, "which this backend cannot; use backend='eager', or for"),
    ],
)
def test_bad_arguments(arguments, error, message):
    q, k = torch.zeros(2, arguments.pop("n", 20), 2, 4), torch.zeros(2, 20, 2, 4)
    with pytest.raises(error, match=re.escape(message)):
        attention(q, k, k, Dilated([8], [1]), **{"order": Hilbert.grid(4, 5)} | arguments)
