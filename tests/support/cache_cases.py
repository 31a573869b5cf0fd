"""Random patterns and sequences for caches, and what one causal call over the whole sequence gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import Dilated, DilatedKVCache, attention


@st.composite
def patterns(draw, key_heads: int, longest: int = 40) -> Dilated:
    """Rates that do not divide segments, segments of one token, offsets of all kinds."""
    branches = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, 9)), min_size=1, max_size=3))
    lengths, rates = zip(*branches, strict=True)
    explicit = st.lists(st.integers(0, max(rates) - 1), min_size=key_heads, max_size=key_heads)
    return Dilated(lengths, rates, draw(st.one_of(st.sampled_from(["interleaved", "blocked"]), explicit)))


class Sequences(NamedTuple):
    """A batch of whole sequences and the results of one call."""

    pattern: Dilated
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor

    @staticmethod
    def of(pattern: Dilated, batch: int, tokens: int, key_heads: int, heads_per_key: int = 1, scale=None) -> Sequences:
        torch.manual_seed(tokens)
        q = torch.randn(batch, tokens, key_heads * heads_per_key, 4, dtype=torch.float64)
        k, v = torch.randn(2, batch, tokens, key_heads, 4, dtype=torch.float64).unbind(0)
        out, lse = attention(q, k, v, pattern, is_causal=True, scale=scale, backend="reference", return_lse=True)
        return Sequences(pattern, q, k, v, out, lse)

    def cache(self, **options) -> DilatedKVCache:
        batch, _, key_heads, head_dim = self.key.shape
        return DilatedKVCache(self.pattern, batch, key_heads, head_dim, dtype=torch.float64, **options)

    def chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.query[:, start:stop], self.key[:, start:stop], self.value[:, start:stop]

    def check(self, out: Tensor, lse: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Compare results of these rows with those of the one call."""
        torch.testing.assert_close(out, self.out[:, start:stop], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse, self.lse[:, :, start:stop], rtol=1e-10, atol=1e-10)


@st.composite
def sequences(draw, batch: int = 1, most: int = 90) -> Sequences:
    key_heads, tokens = draw(st.integers(1, 4)), draw(st.integers(1, most))
    return Sequences.of(draw(patterns(key_heads)), batch, tokens, key_heads, draw(st.integers(1, 3)))


@st.composite
def chunk_ends(draw, pattern: Dilated, tokens: int) -> list[int]:
    """Ends of chunks: anywhere, and on, before and after ends of segments."""
    w = draw(st.sampled_from(pattern.segment_lengths))
    near = st.builds(lambda s, x: s * w + x, st.integers(0, tokens // w + 1), st.integers(-1, 1))
    ends = draw(st.lists(st.one_of(near, st.integers(1, tokens)), max_size=12))
    return [*sorted({x for x in ends if 0 < x < tokens}), tokens]


def state_of(cache: DilatedKVCache) -> dict:
    """The state, to compare bits of: NaN is equal to NaN."""
    return {name: x.view(torch.uint8).tolist() if isinstance(x, Tensor) else x for name, x in cache.state_dict().items()}
