"""The kernels of a cache, interpreted: steps, chunks and appended rows against one causal call in float64."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from dilated_attention_pytorch import Dilated, DilatedKVCache, attention, cache_operators
from dilated_attention_pytorch.backends.triton.backend import TRITON
from dilated_attention_pytorch.plan.held import HeldRows

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fused(monkeypatch):
    """The choices of a GPU, with small blocks so that programs have several and results are merged."""
    from dilated_attention_pytorch.backends.gpu import decoding

    monkeypatch.setattr(cache_operators, "_tokens_module", lambda *_: decoding)
    monkeypatch.setattr(cache_operators, "choose", lambda *_: TRITON)
    monkeypatch.setattr(decoding, "BLOCK_BYTES", 1024)
    decoding._launch_of.cache_clear()
    yield decoding
    decoding._launch_of.cache_clear()


class Case:
    """Whole sequences in float32, and the results of the definition."""

    def __init__(self, pattern: Dilated, batch: int, total: int, heads: int, key_heads: int, head_dim: int) -> None:
        torch.manual_seed(total)
        shapes = [(batch, total, h, head_dim) for h in (heads, key_heads, key_heads)]
        self.pattern, self.tensors = pattern, [torch.randn(shape, device=DEVICE) for shape in shapes]
        doubles = [x.double() for x in self.tensors]
        self.out, self.lse = attention(*doubles, pattern, is_causal=True, backend="reference", return_lse=True)

    def cache(self, **options) -> DilatedKVCache:
        batch, _, key_heads, head_dim = self.tensors[1].shape
        return DilatedKVCache(self.pattern, batch, key_heads, head_dim, dtype=torch.float32, device=DEVICE, **options)

    def rows(self, start: int, stop: int) -> list[torch.Tensor]:
        return [x[:, start:stop] for x in self.tensors]

    def check(self, out: torch.Tensor, lse: torch.Tensor, start: int) -> None:
        stop = start + out.shape[1]
        torch.testing.assert_close(out.double(), self.out[:, start:stop], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse.double(), self.lse[..., start:stop], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("pattern", "heads", "key_heads", "head_dim", "chunks"),
    [
        (Dilated([8, 30, 64], [1, 3, 4]), 4, 2, 16, (13, 1, 1, 40, 2, 20)),
        (Dilated([5, 64], [2, 7], "blocked"), 2, 2, 20, (1, 1, 1, 60, 1, 9)),
        (Dilated([16, 256], [1, 16], [3, 9]), 2, 2, 16, (50, 8, 50, 3)),
    ],
)
def test_any_chunks(pattern, heads, key_heads, head_dim, chunks):
    case = Case(pattern, 2, sum(chunks), heads, key_heads, head_dim)
    cache, at = case.cache(max_rollback=5), 0
    for n in chunks:
        case.check(*cache.attend(*case.rows(at, at + n), return_lse=True), at)
        at += n
    assert cache.tokens_seen.tolist() == [at, at]


@pytest.mark.usefixtures("fused")
def test_samples_have_their_own_positions():
    case, randoms = Case(Dilated([8, 30], [1, 3]), 3, 80, 2, 1, 16), random.Random(0)
    cache, seen = case.cache(max_tokens=80), [0, 0, 0]
    for n in (12, 1, 1, 3, 20, 1):
        lengths = [randoms.randint(0, n) for _ in range(3)]
        chunk = [torch.full((3, n, *x.shape[2:]), torch.nan, device=DEVICE) for x in case.tensors]
        for b, length in enumerate(lengths):
            for own, whole in zip(chunk, case.tensors, strict=True):
                own[b, :length] = whole[b, seen[b] : seen[b] + length]
        out = cache.attend(*chunk, lengths=lengths)
        for b, length in enumerate(lengths):
            expected = case.out[b, seen[b] : seen[b] + length]
            torch.testing.assert_close(out[b, :length].double(), expected, rtol=1e-4, atol=1e-5)
            assert not out[b, length:].any()
            seen[b] += length
    assert cache.tokens_seen.tolist() == seen


def test_appended_rows_have_the_bits_of_the_chunk(fused):
    """The same storage as that of stock operators, NaN in slots that were never written included."""
    from dilated_attention_pytorch.execute import step as stock

    randoms = random.Random(1)
    case = Case(Dilated([7, 16, 64], [3, 5, 9]), 3, 1, 3, 3, 12)
    caches = [case.cache(max_rollback=9), case.cache(max_rollback=9)]
    for cache in caches:
        cache._storage.keys.fill_(torch.nan)
    for _ in range(10):
        n = randoms.choice([1, 2, 5, 20])
        key, value = torch.randn(2, 3, n, 3, 12, device=DEVICE).unbind(0)
        lengths = None if randoms.random() < 0.5 else torch.tensor([randoms.randint(0, n) for _ in range(3)], device=DEVICE)
        for cache, module in zip(caches, (stock, fused), strict=True):
            module.append_(cache._held, cache._storage, key, value, lengths)
        for a, b in zip(*(cache._storage for cache in caches), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("fused")
def test_tokens_beyond_the_promised_number_give_nan():
    case = Case(Dilated([16], [1]), 1, 12, 2, 2, 16)
    cache = case.cache(max_tokens=10)
    cache.attend(*case.rows(0, 10))
    from dilated_attention_pytorch.backends.gpu import decoding

    out, lse = decoding.step(cache._held, cache._storage, *case.rows(10, 11), None, 0.25)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert cache.tokens_seen.tolist() == [10]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("tokens", [1, 7, 64, 100])
def test_last_row_of_a_sequence(tokens):
    """One query through ``attention``, with grouped heads: the decoding kernel reads the rows of the sequence."""
    case = Case(Dilated([16, 50], [1, 5]), 2, tokens, 4, 2, 16)
    query, key, value = case.tensors
    options = {"is_causal": True, "return_lse": True, "backend": "triton"}
    case.check(*attention(query[:, -1:], key, value, case.pattern, **options), tokens - 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_last_rows_of_a_growing_sequence_share_their_launches(fused, batch):
    """Rows are added by torch.cat, so that samples move apart. A launch is new when there are more blocks of rows."""
    case = Case(Dilated([16, 512], [1, 2]), batch, 200, 4, 2, 16)
    query, key, value = case.tensors
    for tokens in range(150, 200, 7):
        rows = [x[:, :tokens].contiguous() for x in (key, value)]
        out, lse = attention(query[:, tokens - 1 : tokens], *rows, case.pattern, return_lse=True, backend="triton")
        case.check(out, lse, tokens - 1)
    assert fused._launch_of.cache_info().misses == 3  # from 16 + 75 to 16 + 100 rows, in blocks of 16


def test_bits_do_not_depend_on_the_batch(fused, monkeypatch):
    """Neither on the number of programs: sample 0 by itself, and with others that leave each key head fewer programs."""
    monkeypatch.setattr(fused, "PROGRAMS", 12)
    case = Case(Dilated([64, 128], [1, 2]), 6, 101, 2, 2, 16)
    results, found, launch = [], [], fused._launch
    monkeypatch.setattr(fused, "_launch", lambda one, *rest: found.append(one) or launch(one, *rest))
    fused._launch_of.cache_clear()
    for batch in (1, 6):
        cache = DilatedKVCache(case.pattern, batch, 2, 16, dtype=torch.float32, device=DEVICE)
        own = [x[:batch] for x in case.tensors]
        cache.append(own[1][:, :100], own[2][:, :100])
        results.append(cache.attend(*(x[:, 100:] for x in own))[0])
    partials = [one.partial_shape[2] for one in found]
    splits = [one.launch.programs // (one.partial_shape[0] * 2) for one in found]
    assert splits[1] < splits[0] == partials[0] == partials[1]
    assert torch.equal(*results)


def test_chunks_that_kernels_cannot_count():
    """Kernels count positions in 32 bits, modulo a period of the segments. Other chunks go through stock kernels."""
    from dilated_attention_pytorch.backends.gpu.chunks import can_attend

    def possible(segments: list[int], rates: list[int], position: int, tokens: int) -> bool:
        return can_attend(HeldRows.of(Dilated(segments, rates), 1, 10**10), position, tokens)

    assert possible([2048, 2**32], [1, 2**20], 2**33 + 12345, 65_536)
    assert not possible([1000, 4_000_003], [1, 1000], 3_000_000_000, 65_536)
    assert not possible([2048, 2**32], [1, 2**20], 2**32 - 10, 65_536)
    assert not possible([2048, 3_000_000_001], [1, 4096], 2_200_000_000, 65_536)


@pytest.mark.usefixtures("fused")
def test_a_chunk_that_kernels_cannot_count_is_exact():
    pattern = Dilated([8, 3_000_000_001], [1, 400_000_000])
    case = Case(pattern, 1, 60, 2, 2, 16)
    cache = case.cache(max_rollback=0)
    state = cache.state_dict()
    state["tokens_seen"].fill_(3_000_000_001 * 8)  # a multiple of both segments
    cache.load_state_dict(state)
    case.check(*cache.attend(*case.rows(0, 30), return_lse=True), 0)
    case.check(*cache.attend(*case.rows(30, 60), return_lse=True), 30)


def test_last_row_of_an_empty_batch():
    query, key = torch.zeros(0, 1, 2, 16, device=DEVICE), torch.zeros(0, 9, 2, 16, device=DEVICE)
    assert attention(query, key, key, Dilated([4], [1]), backend="triton").shape == (0, 1, 2, 16)


@pytest.mark.usefixtures("fused")
def test_positions_beyond_32_bits():
    case = Case(Dilated([8, 30, 64], [1, 3, 4]), 1, 120, 2, 2, 16)
    cache = case.cache(max_rollback=0)
    state = cache.state_dict()
    state["tokens_seen"].fill_(960 * 2**33)  # a multiple of all segment lengths
    cache.load_state_dict(state)
    at = 0
    for n in (50, 1, 1, 20, 3, 45):
        case.check(*cache.attend(*case.rows(at, at + n), return_lse=True), at)
        at += n


def test_equivalent_starts():
    """Tables of a chunk are found again: the same tiles at a small position, wherever tokens meet in the same way."""
    from dilated_attention_pytorch.backends.gpu.chunks import ChunkProblem, equivalent_start

    randoms = random.Random(2)
    for _ in range(300):
        lengths = [randoms.randint(1, 60) for _ in range(randoms.randint(1, 3))]
        pattern = Dilated(lengths, [randoms.randint(1, 9) for _ in lengths])
        position, tokens = randoms.randint(0, 10**6), randoms.randint(1, 80)
        start = equivalent_start(pattern, position, tokens)
        assert 0 <= start <= position
        plans = []
        for at in (position, start):
            ((_, plan),) = ChunkProblem(pattern, True, 1, tokens, tokens, 2, 2, start=at).plans()
            tiles = sorted(
                (f.branch, tuple(f.key_heads), f.head_row_step, f.q_start - at, f.q_rows, f.k_start - at, f.tiles)
                for f in plan.families
            )
            plans.append(tiles)
        assert plans[0] == plans[1]
