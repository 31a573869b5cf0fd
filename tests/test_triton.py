"""The Triton kernels in float32 through the public function: interpreted here, compiled on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.plan import compile_plan
from dilated_attention_pytorch.spans import spans

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(b, n, m, heads, key_heads, d, dtype=torch.float32):
    shapes = ((b, n, heads, d), (b, m, key_heads, d), (b, m, key_heads, d))
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def results(call, tensors, dout, dlse):
    out, lse = call(*tensors)
    return [out, lse, *oracle.grads((out, lse), tensors, (dout.to(out), dlse.to(lse)))]


def check(pattern, tensors, causal, *, exact=oracle.attention, **options):
    """All five results against the oracle in float64, with plain attention in float32 as the yardstick."""
    q = tensors[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = results(lambda *x: exact(*x, pattern, is_causal=causal), doubles, dout.cpu(), dlse.cpu())
    yardstick = results(oracle.plain(pattern, causal), tensors, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend="triton", return_lse=True, **options)  # noqa: E731
    actual = results(call, tensors, dout, dlse)
    oracle.assert_rounding_only(actual, yardstick, expected, torch.float32)
    return actual


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("segments", "rates", "n", "m"),
    [
        ([64, 128], [1, 2], 128, 128),  # whole segments and blocks
        ([50, 100, 1000], [1, 3, 4], 133, 133),  # everything cut
        ([48, 96], [2, 4], 100, 100),  # no branch covers all rows
        ([64], [1], 65, 65),  # one launch, one row left over
        ([64, 256], [1, 4], 20, 150),  # decoding
    ],
)
def test_every_shape_of_tile(segments, rates, n, m, causal):
    check(Dilated(segments, rates), inputs(1, n, m, 4, 2, 16), causal)


@pytest.mark.parametrize("head_dim", [8, 24, 48, 80, 96, 160, 256])
def test_head_sizes(head_dim):
    check(Dilated([40, 80], [1, 2]), inputs(1, 70, 70, 2, 2, head_dim), True)


def test_batches_and_layouts():
    pattern = Dilated([32, 64], [1, 2], "blocked")
    tensors = inputs(3, 70, 70, 2, 1, 16)
    expected = check(pattern, tensors, True)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    out = attention(*strided, pattern, is_causal=True, backend="triton")
    torch.testing.assert_close(out, expected[0])


def test_lengths_and_documents():
    pattern = Dilated([24, 64], [1, 3])
    tensors = inputs(3, 70, 70, 2, 2, 16)
    lengths = [70, 0, 33]

    def alone(q, k, v, pattern, is_causal):
        parts = [
            oracle.attention(*(x[b : b + 1, :n] for x in (q, k, v)), pattern, is_causal=is_causal)
            for b, n in enumerate(lengths)
        ]
        out, lse = torch.zeros_like(q), torch.full((3, 2, 70), -torch.inf, dtype=torch.float64)
        for b, n in enumerate(lengths):
            out[b, :n], lse[b, :, :n] = parts[b][0][0], parts[b][1][0]
        return out, lse

    dout = torch.randn_like(tensors[0])
    zero = torch.zeros(3, 2, 70, device=DEVICE)
    call = lambda *x: attention(*x, pattern, lengths=torch.tensor(lengths), backend="triton", return_lse=True)  # noqa: E731
    doubles = [x.detach().cpu().double().requires_grad_() for x in tensors]
    expected = results(lambda *x: alone(*x, pattern, False), doubles, dout.cpu(), zero.cpu())
    for a, e in zip(results(call, tensors, dout, zero), expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-5, atol=1e-5)
    packed = attention(*tensors, pattern, cu_seqlens=torch.tensor([0, 40, 41, 70]), backend="triton")
    for a, b in ((0, 40), (40, 41), (41, 70)):
        document = oracle.attention(*(x[:, a:b].cpu() for x in tensors), pattern)[0]
        torch.testing.assert_close(packed[:, a:b].cpu().double(), document, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixing", ["exact", "detached"])
@pytest.mark.parametrize("options", [{"dropout_p": 0.3, "seed": 2**40 + 7}, {"scale": -0.4}, {"scale": 0.0}, {}])
def test_same_as_the_reference(options, mixing):
    """What the oracle does not know; the reference is tested against independent sums in other files."""
    pattern = Dilated([24, 64], [1, 3], torchscale_padding=not options)
    tensors = inputs(2, 70, 70, 4, 2, 16)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, 70, device=DEVICE)
    both = [
        results(
            lambda *x, backend=backend: attention(
                *x, pattern, backend=backend, return_lse=True, mixing_gradient=mixing, **options
            ),
            tensors,
            dout,
            dlse,
        )
        for backend in ("triton", "reference")
    ]
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), *both, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_bit_for_bit():
    tensors, pattern = inputs(1, 70, 70, 2, 1, 16), Dilated([24, 64], [1, 3])
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(1, 2, 70, device=DEVICE)
    call = lambda *x: attention(*x, pattern, is_causal=True, backend="triton", return_lse=True)  # noqa: E731
    first, second = (results(call, tensors, dout, dlse) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("n", "m"), [(100, 100), (17, 100)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_row_has_one_writer_per_launch(n, m, causal):
    """No atomics: within a launch, no two tiles share a row of dq, nor of dk and dv."""
    from dilated_attention_pytorch.backends.triton.tables import launches

    pattern = Dilated([16, 50, 1000], [1, 3, 2])
    found = list(spans(2, n, m, [m, m - 11], None))
    plans = [(s, compile_plan(pattern, s.length, 3, is_causal=causal, queries=s.positions)) for s in found]
    steps = launches(plans)
    assert [step.rate for step in steps] == sorted((step.rate for step in steps), reverse=True)
    for step in steps:
        queries, keys = [], []
        for p in step.families:
            f = p.family
            for b in range(p.first_sample, p.first_sample + p.samples):
                for t in range(f.tiles):
                    for a, g in enumerate(f.key_heads):
                        shift = t * f.tile_step + a * f.head_row_step
                        queries += [(b, g, p.q_start + shift + x * f.row_stride) for x in range(f.q_rows)]
                        keys += [(b, g, p.k_start + shift + x * f.row_stride) for x in range(f.k_rows)]
        assert len(set(queries)) == len(queries)
        assert len(set(keys)) == len(keys)
        assert all(0 <= row < n for _, _, row in queries)
        assert all(0 <= row < m for _, _, row in keys)


def test_refusals():
    x = torch.zeros(1, 4, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"triton: Triton kernels take torch\.float32"):
        attention(x.double(), x.double(), x.double(), Dilated([4], [1]), backend="triton")
    wide = torch.zeros(1, 4, 1, 264, device=DEVICE)
    with pytest.raises(ValueError, match="head sizes up to 256, got 264"):
        attention(wide, wide, wide, Dilated([4], [1]), backend="triton")
