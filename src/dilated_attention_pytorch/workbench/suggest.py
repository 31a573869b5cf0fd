"""Segment lengths and dilation rates for a length, with reasons; and what is unusual in a given pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.tiles import compile_plan

LOCAL = 2048  # positions of the first segment, and rows of a tile
FACTOR = 4  # from one branch to the next
SHORT_TILE = 512  # rows of a tile, below which a GPU loses speed


@dataclass(frozen=True, slots=True)
class BranchFigures:
    """One branch of a pattern on a length."""

    segment_length: int
    dilation_rate: int
    tile_rows: int  # of the longest tile
    pairs_per_row: float  # query-key pairs of a row and head, on average
    cost: float  # the share of all pairs of the pattern
    coverage: float  # the share of positions that some head reads
    reach: int  # the largest distance between positions that meet


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A pattern with the figures of its branches."""

    pattern: Dilated
    tokens: int
    key_heads: int
    branches: tuple[BranchFigures, ...]
    reasons: tuple[str, ...]
    dense_share: float  # the pairs over those of dense attention


def suggest(tokens: int, key_heads: int, *, is_causal: bool = False) -> Suggestion:
    """A pattern by the rules of the README.

    The first branch is dense. Segment lengths and rates of the next ones are four times as large, so that tiles keep 2,048
    rows. The last branch has the smallest multiple of the rate before whose segment covers the sequence.

    >>> suggest(1_000_000, 512).pattern.branches
    ((2048, 1), (8192, 4), (32768, 16), (131072, 64), (524288, 256), (1048576, 512))
    >>> suggest(20_000, 12).pattern.branches
    ((2048, 1), (8192, 4), (24576, 12))
    """
    tokens, key_heads = as_integer("tokens", tokens, 1), as_integer("key_heads", key_heads, 1)
    rates = [1]
    while LOCAL * rates[-1] < tokens:
        rates.append(rates[-1] * min(FACTOR, -(-tokens // (LOCAL * rates[-1]))))
    pattern = Dilated([min(LOCAL, tokens)] if len(rates) == 1 else [LOCAL * r for r in rates], rates)
    branches, share = figures(pattern, tokens, key_heads, is_causal=is_causal)
    return Suggestion(pattern, tokens, key_heads, branches, tuple(_reasons(pattern, tokens, key_heads)), share)


def _reasons(pattern: Dilated, tokens: int, key_heads: int) -> Iterator[str]:
    rates = pattern.dilation_rates
    if len(rates) == 1:
        yield f"one dense segment: {tokens:,} tokens are not more than {LOCAL:,}, where dense attention is as fast"
        return
    yield f"the first branch is dense: every token meets those of its segment of {LOCAL:,}"
    yield f"w / r stays {LOCAL:,}, so that tiles are long, and each branch costs less than the one before"
    yield "rates divide one another, so that a denser branch has the rows of a sparser one and adds its result"
    yield f"the last segment covers the sequence: {pattern.segment_lengths[-1]:,} positions for {tokens:,} tokens"
    above = [r for r in rates if r > key_heads]
    if above:
        read = ", ".join(f"{key_heads / r:.2%} at rate {r}" for r in above)
        yield (
            f"rates {', '.join(map(str, above))} are above the {key_heads} key heads: in these branches the heads together "
            f"read {read}; more heads would read more, and shorter last segments would reach less"
        )
    else:
        yield f"{key_heads} key heads are at least the largest rate {rates[-1]}: every position is read in every branch"


def figures(
    pattern: Dilated, tokens: int, key_heads: int, *, is_causal: bool
) -> tuple[tuple[BranchFigures, ...], float]:  # fmt: skip
    """The figures of the branches of a pattern, and the share of the pairs of dense attention."""
    plan = compile_plan(pattern, tokens, key_heads, is_causal=is_causal)
    found = []
    for number, (w, r) in enumerate(pattern.branches):
        pairs = plan.of_branch(number).pairs
        offsets = {pattern.offset(g, key_heads, r) for g in range(key_heads)}
        inside = min(w, tokens)
        found.append(
            BranchFigures(
                segment_length=w, dilation_rate=r, tile_rows=-(-inside // r), pairs_per_row=pairs / tokens / key_heads,
                cost=pairs / max(1, plan.pairs), coverage=min(1.0, len(offsets) / r), reach=(inside - 1) // r * r,
            )
        )  # fmt: skip
    dense = tokens * (tokens + 1) // 2 if is_causal else tokens**2
    return tuple(found), plan.pairs / (dense * key_heads)


def pattern_warnings(pattern: Dilated, tokens: int, key_heads: int) -> tuple[str, ...]:
    """What is allowed in a pattern and probably not meant.

    >>> for text in pattern_warnings(Dilated([512, 8192], [2, 24]), 65536, 8): print(text)
    no branch has rate 1: rows that no branch gives to a head meet no key, and their output is 0; add a dense branch
    tiles of branch 512/2 have 256 rows, of branch 8192/24 have 342 rows: below 512 a GPU loses speed; use a larger w / r
    rates above the 8 key heads, which together read only a share of positions: 33.33% at rate 24
    no segment covers the sequence: the longest has 8,192 of 65,536 positions, and tokens of two segments never meet
    """
    found, rates = [], pattern.dilation_rates
    if 1 not in rates:
        found.append(
            "no branch has rate 1: rows that no branch gives to a head meet no key, and their output is 0; add a dense "
            "branch"
        )
    tiles = [(w, r, -(-min(w, tokens) // r)) for w, r in pattern.branches]
    short = [f"of branch {w}/{r} have {rows} rows" for w, r, rows in tiles if rows < min(SHORT_TILE, tokens)]
    if short:
        found.append(f"tiles {', '.join(short)}: below {SHORT_TILE} a GPU loses speed; use a larger w / r")
    above = sorted({r for r in rates if r > key_heads})
    if above:
        read = ", ".join(f"{key_heads / r:.2%} at rate {r}" for r in above)
        found.append(f"rates above the {key_heads} key heads, which together read only a share of positions: {read}")
    uneven = [f"{a} and {b}" for a, b in pairwise(sorted(set(rates))) if b % a]
    if uneven:
        found.append(f"rates {', '.join(uneven)} do not divide one another: their partial results are added separately")
    longest = max(pattern.segment_lengths)
    if longest < tokens:
        found.append(
            f"no segment covers the sequence: the longest has {longest:,} of {tokens:,} positions, and tokens of two "
            "segments never meet"
        )
    return tuple(found)
