"""What the Hopper kernels have of their own: head sizes, ragged tiles, launches that overlap, odd addresses."""

from __future__ import annotations

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention
from gpu_cases import check, over_tables, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and "hopper" not in over_tables(torch.bfloat16, 64),
        reason="the kernels are for Hopper GPUs",
    ),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 40, 48, 80, 96, 128])
def test_head_sizes(head_dim, causal):
    check(Dilated([160, 330], [1, 3]), 330, torch.bfloat16, head_dim, causal=causal, backend="hopper")


@pytest.mark.parametrize("lengths", [None, [1140, 500]])
@pytest.mark.parametrize("head_dim", [40, 48, 64])
def test_ragged_tiles(head_dim, lengths):
    """Tiles of 570 and 380 rows are 5 and 3 items with ragged ends; parts; two query heads to a key."""
    pattern, n = Dilated([570, 1140], [1, 3]), 1140
    batch = len(lengths or [n])
    lengths = None if lengths is None else torch.tensor(lengths, device="cuda")
    q, dout = torch.randn(2, batch, n, 4, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, batch, n, 2, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    dlse = torch.randn(batch, 4, n, device="cuda")
    call = lambda *x: attention(*x, pattern, lengths=lengths, backend="hopper", return_lse=True)  # noqa: E731
    actual = run(call, q, k, v, dout, dlse)
    for sample, length in enumerate([n] if lengths is None else lengths.tolist()):
        own = [x[sample : sample + 1, :length] for x in (q, k, v, dout)]
        own_dlse = dlse[sample : sample + 1, :, :length]
        exact = run(lambda *x: oracle.attention(*x, pattern), *(x.double().cpu() for x in own), own_dlse.cpu())
        yardstick = run(oracle.plain(pattern, False), *own, own_dlse)
        ours = [x[sample : sample + 1, :length] for x in actual]
        ours[1] = actual[1][sample : sample + 1, :, :length]
        oracle.assert_rounding_only(ours, yardstick, exact, torch.bfloat16)


def test_serves_what_triton_serves():
    """One branch, lengths, a negative scale, constant mixing weights, unaligned rows: against the portable kernels."""
    q, dout = torch.randn(2, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, 2, 300, 2, 65, device="cuda", dtype=torch.bfloat16)[..., 1:].unbind(0)
    cases = [
        {},
        {"lengths": torch.tensor([300, 77], device="cuda")},
        {"scale": -0.3, "is_causal": True},
        {"mixing_gradient": "detached"},
    ]
    for options in cases:
        pattern = Dilated([64, 200], [1, 3]) if options else Dilated([200], [1])
        dlse = torch.randn(2, 4, 300, device="cuda")
        ours, others = (
            run(
                lambda *x, b=b, p=pattern, o=options: attention(*x, p, backend=b, return_lse=True, **o), q, k, v, dout, dlse
            )
            for b in ("hopper", "triton")
        )
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, others, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=lambda m, name=name, o=options: f"{o} {name}: {m}")


# Five launches of which each adds the part of the last; and rates 6 and 12 in segments that are no multiples of them.
CHAINS = [Dilated([256, 512, 1024, 2048, 4096], [1, 2, 4, 8, 16]), Dilated([256, 512, 1024, 2048, 4096], [1, 2, 4, 6, 12])]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", CHAINS, ids=["powers", "paper"])
def test_launches_that_begin_before_the_last_is_done(pattern, causal):
    q, k, v, dout = torch.randn(4, 1, 9000, 16, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    dlse = torch.randn(1, 16, 9000, device="cuda")
    ours, others = (
        run(lambda *x, b=b: attention(*x, pattern, is_causal=causal, backend=b, return_lse=True), q, k, v, dout, dlse)
        for b in ("hopper", "triton")
    )
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, others, strict=True):
        assert (a - b).float().norm() < 1e-2 * b.float().norm(), name


@pytest.mark.parametrize("pattern", CHAINS, ids=["powers", "paper"])
def test_launches_in_a_captured_graph(pattern):
    """Forward and backward; the inputs change between replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = [torch.randn(1, 9000, 16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        dout = torch.randn_like(inputs[0])

        def call():
            out = attention(*inputs, pattern, backend="hopper")
            return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call()
        for _ in range(3):
            with torch.no_grad():
                for x in inputs:
                    x.copy_(torch.randn_like(x))
            graph.replay()
            for a, b in zip(captured, call(), strict=True):
                assert torch.equal(a, b)
    torch.cuda.synchronize()


def test_copies_what_lies_at_odd_addresses():
    """Contiguous, but two bytes behind a multiple of 16: what views of flat buffers look like."""
    pattern, shape = Dilated([64, 200], [1, 3]), (1, 300, 4, 64)
    odd = [torch.randn(300 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(shape) for _ in range(4)]
    dlse = torch.zeros(1, 4, 300, device="cuda")
    call = lambda *x: attention(*x, pattern, backend="hopper", return_lse=True)  # noqa: E731
    for a, b in zip(run(call, *odd, dlse), run(call, *(x.clone() for x in odd), dlse), strict=True):
        assert torch.equal(a, b)
