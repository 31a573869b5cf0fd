"""Shares of a batch, which are computed one after the other and put their partial results in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, product

from dilated_attention_pytorch.plan.tiles import TileFamily


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """All key heads of some samples of a sequence, or some key heads of one sample."""

    number: int  # among all slices
    sequence: int  # its number among the sequences of the batch
    samples: range
    key_heads: range


def _cut(length: int, ranges: int) -> list[range]:
    """So many ranges of nearly the same length.

    >>> _cut(5, 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    return [range(start, stop) for start, stop in pairwise(length * i // ranges for i in range(ranges + 1))]


def shares_of(samples: Sequence[range], head_rows: Sequence[int], key_heads: int, most_rows: int) -> list[list[BatchSlice]]:
    """The batch in few shares, each of at most ``most_rows`` rows, or of one key head that has more.

    ``samples`` and ``head_rows`` have an entry for each sequence: its samples, and the rows of one key head of one sample.
    A sample that fits into a share is not cut.

    >>> [[(x.sequence, x.samples, x.key_heads) for x in share] for share in shares_of([range(3)], [10], 2, 40)]
    [[(0, range(0, 2), range(0, 2))], [(0, range(2, 3), range(0, 2))]]
    >>> [[(x.sequence, x.samples, x.key_heads) for x in share] for share in shares_of([range(1)] * 2, [1, 10], 3, 20)]
    [[(0, range(0, 1), range(0, 3))], [(1, range(0, 1), range(0, 1))], [(1, range(0, 1), range(1, 3))]]
    """
    shares: list[list[BatchSlice]] = [[]]
    numbers = count()
    left = most_rows
    for sequence, (own, rows) in enumerate(zip(samples, head_rows, strict=True)):
        sample_rows = rows * key_heads
        if sample_rows > most_rows:
            for sample, heads in product(own, _cut(key_heads, -(-key_heads // max(1, most_rows // rows)))):
                shares.append([BatchSlice(next(numbers), sequence, range(sample, sample + 1), heads)])
            left = 0
            continue
        rest = own
        while rest:
            if sample_rows > left:
                shares.append([])
                left = most_rows
            fitting = left // sample_rows if sample_rows else len(rest)
            shares[-1].append(BatchSlice(next(numbers), sequence, rest[:fitting], range(key_heads)))
            left -= len(rest[:fitting]) * sample_rows
            rest = rest[fitting:]
    return [share for share in shares if share]


def of_heads(family: TileFamily, key_heads: range) -> TileFamily:
    """The tiles of a family that belong to these key heads, which may be none."""
    heads = family.key_heads
    if heads[0] in key_heads and heads[-1] in key_heads:
        return family
    own = [i for i, g in enumerate(heads) if g in key_heads]
    if not own:
        return replace(family, key_heads=range(0))
    shift = own[0] * family.head_row_step
    heads = heads[own[0] : own[-1] + 1]
    return replace(family, key_heads=heads, q_start=family.q_start + shift, k_start=family.k_start + shift)
