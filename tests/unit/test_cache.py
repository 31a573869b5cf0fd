"""``DilatedKVCache``: chunks of any lengths give the results of one causal call over the whole sequence."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_cases import Sequences, chunk_ends, patterns, sequences, state_of
from dilated_attention_pytorch import Dilated, DilatedKVCache, attention
from dilated_attention_pytorch.execute.step import append_, step
from dilated_attention_pytorch.plan.held import HeldRows
from dilated_attention_pytorch.plan.tiles import compile_plan
from oracle import offset


def rows_by_enumeration(pattern: Dilated, key_head: int, key_heads: int, tokens: int) -> int:
    """Rows of the first tokens in the segments of the next token, counted once per branch."""
    return sum(
        j // w == tokens // w and j % w % r == offset(pattern.offsets, key_head, key_heads, r)
        for w, r in pattern.branches
        for j in range(tokens)
    )


@given(st.data())
@settings(max_examples=60)
def test_any_chunks_are_one_causal_call(data):
    case = data.draw(sequences(batch=data.draw(st.integers(1, 2))))
    tokens = case.query.shape[1]
    ends = data.draw(chunk_ends(case.pattern, tokens))
    cache = case.cache(
        max_rollback=data.draw(st.sampled_from([0, 1, 7, 32])), max_tokens=data.draw(st.sampled_from([None, tokens, 200]))
    )
    for start, stop in pairwise([0, *ends]):
        case.check(*cache.attend(*case.chunk(start, stop), return_lse=True), start, stop)
    assert cache.tokens_seen.tolist() == [tokens] * len(case.query)


@given(st.data())
@settings(max_examples=20)
def test_single_tokens_are_one_causal_call(data):
    case = data.draw(sequences(most=50))
    cache = case.cache()
    for i in range(case.query.shape[1]):
        case.check(*cache.attend(*case.chunk(i, i + 1), return_lse=True), i, i + 1)


@given(st.data())
@settings(max_examples=30)
def test_rows_held_are_those_of_an_enumeration_at_every_step(data):
    case = data.draw(sequences(most=50))
    pattern, (_, tokens, heads, _) = case.pattern, case.key.shape
    cache, held = case.cache(), HeldRows.of(case.pattern, heads)
    for i in range(tokens):
        cache.append(case.key[:, i : i + 1], case.value[:, i : i + 1])
        expected = [rows_by_enumeration(pattern, g, heads, i + 1) for g in range(heads)]
        assert cache.rows_held.tolist() == [expected]
        assert [held.rows_after(g, i + 1) for g in range(heads)] == expected


def test_the_setting_of_the_paper_holds_11605_rows():
    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    held = HeldRows.of(pattern, 12)
    assert max(held.rows_after(g, tokens) for g in range(12) for tokens in range(32700, 32800)) == 11605
    assert held.rows == 11606  # a token that ends all segments is written before it attends


@given(st.data())
@settings(max_examples=80)
def test_slots_keep_every_row_that_a_rollback_needs(data):
    """A storage of positions, written one by one: after any rollback, the rows of the open segment are in their slots."""
    pattern = data.draw(patterns(3, longest=12))
    most, end = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 60))
    limit = data.draw(st.sampled_from([None, end, end + 5]))
    held = HeldRows.of(pattern, 3, limit, most)
    assert held.rows <= sum(-(-w // r) + most + 2 for w, r in pattern.branches)
    slots: dict[tuple[int, int], int] = {}
    for tokens in range(1, end + 1):
        for branch in held.branches:
            w, r = branch.segment_length, branch.dilation_rate
            written = tokens - 1
            for g, o in enumerate(branch.offsets):
                if written % w % r == o:
                    assert branch.first_row <= branch.slot(written) < branch.first_row + branch.slots
                    slots[g, branch.slot(written)] = written
                for back in range(max(0, tokens - most), tokens + 1):
                    needed = [p for p in range(back // w * w, back) if p % w % r == o]
                    assert len(needed) == branch.rows_after(g, back)
                    assert all(slots[g, branch.slot(p)] == p for p in needed)


@given(st.data())
@settings(max_examples=25)
def test_samples_of_other_lengths_are_independent(data):
    """Chunks with a length for each sample: finished samples, samples that start later, empty chunks."""
    case = data.draw(sequences(batch=3, most=60))
    tokens = case.query.shape[1]
    cache, at = case.cache(), [0, 0, 0]
    for n in data.draw(st.lists(st.sampled_from([0, 1, 3, 8, 9, 20]), max_size=8)):
        lengths = [data.draw(st.integers(0, min(n, tokens - p))) for p in at]
        chunk = [torch.full((3, n, *x.shape[2:]), torch.nan, dtype=x.dtype) for x in case[1:4]]
        for b, (start, length) in enumerate(zip(at, lengths, strict=True)):
            for x, whole in zip(chunk, case[1:4], strict=True):
                x[b, :length] = whole[b, start : start + length]
        given_as = data.draw(st.sampled_from([list, tuple, torch.tensor]))
        out, lse = cache.attend(*chunk, lengths=given_as(lengths), return_lse=True)
        for b, (start, length) in enumerate(zip(at, lengths, strict=True)):
            own = slice(start, start + length)
            torch.testing.assert_close(out[b, :length], case.out[b, own], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(lse[b, :, :length], case.lse[b, :, own], rtol=1e-10, atol=1e-10)
            assert (out[b, length:] == 0).all()
            assert (lse[b, :, length:] == -torch.inf).all()
        at = [start + length for start, length in zip(at, lengths, strict=True)]
        assert cache.tokens_seen.tolist() == at


@pytest.mark.parametrize("n", [1, 5, 8, 9, 40])
def test_the_bits_of_a_sample_do_not_depend_on_the_others(n):
    pattern = Dilated([16, 50], [1, 3])
    case = Sequences.of(pattern, 3, 80, 2, 2)
    query, key, value = (x.clone() for x in case[1:4])
    query[1], key[1, 10], value[1, 20] = torch.nan, torch.inf, torch.nan
    together, single = case.cache(), Sequences(pattern, *(x[2:] for x in case[1:])).cache()
    for i in range(0, 80, n):
        own = slice(i, i + n)
        out = together.attend(query[:, own], key[:, own], value[:, own])
        assert out[2:].equal(single.attend(query[2:, own], key[2:, own], value[2:, own]))
        assert out[2].isfinite().all()


@pytest.mark.parametrize("n", [1, 4, 9, 32])
def test_forgotten_rows_do_not_return(n):
    """NaN and inf in keys and values of ended segments reach no later token."""
    case = Sequences.of(Dilated([8, 16, 32], [1, 3, 4]), 2, 96, 2)
    query, key, value = (x.clone() for x in case[1:4])
    for x in (query, key, value):
        x[:, :32] = torch.nan
    value[:, 5:9] = torch.inf
    cache = case.cache(max_rollback=5)
    cache.append(key[:, :32], value[:, :32])
    expected = Sequences.of(case.pattern, 2, 64, 2)
    for i in range(0, 64, n):
        own = slice(i, i + n)
        expected.check(*cache.attend(*expected.chunk(i, i + n), return_lse=True), i, i + n)
        assert expected.out[:, own].isfinite().all()


@pytest.mark.parametrize("n", [1, 3, 8, 9, 33])
def test_append_leaves_the_same_state_as_attend(n):
    case = Sequences.of(Dilated([7, 30], [2, 4], "blocked"), 2, 99, 3)
    cache, other = case.cache(), case.cache()
    for i in range(0, 99, n):
        query, key, value = case.chunk(i, i + n)
        cache.attend(query, key, value)
        other.append(key, value)
    assert state_of(cache) == state_of(other)


@pytest.mark.parametrize("scale", [0.3, -0.7, 0])
@pytest.mark.parametrize("n", [1, 10])
def test_scale(scale, n):
    case = Sequences.of(Dilated([8, 16], [1, 2]), 1, 40, 2, scale=scale)
    cache = case.cache()
    for i in range(0, 40, n):
        case.check(*cache.attend(*case.chunk(i, i + n), scale=scale, return_lse=True), i, i + n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 20])
def test_other_types_lose_only_their_rounding(dtype, n):
    case = Sequences.of(Dilated([8, 32], [1, 2]), 1, 60, 2, 2)
    q, k, v = (x.to(dtype) for x in case[1:4])
    exact = attention(q.double(), k.double(), v.double(), case.pattern, is_causal=True, backend="reference")
    cache = DilatedKVCache(case.pattern, 1, 2, 4, dtype=dtype)
    outs = [cache.attend(q[:, i : i + n], k[:, i : i + n], v[:, i : i + n], return_lse=True) for i in range(0, 60, n)]
    assert all(out.dtype == dtype and lse.dtype == torch.float32 for out, lse in outs)
    error = (torch.cat([out for out, _ in outs], 1).double() - exact).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("first", [2**31, 2**40, 2**50])
@pytest.mark.parametrize("branches", [([8, 32], [1, 4]), ([6, 30, 7], [4, 7, 3]), ([16, 2**31], [1, 2**27])])
def test_positions_of_any_size(first, branches):
    """A cache that starts some segments before a position and goes past it gives what one at position 0 gives."""
    pattern = Dilated(*branches)
    period = math.lcm(*branches[0])
    case = Sequences.of(pattern, 1, 2 * 210 + 20, 2, 2)
    cache = case.cache(max_rollback=9)
    state = cache.state_dict()
    state["tokens_seen"] = torch.tensor([first // period * period - (period if period < 300 else 0)])
    cache.load_state_dict(state)
    start, before = 0, state["tokens_seen"].tolist()[0]
    for n in (1, 100, 8, 9, 1, 1, 300, 17, 1):
        case.check(*cache.attend(*case.chunk(start, start + n), return_lse=True), start, start + n)
        start += n
        assert cache.tokens_seen.tolist() == [before + start]
        if n in (8, 9):
            cache.rollback(5)
            start -= 5
    assert before + start > first


def test_memory_does_not_grow_with_the_tokens():
    pattern = Dilated([64, 4096], [1, 64])
    cache = DilatedKVCache(pattern, 1, 2, 8)
    q, k, v = torch.randn(3, 1, 1024, 2, 8).unbind(0)
    tensors, bytes_before = [x.data_ptr() for x in cache._storage], cache.nbytes
    for _ in range(20):
        cache.attend(q, k, v)
        cache.attend(q[:, :1], k[:, :1], v[:, :1])
    assert [x.data_ptr() for x in cache._storage] == tensors
    assert cache.nbytes == bytes_before < 2 * (64 + 64 + 40 + 5) * 2 * 8 * 4 + 200


def test_plans_of_a_long_stream_are_found_again():
    """The plans of a chunk with itself do not depend on how far the stream is. Those with held rows are new ones."""
    pattern = Dilated([64, 1024, 2**20], [1, 16, 128])
    cache = DilatedKVCache(pattern, 1, 1, 4)
    q, k, v = torch.randn(3, 1, 64, 1, 4).unbind(0)
    for _ in range(16):
        cache.attend(q, k, v)
    before = compile_plan.cache_info().misses
    for _ in range(16):
        cache.attend(q, k, v)
    # Held rows: the branch of 1,024 repeats, and the longest has another number of them in every chunk.
    assert compile_plan.cache_info().misses - before <= 16


def test_inputs_of_any_strides_and_empty_chunks():
    case = Sequences.of(Dilated([8, 16], [1, 2]), 2, 40, 2)
    cache = case.cache()
    query, key, value = (x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in case[1:4])
    for start, stop in ((0, 1), (1, 1), (1, 30), (30, 30), (30, 40)):
        own = slice(start, stop)
        out, lse = cache.attend(query[:, own], key[:, own], value[:, own], return_lse=True)
        case.check(out, lse, start, stop)


def test_inference_mode_inside_and_outside():
    case = Sequences.of(Dilated([8, 16], [1, 2]), 1, 40, 2)
    with torch.inference_mode():
        cache = case.cache()
        cache.attend(*case.chunk(0, 20))
    cache.attend(*case.chunk(20, 21))
    cache.repeat(1)
    with torch.inference_mode():
        case.check(*cache.attend(*case.chunk(21, 40), return_lse=True), 21, 40)


def test_padding_of_torchscale_changes_nothing():
    case = Sequences.of(Dilated([8, 16], [1, 3], torchscale_padding=True), 1, 40, 2)
    cache = case.cache()
    for i in range(0, 40, 10):
        case.check(*cache.attend(*case.chunk(i, i + 10), return_lse=True), i, i + 10)


def test_steps_beyond_max_tokens_that_only_the_device_knows():
    """A decoding step cannot raise for a position on a GPU: the token gets NaN, and nothing is changed."""
    case = Sequences.of(Dilated([64], [3]), 3, 30, 2)
    cache, held = case.cache(max_tokens=20), HeldRows.of(case.pattern, 2, 20, 32)
    cache.attend(*case.chunk(0, 20), lengths=[20, 20, 10])
    keys = cache._storage.keys.clone()
    row = [torch.stack([x[b, p : p + 1] for b, p in enumerate((20, 20, 10))]) for x in case[1:4]]
    out, lse = step(held, cache._storage, *row, torch.tensor([True, False, True]), 0.5)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[2, 0], case.out[2, 10], rtol=1e-10, atol=1e-10)
    assert cache.tokens_seen.tolist() == [20, 20, 11]
    append_(held, cache._storage, *(x[:, :3] for x in case[2:4]), None)
    assert cache.tokens_seen.tolist() == [20, 20, 14]
    assert cache._storage.keys[:2].equal(keys[:2])
