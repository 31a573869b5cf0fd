"""All gradients at once on a Hopper GPU: against float64, and against dq and dk, dv apart."""

from __future__ import annotations

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.backends.hopper import configs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for Hopper GPUs",
    ),
]
# Tiles of 570 and 380 rows have ragged ends; tiles of 1024 are whole. Several launches, of which all but one add parts.
PATTERNS = {"cut": (Dilated([570, 1140], [1, 3]), 1140), "chain": (Dilated([256, 1024, 4096], [1, 2, 4]), 5000)}


@pytest.fixture
def choose(monkeypatch):
    """A function that says whether gradients are computed at once, or apart."""
    return lambda at_once: monkeypatch.setattr(configs, "_fits_joint", lambda problem: at_once)


def tensors(n, m, head_dim, batch=1, heads=4, key_heads=2):
    """q, k, v, dout, dlse."""
    q, dout = torch.randn(2, batch, n, heads, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, batch, m, key_heads, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    return q, k, v, dout, torch.randn(batch, heads, n, device="cuda")


def results(call, q, k, v, dout, dlse):
    """out, lse, dq, dk, dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*inputs)
    return [x.detach() for x in (out, lse, *oracle.grads((out, lse), inputs, (dout.to(out), dlse.to(lse))))]


def ours(pattern, **options):
    return lambda *x: attention(*x, pattern, backend="hopper", return_lse=True, **options)


def gradients(pattern, *tensors, **options):
    return results(ours(pattern, **options), *tensors)[2:]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("head_dim", [40, 48, 64])
def test_against_float64(name, head_dim, choose):
    pattern, n = PATTERNS[name][0], 1140
    x = tensors(n, n, head_dim)
    choose(True)
    actual = results(ours(pattern), *x)
    exact = results(lambda *y: oracle.attention(*y, pattern), *(y.double().cpu() for y in x))
    oracle.assert_rounding_only(actual, results(oracle.plain(pattern, False), *x), exact, torch.bfloat16)


CASES = {
    "chain": ("chain", 5000, {}),
    "decoding": ("cut", 300, {}),
    "negative scale": ("cut", 1140, {"scale": -0.3}),
    "detached": ("chain", 5000, {"mixing_gradient": "detached"}),
}


@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("case", CASES)
def test_against_gradients_apart(case, head_dim, choose):
    """dk and dv come from the same products in the same order: the same bits. dq is added up in another."""
    name, n, options = CASES[case]
    pattern, m = PATTERNS[name]
    x = tensors(n, m, head_dim, batch=2)
    choose(False)
    dq, dk, dv = gradients(pattern, *x, **options)
    choose(True)
    joint_dq, joint_dk, joint_dv = gradients(pattern, *x, **options)
    assert torch.equal(dk, joint_dk)
    assert torch.equal(dv, joint_dv)
    assert not torch.equal(dq, joint_dq), "it is another kernel"
    assert (dq - joint_dq).float().norm() < 3e-3 * dq.float().norm()  # rounded to bfloat16 twice


@pytest.mark.parametrize("head_dim", [48, 64])
def test_the_same_bits_in_200_runs(head_dim, choose):
    """More items than multiprocessors, which add to the same rows in any order; fresh memory holds NaN (conftest)."""
    pattern = Dilated([384, 1536, 6912], [1, 2, 6])
    x = tensors(12288, 12288, head_dim, heads=6, key_heads=6)
    choose(True)
    first = gradients(pattern, *x)
    assert all(y.isfinite().all() for y in first)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(pattern, *x), strict=True))


def spoil(which, q, k, v, dout):
    if which == "a large key":
        k[0, 77, 1] *= 1e4
    elif which == "small values":
        v[0, 256:512] *= 1e-5
    elif which == "no number":
        v[0, 700, 0, 3] = torch.nan
    else:
        dout[0, 5, 2] = torch.inf


@pytest.mark.parametrize("which", ["a large key", "small values", "no number", "infinity"])
def test_what_quanta_do_not_serve(which, choose):
    """Then dq is computed apart: the same bits, also where it is no number."""
    pattern, n = PATTERNS["chain"]
    q, k, v, dout, dlse = tensors(n, n, 48)
    spoil(which, q, k, v, dout)
    choose(False)
    apart = gradients(pattern, q, k, v, dout, dlse)
    choose(True)
    at_once = gradients(pattern, q, k, v, dout, dlse)
    for name, a, b in zip(("dq", "dk", "dv"), apart, at_once, strict=True):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)), name


def test_rows_that_see_only_small_values(choose):
    """The second half of the values is smaller by 50: its rows are as exact as alone."""
    pattern, n = Dilated([512], [1]), 1024
    q, k, v, dout, dlse = tensors(n, n, 64)
    v[:, 512:] *= 0.02
    choose(True)
    whole = gradients(pattern, q, k, v, dout, dlse)[0][:, 512:].double()
    choose(False)
    alone = gradients(pattern, *(x[:, 512:] for x in (q, k, v, dout)), dlse[:, :, 512:])[0].double()
    assert float(((whole - alone).norm(dim=-1) / alone.norm(dim=-1)).max()) < 1e-2


def test_in_a_captured_graph(choose):
    """The inputs change between replays, and with them the quanta; one replay has to compute dq apart."""
    pattern, n = PATTERNS["chain"]
    choose(True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        *x, dlse = tensors(n, n, 48)
        gradients(pattern, *x, dlse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = gradients(pattern, *x, dlse)
        for round_ in range(3):
            for y in x:
                y.copy_(torch.randn_like(y) * 10.0**round_)
            if round_ == 1:
                spoil("a large key", *x)
            graph.replay()
            for a, b in zip(captured, gradients(pattern, *x, dlse), strict=True):
                assert torch.equal(a, b)
    torch.cuda.synchronize()
