"""``DilatedKVCache`` with PyTorch's compilers: one graph for all decoding steps."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cache_cases import Sequences, state_of
from dilated_attention_pytorch import Dilated, DilatedKVCache, cache_operators

PATTERN = Dilated([8, 16], [1, 3])

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_steps_share_one_graph(n, with_lengths):
    case = Sequences.of(PATTERN, 2, 40 * n, 2, 2)
    cache, eager, counter = case.cache(), case.cache(), CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v, lengths):
        out, lse = cache.attend(2 * q, k, v, scale=0.25, lengths=lengths, return_lse=True)
        return out + 0, lse

    for i in range(0, 40 * n, n):
        lengths = torch.full((2,), n) if with_lengths else None
        case.check(*attend(*case.chunk(i, i + n), lengths), i, i + n)
        eager.attend(*case.chunk(i, i + n))
    assert counter.frame_count == 1
    assert state_of(cache) == state_of(eager)


def test_chunks_and_appends_are_in_the_graph():
    case = Sequences.of(PATTERN, 2, 90, 2)
    cache, counter = case.cache(max_tokens=90), CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend_and_append(q, k, v):
        out, lse = cache.attend(q[:, :20], k[:, :20], v[:, :20], return_lse=True)
        cache.append(k[:, 20:], v[:, 20:])
        return out, lse, cache.tokens_seen

    for i in range(0, 90, 30):
        out, lse, seen = attend_and_append(*case.chunk(i, i + 30))
        case.check(out, lse, i, i + 20)
        assert seen.tolist() == [i + 30] * 2
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="max_tokens = 90"):
        attend_and_append(*case.chunk(0, 30))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor():
    """It changes the storage in place, and does not copy it."""
    case = Sequences.of(PATTERN, 2, 40, 2)
    cache = case.cache()
    attend = torch.compile(lambda q, k, v: cache.attend(q + 1, k, v, return_lse=True), fullgraph=True)
    addresses = [x.data_ptr() for x in cache._storage]
    for i in range(12):
        q, k, v = case.chunk(i, i + 1)
        case.check(*attend(q - 1, k, v), i, i + 1)
    assert [x.data_ptr() for x in cache._storage] == addresses
    case.check(*cache.attend(*case.chunk(12, 40), return_lse=True), 12, 40)


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("lengths", [None, [1, 0]])
def test_opcheck(n, lengths):
    case = Sequences.of(PATTERN, 2, 40, 2, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 13))
    lengths = None if lengths is None else torch.tensor(lengths)
    state = lengths, *cache._storage, PATTERN.spec, None, 32
    query, key, value = (x.contiguous() for x in case.chunk(13, 13 + n))
    torch.library.opcheck(cache_operators.attend_cached, (query, key, value, *state, 0.5))
    torch.library.opcheck(cache_operators.append_cached, (key, value, *state))


@pytest.mark.parametrize("n", [1, 8])
def test_steps_read_no_values(n):
    """Tensors without values: a step that read one on the host would raise."""
    with FakeTensorMode():
        cache = DilatedKVCache(PATTERN, 2, 2, 8)
        query, key = torch.empty(2, n, 4, 8), torch.empty(2, n, 2, 8)
        out, lse = cache.attend(query, key, key, return_lse=True)
        assert out.shape == query.shape
        assert lse.shape == (2, 4, n)
        cache.append(key, key)
        cache.reset()
        with pytest.raises(DataDependentOutputException):
            cache.tokens_seen.tolist()


def test_caches_of_other_sequences_share_the_graph():
    """A compiled function takes the cache as an argument: a new sequence, or a reset one, needs no new graph."""
    case = Sequences.of(PATTERN, 2, 20, 2)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(cache, q, k, v):
        return cache.attend(q, k, v, return_lse=True)

    caches = [case.cache(), case.cache()]
    for turn in range(2):
        for i in range(20):
            for cache in caches:
                case.check(*attend(cache, *case.chunk(i, i + 1)), i, i + 1)
        for cache in caches:
            cache.reset([0, 1])
        assert counter.frame_count == 1, turn
