"""Block-sparse attention with an order against the definition: lists over places, causality by original position, both
by loops over positions in float64. test_ordered_block_ring.py does the same on several ranks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from block_cases import (
    KINDS,
    SIZE,
    assert_same,
    config,
    ordered_attention,
    pattern_of,
    random_inputs,
    random_order,
    table_of,
    with_grads,
)  # fmt: skip
from dilated_attention_pytorch import (
    BlockSparse,
    BlockSparseRingDilatedAttention,
    Hilbert,
    Identity,
    Order,
    Striped,
    attention,
    backends,
    operators,
)
from dilated_attention_pytorch.backends import eager
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.execute import listed


def compare(kind, n, order, *, causal=True, backends=("reference", "eager"), heads=4, **options):
    pattern, table = pattern_of(kind, n, heads)
    inputs = random_inputs(2, n, n, heads, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, heads, n, dtype=torch.float64)
    expected = with_grads(lambda *x: ordered_attention(*x, table, order, causal, **options), inputs, dout, dlse)
    for backend in backends:
        more = {"is_causal": causal, "order": order, "backend": backend, "return_lse": True, **options}
        assert_same(with_grads(lambda *x: attention(*x, pattern, **more), inputs, dout, dlse), expected)  # noqa: B023
    return expected


@pytest.mark.parametrize("kind", [*KINDS, "adaptive", "mask", "masks"])
def test_causal_by_original_position(kind):
    compare(kind, 70, random_order(70, 2))


def test_one_order_for_all_samples():
    compare("adaptive", 52, random_order(52), backends=("auto",))
    compare("masks", 52, Hilbert.grid(4, 13), backends=("auto",))


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive"])
def test_not_causal(kind):
    for order in (Hilbert.grid(4, 9), random_order(36, 2)):
        compare(kind, 36, order, causal=False, backends=("reference", "sdpa", "eager"))


@pytest.mark.parametrize("n", [1, 15, 32, 33])
def test_short_and_whole_blocks(n):
    compare("masks", n, random_order(n))
    compare("local_window", n, Hilbert.line(n), scale=-0.3)


def test_rows_that_see_nothing_are_exactly_empty():
    """The blocks that they name hold later positions only."""
    n, pattern = 48, BlockSparse.custom(torch.eye(3).roll(1, 0).bool(), block_size=SIZE)
    order = Order.from_permutation([*range(16, 48), *range(16)])
    q, k, v = random_inputs(2, n, n, 4, 2, 4)
    for backend in ("reference", "eager"):
        out, lse = attention(q, k, v, pattern, is_causal=True, order=order, backend=backend, return_lse=True)
        # By place: block 0 (positions 16 to 31) reads block 2 (0 to 15), 1 (32 to 47) reads 0, 2 (0 to 15) reads 1.
        assert (out[:, :16] == 0).all()
        assert (lse[:, :, :16] == -torch.inf).all()
        assert lse[:, :, 16:].isfinite().all()
        dq, *dkv = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
        assert (dq[:, :16] == 0).all()
        assert (dq[:, 16:] != 0).any((0, 2, 3)).all()
        for grad in dkv:  # only the first 16 positions could see the last
            assert (grad[:, 32:] == 0).all()
            assert (grad[:, :32] != 0).any((0, 2, 3)).all()
    _, lse, *grads = compare("masks", n, random_order(n))
    assert (lse == -torch.inf).any()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("kind", ["masks", "adaptive"])
def test_many_small_calls_and_tiles_that_do_not_count(kind, monkeypatch):
    """As on a device whose block numbers the host cannot read: short last blocks are computed everywhere, weight 0."""
    monkeypatch.setattr(listed, "_host_reads", lambda x: False)
    monkeypatch.setattr("dilated_attention_pytorch.execute.loop.partial_limit", lambda query: 300)
    monkeypatch.setattr(eager, "_MAX_SCORES", 200)
    for n in (32, 41):
        compare(kind, n, random_order(n, 2), backends=("eager",))


def test_one_dense_block_list_is_causal_attention_under_every_order():
    n, pattern = 50, BlockSparse.custom(torch.ones(4, 4, dtype=torch.bool), block_size=SIZE)
    q, k, v = (x.detach() for x in random_inputs(2, n, n, 4, 2, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for order in (Hilbert.line(n), Striped(n, 3), random_order(n, 2), Identity(n)):
        torch.testing.assert_close(attention(q, k, v, pattern, is_causal=True, order=order), expected)


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "masks"])
def test_rows_that_already_lie_in_order(kind):
    for order in (Hilbert.grid(4, 13), random_order(52, 2)):
        pattern, table = pattern_of(kind, 52, 4)
        inputs = [x.detach() for x in random_inputs(2, 52, 52, 4, 2, 8)]
        expected, lse = ordered_attention(*inputs, table, order, True)
        rows = torch.arange(2)[:, None], order.positions.expand(2, -1)
        for backend in ("reference", "eager"):
            options = {"is_causal": True, "order": order, "ordered": True, "backend": backend, "return_lse": True}
            out, part = attention(*(x[rows] for x in inputs), pattern, **options)
            torch.testing.assert_close(out, expected[rows], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(part.transpose(1, 2), lse.transpose(1, 2)[rows], rtol=1e-10, atol=1e-10)


def test_identity_is_no_order_at_all():
    inputs, pattern = random_inputs(2, 70, 70, 4, 2, 8), BlockSparse.from_config(config("hierarchical"))
    causal = attention(*inputs, pattern, order=Identity(70), is_causal=True)
    assert torch.equal(causal, attention(*inputs, pattern, is_causal=True))


def test_derivatives():
    order, inputs = random_order(18, 2), random_inputs(2, 18, 18, 2, 1, 3)
    pattern = BlockSparse.custom(torch.tensor([[1, 1], [1, 0]]).bool(), block_size=SIZE)

    def call(q, k, v, backend="eager"):
        out, lse = attention(q, k, v, pattern, is_causal=True, order=order, backend=backend, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x, backend="reference"), inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8)])
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_empty_batches_and_sequences(shape, backend):
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    pattern = BlockSparse.from_config(config("local_window"))
    out = attention(q, k, v, pattern, is_causal=True, order=Hilbert.line(shape[1]), backend=backend)
    out.sum().backward()
    assert out.shape == q.grad.shape == shape


def test_what_cannot_is_refused():
    n, pattern = 256, BlockSparse.from_config(config("local_window"))
    q, order = torch.zeros(1, n, 2, 32), Hilbert.grid(16, 16)
    for backend in ("sdpa", "triton"):
        cannot = rf"{backend}: is_causal under an order masks .* which this backend cannot; use backend='eager'"
        with pytest.raises(ValueError, match=cannot):
            attention(q, q, q, pattern, is_causal=True, order=order, backend=backend)
    with pytest.raises(ValueError, match="the order is over 64 positions, got a sequence of 256"):
        attention(q, q, q, pattern, is_causal=True, order=Hilbert.line(64))
    with pytest.raises(ValueError, match="but lengths says that samples or documents end inside"):
        attention(q, q, q, pattern, is_causal=True, order=order, lengths=torch.tensor([3]))
    mask = flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device="cpu")
    with pytest.raises(ValueError, match="this BlockMask is causal by places of the ordered sequence"):
        attention(q, q, q, BlockSparse.from_flex(mask), is_causal=True, order=order)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
def test_kernels_on_a_gpu_are_passed_over(monkeypatch):
    """``auto`` on a GPU: those that could serve the call if it were not causal cannot mask by position."""
    request = Request("cuda", (9, 0), torch.bfloat16, 64, block_size=128)
    assert backends.choose("auto", request).name == "hopper"
    assert backends.choose("auto", replace(request, block_size=64)).name == "triton"
    assert backends.choose("auto", replace(request, square=False)).name == "triton"
    ordered = replace(request, masks_by_position=True)
    assert {backends.choose("auto", replace(ordered, block_size=size)).name for size in (32, 64, 128)} == {"eager"}


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "masks"])
def test_operators(kind):
    pattern, _ = pattern_of(kind, 50, 4)
    q, k, v = random_inputs(2, 50, 50, 4, 2, 8)
    positions = torch.randperm(50) if kind == "adaptive" else torch.stack([torch.randperm(50) for _ in range(2)])
    call, inputs = make_call(q, k, v, pattern, scale=0.3)
    arguments = operators.OperatorArguments.of(call, inputs, None, "eager")._replace(positions=positions)
    torch.library.opcheck(operators.attend, (q, k, v, *arguments))
    out, lse = operators.attend(q, k, v, *arguments)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    given = (torch.randn_like(out), torch.randn_like(lse), *saved, *arguments)
    torch.library.opcheck(operators.attend_backward, given)


@pytest.mark.parametrize("kind", ["dilated_sparse", "adaptive"])
def test_module_compiled(kind):
    order = random_order(70, 2)
    module = BlockSparseRingDilatedAttention(sparse_config=config(kind), order=order)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q, k, v):
        return module((q * 2).sin(), k, v, is_causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(2):
        inputs = random_inputs(2, 70, 70, 4, 2, 8)
        out, expected = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        for a, e in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def test_module():
    order, arguments = Hilbert.grid(7, 10), ([40, 96], [1, 2], config("dilated_sparse"))
    inputs = [x.detach() for x in random_inputs(2, 70, 70, 4, 2, 8)]
    plain, ordered = (BlockSparseRingDilatedAttention(*arguments, order=order, ordered=x) for x in (None, True))
    table = table_of("dilated_sparse", "0.4", 0, 5, False)
    for causal in (False, True):
        expected, _ = ordered_attention(*inputs, table, order, causal)
        torch.testing.assert_close(plain(*inputs, is_causal=causal), expected)
        there = ordered(*map(order.permute, inputs), is_causal=causal)
        torch.testing.assert_close(order.unpermute(there), expected)
    assert "order=Hilbert.grid(7, 10), ordered=True" in repr(ordered)
    assert ordered.state_dict() == {}
    assert ordered.to("meta").order.device.type == "meta"
    with pytest.raises(ValueError, match="ordered=True says that rows are in an order already"):
        BlockSparseRingDilatedAttention(*arguments, ordered=True)
    with pytest.raises(TypeError, match="order must be an Order, got list"):
        BlockSparseRingDilatedAttention(*arguments, order=[1, 0])
