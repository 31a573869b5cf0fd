"""Spans: the sequences of a batch, from ``lengths`` and ``starts`` or ``cu_seqlens``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, repeat


@dataclass(frozen=True, slots=True)
class Span:
    """Samples that share a sequence: rows ``queries`` of the query tensor against rows ``keys`` of the key tensor.

    The queries are the last ``len(queries)`` of the ``len(keys)`` positions.
    """

    samples: slice
    queries: slice
    keys: slice
    padding: int = field(default=0, kw_only=True)  # rows in front of the sample, which dropout does not count

    @property
    def query_rows(self) -> tuple[slice, slice]:
        """Samples and rows of the query tensor."""
        return self.samples, self.queries

    @property
    def key_rows(self) -> tuple[slice, slice]:
        """Samples and rows of the key tensor."""
        return self.samples, self.keys

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return int(self.keys.stop - self.keys.start)

    @property
    def positions(self) -> range:
        """The positions of the query rows."""
        return range(self.length - (self.queries.stop - self.queries.start), self.length)

    @property
    def dropout_row(self) -> int:
        """The number of position 0 in dropout: its row, without the padding in front."""
        return int(self.keys.start) - self.padding


def spans(
    batch: int, n: int, m: int, lengths: Sequence[int] | None, cu_seqlens: Sequence[int] | None,
    within: range | None = None, starts: Sequence[int] | None = None,
) -> Iterator[Span]:  # fmt: skip
    """The non-empty sequences of a batch of ``n`` query rows and ``m`` key rows.

    Only those with a key row ``within`` a range, if it is given. The time then does not depend on other documents. With
    ``starts``, which need ``lengths``, a sample begins at its start.

    >>> [(s.samples, s.queries) for s in spans(3, 5, 5, [4, 4, 0], None)]
    [(slice(0, 2, None), slice(0, 4, None))]
    >>> [s.queries for s in spans(1, 9, 9, None, [0, 3, 5, 9], range(4, 5))]
    [slice(3, 5, None)]
    >>> [(s.queries, s.keys, s.positions) for s in spans(2, 2, 9, [5, 3], None, starts=[4, 5])]
    [(slice(0, 2, None), slice(4, 9, None), range(3, 5)), (slice(0, 1, None), slice(5, 8, None), range(2, 3))]
    """
    every = slice(0, batch)
    if within is not None and not within:
        return
    if cu_seqlens is not None:
        if within is not None:
            cu_seqlens = cu_seqlens[bisect_right(cu_seqlens, within.start) - 1 : bisect_left(cu_seqlens, within.stop) + 1]
        for start, stop in pairwise(cu_seqlens):
            if stop > start:
                yield Span(every, slice(start, stop), slice(start, stop))
    elif lengths is not None:
        sample = 0
        for (start, length), run in groupby(zip(repeat(0) if starts is None else starts, lengths, strict=False)):
            samples = slice(sample, sample + len(list(run)))
            sample, stop = samples.stop, start + length
            # Query row a is row a + m - n of the keys: queries in the padding come first, those behind the sample last.
            queries = slice(max(0, start - (m - n)), stop - (m - n))
            held = within is None or (within.start < stop and start < within.stop)
            if held and queries.start < queries.stop:
                yield Span(samples, queries, slice(start, stop), padding=start)
    elif batch and n:
        yield Span(every, slice(0, n), slice(0, m))
