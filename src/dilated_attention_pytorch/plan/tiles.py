"""Plans: pattern x lengths -> families of dense tiles. Plain integers, without torch.

The number of families and the time to make them do not grow with the sequence. The whole segments of a branch are one
family of ``tiles`` equal tiles, and only the cut segments at the ends of the ranges are families of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from dilated_attention_pytorch.patterns.dilated import Dilated


@dataclass(frozen=True, slots=True)
class TileFamily:
    """Equal dense tiles at equal distances, for key heads whose rows are shifted against each other by equal steps.

    For the ``a``-th of ``key_heads`` and tile ``t``, the tile lets every query position in

        q_start + a * head_row_step + t * tile_step + row_stride * range(q_rows)

    see every key position in the same expression with ``k_start`` and ``k_rows``. In a ``causal`` tile both are the same
    positions, and each sees itself and those before it. No other mask exists. ``zero_keys`` counts keys with logit zero and
    value zero that every row sees as well (see ``Dilated.torchscale_padding``).

    ``Dilated([8], [2])`` with 2 key heads and 20 tokens is two families: 2 whole segments, in which head 1 starts one row
    later than head 0 (``head_row_step=1``), and the cut one of 4 tokens.

    >>> for family in compile_plan(Dilated([8], [2]), 20, 2, is_causal=False).families: print(family)
    TileFamily(branch=0, key_heads=range(0, 2), head_row_step=1, q_start=0, q_rows=4, k_start=0, k_rows=4, row_stride=2, \
tile_step=8, tiles=2, causal=False, zero_keys=0)
    TileFamily(branch=0, key_heads=range(0, 2), head_row_step=1, q_start=16, q_rows=2, k_start=16, k_rows=2, row_stride=2, \
tile_step=8, tiles=1, causal=False, zero_keys=0)
    """

    branch: int
    key_heads: range
    head_row_step: int
    q_start: int
    q_rows: int
    k_start: int
    k_rows: int
    row_stride: int
    tile_step: int
    tiles: int
    causal: bool
    zero_keys: int

    @property
    def pairs_per_tile(self) -> int:
        """Query-key pairs of one tile and head."""
        return self.q_rows * (self.q_rows + 1) // 2 if self.causal else self.q_rows * self.k_rows

    @property
    def pairs(self) -> int:
        """Query-key pairs over all tiles and key heads."""
        return self.pairs_per_tile * self.tiles * len(self.key_heads)


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles that together cover every pair of a pattern as often as it meets, and no other pair."""

    families: tuple[TileFamily, ...]
    queries: range  # the positions of the query rows
    keys: range  # the positions of the key rows

    @property
    def pairs(self) -> int:
        """Query-key pairs over all families, counted once per key head."""
        return sum(family.pairs for family in self.families)

    def flops(self, head_dim: int, *, queries_per_key: int = 1, backward: bool = False) -> int:
        """Floating-point operations of one sample: 4 D per pair and query head forward, 2.5 times that backward.

        >>> compile_plan(Dilated([2048], [1]), 4096, 1, is_causal=False).flops(64) == 2 * 4 * 2048**2 * 64
        True
        """
        forward = 4 * head_dim * queries_per_key * self.pairs
        return forward * 5 // 2 if backward else forward

    def of_branch(self, branch: int) -> Plan:
        """The families of one branch."""
        return Plan(tuple(f for f in self.families if f.branch == branch), self.queries, self.keys)


@dataclass(frozen=True, slots=True)
class _Segments:
    """``count`` equal segments from ``start``, of which the ranges ``queries`` and ``keys`` (relative) are planned."""

    start: int
    count: int
    length: int  # real rows of each segment
    queries: range
    keys: range


