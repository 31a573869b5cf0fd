"""Shares of a problem: some of its samples or heads, which are computed one share after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from dilated_attention_pytorch.plan import TileFamily


@dataclass(frozen=True, slots=True)
class Share:
    """All key heads of some samples, or some of one sample."""

    samples: range
    key_heads: range


def _cut(rows: range, pieces: int) -> list[range]:
    """So many pieces of nearly the same length.

    >>> _cut(range(5), 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    ends = [len(rows) * i // pieces for i in range(pieces + 1)]
    return [rows[start:stop] for start, stop in pairwise(ends)]


def shares_of(batch: int, key_heads: int, least: int) -> list[Share]:
    """At least so many shares, as far as there are samples and heads.

    >>> len(shares_of(4, 6, 2)), len(shares_of(4, 6, 5)), len(shares_of(1, 6, 100))
    (2, 8, 6)
    """
    samples, heads = range(batch), range(key_heads)
    if least <= max(batch, 1):
        return [Share(some, heads) for some in _cut(samples, least)]
    pieces = min(key_heads, -(-least // batch))
    return [Share(range(sample, sample + 1), some) for sample in samples for some in _cut(heads, pieces)]


def of_heads(family: TileFamily, key_heads: range) -> TileFamily:
    """The tiles of a family that belong to these key heads, which may be none."""
    own = [i for i, g in enumerate(family.key_heads) if g in key_heads]
    if not own:
        return replace(family, key_heads=range(0))
    shift = own[0] * family.head_row_step
    heads = family.key_heads[own[0] : own[-1] + 1]
    return replace(family, key_heads=heads, q_start=family.q_start + shift, k_start=family.k_start + shift)
