"""``DilatedKVCache``: chunks of any lengths give the results of one causal call over the whole sequence."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_cases import chunk_ends, sequences
from dilated_attention_pytorch import Dilated
from oracle import met_in, offset


def rows_by_enumeration(pattern: Dilated, key_head: int, key_heads: int, tokens: int, later: int = 90) -> int:
    """Rows of the first tokens that a later token meets, counted once per branch."""
    count = 0
    for w, r in pattern.branches:
        o = offset(pattern.offsets, key_head, key_heads, r)
        segment = range(tokens // w * w, tokens)
        count += sum(any(met_in((w, r), o, i, j) for i in range(tokens, tokens + later)) for j in segment)
    return count


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
