"""The Triton kernels with an order, in float32 next to the reference: interpreted here, compiled on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dilated_attention_pytorch import Dilated, Hilbert, Order, attention
from oracle import assert_same, with_grads

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")


def random_inputs(b, n, heads, key_heads, d, dtype=torch.float64):
    shapes = ((b, n, heads, d), (b, n, key_heads, d), (b, n, key_heads, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_order(n, batch):
    return Order.from_permutation(torch.stack([torch.randperm(n) for _ in range(batch)]) if batch else torch.randperm(n))


# Each combination of orders and masks meets two of the four shapes: with an order for each sample (batch 2), causal.
@pytest.mark.parametrize(
    ("segments", "rates", "n", "batch", "causal"),
    [
        ([64, 128], [1, 2], 128, 0, False),
        ([64, 128], [1, 2], 128, 2, True),
        ([50, 100, 1000], [1, 3, 4], 133, 0, True),
        ([50, 100, 1000], [1, 3, 4], 133, 2, False),
        ([48, 96], [2, 4], 100, 0, False),
        ([48, 96], [2, 4], 100, 2, True),
        ([64], [1], 65, 0, True),
        ([64], [1], 65, 2, False),
    ],
)
def test_every_shape_of_tile(segments, rates, n, batch, causal):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pattern, order = Dilated(segments, rates), random_order(n, batch)
    inputs = random_inputs(max(1, batch), n, 2, 1 if batch else 2, 16, torch.float32)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(max(1, batch), 2, n)
    doubles = [x.detach().double().requires_grad_() for x in inputs]

    def call(order, backend):
        return lambda *x: attention(*x, pattern, is_causal=causal, order=order, backend=backend, return_lse=True)

    expected = with_grads(call(order, "reference"), doubles, dout, dlse)
    there = [x.detach().to(device).requires_grad_() for x in inputs]
    actual = with_grads(call(order.to(device), "triton"), there, dout.to(device), dlse.to(device))
    assert_same([x.cpu() for x in actual], expected, 2e-5)


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.3, "seed": 2**40 + 7}, {"scale": -0.4}, {"mixing_gradient": "detached"}]
)
def test_options(options):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pattern, order = Dilated([24, 64], [1, 3]), Hilbert.grid(7, 10, device=device)
    inputs = [x.detach().to(device).requires_grad_() for x in random_inputs(2, 70, 2, 1, 16, torch.float32)]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 2, 70, device=device)
    both = [
        with_grads(
            lambda *x, b=backend: attention(
                *x, pattern, is_causal=True, order=order, backend=b, return_lse=True, **options
            ),
            inputs,
            dout,
            dlse,
        )
        for backend in ("triton", "reference")
    ]
    assert_same(both[0], [x.double() for x in both[1]], 2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "cu_seqlens"])
def test_several_sequences(kind, causal):
    """Padded samples and packed documents, each with an order of its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    orders = [random_order(n, 0) for n in ((133, 70) if kind == "lengths" else (33, 0, 100))]
    order = Order.padded(orders) if kind == "lengths" else Order.packed(orders)
    inputs = random_inputs(2, 133, 2, 2, 16, torch.float32)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 2, 133)

    def call(order, backend):
        options = {"is_causal": causal, "order": order, kind: getattr(order, kind), "backend": backend}
        return lambda *x: attention(*x, Dilated([50, 100], [1, 3]), **options, return_lse=True)

    expected = with_grads(call(order, "reference"), [x.detach().double().requires_grad_() for x in inputs], dout, dlse)
    there = [x.detach().to(device).requires_grad_() for x in inputs]
    actual = with_grads(call(order.to(device), "triton"), there, dout.to(device), dlse.to(device))
    assert_same([x.cpu() for x in actual], expected, 2e-5)


@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8), (0, 0, 4, 8)])
def test_empty_batches_and_sequences(shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(3))
    order = Hilbert.line(shape[1], device=device)
    out, lse = attention(q, k, v, Dilated([8], [2]), is_causal=True, order=order, backend="triton", return_lse=True)
    assert out.shape == shape
    assert lse.shape == (shape[0], 4, shape[1])
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == shape


def test_orders_made_in_inference_mode():
    """Such positions do not count their changes, so their rows are sorted again in each call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.detach().to(device) for x in random_inputs(2, 33, 2, 1, 16, torch.float32))
    with torch.inference_mode():
        order = Hilbert.coordinates(torch.rand(2, 33, 2, device=device))
        out, expected = (
            attention(q, k, v, Dilated([8, 33], [1, 2]), is_causal=True, order=order, backend=backend)
            for backend in ("triton", "reference")
        )
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory would be used, not only reserved")
def test_heads_that_are_far_apart(monkeypatch):
    """The last head begins 2**31 elements behind the first one, as in long sequences with memory (B, H, N, D)."""
    # The fixture of all tests lets torch.empty write NaN, here 4 GiB of it.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    n, d = 16, 16
    memory = torch.empty(2**31 + n * d, dtype=torch.float16, device="cpu")
    q = memory.as_strided((1, n, 3, d), (0, d, 2**30, 1)).copy_(torch.randn(1, n, 3, d))
    k, v = torch.randn(2, 1, n, 3, d).half().unbind(0)
    order = random_order(n, 0)
    out, expected = (
        attention(q, k, v, Dilated([8], [1]), is_causal=True, order=order, backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-3)
