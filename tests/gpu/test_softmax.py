"""Scores that grow: the Hopper forward takes the maximum of a row's first keys for all of them, see hopper/softmax.py."""

from __future__ import annotations

import pytest
import torch

import oracle
from block_cases import plain, positions_met
from dilated_attention_pytorch import BlockSparse, Dilated, attention
from dilated_attention_pytorch.backends.hopper.backend import HOPPER
from dilated_attention_pytorch.backends.request import Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available()
        and bool(HOPPER.why_not(Request("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 64))),
        reason="the kernels are for Hopper GPUs",
    ),
]
PATTERNS = {
    "one branch": Dilated([1024], [1]),
    "parts": Dilated([512, 1024], [1, 2]),
    "blocks": BlockSparse.custom(torch.ones(8, 8, dtype=torch.bool), block_size=128),
}


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def growing(n, heads, head_dim, nats):
    """q, k, v, dout: scores grow by about so much over 1,024 keys, by 4 times that in every third row."""
    q, k, v, dout = random(4, 1, n, heads, head_dim).unbind(0)
    q = q.abs()
    q[:, ::3] *= 4
    slope = nats / (0.8 * head_dim**0.5)
    k += (torch.arange(n, device="cuda") % 1024 / 1024 * slope).to(k)[None, :, None, None]
    return q, k, v, dout


def results(call, q, k, v, dout):
    """out, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = call(q, k, v)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, (q, k, v), dout))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nats", [0.0, 5.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("pattern", [PATTERNS["one branch"], PATTERNS["parts"]], ids=["one branch", "parts"])
def test_scores_that_grow(pattern, nats, causal):
    """By 60 nats and more, the weights of a row overflow; those of other rows do not."""
    q, k, v, dout = growing(1024, 2, 64, nats)
    exact = results(
        lambda *x: oracle.attention(*x, pattern, is_causal=causal), *(x.double().cpu() for x in (q, k, v, dout))
    )
    yardstick = results(oracle.plain(pattern, causal), q, k, v, dout)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend="hopper", return_lse=True)  # noqa: E731
    oracle.assert_rounding_only(results(call, q, k, v, dout), yardstick, exact, torch.bfloat16)


def exact_results(pattern, q, k, v, dout):
    """out, lse, dq, dk, dv of causal attention in float64, head by head on the GPU: longer than ``oracle`` can."""
    n, heads, d = q.shape[1:]
    rows = torch.arange(n, device=q.device)[:, None]
    keys = rows.T
    found = []
    for h in range(heads):
        count = torch.zeros(n, n, dtype=torch.float64, device=q.device)
        for w, r in pattern.branches:
            own = [(x % w) % r == h % r for x in (rows, keys)]
            count += (rows // w == keys // w) & own[0] & own[1] & (keys <= rows)
        one = [x[:, :, h].double() for x in (q, k, v, dout)]

        def dense(q, k, v, count=count):
            s = q @ k.transpose(1, 2) * d**-0.5 + count.log()
            return s.softmax(-1) @ v, s.logsumexp(-1)

        found.append(results(dense, *one))
    by_head = list(zip(*found, strict=True))
    return [
        torch.stack(x, 1 if name == "lse" else 2) for name, x in zip(("out", "lse", "dq", "dk", "dv"), by_head, strict=True)
    ]


@pytest.mark.parametrize("nats", [20.0, 60.0])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_programs_of_many_items(head_dim, nats):
    """Three and four items for a multiprocessor, and parts; errors beside those of PyTorch's kernels.

    Softmax is so sharp here that dq has a relative error of 1 to 3 % in bfloat16, whoever computes it.
    """
    pattern = Dilated([1024, 2048], [1, 2])
    inputs = growing(4096, 16, head_dim, nats)
    ours, stock = (
        results(lambda *x, b=b: attention(*x, pattern, is_causal=True, backend=b, return_lse=True), *inputs)
        for b in ("hopper", "sdpa")
    )
    oracle.assert_rounding_only(ours, stock, exact_results(pattern, *inputs), torch.bfloat16)


@pytest.mark.parametrize("nats", [20.0, 40.0, 80.0, 300.0])
@pytest.mark.parametrize("at", [3, 500, 1020])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_key_that_outweighs_all_others(pattern, at, nats):
    """Its value is the result, bit for bit, and queries have no gradient: its weight may be rounded, but not only above."""
    q, k, v, dout = random(4, 1, 1024, 2, 64).unbind(0)
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, at, :, 0] = nats + 5.0
    v += v.sign() / 2
    # Of two branches, the rows of its segment in the first one see it for sure.
    rows = slice(at // 512 * 512, at // 512 * 512 + 512) if pattern is PATTERNS["parts"] else slice(None)
    out, _, dq, dk, _ = results(lambda *x: attention(*x, pattern, backend="hopper", return_lse=True), q, k, v, dout)
    assert torch.equal(out[:, rows], v[:, at : at + 1].expand_as(out[:, rows]))
    assert dq[:, rows].abs().max() < 1e-3
    assert dk.isfinite().all()


# Infinity times a weight that is too small for float32 is NaN, for blocks of some sizes: so only without growth.
@pytest.mark.parametrize(
    ("value", "nats"), [(1e30, 0.0), (1e30, 40.0), (1e30, 300.0), (torch.inf, 0.0), (torch.nan, 0.0), (torch.nan, 300.0)]
)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_values_that_are_huge_or_no_numbers(pattern, nats, value):
    """With 1e30 the weights may be finite where their product with it is not."""
    q, k, v, _ = growing(1024, 2, 64, nats)
    v[:, 100] = value
    ours, others = (attention(q, k, v, pattern, backend=b) for b in ("hopper", "triton"))
    torch.testing.assert_close(ours, others, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_items_of_one_block(head_dim):
    """Four and five of them for a multiprocessor; one has a value that is no number, so some programs come again."""
    q, k, v = random(3, 1, 40 * 128, 16, head_dim).unbind(0)
    v[:, 300, 3] = torch.nan
    ours, others = (attention(q, k, v, Dilated([128], [1]), backend=b) for b in ("hopper", "triton"))
    torch.testing.assert_close(ours, others, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert ours[:, 256:384, 3].isnan().all()
    assert ours.isnan().sum() == 128 * head_dim


@pytest.mark.parametrize("nats", [5.0, 60.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("blocks", "heads", "head_dim"), [(8, 4, 128), (40, 16, 128), (40, 16, 48)])
def test_listed_blocks_with_scores_that_grow(blocks, heads, head_dim, causal, nats):
    """Fewer blocks than multiprocessors, and about five for each, whose lists have very different lengths.

    Differences from float64, at most half larger than those of the portable kernels, whose softmax is online.
    """
    table = torch.rand(blocks, blocks) < torch.linspace(0.05, 0.9, blocks)[:, None]
    table[3], table[:, 2] = False, False
    pattern, n = BlockSparse.custom(table, block_size=128), blocks * 128 - 24
    inputs = growing(n, heads, head_dim, nats)
    slow = plain(positions_met(table, 128, n, n, causal))
    by_head = [results(slow, *(x[:, :, h, None].double() for x in inputs)) for h in range(heads)]
    exact = [torch.cat(x, 1 if x[0].dim() == 3 else 2) for x in zip(*by_head, strict=True)]
    ours, others = (
        results(lambda *x, b=b: attention(*x, pattern, is_causal=causal, backend=b, return_lse=True), *inputs)
        for b in ("hopper", "triton")
    )
    for name, a, b, e in zip(("out", "lse", "dq", "dk", "dv"), ours, others, exact, strict=True):
        assert torch.equal(a.isneginf(), e.isneginf()), name
        a, b, e = (x.double().masked_fill(e.isneginf(), 0.0) for x in (a, b, e))
        assert (a - e).norm() <= 1.5 * (b - e).norm() + 1e-3 * e.norm(), name


def test_the_same_bits_where_some_rows_overflow():
    """Programs take blocks as they come: which ones they compute again must not show in rows that did not overflow."""
    q, k, v, dout = growing(40 * 128 - 24, 16, 64, 60.0)
    k[:, :, 1:] = random(1, 40 * 128 - 24, 15, 64)
    pattern = BlockSparse.custom(torch.rand(40, 40) < torch.linspace(0.05, 0.9, 40)[:, None], block_size=128)
    call = lambda *x: attention(*x, pattern, backend="hopper", return_lse=True)  # noqa: E731
    first = results(call, q, k, v, dout)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(results(call, q, k, v, dout), first, strict=True))
