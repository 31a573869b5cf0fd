"""Which key rows a causal dilated pattern still needs after some tokens, and where a cache stores them. Plain integers.

A later position meets only rows of its own segment. So a branch ``(w, r)`` needs, for every key head, the rows of the open
segment: at most ``ceil(w / r)``, however long the sequence is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dilated_attention_pytorch.patterns.dilated import Dilated


@dataclass(frozen=True, slots=True)
class HeldBranch:
    """The rows of one branch: ``slots`` consecutive rows of the storage, from ``first_row`` on.

    Position ``p`` is a row of key head ``g`` if ``(p % w) % r == offsets[g]``. Its number is
    ``p // w * segment_rows + p % w // r``. It is stored in the slot ``number % slots``.
    """

    pattern: Dilated  # of this branch
    segment_length: int
    dilation_rate: int
    offsets: tuple[int, ...]  # one per key head
    segment_rows: int  # the most rows that a key head has in one segment
    first_row: int
    slots: int

    def number(self, position: int) -> int:
        """The number of the row at a position. Rows of one head have ascending numbers."""
        return position // self.segment_length * self.segment_rows + position % self.segment_length // self.dilation_rate

    def slot(self, position: int) -> int:
        """The row of the storage that holds a position."""
        return self.first_row + self.number(position) % self.slots

    def rows_after(self, key_head: int, tokens: int) -> int:
        """How many rows a key head has in the open segment. There are none if a segment has just ended."""
        return max(0, -(-(tokens % self.segment_length - self.offsets[key_head]) // self.dilation_rate))


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The rows of all branches. Each branch has storage of its own, so a row that two branches need is stored twice.

    The slots suffice for every sequence of at most ``max_tokens`` tokens. After going back by at most ``max_rollback``
    tokens, all rows that later positions meet are still in their slots.

    >>> held = HeldRows.of(Dilated([8, 32], [1, 4]), key_heads=2, max_rollback=0)
    >>> held.rows, [held.rows_after(0, tokens) for tokens in (7, 8, 30, 32)]
    (16, [9, 2, 14, 0])
    """

    pattern: Dilated
    branches: tuple[HeldBranch, ...]
    key_heads: int
    max_tokens: int | None
    max_rollback: int

    @property
    def rows(self) -> int:
        """The slots of all branches, for one key head."""
        return sum(branch.slots for branch in self.branches)

    def rows_after(self, key_head: int, tokens: int) -> int:
        """How many rows a key head has in the open segments of all branches."""
        return sum(branch.rows_after(key_head, tokens) for branch in self.branches)

    @staticmethod
    @lru_cache(maxsize=64)
    def of(pattern: Dilated, key_heads: int, max_tokens: int | None = None, max_rollback: int = 0) -> HeldRows:
        """The rows of a pattern."""
        pattern.check_key_heads(key_heads)
        branches: list[HeldBranch] = []
        first = 0
        for w, r in pattern.branches:
            offsets = tuple(pattern.offset(g, key_heads, r) for g in range(key_heads))
            rows = -(-(w if max_tokens is None else min(w, max_tokens)) // r)
            slots = max(rows, _reach(w, r, rows, max_tokens, max_rollback))
            branches.append(HeldBranch(Dilated([w], [r], offsets), w, r, offsets, rows, first, slots))
            first += slots
        return HeldRows(pattern, tuple(branches), key_heads, max_tokens, max_rollback)


def _reach(w: int, r: int, segment_rows: int, max_tokens: int | None, max_rollback: int) -> int:
    """How many numbers lie between the first row that a rollback may need and the last row that was written.

    The worst case goes back to the last position of a segment. Going back to the start of a segment needs no rows.
    """
    if w == 1 or max_rollback == 0:
        return 0
    last = w - 2 + max_rollback
    last = last if max_tokens is None else min(last, max_tokens - 1)
    return last // w * segment_rows + last % w // r + 1
