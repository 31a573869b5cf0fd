"""Dropout of block-sparse attention by global position: every weight kept or dropped as the rule says, in loops."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import block_oracle
from block_cases import SIZE, assert_same, config, pattern_of, random_inputs, random_order, with_grads
from dilated_attention_pytorch import BlockSparse, BlockSparseRingDilatedAttention, Dilated, attention, backends, explain
from dilated_attention_pytorch.backends import eager
from dilated_attention_pytorch.backends.request import Request

BACKENDS = ["eager", "reference"]


def compare(pattern, inputs, slow, **options):
    """All five results of both backends with ``slow``, for the same random gradients."""
    q = inputs[0]
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)
    expected = with_grads(slow, inputs, dout, dlse)
    for backend in BACKENDS:
        call = lambda *x, b=backend: attention(*x, pattern, backend=b, return_lse=True, **options)  # noqa: E731
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["masks", "adaptive"])
def test_kept_weights_are_those_of_the_rule(kind, causal, monkeypatch):
    """Masks by head and choices by sample, grouped heads, fewer queries than keys, blocks of queries."""
    monkeypatch.setattr(eager, "_MAX_FACTORS", 100)
    for n, m in ((53, 53), (20, 53)):
        inputs = random_inputs(2, n, m, 4, 2, 4)
        pattern, table = pattern_of(kind, m, 4)
        if table is None:
            table = block_oracle.adaptive(*(x.detach() for x in inputs[:2]), "0.4", SIZE, 4**-0.5, causal)
        table = table[..., table.shape[-2] - (-(-m // SIZE) - (m - n) // SIZE) :, :]
        for seed in (7, 2**40 + 3):
            slow = lambda *x, t=table, s=seed: block_oracle.attention(  # noqa: E731
                *x, t, SIZE, causal=causal, dropout=(0.3, s, 0, 0)
            )
            compare(pattern, inputs, slow, is_causal=causal, dropout_p=0.3, seed=seed)


@pytest.mark.parametrize("kind", ["lengths", "cu_seqlens"])
def test_sequences_of_their_own_count_rows_of_the_batch(kind):
    pattern, inputs = BlockSparse.from_config(config("local_window")), random_inputs(2, 40, 40, 2, 1, 4)
    parts = [(0, 0, 40), (1, 0, 21)] if kind == "lengths" else [(b, x, y) for b in (0, 1) for x, y in ((0, 17), (17, 40))]

    def slow(q, k, v):
        out, lse = q * 0.0 + (k * 0.0).sum() + (v * 0.0).sum(), torch.full((2, 2, 40), -torch.inf, dtype=q.dtype)
        for b, x, y in parts:
            some = (t[b : b + 1, x:y] for t in (q, k, v))
            blocks = -(-(y - x) // SIZE)
            table = torch.zeros(blocks, blocks, dtype=torch.bool)
            for i in range(blocks):
                table[i, block_oracle.choose("local_window", "0.4", i, blocks, True)] = True
            got = block_oracle.attention(*some, table, SIZE, causal=True, dropout=(0.4, 11, b, x))
            out[b, x:y], lse[b, :, x:y] = got[0][0], got[1][0]
        return out, lse

    options = {kind: torch.tensor([40, 21] if kind == "lengths" else [0, 17, 40])}
    compare(pattern, inputs, slow, is_causal=True, dropout_p=0.4, seed=11, **options)


def test_orders_count_places():
    """As for dilated patterns: places of the ordered sequence, here causal by original position."""
    order, (pattern, table) = random_order(50), pattern_of("mask", 50, 2)
    q, k, v = inputs = random_inputs(1, 50, 50, 2, 2, 4)
    ordered = [x[:, order.positions] for x in inputs]
    positions = order.positions.expand(1, -1)
    out, lse = block_oracle.attention(*ordered, table, SIZE, causal=True, positions=positions, dropout=(0.3, 5, 0, 0))
    for backend in BACKENDS:
        options = {"is_causal": True, "order": order, "dropout_p": 0.3, "seed": 5, "backend": backend}
        actual = attention(q, k, v, pattern, return_lse=True, **options)
        torch.testing.assert_close(actual, (order.unpermute(out), order.unpermute(lse, dim=2)))


def test_one_dense_branch_is_the_same_pattern():
    """All blocks, and one segment of rate 1: the same weights are dropped."""
    q, k, v = (x.detach() for x in random_inputs(2, 40, 40, 4, 2, 4))
    blocks = BlockSparse.from_config(config("local_window", 1.0))
    options = {"is_causal": True, "dropout_p": 0.3, "seed": 3}
    torch.testing.assert_close(attention(q, k, v, blocks, **options), attention(q, k, v, Dilated([40], [1]), **options))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
def test_a_gpu_takes_the_kernels_that_have_it():
    request = Request("cuda", (9, 0), torch.bfloat16, 64, 0.1)
    assert backends.choose("auto", request).name == "triton"
    assert backends.find("hopper").why_not(request) == ["Hopper kernels have no dropout, got dropout_p = 0.1"]


def test_auto_and_seeds():
    q, k, v = (x.detach() for x in random_inputs(1, 40, 40, 2, 2, 4, torch.float32))
    pattern = BlockSparse.from_config(config("local_window"))
    told = explain(q, k, v, pattern, dropout_p=0.5)
    assert told.backend == "eager"
    assert "not       sdpa: dropout is not supported" in str(told)
    run = lambda: attention(q, k, v, pattern, dropout_p=0.5)  # noqa: E731
    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)
    module = BlockSparseRingDilatedAttention(sparse_config=config("local_window"), dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(module(q, k, v), first)
    assert torch.equal(module.eval()(q, k, v), attention(q, k, v, pattern))
    with pytest.raises(ValueError, match=r"0 <= dropout_p < 1, got 1.5"):
        BlockSparseRingDilatedAttention([40], [1], dropout_p=1.5)
