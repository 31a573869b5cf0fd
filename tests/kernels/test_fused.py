"""Stock operators with one merge, interpreted here in float32 through the public function; on a GPU see tests/gpu."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from dilated_attention_pytorch import Dilated, attention, fused
from dilated_attention_pytorch.execute import loop as tiles
from dilated_attention_pytorch.execute import strided as pieces
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import compile_plan

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU: tests/gpu/test_dilated.py"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # where results are not taken
]


def refuse(*_, **__):
    raise AssertionError("merged piece by piece")


@pytest.fixture(autouse=True)
def _one_merge(monkeypatch):
    """Every call of ``sdpa`` goes through the one kernel, in blocks of 32 rows."""
    from dilated_attention_pytorch.backends.gpu import parts

    monkeypatch.setattr(fused, "serves", lambda query: True)
    monkeypatch.setattr(tiles, "forward", refuse)
    monkeypatch.setattr(tiles, "backward", refuse)
    monkeypatch.setattr(parts, "_MOST_ROWS", 32)


def check(pattern, b, n, m, heads, key_heads, causal, *, with_lse=False, layout=lambda x: x, **options):
    """All five results against the oracle in float64, with plain attention in float32 as the yardstick."""
    inputs = oracle.random_inputs(b, n, m, heads, key_heads, 16)
    dout = torch.randn(b, n, heads, 16, dtype=torch.float64)
    dlse = torch.randn(b, heads, n, dtype=torch.float64) * with_lse
    expected = oracle.with_grads(lambda *x: oracle.attention(*x, pattern, is_causal=causal), inputs, dout, dlse)
    floats = [layout(x.detach().float()).requires_grad_() for x in inputs]
    yardstick = oracle.with_grads(oracle.plain(pattern, causal), floats, dout, dlse)

    def call(*x):
        out, lse = attention(*x, pattern, is_causal=causal, backend="sdpa", return_lse=True, **options)
        return out, lse if with_lse else lse.detach()  # detached: the backward gets no dlse

    oracle.assert_rounding_only(oracle.with_grads(call, floats, dout, dlse), yardstick, expected, torch.float32)


@pytest.mark.parametrize(
    ("segments", "rates", "n", "m", "causal"),
    [
        ([32, 64], [1, 2], 64, 64, False),  # whole segments and blocks
        ([20, 50, 1000], [1, 3, 4], 67, 67, True),  # everything cut
        ([24, 48], [2, 4], 50, 50, False),  # some rows meet nobody
        ([32, 128], [1, 4], 10, 75, True),  # decoding
    ],
)
def test_every_shape_of_tile(segments, rates, n, m, causal):
    check(Dilated(segments, rates), 1, n, m, 4, 2, causal)


@pytest.mark.parametrize("rows", [64, 60])  # the tiles of all samples evenly spaced, or not
def test_batches_in_any_layout(rows):
    heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    check(Dilated([16, 32], [1, 2], "blocked"), 2, rows, rows, 2, 1, True)
    check(Dilated([16, 32], [1, 2]), 2, rows, rows, 2, 2, False, layout=heads_first)


def test_gradient_through_lse():
    check(Dilated([16, 40], [1, 3]), 1, 45, 45, 4, 2, True, with_lse=True)


def test_calls_cut_along_units(monkeypatch):
    """Two tiles a call, over the ends of samples."""
    monkeypatch.setattr(pieces, "_MOST_UNITS", 2)
    pieces._pieces.cache_clear()
    try:
        pattern = Dilated([16], [1])
        assert len(pieces.Cut(Problem(pattern, False, 2, 48, 48, 2, 2, None, None), 16, 48).pieces()) == 3
        check(pattern, 2, 48, 48, 2, 2, False)
    finally:
        pieces._pieces.cache_clear()


@pytest.mark.parametrize("kind", ["lengths", "documents"])
def test_lengths_and_documents(kind):
    pattern, batch = Dilated([12, 32], [1, 3]), 3 if kind == "lengths" else 1
    inputs = [x.detach().float().requires_grad_() for x in oracle.random_inputs(batch, 40, 40, 2, 2, 16)]
    dout, dlse = torch.randn(batch, 40, 2, 16), torch.zeros(batch, 2, 40)
    if kind == "lengths":
        options = {"lengths": torch.tensor([40, 0, 23])}
        parts = [(slice(b, b + 1), slice(0, n)) for b, n in enumerate([40, 0, 23])]
    else:
        options = {"cu_seqlens": torch.tensor([0, 25, 26, 40])}
        parts = [(slice(0, 1), slice(a, b)) for a, b in ((0, 25), (25, 26), (26, 40))]

    def alone(*x):
        out, lse = torch.zeros_like(x[0]), torch.full((batch, 2, 40), -torch.inf, dtype=torch.float64)
        for samples, rows in parts:
            part = oracle.attention(*(y[samples, rows] for y in x), pattern)
            out[samples, rows], lse[samples, :, rows] = part
        return out, lse

    call = lambda *x: attention(*x, pattern, backend="sdpa", return_lse=True, **options)  # noqa: E731
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle.with_grads(alone, doubles, dout, dlse)
    oracle.assert_same(oracle.with_grads(call, inputs, dout, dlse), expected, tolerance=1e-5)


@pytest.mark.parametrize("options", [{"mixing_gradient": "detached"}, {"scale": -0.4}, {"scale": 0.0}, {}])
def test_same_as_the_reference(options):
    """What the oracle does not know; the reference is tested against independent sums in other files."""
    pattern = Dilated([12, 32], [1, 3], torchscale_padding=not options)
    inputs = [x.detach().float().requires_grad_() for x in oracle.random_inputs(1, 40, 40, 4, 2, 16)]
    dout, dlse = torch.randn(1, 40, 4, 16), torch.randn(1, 4, 40)
    ours, others = (
        oracle.with_grads(
            lambda *x, name=name: attention(*x, pattern, backend=name, return_lse=True, **options), inputs, dout, dlse
        )
        for name in ("sdpa", "reference")
    )
    oracle.assert_same(ours, others, tolerance=2e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_patterns(seed):
    draw = random.Random(seed)
    rates = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
    pattern = Dilated([draw.randint(1, 40) for _ in rates], rates)
    key_heads, m = draw.randint(1, 3), draw.randint(1, 45)
    heads, n, causal = key_heads * draw.randint(1, 2), draw.randint(1, m), draw.random() < 0.5
    inputs = oracle.random_inputs(2, n, m, heads, key_heads, 16)
    dout, dlse = torch.randn(2, n, heads, 16), torch.zeros(2, heads, n)
    expected = oracle.with_grads(lambda *x: oracle.attention(*x, pattern, is_causal=causal), inputs, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend="sdpa", return_lse=True)  # noqa: E731
    floats = [x.detach().float().requires_grad_() for x in inputs]
    oracle.assert_same(oracle.with_grads(call, floats, dout, dlse), expected, tolerance=1e-5)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division(divisor, x):
    from dilated_attention_pytorch.backends.gpu.parts import division

    magic, shift = division(divisor)
    assert magic < 2**32
    for y in (x, x // divisor * divisor, max(0, x // divisor * divisor - 1), 2**31 - 1):
        assert y * magic >> shift == y // divisor


def test_tables_and_kernels_agree_on_columns():
    from dilated_attention_pytorch.backends.gpu import parts
    from dilated_attention_pytorch.backends.gpu.kernels import merge

    assert len(parts.COLUMNS) == merge.COLUMNS.value


def test_many_documents_are_merged_piece_by_piece():
    x = torch.randn(1, 400, 1, 8)
    every = torch.arange(401)
    with pytest.raises(AssertionError, match="piece by piece"):
        attention(x, x, x, Dilated([4], [1]), cu_seqlens=every, backend="sdpa")


def test_nothing_to_do():
    x = torch.zeros(1, 0, 2, 8, requires_grad=True)
    attention(x, x, x, Dilated([4], [1]), backend="sdpa").sum().backward()
    y = torch.randn(2, 5, 2, 8, requires_grad=True)
    out, lse = attention(y, y, y, Dilated([4], [1]), lengths=torch.tensor([0, 0]), backend="sdpa", return_lse=True)
    out.sum().backward()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (y.grad == 0).all()


def test_as_few_calls_as_families():
    """The paper's setting: 12 calls, whose rows are the output's twice."""
    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    problem = Problem(pattern, False, 1, 2**20, 2**20, 12, 12, None, None)
    found = pieces.Cut(problem, 64, None).pieces()
    families = compile_plan(pattern, 2**20, 12, is_causal=False).families
    assert len(found) == len(families) == 12
    rows = sum(len(piece.units) * len(piece.heads) * piece.family.q_rows for _, piece in found)
    assert rows <= 2.01 * 12 * 2**20
