"""Jagged nested tensors: each sequence is what it is alone, and results are nested like the inputs."""

from __future__ import annotations

import pytest
import torch

import oracle
from block_cases import config
from dilated_attention_pytorch import BlockSparse, Dilated, DilatedAttention, Order, attention, dilated_attention

PATTERN = Dilated([8, 12, 100], [1, 3, 4])
LENGTHS = (30, 1, 17)


def nested(sequences, **options):
    return torch.nested.nested_tensor(sequences, layout=torch.jagged, **options)


def random(heads):
    return [torch.randn(n, heads, 5, dtype=torch.float64) for n in LENGTHS]


def per_sequence(x):
    return [one.unsqueeze(0) for one in x.unbind()]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "eager", "auto"])
def test_each_sequence_is_what_it_is_alone(backend, causal):
    sequences = [random(4), random(2), random(2)]
    q, k, v = (nested(x, requires_grad=True) for x in sequences)
    out, lse = attention(q, k, v, PATTERN, is_causal=causal, backend=backend, return_lse=True)
    assert out.layout == torch.jagged
    assert out.shape == q.shape
    (q + out).sum()  # the same sequences for PyTorch as well
    dout = [torch.randn_like(x) for x in sequences[0]]
    loss = sum((own * other).sum() for own, other in zip(out.unbind(), dout, strict=True))
    grads = torch.autograd.grad(loss + sum(x.square().sum() for x in lse.unbind()), (q, k, v))
    for b, own in enumerate(zip(*sequences, strict=True)):
        inputs = [x.unsqueeze(0).requires_grad_() for x in own]
        expected, expected_lse = oracle.attention(*inputs, PATTERN, is_causal=causal)
        torch.testing.assert_close(out.unbind()[b], expected[0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(lse.unbind()[b], expected_lse[0], rtol=1e-11, atol=1e-11)
        alone = torch.autograd.grad((expected[0] * dout[b]).sum() + expected_lse.square().sum(), inputs)
        for grad, one in zip(grads, alone, strict=True):
            torch.testing.assert_close(grad.unbind()[b], one[0], rtol=1e-11, atol=1e-11)


def test_blocks_modules_and_orders():
    sequences = [random(2) for _ in range(3)]
    q, k, v = (nested(x) for x in sequences)
    orders = [Order.from_permutation(torch.randperm(n)) for n in LENGTHS]
    pattern = BlockSparse.from_config(config("hierarchical"))
    calls = {
        "blocks": lambda *x: attention(*x, pattern),
        "function": lambda *x: dilated_attention(*x, [8, 12], [1, 3], scale=0.3),
        "module": DilatedAttention([8, 12], [1, 3]),
    }
    for name, call in calls.items():
        for b, out in enumerate(call(q, k, v).unbind()):
            torch.testing.assert_close(out, call(*(x[b].unsqueeze(0) for x in sequences))[0], msg=name)
    ordered = attention(q, k, v, PATTERN, is_causal=True, order=Order.packed(orders))
    for b, out in enumerate(ordered.unbind()):
        alone = attention(*(x[b].unsqueeze(0) for x in sequences), PATTERN, is_causal=True, order=orders[b])
        torch.testing.assert_close(out, alone[0])


def test_compiled():
    q, k, v = (nested(random(2)) for _ in range(3))
    k, v = (torch.nested.nested_tensor_from_jagged(x.values(), q.offsets()) for x in (k, v))
    call = lambda *x: attention(*x, PATTERN, is_causal=True)  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled.values(), call(q, k, v).values())


def test_what_is_refused():
    q = nested(random(2))
    dense, other = torch.zeros(3, 30, 2, 5, dtype=torch.float64), nested([torch.zeros(n, 2, 5).double() for n in (2, 3, 4)])
    with pytest.raises(TypeError, match="query, key, value must all be jagged nested tensors if one is, key is not"):
        attention(q, dense, dense, PATTERN)
    with pytest.raises(ValueError, match="query, key, value must have the same lengths, those of key differ; call once"):
        attention(q, other, other, PATTERN)
    with pytest.raises(
        ValueError, match=r"the sequence must be dimension 1 of a nested tensor.* that of query is 2; use tran"
    ):
        attention(*[q.transpose(1, 2)] * 3, PATTERN)
    for name, value in {"lengths": [30, 1, 17], "cu_seqlens": [0, 48]}.items():
        with pytest.raises(ValueError, match=f"hold the lengths of their sequences, got {name} as well; leave it out"):
            attention(q, q, q, PATTERN, **{name: value})
    gaps = torch.nested.narrow(dense, 1, torch.tensor([0, 2, 4]), torch.tensor([5, 6, 7]), layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query is a nested tensor with gaps between its sequences; use x\.contiguous"):
        attention(gaps, gaps, gaps, PATTERN)
    strided = torch.nested.nested_tensor(random(2))
    with pytest.raises(
        TypeError, match=r"query must be a dense tensor, got one that is nested with strides; use x\.to_padded"
    ):
        attention(strided, strided, strided, PATTERN)
