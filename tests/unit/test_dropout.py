"""Dropout by global position."""

from __future__ import annotations

import itertools

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated, attention, explain
from dilated_attention_pytorch.backends import eager
from dilated_attention_pytorch.plan.dropout import mix, words
from oracle import M32, plain_word


def dropped(q, k, v, pattern, p, seed, causal, first_row=0):
    """Dropout from the definition: every branch's weight of every pair kept or dropped on its own."""
    batch, n, heads, _ = q.shape
    count = oracle.multiplicities(pattern, n, n, heads, heads, causal)
    _, lse = oracle.attention(q, k, v, pattern, is_causal=causal)
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            weights = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                for j in range(n):
                    for c, (w, r) in enumerate(pattern.branches):
                        o = oracle.offset(pattern.offsets, h, heads, r)
                        kept = plain_word(seed, b, h, c, i + first_row, j + first_row) >= int(p * M32)
                        if count[h, i, j] and oracle.met_in((w, r), o, i, j) and kept:
                            s = q[b, i, h] @ k[b, j, h] * q.shape[-1] ** -0.5
                            weights[i, j] += torch.exp(s - lse[b, h, i]) / (1 - p)
            out[b, :, h] = weights @ v[b, :, h]
    return out, lse


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_kept_weights_are_those_of_the_rule(causal, backend):
    pattern = Dilated([8, 16], [1, 2])
    q, k, v = torch.randn(3, 2, 20, 2, 4, dtype=torch.float64).unbind(0)
    for seed in (0, 7, 2**40 + 3):
        expected = dropped(q, k, v, pattern, 0.3, seed, causal)
        actual = attention(q, k, v, pattern, dropout_p=0.3, seed=seed, is_causal=causal, return_lse=True, backend=backend)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("options", [
    {},
    {"is_causal": True, "lengths": [37, 20, 20]},
    {"cu_seqlens": [0, 5, 18, 37], "mixing_gradient": "detached"},
    {"is_causal": True, "queries": 9},
])  # fmt: skip
def test_eager_tiles_are_the_reference(monkeypatch, options):
    """Grouped heads, diagonal families, whole segments of several samples, blocks of queries: out, lse and gradients."""
    monkeypatch.setattr(eager, "_MAX_FACTORS", 40)
    options = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in options.items()}
    n = options.pop("queries", 37)
    for pattern in (Dilated([8, 20, 64], [1, 2, 3]), Dilated([37], [2], [1, 0, 1])):
        q = torch.randn(3, n, 6, 4, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(3, 37, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        results = []
        for backend in ("eager", "reference"):
            out, lse = attention(q, k, v, pattern, dropout_p=0.4, seed=11, backend=backend, return_lse=True, **options)
            total = (out * torch.arange(4)).sum() + lse.where(lse.isfinite(), 0.0).sin().sum()
            results.append((out, lse, *torch.autograd.grad(total, (q, k, v))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_words_are_the_same_from_integers_and_tensors():
    i, j = torch.arange(2**33, 2**33 + 5)[:, None], torch.arange(6)[None, :]
    for seed in (3, 2**62 - 1):
        word = words(torch.tensor(seed), 2, 3, 1, i, j)
        assert word.tolist() == [[plain_word(seed, 2, 3, 1, a, b) for b in range(6)] for a in range(2**33, 2**33 + 5)]
    assert mix(0) == 0


def test_rate_and_independence_of_the_words():
    i, j = torch.arange(400)[:, None], torch.arange(500)[None, :]
    bits = [words(9, b, h, c, i, j) >= int(0.25 * M32) for b in (0, 1) for h in (0, 1) for c in (0, 1)]
    for one in bits:
        assert abs(one.double().mean() - 0.75) < 0.005
        assert one.double().mean(1).std() < 0.03  # 0.0194 if independent
        assert one.double().mean(0).std() < 0.03  # 0.0217 if independent
    for a in range(8):
        for b in range(a):
            together = (bits[a] & bits[b]).double().mean()
            assert abs(together - 0.75**2) < 0.007


def test_rows_of_two_heads_with_the_same_first_word_differ():
    seed, n, p, golden = 3, 4096, 0.25, 0x9E3779B1
    # What plain_word calls the stream of a head.
    streams = [mix(mix(mix(mix(mix(seed) + 0) + 0) + h)) for h in (0, 1)]
    i = 100
    other = (streams[0] + i * golden - streams[1]) * pow(golden, -1, M32) % M32
    assert mix(streams[0] + i * golden) == mix(streams[1] + other * golden)
    first, second = (
        (words(seed, 0, h, 0, row, torch.arange(n)) < int(p * M32)).double() - p for h, row in ((0, i), (1, other))
    )
    assert abs((first * second).sum()) < 4 * (p - p**2) * n**0.5


@pytest.mark.parametrize("strides", [(1, 1), (1, 4096), (12, 12), (4096, 1), (2**16, 2**16), (2**20, 2**20)])
def test_pairs_at_equal_distances_are_independent(strides):
    """Rows and keys of a dilated branch are at equal distances, up to the largest rate: no pattern repeats in them."""
    n, p, z = 512, 0.25, []
    for seed in range(8):
        i, j = (777 * seed + stride * torch.arange(n) for stride in strides)
        dropped = (words(seed, 0, 0, 0, i[:, None], j) < int(p * M32)).double() - p
        for rows in (dropped, dropped.T):  # correlations of a row with itself, by distance
            spectrum = torch.fft.rfft(rows, 2 * n).abs().square().sum(0)
            distances = torch.arange(1, n - 32)
            z.append(torch.fft.irfft(spectrum)[distances] / ((n - distances) * n).sqrt() / (p - p**2))
        for a, b in itertools.product((1, 3, 16, 256), repeat=2):  # the four corners of rectangles
            corners = dropped[a:, b:] * dropped[:-a, :-b] * dropped[a:, :-b] * dropped[:-a, b:]
            z.append(corners.sum().reshape(1) / corners.numel() ** 0.5 / (p - p**2) ** 2)
    scores = torch.cat(z)  # normally distributed if pairs are independent
    assert abs(scores.square().mean() - 1.0) < 0.06  # the standard deviation is 0.016
    assert scores.abs().max() < 5.5


def test_lengths_and_documents_count_positions_of_the_batch_as_given():
    pattern = Dilated([8, 16], [1, 2])
    q, k, v = torch.randn(3, 2, 20, 2, 4, dtype=torch.float64).unbind(0)
    packed = attention(q, k, v, pattern, dropout_p=0.3, seed=5, cu_seqlens=torch.tensor([0, 9, 20]))
    second, _ = dropped(q[:, 9:], k[:, 9:], v[:, 9:], pattern, 0.3, 5, False, first_row=9)
    torch.testing.assert_close(packed[:, 9:], second)
    padded = attention(q, k, v, pattern, dropout_p=0.3, seed=5, lengths=torch.tensor([9, 9]))
    first, _ = dropped(q[:, :9], k[:, :9], v[:, :9], pattern, 0.3, 5, False)
    torch.testing.assert_close(padded[:, :9], first)


@pytest.mark.slow
def test_gradients_with_dropout():
    inputs = [torch.randn(1, 9, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, Dilated([4, 8], [1, 2]), dropout_p=0.4, seed=1, is_causal=True), inputs
    )


def test_seed_comes_from_the_generator_unless_given():
    q, k, v = torch.randn(3, 1, 30, 2, 4).unbind(0)
    run = lambda: attention(q, k, v, Dilated([8], [1]), dropout_p=0.5)  # noqa: E731
    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)


def test_fused_operators_refuse_with_the_reason():
    q, k, v = torch.randn(3, 1, 30, 2, 4).unbind(0)
    with pytest.raises(ValueError, match="sdpa: dropout is not supported"):
        attention(q, k, v, Dilated([8], [1]), dropout_p=0.5, backend="sdpa")


def test_explain_draws_no_seed():
    """Explaining a call leaves PyTorch's generator as it is."""
    q = torch.randn(1, 40, 2, 8)
    before = torch.get_rng_state()
    explain(q, q, q, Dilated([16], [1]), dropout_p=0.5, world_size=2)
    assert torch.equal(torch.get_rng_state(), before)
