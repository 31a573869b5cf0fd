"""Every tile kernel of the GPU against float64, through the public function."""

from __future__ import annotations

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention, ops
from dilated_attention_pytorch.backends import sdpa
from dilated_attention_pytorch.backends.request import Request

pytestmark = pytest.mark.gpu

CASES = {
    "whole segments": (Dilated([32, 64, 128], [1, 2, 4]), 128, 128),
    "cut segments": (Dilated([32, 100, 1000], [1, 3, 8]), 133, 133),
    "one row left": (Dilated([64], [2], "blocked"), 129, 129),
    "decoding": (Dilated([64, 256], [1, 4]), 20, 233),
    "zero keys": (Dilated([64, 100], [1, 3], "blocked", torchscale_padding=True), 150, 150),
}


def kernels(dtype, head_dim):
    request = Request("cuda", torch.cuda.get_device_capability(), dtype, head_dim, 0.0)
    return [kernel for kernel, why_not in sdpa.KERNELS if not why_not(request)]


def run(call, q, k, v, dout, dlse):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*inputs)
    return [x.detach() for x in (out, lse, *oracle.grads((out, lse), inputs, (dout.to(out), dlse.to(lse))))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.bfloat16, 64),
        (torch.float16, 80),
        (torch.float32, 24),
    ],
)
def test_every_kernel(case, causal, dtype, head_dim, monkeypatch):
    pattern, n, m = CASES[case]
    q, dout = torch.randn(2, 2, n, 4, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 2, m, 2, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(2, 4, n, device="cuda")
    exact = run(
        lambda *x: oracle.attention(*x, pattern, is_causal=causal),
        *(x.double().cpu() for x in (q, k, v, dout)),
        dlse.cpu(),
    )
    yardstick_pattern = Dilated(pattern.segment_lengths, pattern.dilation_rates, pattern.offsets)
    yardstick = run(oracle.plain(yardstick_pattern, causal), q, k, v, dout, dlse)
    if pattern.torchscale_padding:  # the yardstick has no zero keys: compare its own error
        reference = run(
            lambda *x: oracle.attention(*x, yardstick_pattern, is_causal=causal),
            *(x.double().cpu() for x in (q, k, v, dout)),
            dlse.cpu(),
        )
        yardstick = [e + (y.cpu() - r) for e, y, r in zip(exact, yardstick, reference, strict=True)]

    def compare(backend: str, name: str) -> None:
        call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
        try:
            oracle.assert_rounding_only(run(call, q, k, v, dout, dlse), yardstick, exact, dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None

    compare("triton", "triton")
    for kernel in kernels(dtype, head_dim):
        monkeypatch.setattr(ops, "_tile_kernel", lambda backend, query, kernel=kernel: kernel)
        compare("sdpa", kernel.name)


def test_eager_serves_double_precision():
    pattern = Dilated([64, 100], [1, 3])
    q, k, v = torch.randn(3, 2, 150, 4, 16, device="cuda", dtype=torch.float64).unbind(0)
    out, lse = attention(q, k, v, pattern, return_lse=True)
    expected = oracle.attention(q.cpu(), k.cpu(), v.cpu(), pattern)
    torch.testing.assert_close(out.cpu(), expected[0])
    torch.testing.assert_close(lse.cpu(), expected[1])


def test_lengths_on_the_gpu():
    pattern = Dilated([64, 100], [1, 3])
    q, k, v = torch.randn(3, 3, 150, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    lengths = torch.tensor([150, 0, 77], device="cuda")
    out = attention(q, k, v, pattern, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = attention(q[b : b + 1, :n], k[b : b + 1, :n], v[b : b + 1, :n], pattern)
        torch.testing.assert_close(out[b : b + 1, :n], alone)
        assert (out[b, n:] == 0).all()
