"""What new users do on a GPU: a default device, nested tensors, orders of samples, PyTorch's own layers."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    Hilbert,
    MultiheadDilatedAttention,
    Order,
    SparsePatternConfig,
    attention,
    explain,
)
from gpu_cases import over_tables

pytestmark = pytest.mark.gpu
PATTERN = Dilated([128, 512], [1, 4])


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def everything():
    """Results of many calls, with new patterns and tables each time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.rand(6, 6, device="cpu", generator=torch.Generator("cpu").manual_seed(1)) < 0.5
    patterns = [
        Dilated([96, 500], [1, 3]),
        BlockSparse.custom(mask | torch.eye(6, dtype=torch.bool, device="cpu"), block_size=128),
        *(BlockSparse.from_config(SparsePatternConfig(kind, 0.4)) for kind in ("local_window", "hierarchical", "adaptive")),
    ]
    order = Hilbert.line(700, device="cuda")
    calls = [(pattern, options) for pattern in patterns for options in ({}, {"is_causal": True}, {"lengths": [700, 300]})]
    calls += [
        (patterns[0], {"order": order}),
        (patterns[0], {"dropout_p": 0.1, "seed": 3}),
        (patterns[0], {"backend": "sdpa"}),
    ]
    for pattern, options in calls:
        out = attention(q, k, v, pattern, **options)
        yield [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    yield [torch.tensor(float(explain(q, k, v, patterns[0]).pairs), device="cuda")]


def test_a_default_device_changes_nothing():
    expected = list(everything())
    with torch.device("cuda"):
        actual = list(everything())
    torch.set_default_device("cuda")
    try:
        again = list(everything())
    finally:
        torch.set_default_device(None)
    for results in (actual, again):
        for own, other in zip(results, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(causal):
    lengths = (700, 1, 300)
    for backend in ("sdpa", *over_tables(torch.bfloat16, 64)):
        sequences = [[random(n, 4, 64) for n in lengths] for _ in range(3)]
        q, k, v = (torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in sequences)
        out = attention(q, k, v, PATTERN, is_causal=causal, backend=backend)
        grads = torch.autograd.grad(out.values().float().square().sum(), [x for own in sequences for x in own])
        for b, own in enumerate(zip(*sequences, strict=True)):
            inputs = [x.detach().unsqueeze(0).requires_grad_() for x in own]
            alone = attention(*inputs, PATTERN, is_causal=causal, backend=backend)
            torch.testing.assert_close(out.unbind()[b], alone[0], rtol=1e-2, atol=1e-2)
            for i, grad in enumerate(torch.autograd.grad(alone.float().square().sum(), inputs)):
                torch.testing.assert_close(grads[i * len(lengths) + b], grad[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_orders_of_samples_against_float64(causal):
    lengths = [700, 300]
    order = Order.padded([Order.from_permutation(torch.randperm(n)) for n in lengths])
    q, k, v = (random(2, 700, 4, 64, dtype=torch.float32) for _ in range(3))
    out = attention(q, k, v, PATTERN, is_causal=causal, order=order.to("cuda"), lengths=lengths)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    doubles = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    exact = attention(*doubles, PATTERN, is_causal=causal, order=order, lengths=lengths, backend="reference")
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    for grad, other in zip(grads, torch.autograd.grad(exact.square().sum(), doubles), strict=True):
        torch.testing.assert_close(grad.cpu().double(), other, rtol=1e-4, atol=1e-4)


def test_in_an_encoder_layer():
    layer = torch.nn.TransformerEncoderLayer(128, 2, batch_first=True, dropout=0.0, device="cuda")
    layer.self_attn = MultiheadDilatedAttention(128, 2, [64, 256], [1, 2], device="cuda")
    x = torch.randn(2, 300, 128, device="cuda")
    padding = torch.arange(300, device="cuda").expand(2, -1) >= torch.tensor([[300], [200]], device="cuda")
    trained = layer(x, src_key_padding_mask=padding)
    with torch.no_grad():
        evaluated = layer.eval()(x, src_key_padding_mask=padding)
        alone = layer(x[1:, :200])
    torch.testing.assert_close(evaluated, trained, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(evaluated[1:, :200], alone, rtol=1e-4, atol=1e-4)
