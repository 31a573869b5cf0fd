"""All gradients at once on a Hopper GPU: against float64, and against dq and dk, dv apart."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.backends.hopper import configs
from dilated_attention_pytorch.backends.hopper import run as hopper_run

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
    found = lambda at_once: lambda problem, head_dim: configs.configs(head_dim).joint if at_once else None  # noqa: E731
    return lambda at_once: monkeypatch.setattr(hopper_run, "joint_config", found(at_once))


def tensors(n, m, head_dim, batch=1, heads=4, key_heads=2, dtype=torch.bfloat16):
    """q, k, v, dout, dlse."""
    q, dout = torch.randn(2, batch, n, heads, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, batch, m, key_heads, head_dim, device="cuda", dtype=dtype).unbind(0)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (40, torch.bfloat16),
        (48, torch.bfloat16),
        (64, torch.bfloat16),
        (64, torch.float16),
        (104, torch.bfloat16),
        (128, torch.float16),
    ],
)
def test_against_float64(name, head_dim, dtype, causal, choose):
    pattern, n = PATTERNS[name][0], 1140
    x = tensors(n, n, head_dim, dtype=dtype)
    choose(True)
    actual = results(ours(pattern, is_causal=causal), *x)
    exact = results(lambda *y: oracle.attention(*y, pattern, is_causal=causal), *(y.double().cpu() for y in x))
    oracle.assert_rounding_only(actual, results(oracle.plain(pattern, causal), *x), exact, dtype)


CASES = {
    "chain": ("chain", 5000, {}),
    "decoding": ("cut", 300, {}),
    "lengths": ("chain", 5000, {"lengths": [5000, 1701]}),
    "negative scale": ("cut", 1140, {"scale": -0.3}),
    "no scale": ("cut", 1140, {"scale": 0.0}),
    "detached": ("chain", 5000, {"mixing_gradient": "detached"}),
    "causal": ("chain", 5000, {"is_causal": True}),
    "causal decoding": ("cut", 300, {"is_causal": True}),  # rectangles and squares, in launches of their own
    "causal lengths": ("chain", 5000, {"is_causal": True, "lengths": [5000, 1701]}),
}


@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_against_gradients_apart(case, head_dim, choose):
    """dk and dv come from the same products in the same order: the same bits. dq is added up in another."""
    name, n, options = CASES[case]
    pattern, m = PATTERNS[name]
    options = {k: torch.tensor(v, device="cuda") if k == "lengths" else v for k, v in options.items()}
    x = tensors(n, m, head_dim, batch=2)
    choose(False)
    dq, dk, dv = gradients(pattern, *x, **options)
    choose(True)
    joint_dq, joint_dk, joint_dv = gradients(pattern, *x, **options)
    assert torch.equal(dk, joint_dk)
    assert torch.equal(dv, joint_dv)
    assert case == "no scale" or not torch.equal(dq, joint_dq), "it is another kernel"
    assert (dq - joint_dq).float().norm() <= 3e-3 * dq.float().norm()  # rounded to bfloat16 twice


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_the_same_bits_in_200_runs(head_dim, causal, choose):
    """More items than multiprocessors, which add to the same rows; fresh memory holds NaN (conftest)."""
    pattern = Dilated([384, 1536, 6912], [1, 2, 6])
    x = tensors(12288, 12288, head_dim, heads=6, key_heads=6)
    choose(True)
    first = gradients(pattern, *x, is_causal=causal)
    assert all(y.isfinite().all() for y in first)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(pattern, *x, is_causal=causal), strict=True))


@pytest.mark.parametrize("which", ["value", "dout", "query"])
@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_no_number_stays_where_it_is(which, at_once, choose):
    """dv does not depend on values, and has the columns of dout. Rows 256 to 511 see one another."""
    pattern, row, tile = Dilated([256], [1]), (0, 300, 0), (0, slice(256, 512), 0)
    q, k, v, dout, dlse = tensors(1024, 1024, 64, heads=2, key_heads=2)
    {"value": v, "dout": dout, "query": q}[which][(*row, 3)] = math.inf if which == "dout" else math.nan
    dq, dk, dv = (torch.zeros(q.shape, dtype=torch.bool) for _ in range(3))
    dq[tile if which == "value" else row] = True
    dk[tile] = True
    if which == "query":
        dv[tile] = True
    elif which == "dout":
        dv[(*tile, 3)] = True
    choose(at_once)
    for name, actual, expected in zip(
        ("dq", "dk", "dv"), gradients(pattern, q, k, v, dout, dlse), (dq, dk, dv), strict=True
    ):
        assert torch.equal(actual.isfinite().logical_not().cpu(), expected), name


@pytest.mark.parametrize("at_once", [False, True])
def test_rows_that_give_all_weight_to_one_key(at_once, choose):
    """Their gradients are differences of almost equal numbers: as exact as the definition in bfloat16."""
    pattern, n = Dilated([512], [1]), 1024
    x = q, k, v, _, _ = tensors(n, n, 64, heads=2, key_heads=2)
    q[..., 0] += 4.0
    k[:, ::512, :, 0] += 20.0  # a sink at the begin of each segment: scores larger by 10
    v[:, ::512] = 0.0
    choose(at_once)
    actual = results(ours(pattern), *x)
    exact = results(lambda *y: oracle.attention(*y, pattern), *(y.double().cpu() for y in x))
    oracle.assert_rounding_only(actual, results(oracle.plain(pattern, False), *x), exact, torch.bfloat16)


def test_in_a_captured_graph(choose):
    """Counters are zeros again for each replay; the inputs change in between."""
    pattern, n = PATTERNS["chain"]
    choose(True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        *x, dlse = tensors(n, n, 48)
        gradients(pattern, *x, dlse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = gradients(pattern, *x, dlse)
        for _ in range(3):
            for y in x:
                y.copy_(torch.randn_like(y))
            graph.replay()
            for a, b in zip(captured, gradients(pattern, *x, dlse), strict=True):
                assert torch.equal(a, b)
    torch.cuda.synchronize()
