"""Every tile kernel of the GPU against float64, through the public function."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, Hilbert, Order, attention, explain
from dilated_attention_pytorch.backends import sdpa
from gpu_cases import check, over_tables, request, run

pytestmark = pytest.mark.gpu

CASES = {
    "whole segments": (Dilated([32, 64, 128], [1, 2, 4]), 128, 128),
    "cut segments": (Dilated([32, 100, 1000], [1, 3, 8]), 133, 133),
    "one row left": (Dilated([64], [2], "blocked"), 129, 129),
    "decoding": (Dilated([64, 256], [1, 4]), 20, 233),
    "zero keys": (Dilated([64, 100], [1, 3], "blocked", torchscale_padding=True), 150, 150),
}


def kernels(dtype, head_dim):
    """The stock kernels that serve this, each with its reasons not to."""
    return [pair for pair in sdpa.KERNELS if not pair[1](request(dtype, head_dim))]


def stock(pattern, causal):
    """PyTorch's own memory-efficient attention with the multiplicity as a bias: what that operator costs in precision."""

    def call(q, k, v):
        (n, heads), (m, key_heads) = q.shape[1:3], k.shape[1:3]
        count = oracle.multiplicities(pattern, n, m, heads, key_heads, causal).to(q)
        met = (count > 0).any(-1, keepdim=True)
        q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            bias = count.log().masked_fill(~met, 0.0).expand(q.shape[0], -1, -1, -1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out.masked_fill(~met, 0.0).transpose(1, 2)

    return call


def grads_of(call, inputs, dout):
    """out, dq, dk, dv, on the CPU."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, inputs, dout.to(out)))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        # One process per type with --dist loadgroup: compiling is what takes the time.
        pytest.param(torch.bfloat16, 64, marks=pytest.mark.xdist_group("bfloat16")),
        pytest.param(torch.float16, 80, marks=pytest.mark.xdist_group("float16")),
        pytest.param(torch.float32, 24, marks=pytest.mark.xdist_group("float32")),
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

    for backend in over_tables(dtype, head_dim):
        compare(backend, backend)
    for kernel, why_not in kernels(dtype, head_dim):
        if kernel.name == "memory-efficient" and dtype == torch.float32:
            # Its weights are less precise than plain attention's, also in dense use: measured in place of it.
            dense = lambda *x: oracle.attention(*x, yardstick_pattern, is_causal=causal)[0]  # noqa: E731
            reference = grads_of(dense, [x.double().cpu() for x in (q, k, v)], dout)
            used = grads_of(stock(yardstick_pattern, causal), [q, k, v], dout)
            own = [e + (y - r) for e, y, r in zip((exact[0], *exact[2:]), used, reference, strict=True)]
            yardstick = [own[0], yardstick[1], *own[1:]]
        monkeypatch.setattr(sdpa, "KERNELS", ((kernel, why_not),))
        compare("sdpa", kernel.name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 128, 256])
def test_float32_head_sizes(head_dim, causal):
    """Products of three TF32 products each are as exact as float32, for every shape that is compiled for tensor cores."""
    check(Dilated([512, 1000], [1, 3]), 1300, torch.float32, head_dim, causal=causal, backend="triton")


@pytest.mark.parametrize(("dtype", "head_dim"), [(x, d) for x in (torch.bfloat16, torch.float32) for d in (64, 128, 256)])
def test_tables_of_other_gpus(dtype, head_dim, monkeypatch):
    """The sizes that other GPUs get, on this one: the same Python, other tensor cores."""
    from dilated_attention_pytorch.backends.triton import run as portable

    monkeypatch.setattr(portable, "capability", lambda x: (8, 6))  # that of dilated kernels
    for causal in (False, True):
        check(Dilated([256, 500], [1, 3]), 900, dtype, head_dim, causal=causal, backend="triton")


def test_auto_takes_stock_operators_for_wide_float32():
    """The float32 kernels for heads above 128 have no tuned gradients."""
    pattern = Dilated([256, 500], [1, 3])
    tensors = check(pattern, 900, torch.float32, 256, causal=True, backend="auto")
    assert explain(*tensors, pattern, is_causal=True).backend == "sdpa"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("rates", [[1, 2, 4], [2, 4, 12]], ids=["dense", "sums"])
def test_shares_have_the_same_bits(rates, backend, causal, monkeypatch):
    """Parts of one share of samples or heads after the other, in the same memory: launches that overlap must not meet."""
    from dilated_attention_pytorch.backends.gpu import launch_plan

    pattern = Dilated([512, 1024, 4096], rates)
    if backend not in over_tables(torch.bfloat16, 64):
        pytest.skip("needs a Hopper GPU")
    x = [torch.randn(2, 8192, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    dlse = torch.randn(2, 4, 8192, device="cuda")
    call = lambda *y: attention(*y, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
    together = run(call, *x, dlse)
    for numbers in (2**21, 1):  # a few shares, and as many as there are heads
        monkeypatch.setattr(launch_plan, "PARTIAL_ELEMENTS", numbers)
        for _ in range(20):
            assert all(map(torch.equal, run(call, *x, dlse), together))


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim"),
    [
        ("hopper", torch.bfloat16, 64),
        ("hopper", torch.float16, 96),
        ("triton", torch.bfloat16, 64),
        ("triton", torch.float32, 48),
    ],
)
def test_documents_in_one_sequence(backend, dtype, head_dim, causal):
    """``cu_seqlens``, with a document of no tokens and one of one, against float64 of each alone."""
    if backend not in over_tables(dtype, head_dim):
        pytest.skip("the kernels are for Hopper GPUs")
    pattern, bounds = Dilated([64, 200], [1, 3]), [0, 133, 133, 134, 700, 1000]
    q, dout = torch.randn(2, 1, 1000, 4, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 1, 1000, 2, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(1, 4, 1000, device="cuda")

    def each_alone(call):
        def packed(*inputs):
            spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]
            outs, lses = zip(*(call(*(x[:, span] for x in inputs)) for span in spans), strict=True)
            return torch.cat(outs, 1), torch.cat(lses, 2)

        return packed

    dense = each_alone(lambda *x: oracle.attention(*x, pattern, is_causal=causal))
    exact = run(dense, *(x.double().cpu() for x in (q, k, v, dout)), dlse.double().cpu())
    yardstick = run(each_alone(oracle.plain(pattern, causal)), q, k, v, dout, dlse)
    options = {"cu_seqlens": torch.tensor(bounds, device="cuda"), "is_causal": causal, "backend": backend}
    ours = lambda *x: attention(*x, pattern, return_lse=True, **options)  # noqa: E731
    oracle.assert_rounding_only(run(ours, q, k, v, dout, dlse), yardstick, exact, dtype)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 24), (torch.bfloat16, 128)])
@pytest.mark.parametrize(
    "options",
    [{"is_causal": True, "order": (19, 7)}, {"order": (19, 7)}, {"is_causal": True, "dropout_p": 0.3, "seed": 5}],
    ids=["causal order", "order", "dropout"],
)
def test_orders_and_dropout(options, dtype, head_dim):
    """What no other test here reaches: rows that are sorted by position, and words of dropout, against float64."""
    pattern, n = Dilated([32, 100], [1, 3]), 133
    q, dout = torch.randn(2, 2, n, 4, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 2, n, 2, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(2, 4, n, device="cuda")

    def call(backend, device):
        order = Hilbert.grid(*options["order"], device=device) if "order" in options else None
        rest = {"order": order, "backend": backend, "return_lse": True}
        return lambda *x: attention(*x, pattern, **(options | rest))

    exact = run(call("reference", "cpu"), *(x.double().cpu() for x in (q, k, v, dout)), dlse.cpu())
    yardstick = run(call("reference", "cuda"), q, k, v, dout, dlse)
    for backend in ["triton"] if "dropout_p" in options else over_tables(dtype, head_dim):
        oracle.assert_rounding_only(run(call(backend, "cuda"), q, k, v, dout, dlse), yardstick, exact, dtype)


@pytest.mark.parametrize("options", [{}, {"mixing_gradient": "detached"}, {"lengths": [4096, 1365]}])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)])
def test_causal_orders_give_the_same_bits(dtype, head_dim, options):
    """Long tiles, segments that do not divide the sequence, and heads with fewer rows than others. Memory holds NaN."""
    pattern, n = Dilated([384, 1537, 6912], [1, 3, 7]), 4096
    make = [Order.from_permutation(torch.randperm(n, device="cuda")) for n in options.get("lengths", [n, n])]
    q, dout = torch.randn(2, 2, n, 6, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 2, n, 3, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(2, 6, n, device="cuda")
    how = options | {"is_causal": True, "order": Order.padded(make), "return_lse": True}
    call = lambda *x, backend: attention(*x, pattern, backend=backend, **how)  # noqa: E731
    finite = lambda found: [torch.where(x == -torch.inf, 0.0, x) for x in found]  # noqa: E731  # lse of padding
    exact = finite(run(partial(call, backend="eager"), *(x.double() for x in (q, k, v, dout)), dlse.double()))
    yardstick = finite(run(partial(call, backend="eager"), q, k, v, dout, dlse))
    for backend in over_tables(dtype, head_dim):
        first = run(partial(call, backend=backend), q, k, v, dout, dlse)
        oracle.assert_rounding_only(finite(first), yardstick, exact, dtype)
        for _ in range(20):
            assert all(map(torch.equal, first, run(partial(call, backend=backend), q, k, v, dout, dlse)))


def test_orders_made_on_the_gpu():
    points = torch.rand(3, 1000, 2)
    for make in (lambda d: Hilbert.grid(37, 91, device=d), lambda d: Hilbert.grid(5, 6, 7, device=d),
                 lambda d: Hilbert.segments(1000, 77, device=d), lambda d: Hilbert.coordinates(points.to(d))):  # fmt: skip
        here, there = make("cpu"), make("cuda")
        assert there.positions.is_cuda
        assert torch.equal(here.positions, there.positions.cpu())
        assert torch.equal(here.inverse.positions, there.inverse.positions.cpu())


# Each row of the tables of sizes, and each of the Hopper kernels' head sizes as computed.
SAME_BITS = [
    *(("hopper", torch.bfloat16, d, 6) for d in (24, 48, 64, 96, 128)),
    ("hopper", torch.float16, 64, 2),
    ("hopper", torch.float16, 128, 2),
    *(("triton", torch.bfloat16, d, 6) for d in (48, 64, 128)),
    *(
        ("triton", x, d, 2)
        for x, d in ((torch.float16, 256), (torch.float32, 64), (torch.float32, 128), (torch.float32, 256))
    ),
]


@pytest.mark.parametrize(("backend", "dtype", "head_dim", "key_heads"), SAME_BITS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_in_200_runs(backend, dtype, head_dim, key_heads, causal):
    """Short and long tiles, more blocks than multiprocessors; fresh memory holds NaN (conftest)."""
    if backend not in over_tables(dtype, head_dim):
        pytest.skip("the kernels are for Hopper GPUs")
    pattern, n = Dilated([384, 1536, 6912], [1, 2, 6]), 4096 if dtype == torch.float32 else 12288
    dropout = {"dropout_p": 0.2, "seed": 3} if backend == "triton" and dtype == torch.float16 else {}
    q, dout = torch.randn(2, 1, n, 6, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 1, n, key_heads, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(1, 6, n, device="cuda")
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True, **dropout)  # noqa: E731
    first = run(call, q, k, v, dout, dlse)
    assert all(x.isfinite().all() for x in first)
    for _ in range(200):
        again = run(call, q, k, v, dout, dlse)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_more_than_2_to_the_31_elements(backend):
    """The end of a very long sequence is what it would be alone: segments are independent."""
    if backend not in over_tables(torch.bfloat16, 64):
        pytest.skip("the kernels are for Hopper GPUs")
    pattern, n, tail = Dilated([2048, 8192], [1, 4]), 264 * 8192, 8192
    q, k, v = (torch.randn(1, n, 16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    assert q.numel() > 2**31
    dout = torch.randn(1, n, 16, 64, device="cuda", dtype=torch.bfloat16)
    call = lambda *x: attention(*x, pattern, backend=backend, return_lse=True)  # noqa: E731
    out, lse = call(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    alone = [x[:, -tail:].detach().requires_grad_() for x in (q, k, v)]
    alone_out, alone_lse = call(*alone)
    alone_grads = torch.autograd.grad(alone_out, alone, dout[:, -tail:])
    for a, b in zip((out, *grads), (alone_out, *alone_grads), strict=True):
        assert torch.equal(a[:, -tail:], b)
    assert torch.equal(lse[..., -tail:], alone_lse)
