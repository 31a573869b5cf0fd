"""Block-sparse attention against loops over positions: out, lse, dq, dk, dv, every element."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import block_oracle
from block_cases import KINDS, SIZE, assert_same, config, random_inputs, table_of, with_grads
from dilated_attention_pytorch import BlockSparse, attention, attention_weights
from dilated_attention_pytorch.execute import listed, loop
from dilated_attention_pytorch.plan import adaptive as choice
from dilated_attention_pytorch.plan import lists as plan_lists

BACKENDS = ["reference", "sdpa", "eager"]


def compare(pattern, table, inputs, *, causal, backends=BACKENDS, scale=None, **options):
    q = inputs[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)
    expected = with_grads(
        lambda *x: block_oracle.attention(*x, table, SIZE, causal=causal, scale=scale), inputs, dout, dlse
    )
    options |= {"is_causal": causal, "scale": scale, "return_lse": True}
    for backend in backends:
        call = functools.partial(attention, pattern=pattern, backend=backend, **options)
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (75, 75), (5, 75), (40, 75), (1, 64), (9, 9)])
@pytest.mark.parametrize("kind", KINDS)
def test_static_patterns(kind, n, m, causal):
    table = table_of(kind, "0.4", (m - n) // SIZE, -(-m // SIZE), causal)
    inputs = random_inputs(2, n, m, 4, 2, 4)
    compare(BlockSparse.from_config(config(kind)), table, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (75, 75), (30, 75)])
def test_adaptive(n, m, causal):
    inputs = random_inputs(2, n, m, 4, 2, 4)
    for scale in (0.5, -0.7):
        table = block_oracle.adaptive(*(x.detach() for x in inputs[:2]), "0.4", SIZE, scale, causal)
        pattern = BlockSparse.from_config(config("adaptive"))
        compare(pattern, table, inputs, causal=causal, scale=scale)


def test_adaptive_takes_the_earlier_of_equals_and_its_own():
    q = torch.zeros(1, 6 * SIZE, 1, 4)
    weights = attention_weights(q, q, BlockSparse.from_config(config("adaptive")), [5 * SIZE])
    assert (weights[0, 0, 0].view(6, SIZE).sum(1) > 0).tolist() == [True, True, False, False, False, True]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_adaptive_scores_are_not_rounded(size):
    """Products of ones with the same numbers in another order are equal, in whatever order a matrix product adds them."""
    numbers = torch.randn(257) * size
    q, k = torch.ones(1, SIZE, 1, 257), torch.zeros(1, 64 * SIZE, 1, 257)
    k[0, ::SIZE, 0] = torch.stack([numbers[torch.randperm(257)] for _ in range(64)])
    rows = config("adaptive", 0.25).rows(63, 64, False)
    for scale in (1.0, -1.0):
        assert choice.adaptive(q, k, rows, 63, SIZE, scale, 16).tolist() == [[[[*range(15), 63]]]]
    q[..., 3], k[..., 3] = torch.inf, 0.0
    k[:, 40 * SIZE : 50 * SIZE, :, 3] = size  # other products are NaN
    assert choice.adaptive(q, k, rows, 63, SIZE, 1.0, 16).tolist() == [[[[*range(5), *range(40, 50), 63]]]]


def test_adaptive_does_not_change_the_means(monkeypatch):
    """A rank chooses for each of its chunks by the same means, which are not copied if there are many."""
    monkeypatch.setattr(choice, "_MAX_SCORES", 100)
    q, k = torch.randn(2, 4, 9, 5, dtype=torch.float64), torch.randn(2, 2, 9, 5, dtype=torch.float64)
    copies, rows = (q.clone(), k.clone()), config("adaptive", 0.25).rows(0, 9, False)
    first = choice.best_blocks(q, k, rows, 0.5, 3)
    assert torch.equal(q, copies[0])
    assert torch.equal(k, copies[1])
    assert torch.equal(choice.best_blocks(q, k, rows, 0.5, 3), first)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [None, 4])
def test_masks(heads, causal):
    """Random masks, for all heads and for each, with query blocks that read nothing."""
    for n, m in ((64, 64), (75, 75), (40, 75)):
        blocks = -(-m // SIZE)
        rows = blocks - (m - n) // SIZE
        mask = torch.rand(*(() if heads is None else (heads,)), blocks, blocks) < 0.5
        mask[..., blocks - 2, :] = False
        inputs = random_inputs(2, n, m, 4, 2, 4)
        table = mask[..., blocks - rows :, :]
        compare(BlockSparse.custom(mask, block_size=SIZE), table, inputs, causal=causal)
        if n < m:  # the rows of the queries alone
            compare(BlockSparse.custom(table, block_size=SIZE), table, inputs, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_in_many_calls(causal, monkeypatch):
    """The bounds on gathered elements, forced on a short sequence."""
    for limit in (1, 4 * SIZE * 4, 2 * 4 * SIZE * 4 * 2):
        monkeypatch.setattr(loop, "partial_limit", lambda query, limit=limit: limit)
        mask = torch.rand(4, 4, 4) < 0.8
        for some in (mask, mask[0]):
            inputs = random_inputs(2, 58, 58, 4, 2, 4)
            compare(BlockSparse.custom(some, block_size=SIZE), some, inputs, causal=causal, backends=["sdpa", "eager"])


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_do_not_count(causal, monkeypatch):
    """Where reading block numbers would wait for a device, special blocks are computed everywhere, weight 0."""
    monkeypatch.setattr(listed, "_host_reads", lambda x: False)
    for n, m in ((64, 64), (75, 75), (40, 75), (9, 9)):
        blocks = -(-m // SIZE)
        mask = torch.rand(4, blocks, blocks) < 0.5
        inputs = random_inputs(2, n, m, 4, 2, 4)
        table = mask[:, (m - n) // SIZE :]
        compare(BlockSparse.custom(mask, block_size=SIZE), table, inputs, causal=causal, backends=["sdpa", "eager"])


@pytest.mark.parametrize("kind", [*KINDS, "adaptive", "mask"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_samples_are_what_they_are_alone(backend, causal, kind):
    lengths = torch.tensor([75, 0, 41, 41])
    mask = torch.rand(5, 5) < 0.6
    pattern = BlockSparse.custom(mask, block_size=SIZE) if kind == "mask" else BlockSparse.from_config(config(kind))
    inputs = random_inputs(4, 75, 75, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, 4, 75, dtype=torch.float64)

    def alone(q, k, v):
        outs, lses = [], []
        for b, length in enumerate(lengths.tolist()):
            own = pattern
            if kind == "mask":
                corner = mask[: -(-max(length, 1) // SIZE), : -(-max(length, 1) // SIZE)]
                own = BlockSparse.custom(corner, block_size=SIZE)
            out, lse = torch.zeros_like(q[b : b + 1]), torch.full((1, 4, 75), -torch.inf, dtype=q.dtype)
            if length:
                rows = (x[b : b + 1, :length] for x in (q, k, v))
                got = attention(*rows, own, is_causal=causal, backend="reference", return_lse=True)
                out, lse = torch.cat((got[0], out[:, length:]), 1), torch.cat((got[1], lse[..., length:]), 2)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    expected = with_grads(alone, inputs, dout, dlse)
    call = lambda *x: attention(  # noqa: E731
        *x, pattern, is_causal=causal, lengths=lengths, backend=backend, return_lse=True
    )
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("kind", [*KINDS, "adaptive"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_what_they_are_alone(backend, kind):
    cu_seqlens = torch.tensor([0, 37, 37, 69, 100])
    pattern, inputs = BlockSparse.from_config(config(kind)), random_inputs(2, 100, 100, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 100, dtype=torch.float64)

    def alone(q, k, v):
        parts = [
            attention(q[:, a:b], k[:, a:b], v[:, a:b], pattern, is_causal=True, backend="reference", return_lse=True)
            for a, b in ((0, 37), (37, 69), (69, 100))
        ]
        return torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts], 2)

    expected = with_grads(alone, inputs, dout, dlse)
    call = lambda *x: attention(  # noqa: E731
        *x, pattern, is_causal=True, cu_seqlens=cu_seqlens, backend=backend, return_lse=True
    )
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("scale", [-0.6, 0.0])
def test_any_scale(scale):
    table = table_of("local_window", "0.4", 0, 4, True)
    pattern = BlockSparse.from_config(config("local_window"))
    compare(pattern, table, random_inputs(1, 50, 50, 2, 1, 4), causal=True, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_tensors(backend):
    for kind in ("local_window", "adaptive"):
        for b, n, m in ((0, 20, 20), (2, 0, 0), (2, 0, 20)):
            q, k, v = random_inputs(b, n, m, 2, 2, 4)
            out, lse = attention(q, k, v, BlockSparse.from_config(config(kind)), backend=backend, return_lse=True)
            assert out.shape == q.shape
            assert lse.shape == (b, 2, n)
            torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    q, k, v = (x.detach() for x in random_inputs(1, 75, 75, 4, 2, 8))
    pattern = BlockSparse.from_config(config("local_window"))
    expected = attention(q, k, v, pattern, backend="reference")
    for backend in BACKENDS:
        out = attention(q.to(dtype), k.to(dtype), v.to(dtype), pattern, backend=backend)
        assert out.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_strided_inputs():
    qkv = torch.randn(2, 75, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    pattern = BlockSparse.from_config(config("local_window"))
    out = attention(*qkv.unbind(2), pattern)
    (grad,) = torch.autograd.grad(out.sin().sum(), qkv)
    expected = attention(*qkv.unbind(2), pattern, backend="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sin().sum(), qkv)[0])


def test_weights_of_rows():
    q, k, v = (x.detach() for x in random_inputs(2, 75, 75, 4, 2, 4))
    lengths = torch.tensor([75, 50])
    for kind in ("hierarchical", "adaptive"):
        pattern = BlockSparse.from_config(config(kind))
        rows = [0, 7, 39, 60]
        weights = attention_weights(q, k, pattern, rows, is_causal=True, lengths=lengths)
        out = attention(q, k, v, pattern, is_causal=True, lengths=lengths)[:, rows]
        torch.testing.assert_close(torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(2, 2)), out)


def test_static_lists_are_made_once():
    plan_lists._static_lists.cache_clear()
    q, k, v = random_inputs(1, 64, 64, 2, 2, 4)
    for _ in range(3):
        attention(q, k, v, BlockSparse.from_config(config("hierarchical"))).sum().backward()
    assert plan_lists._static_lists.cache_info().misses == 1


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        (torch.ones(3, 3), {}, "has 3 x 3 blocks of 16: got 75 queries and 75 keys, which are 5 x 5 blocks"),
        (torch.ones(4, 5), {}, "has 4 x 5 blocks of 16: got 75 queries and 75 keys, which are 5 x 5 blocks"),
        (torch.ones(3, 5, 5), {}, "for 1 sample(s) and 3 query head(s) (1 serves any number), got 2 and 4"),
        (torch.ones(5, 5), {"cu_seqlens": torch.tensor([0, 75])}, "it excludes cu_seqlens"),
        (None, {"dropout_p": 0.1, "backend": "sdpa"}, "sdpa: dropout is not supported (dropout_p = 0.1); use backend="),
        (None, {"mixing_gradient": "detached"}, "is one softmax"),
        (None, {"backend": "hopper"}, "hopper: Hopper kernels take blocks of 128 or 256, got 16"),
        (None, {"backend": "magic"}, "backend must be one of"),
        (None, {"layout": "zigzag"}, "without group"),
    ],
)
def test_bad_calls(pattern, options, message):
    q = torch.zeros(2, 75, 4, 8)
    made = BlockSparse.from_config(config("local_window"))
    if pattern is not None:
        made = BlockSparse.custom(pattern.bool(), block_size=16)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(q, q, q, made, **options)
