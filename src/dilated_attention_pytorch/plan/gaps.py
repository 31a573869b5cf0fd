"""Rows of a dilated pattern that meet no key: counted by arithmetic on integers, for sequences of any length.

A row sees itself in every branch that has it, so a row of a head meets no key if no branch has it. A branch of segment
length ``w``, rate ``r`` and offset ``o`` has the rows ``i`` with ``i % w % r == o``. If ``r`` divides ``w``, these are the
rows with ``i % r == o``. Otherwise each segment has its own progression, and the segments are counted one by one, as far as
they do not repeat.
"""

from __future__ import annotations

import math

from dilated_attention_pytorch.patterns.dilated import Dilated

_MOST_STEPS = 2**15  # segments that are counted one by one, about a second
# Rows i with i % rate == offset, as (offset, rate).
_Progression = tuple[int, int]


def empty_rows(pattern: Dilated, rows: range, key_heads: int) -> int | None:
    """How many pairs of a row and a key head meet no key; None for patterns whose segments repeat too rarely to count.

    >>> empty_rows(Dilated([2**30], [2]), range(2**30), 2) == 2**30
    True
    >>> empty_rows(Dilated([2**30, 5], [4, 2]), range(20), 1)  # rows 1, 3, 6, 11, 13 and 18
    6
    """
    heads_of: dict[tuple[int, ...], int] = {}
    for head in range(key_heads):
        offsets = tuple(pattern.offset(head, key_heads, rate) for rate in pattern.dilation_rates)
        heads_of[offsets] = heads_of.get(offsets, 0) + 1
    total, steps = 0, 0
    for offsets, heads in heads_of.items():
        progressions, uneven = [], []
        for (w, r), offset in zip(pattern.branches, offsets, strict=True):
            if offset < w:  # otherwise no segment has a row
                regular = w % r == 0 or rows.stop <= w
                progressions += [(offset, r)] * regular
                uneven += [(w, r, offset)] * (not regular)
        uneven.sort(reverse=True)
        steps += _steps(len(rows), uneven, [rate for _, rate in progressions])
        if steps > _MOST_STEPS:
            return None
        total += heads * _outside(rows, tuple(uneven), tuple(progressions))
    return total


def _steps(length: int, uneven: list[tuple[int, int, int]], rates: list[int]) -> int:
    """About how many segments ``_outside`` counts one by one."""
    if not uneven or 1 in rates:
        return 1
    (w, r, _), *others = uneven
    period = math.lcm(*(own for own, _, _ in uneven), *rates)
    return (1 + min(length, period) // w) * _steps(w, others, [*rates, r])


def _outside(
    rows: range, uneven: tuple[tuple[int, int, int], ...], progressions: tuple[_Progression, ...]
) -> int:  # fmt: skip
    """The rows in none of the progressions, nor in the branches (w, r, offset) whose segments are longest first."""
    if any(rate == 1 for _, rate in progressions) or not rows:
        return 0
    if not uneven:
        return len(rows) - _in_union(rows, _without_contained(progressions))
    period = math.lcm(*(w for w, _, _ in uneven), *(rate for _, rate in progressions))
    if len(rows) > period:
        whole, left = divmod(len(rows), period)
        first, last = rows[:period], rows[len(rows) - left :]
        return whole * _outside(first, uneven, progressions) + _outside(last, uneven, progressions)
    (w, r, offset), *others = uneven
    count = 0
    for start in range(rows.start // w * w, rows.stop, w):
        inside = range(max(rows.start, start), min(rows.stop, start + w))
        count += _outside(inside, tuple(others), (*progressions, ((start + offset) % r, r)))
    return count


def _without_contained(progressions: tuple[_Progression, ...]) -> tuple[_Progression, ...]:
    """The progressions that are in no other one."""
    kept: list[_Progression] = []
    for offset, rate in sorted(set(progressions), key=lambda x: x[1]):
        if not any(rate % other == 0 and offset % other == first for first, other in kept):
            kept.append((offset, rate))
    return tuple(kept)


def _in_union(rows: range, progressions: tuple[_Progression, ...]) -> int:
    """The rows in any of the progressions, by inclusion and exclusion."""
    count = 0
    for number, one in enumerate(progressions):
        common = (_common(one, other) for other in progressions[:number])
        count += _in_one(rows, one) - _in_union(rows, _without_contained(tuple(x for x in common if x is not None)))
    return count


def _in_one(rows: range, progression: _Progression) -> int:
    offset, rate = progression
    before_start, before_stop = (-(-(end - offset) // rate) for end in (rows.start, rows.stop))
    return before_stop - before_start


def _common(a: _Progression, b: _Progression) -> _Progression | None:
    """The rows that two progressions share."""
    (a_offset, a_rate), (b_offset, b_rate) = a, b
    divisor = math.gcd(a_rate, b_rate)
    if (b_offset - a_offset) % divisor:
        return None
    rate = b_rate // divisor
    steps = (b_offset - a_offset) // divisor * pow(a_rate // divisor, -1, rate) % rate
    return a_offset + steps * a_rate, a_rate * rate