def _segments(w: int, length: int, queries: range, keys: range) -> Iterator[_Segments]:
    """The segments that hold both queries and keys; whole segments are one item.

    >>> list(_segments(8, 20, range(20), range(20))) == [
    ...     _Segments(0, 2, 8, range(8), range(8)), _Segments(16, 1, 4, range(4), range(4))]
    True
    """
    first = max(queries.start, keys.start) // w
    last = (min(queries.stop, keys.stop) - 1) // w
    whole_first = -(-max(queries.start, keys.start) // w)
    whole_last = min(queries.stop, keys.stop) // w - 1
    if whole_first > whole_last:
        numbers: Iterable[tuple[int, int]] = ((s, 1) for s in range(first, last + 1))
    else:
        ends = {s for s in (first, last) if not whole_first <= s <= whole_last}
        numbers = sorted({(whole_first, whole_last - whole_first + 1)} | {(s, 1) for s in ends})
    for number, count in numbers:
        start = number * w
        inside = [range(max(rows.start - start, 0), min(rows.stop - start, w)) for rows in (queries, keys)]
        if inside[0] and inside[1]:
            yield _Segments(start, count, min(w, length - start), *inside)


def _rows(inside: range, offset: int, rate: int) -> tuple[int, int]:
    """First row number and number of rows of ``range(offset, inf, rate)`` that lie in ``inside``."""
    first = max(0, -(-(inside.start - offset) // rate))
    stop = max(0, -(-(inside.stop - offset) // rate))
    return first, max(0, stop - first)


def _progressions(heads_and_offsets: list[tuple[int, int]]) -> list[tuple[range, int, int]]:
    """Cut a list of (head, offset) into arithmetic progressions: (heads, first offset, offset step).

    >>> _progressions([(0, 0), (1, 1), (2, 2), (5, 5)])
    [(range(0, 3), 0, 1), (range(5, 6), 5, 0)]
    """
    result: list[tuple[range, int, int]] = []
    index = 0
    while index < len(heads_and_offsets):
        head, offset = heads_and_offsets[index]
        following = heads_and_offsets[index + 1 :]
        head_step, offset_step, count = 1, 0, 1
        if following and following[0][0] > head:  # strides must not be negative, so heads only rise
            head_step, offset_step = following[0][0] - head, following[0][1] - offset
            while following[count - 1 : count] == [(head + count * head_step, offset + count * offset_step)]:
                count += 1
        result.append((range(head, head + count * head_step, head_step), offset, offset_step))
        index += count
    return result


@lru_cache(maxsize=256)  # a pattern has few different sets of heads, and each has a few hundred bytes
def _head_runs(offsets: tuple[tuple[int, int], ...]) -> list[tuple[range, int, int]]:
    """Few arithmetic progressions that cover all pairs of a key head and its offset.

    Either heads of equal offset make one run (16 heads at rate 2: 2 runs of 8). Or the first head of every offset makes
    one, the second head another, and so on (16 heads at rate 16: 1 diagonal run of 16). The shorter list is taken.
    """
    by_offset: dict[int, list[int]] = defaultdict(list)
    for head, offset in offsets:
        by_offset[offset].append(head)
    most = max(map(len, by_offset.values()))
    diagonals = [[(heads[k], o) for o, heads in sorted(by_offset.items()) if k < len(heads)] for k in range(most)]
    level = [run for o, heads in sorted(by_offset.items()) for run in _progressions([(h, o) for h in heads])]
    diagonal = [run for chain in diagonals for run in _progressions(chain)]
    return min(level, diagonal, key=len)


def _branch_families(
    pattern: Dilated, branch: int, length: int, key_heads: int, queries: range, keys: range, is_causal: bool
) -> Iterator[TileFamily]:
    w, r = pattern.branches[branch]
    offsets = {g: pattern.offset(g, key_heads, r) for g in range(key_heads)}
    for segment in _segments(w, length, queries, keys):
        # Heads whose rows have the same numbers in the segment differ only by a shift, so they can share a family.
        classes: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for g, offset in offsets.items():
            zeros = 0
            if pattern.torchscale_padding and not is_causal:
                zeros = pattern.zero_keys(branch, segment.start + offset, length, key_head=g, key_heads=key_heads)
            classes[*_rows(segment.queries, offset, r), *_rows(segment.keys, offset, r), zeros][g] = offset
        for (q_first, q_rows, k_first, k_rows, zeros), members in classes.items():
            for heads, offset, offset_step in _head_runs(tuple(members.items())):
                for q_from, q_count, k_from, k_count, causal in _visible(q_first, q_rows, k_first, k_rows, is_causal):
                    yield TileFamily(
                        branch=branch, key_heads=heads, head_row_step=offset_step, row_stride=r, tile_step=w,
                        q_start=segment.start + offset + q_from * r, q_rows=q_count,
                        k_start=segment.start + offset + k_from * r, k_rows=k_count,
                        tiles=segment.count, causal=causal, zero_keys=zeros,
                    )  # fmt: skip


def _visible(
    q_first: int, q_rows: int, k_first: int, k_rows: int, is_causal: bool
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Split a tile into full rectangles and at most one causal square: (query from, count, key from, count, causal).

    Rows are numbered within the segment. Queries 4..7 over keys 0..7 see 0..3 whole and 4..7 as a triangle:

    >>> list(_visible(4, 4, 0, 8, True))
    [(4, 4, 0, 4, False), (4, 4, 4, 4, True)]
    """
    q_stop, k_stop = q_first + q_rows, k_first + k_rows
    square = range(max(q_first, k_first), min(q_stop, k_stop))
    rectangles: list[tuple[int, int, int, int, bool]] = []
    if not is_causal or k_stop <= q_first:  # all keys are before the queries
        rectangles = [(q_first, q_rows, k_first, k_rows, False)]
    elif square:
        rectangles = [
            (square.start, len(square), k_first, square.start - k_first, False),
            (square.start, len(square), square.start, len(square), True),
            (square.stop, q_stop - square.stop, k_first, square.stop - k_first, False),
        ]
    yield from (tile for tile in rectangles if tile[1] > 0 and tile[3] > 0)


@lru_cache(maxsize=4096)
def compile_plan(
    pattern: Dilated, length: int, key_heads: int, *, is_causal: bool,
    queries: range | None = None, keys: range | None = None,
) -> Plan:  # fmt: skip
    """The tiles of ``pattern`` on a sequence of ``length`` tokens, for the query and key positions given (default: all).

    Decoding asks for ``queries=range(M - N, M)``. A rank asks for the positions that it holds.
    """
    pattern.check_key_heads(key_heads)
    queries = range(length) if queries is None else queries
    keys = range(length) if keys is None else keys
    families: tuple[TileFamily, ...] = ()
    if queries and keys and key_heads:
        families = tuple(
            family
            for branch in range(len(pattern.branches))
            for family in _branch_families(pattern, branch, length, key_heads, queries, keys, is_causal)
        )
    return Plan(families, queries, keys)
