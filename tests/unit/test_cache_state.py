"""``DilatedKVCache``: going back, beams, saved states, and calls that are refused."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_cases import Sequences, chunk_ends, sequences, state_of
from dilated_attention_pytorch import BlockSparse, Dilated, DilatedKVCache, SparsePatternConfig

PATTERN = Dilated([8, 32], [1, 3])


def attend_all(case: Sequences, cache: DilatedKVCache, start: int, sizes) -> None:
    """Go on from a position in chunks of these sizes, which repeat, and compare every result."""
    tokens, turn = case.query.shape[1], 0
    while start < tokens:
        stop = min(tokens, start + sizes[turn % len(sizes)])
        case.check(*cache.attend(*case.chunk(start, stop), return_lse=True), start, stop)
        start, turn = stop, turn + 1


@given(st.data())
@settings(max_examples=30)
def test_rollback_and_going_on_is_never_having_gone(data):
    """Tokens that are taken back are other tokens, over several chunks and segment ends, twice in a row."""
    case = data.draw(sequences(most=80))
    tokens, most = case.query.shape[1], data.draw(st.integers(0, 40))
    cache, at = case.cache(max_rollback=most), 0
    other = [torch.full_like(x[:, :1].expand(-1, 30, -1, -1), torch.nan) for x in case[1:4]]
    sizes = st.sampled_from([1, 2, 8, 9, 30])
    while at < tokens:
        for n in data.draw(st.lists(sizes, max_size=3)):  # tokens that will be taken back
            n = min(n, most)
            cache.attend(*(x[:, :n] for x in other))
            first = data.draw(st.integers(0, n))
            cache.rollback(first)
            cache.rollback(n - first)
        n = min(tokens - at, data.draw(sizes))
        case.check(*cache.attend(*case.chunk(at, at + n), return_lse=True), at, at + n)
        at += n
        assert cache.tokens_seen.tolist() == [at]


@pytest.mark.parametrize("most", [1, 8, 13, 40])
def test_rollback_at_every_position(most):
    """A chunk at every distance from segment ends, taken back as a whole, before every single token."""
    case = Sequences.of(Dilated([5, 12], [1, 5]), 1, 120, 2)
    for n in {1, most}:
        cache = case.cache(max_rollback=most)
        for start in range(25):
            cache.attend(*case.chunk(60, 60 + n))
            cache.rollback(n)
            case.check(*cache.attend(*case.chunk(start, start + 1), return_lse=True), start, start + 1)


def test_rollback_of_each_sample():
    case = Sequences.of(PATTERN, 3, 60, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 40))
    cache.rollback([0, 7, 32])
    assert cache.tokens_seen.tolist() == [40, 33, 8]
    cache.rollback(torch.tensor([3, 0, 0]))
    chunk = [torch.stack([x[b, p : p + 20] for b, p in enumerate((37, 33, 8))]) for x in case[1:4]]
    out = cache.attend(*chunk)
    for b, p in enumerate((37, 33, 8)):
        torch.testing.assert_close(out[b], case.out[b, p : p + 20], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("before", "n", "message"),
    [
        (0, 11, "max_rollback = 10 tokens before its furthest position (30): got 11 for sample 0"),
        (6, 5, "max_rollback = 10 tokens before its furthest position (30): got 5 for sample 0"),
        (0, [0, 11], "got 11 for sample 1"),
        (0, -1, "n must be an integer, at least 0, got -1"),
        (0, [-1, 0], "n must be integers at least 0, got [-1, 0]"),
        (0, [1], "n must have one entry per sample: got 1 entries for a batch of 2"),
    ],
)
def test_rollback_that_is_too_long(before, n, message):
    case = Sequences.of(PATTERN, 2, 30, 2)
    cache = case.cache(max_rollback=10)
    cache.attend(*case.chunk(0, 30))
    cache.rollback(before)
    state = state_of(cache)
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.rollback(n)
    assert state_of(cache) == state


@pytest.mark.parametrize("n", [3, 9])
@pytest.mark.parametrize("with_queries", [True, False])
def test_tokens_after_a_rollback_do_not_make_older_rows_return(n, with_queries):
    """The furthest position counts, not the tokens since the last rollback: rows before it have been overwritten."""
    case = Sequences.of(Dilated([5, 24], [1, 2]), 1, 60, 2)
    cache = case.cache(max_rollback=20)
    cache.attend(*case.chunk(0, 40))
    cache.rollback(15)
    query, key, value = case.chunk(25, 25 + n)
    if with_queries:
        cache.attend(query, key, value)
    else:
        cache.append(key, value)
    with pytest.raises(ValueError, match=re.escape(f"furthest position (40): got {n + 6} for sample 0")):
        cache.rollback(n + 6)
    cache.rollback(n + 5)
    attend_all(case, cache, 20, [1, 12])


def test_rollback_beyond_the_first_token():
    case = Sequences.of(PATTERN, 2, 30, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 3))
    with pytest.raises(ValueError, match=re.escape("at most the tokens of a sample (3)")):
        cache.rollback(4)
    cache.rollback(3)
    attend_all(case, cache, 0, [4])


@given(st.data())
@settings(max_examples=20)
def test_a_saved_state_goes_on(data):
    case = data.draw(sequences(batch=2))
    tokens = case.query.shape[1]
    at = data.draw(chunk_ends(case.pattern, tokens))[0]
    cache, other = case.cache(), case.cache()
    cache.attend(*case.chunk(0, at))
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    cache.attend(*case.chunk(0, tokens))  # the state is a copy
    file.seek(0)
    addresses = [x.data_ptr() for x in other._storage]
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [x.data_ptr() for x in other._storage] == addresses
    attend_all(case, other, at, data.draw(st.lists(st.sampled_from([1, 8, 9, 40]), min_size=1, max_size=3)))


def test_a_state_remembers_what_was_rolled_back():
    case = Sequences.of(PATTERN, 1, 60, 2)
    cache, other = case.cache(max_rollback=10), case.cache(max_rollback=10)
    cache.attend(*case.chunk(0, 40))
    cache.rollback(8)
    other.load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="furthest position"):
        other.rollback(3)
    other.rollback(2)
    attend_all(case, other, 30, [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": Dilated([8, 32], [1, 4]).spec}, "pattern is 'dilated|8,32|1,4|interleaved|', here 'dilated|8,32|1,3|"),
        ({"batch_size": 3}, "batch_size is 3, here 2"),
        ({"head_dim": 8, "max_rollback": 4}, "head_dim is 8, here 4; max_rollback is 4, here 32"),
        ({"num_kv_heads": 4}, "num_kv_heads is 4, here 2"),
        ({"dtype": "torch.float32"}, "dtype is 'torch.float32', here 'torch.float64'"),
        ({"max_tokens": 3}, "max_tokens is 3, here None"),
        ({"format": 2}, "format is 2, here 1"),
        ({"keys": torch.zeros(2)}, "keys of the state must be (2, 2, "),
        (
            {"tokens_seen": torch.zeros(2)},
            "tokens_seen of the state must be (2,) of torch.int64, got (2,) of torch.float32",
        ),
        ({"values": None}, "of torch.float64, got None"),
        ({"tokens_seen": torch.tensor([0, -1])}, "tokens_seen must be at least 0"),
        ({"rolled_back": torch.tensor([0, 33])}, "rolled_back at most max_rollback = 32"),
        ({"more": 1}, "unexpected ['more']"),
        ({"keys": ...}, "missing ['keys']"),
    ],
)
def test_states_of_other_caches_are_refused(change, message):
    case = Sequences.of(PATTERN, 2, 30, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 20))
    before, state = state_of(cache), {**cache.state_dict(), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.load_state_dict({name: x for name, x in state.items() if x is not ...})
    assert state_of(cache) == before
    attend_all(case, cache, 20, [1, 9])


def test_beams():
    """Samples are repeated, then continue one another in any order."""
    case = Sequences.of(PATTERN, 2, 60, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 21))
    cache.repeat(3)
    assert cache.batch_size == 6
    assert cache.tokens_seen.tolist() == [21] * 6
    order = [0, 0, 1, 1, 0, 1]  # which sample each beam continues
    addresses = [x.data_ptr() for x in cache._storage]
    cache.reorder([2, 1, 3, 4, 0, 5])
    cache.reorder(torch.arange(6))
    assert [x.data_ptr() for x in cache._storage] == addresses
    for start, stop in ((21, 22), (22, 50), (50, 60)):
        out = cache.attend(*(x[order, start:stop] for x in case[1:4]))
        torch.testing.assert_close(out, case.out[order, start:stop], rtol=1e-10, atol=1e-10)


def test_reorder_of_samples_at_other_positions():
    case = Sequences.of(PATTERN, 3, 60, 2)
    cache = case.cache(max_rollback=20)
    cache.attend(*case.chunk(0, 30), lengths=[30, 17, 4])
    cache.rollback([5, 0, 0])
    cache.reorder(torch.tensor([2, 0, 0], dtype=torch.int32))
    assert cache.tokens_seen.tolist() == [4, 25, 25]
    with pytest.raises(ValueError, match="got 16 for sample 2"):
        cache.rollback([0, 0, 16])
    chunk = [torch.stack([x[b, p : p + 12] for b, p in ((2, 4), (0, 25), (0, 25))]) for x in case[1:4]]
    out = cache.attend(*chunk)
    for row, (b, p) in enumerate(((2, 4), (0, 25), (0, 25))):
        torch.testing.assert_close(out[row], case.out[b, p : p + 12], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("index", [[0, 1], [0, 1, 3], [0, -1, 1], [0.5, 1, 2], torch.tensor([True, False, True])])
def test_reorder_refuses_what_is_no_index(index):
    case = Sequences.of(PATTERN, 3, 30, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 20))
    before = state_of(cache)
    with pytest.raises((ValueError, TypeError), match="index must"):
        cache.reorder(index)
    assert state_of(cache) == before


@pytest.mark.parametrize(
    ("samples", "chosen"),
    [
        (None, [0, 1, 2]),
        (1, [1]),
        ([2, 0], [0, 2]),
        ([], []),
        ([True, False, True], [0, 2]),
        (torch.tensor([False, True, False]), [1]),
        (torch.tensor(2), [2]),
    ],
)
def test_reset_samples_begin_again(samples, chosen):
    case = Sequences.of(PATTERN, 3, 60, 2)
    cache = case.cache()
    bad = [torch.full_like(x[:, :30], torch.nan) for x in case[1:4]]
    for x, good in zip(bad, case[1:4], strict=True):
        for b in {0, 1, 2} - {*chosen}:
            x[b] = good[b, :30]
    cache.attend(*bad)
    cache.reset(samples)
    at = [0 if b in chosen else 30 for b in range(3)]
    assert cache.tokens_seen.tolist() == at
    for n in (1, 9, 8, 12):
        out = cache.attend(*(torch.stack([x[b, p : p + n] for b, p in enumerate(at)]) for x in case[1:4]))
        for b, p in enumerate(at):
            torch.testing.assert_close(out[b], case.out[b, p : p + n], rtol=1e-10, atol=1e-10)
        at = [p + n for p in at]


@pytest.mark.parametrize("samples", [3, -1, [0, 3], [True, False], 0.5, "a", torch.zeros(3, 1, dtype=torch.int64)])
def test_reset_refuses_other_samples(samples):
    case = Sequences.of(PATTERN, 3, 30, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 20))
    before = state_of(cache)
    with pytest.raises((ValueError, TypeError), match="samples"):
        cache.reset(samples)
    assert state_of(cache) == before


def wrong_chunks():
    """Arguments of ``attend`` that differ from those of a cache for 2 samples, 2 key heads and head size 4 in float64."""

    def rows(*shape, **kind):
        return torch.randn(*shape, **({"dtype": torch.float64} | kind))

    q, k = rows(2, 3, 4, 4), rows(2, 3, 2, 4)
    return {
        "batch": ((rows(1, 3, 4, 4), rows(1, 3, 2, 4), rows(1, 3, 2, 4)), {}, "of this cache are (2, n, 2, 4)"),
        "heads": ((q, rows(2, 3, 4, 4), rows(2, 3, 4, 4)), {}, "got (2, 3, 4, 4)"),
        "head size": ((rows(2, 3, 4, 8), rows(2, 3, 2, 8), rows(2, 3, 2, 8)), {}, "got (2, 3, 2, 8)"),
        "query heads": ((rows(2, 3, 3, 4), k, k), {}, "multiple of the key heads"),
        "dtype": ((q.float(), k.float(), k.float()), {}, "this cache holds torch.float64, got torch.float32"),
        "mixed dtypes": ((q, k.float(), k), {}, "must have one dtype"),
        "device": ((q.to("meta"), k.to("meta"), k.to("meta")), {}, "this cache is on cpu, got tensors on meta"),
        "rows": ((q[:, :2], k, k), {}, "a query for every key: got 2 queries and 3 keys"),
        "more queries": ((rows(2, 4, 4, 4), k, k), {}, "at most as many as keys"),
        "gradients": ((q.clone().requires_grad_(), k, k), {}, "call it under torch.no_grad()"),
        "no tensor": (([1.0], k, k), {}, "query must be a torch.Tensor"),
        "lengths beyond": ((q, k, k), {"lengths": [3, 4]}, "lengths must lie between 0 and the 3"),
        "negative lengths": ((q, k, k), {"lengths": torch.tensor([-1, 3])}, "lengths must lie between 0 and the 3"),
        "number of lengths": ((q, k, k), {"lengths": [3]}, "one entry per sample"),
        "lengths of a chunk": ((rows(2, 9, 4, 4), *rows(2, 2, 9, 2, 4)), {"lengths": [3, 10]}, "between 0 and the 9"),
        "scale": ((q, k, k), {"scale": float("nan")}, "scale must be finite"),
        "tokens": ((rows(2, 8, 4, 4), *rows(2, 2, 8, 2, 4)), {}, "max_tokens = 40 tokens per sample: sample 0 has 33"),
        "tokens of a sample": (
            (rows(2, 9, 4, 4), *rows(2, 2, 9, 2, 4)), {"lengths": [7, 8]}, "sample 1 has 33, got 8 more",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_chunks())
def test_refused_chunks_leave_the_cache_unchanged(name):
    arguments, options, message = wrong_chunks()[name]
    case = Sequences.of(PATTERN, 2, 40, 2, 2)
    cache = case.cache(max_tokens=40)
    cache.attend(*case.chunk(0, 33))
    before = state_of(cache)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        cache.attend(*arguments, **options)
    if name not in ("query heads", "mixed dtypes", "rows", "more queries", "gradients", "no tensor", "scale"):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            cache.append(*arguments[1:], **options)
    assert state_of(cache) == before
    attend_all(case, cache, 33, [1, 2])


def test_tokens_that_require_gradients_are_taken_without_them():
    case = Sequences.of(PATTERN, 1, 40, 2)
    chunk = [x.clone().requires_grad_() for x in case[1:4]]
    with torch.no_grad():
        case.check(*case.cache().attend(*chunk, return_lse=True))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((BlockSparse.from_config(SparsePatternConfig("local_window", 0.5)), 1, 2, 8), {}, "A BlockSparse has no segments"),
        (("dilated", 1, 2, 8), {}, "pattern must be a Dilated, got str"),
        ((PATTERN, 0, 2, 8), {}, "batch_size must be an integer, at least 1, got 0"),
        ((PATTERN, 1, 2.5, 8), {}, "num_kv_heads must be an integer"),
        ((PATTERN, 1, 2, 0), {}, "head_dim must be an integer, at least 1"),
        ((PATTERN, 1, 2, 8), {"dtype": torch.int64}, "dtype must be one of"),
        ((PATTERN, 1, 2, 8), {"max_tokens": 0}, "max_tokens must be an integer, at least 1"),
        ((PATTERN, 1, 2, 8), {"max_rollback": -1}, "max_rollback must be an integer, at least 0"),
        ((Dilated([8], [4], [0, 1, 2]), 1, 2, 8), {}, "explicit offsets need one integer per key head"),
    ],
)
def test_caches_that_cannot_be(arguments, options, message):
    for make in (DilatedKVCache, DilatedKVCache.max_nbytes):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            make(*arguments, **options)


def test_a_cache_beyond_all_memory_names_its_bytes():
    pattern = Dilated([2**40], [1])
    with pytest.raises(RuntimeError) as caught:
        DilatedKVCache(pattern, 1, 8, 64)
    note = "".join(caught.value.__notes__)
    assert f"{2 * (2**40 + 31) * 8 * 64 * 4:,} bytes" in note
    assert "max_tokens" in note
    assert DilatedKVCache(pattern, 1, 8, 64, max_tokens=100).nbytes < 2**20


@given(st.data())
@settings(max_examples=20)
def test_the_memory_is_known_before(data):
    case = data.draw(sequences(batch=2))
    options = {"max_tokens": data.draw(st.sampled_from([None, 5, 1000])), "max_rollback": data.draw(st.integers(0, 40))}
    cache = case.cache(**options)
    batch, _, heads, head_dim = case.key.shape
    assert cache.nbytes == DilatedKVCache.max_nbytes(case.pattern, batch, heads, head_dim, dtype=torch.float64, **options)
    assert cache.nbytes == sum(x.nbytes for x in cache._storage)


def test_copies_and_devices_and_text():
    case = Sequences.of(PATTERN, 2, 60, 2)
    cache = case.cache()
    cache.attend(*case.chunk(0, 30))
    other = copy.deepcopy(cache)
    assert cache.to("cpu") is cache
    assert cache.device == torch.device("cpu")
    attend_all(case, cache, 30, [7])
    attend_all(case, other, 30, [11])
    assert repr(cache).startswith("DilatedKVCache(Dilated(segment_lengths=(8, 32), dilation_rates=(1, 3)")
    assert "batch_size=2, num_kv_heads=2, head_dim=4, dtype=torch.float64, device='cpu'" in repr(cache)
    assert f"{cache.nbytes:,} bytes" in repr(cache)
    assert DilatedKVCache(PATTERN, 1, 2, 4).dtype == torch.get_default_dtype()
