"""What ``show`` draws of a pattern: who meets whom, which rows a head reads, and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated

MOST_TOKENS = 1024  # a picture cannot show more cells
MOST_HEADS = 64
MOST_ROWS = 8192  # of all heads: each head has a picture of tokens x tokens


@dataclass(frozen=True, slots=True)
class PatternView:
    """A dilated pattern over a few tokens.

    >>> view = PatternView(Dilated([4, 8], [1, 2]), tokens=8, key_heads=2, is_causal=False)
    >>> print(view.text(0))
    2 1 2 1 1 . 1 .
    1 1 1 1 . . . .
    2 1 2 1 1 . 1 .
    1 1 1 1 . . . .
    1 . 1 . 2 1 2 1
    . . . . 1 1 1 1
    1 . 1 . 2 1 2 1
    . . . . 1 1 1 1
    """

    pattern: Dilated
    tokens: int
    key_heads: int
    is_causal: bool

    def __post_init__(self) -> None:
        check_size("tokens", self.tokens, MOST_TOKENS)
        check_size("heads", self.key_heads, MOST_HEADS)
        check_size("tokens times heads", self.tokens * self.key_heads, MOST_ROWS)
        self.pattern.check_key_heads(self.key_heads)

    def multiplicity(self, head: int) -> Tensor:
        """The number of branches in which two positions meet: (tokens, tokens), a row for each query."""
        i, j = torch.arange(self.tokens)[:, None], torch.arange(self.tokens)[None, :]
        sizes = {"key_head": head, "key_heads": self.key_heads}
        found: Tensor = self.pattern.multiplicity(i, j, **sizes, is_causal=self.is_causal)
        return found

    def reads(self, branch: int, head: int) -> Tensor:
        """Whether a head reads each row in a branch: (tokens,)."""
        rows = torch.arange(self.tokens)
        found: Tensor = self.pattern.meets(branch, rows, rows, key_head=head, key_heads=self.key_heads)
        return found

    def text(self, head: int) -> str:
        """The multiplicity of a head as digits. A dot is 0."""
        return "\n".join(" ".join(str(m) if m else "." for m in row) for row in self.multiplicity(head).tolist())

    def segments_text(self, branch: int, head: int) -> str:
        """The rows that a head reads in a branch as ``#``. A bar is the end of a segment.

        >>> PatternView(Dilated([4, 8], [1, 2]), tokens=10, key_heads=2, is_causal=False).segments_text(1, 1)
        '.#.#.#.#|.#'
        """
        length, marks = self.pattern.segment_lengths[branch], self.reads(branch, head).tolist()
        cells = ["#" if mark else "." for mark in marks]
        return "|".join("".join(cells[start : start + length]) for start in range(0, self.tokens, length))


@dataclass(frozen=True, slots=True)
class BlocksView:
    """The blocks of a block-sparse pattern over a sequence.

    >>> view = BlocksView(SparsePatternConfig("local_window", 0.5, block_size=16), tokens=64, is_causal=True)
    >>> print(view.text())
    #...
    .#..
    .##.
    ..##
    >>> view.computed, view.visible
    (6, 10)
    """

    config: SparsePatternConfig
    tokens: int
    is_causal: bool

    def __post_init__(self) -> None:
        check_size("tokens", self.tokens, MOST_TOKENS * self.config.block_size)
        if self.config.pattern_type == "adaptive":
            raise ValueError(
                "an adaptive pattern chooses its blocks from queries and keys, so there is nothing to show without them; "
                "choose another pattern type"
            )

    @property
    def blocks(self) -> int:
        """The number of blocks of the sequence."""
        return -(-self.tokens // self.config.block_size)

    def mask(self) -> Tensor:
        """Whether a query block reads a key block: (blocks, blocks)."""
        lists = self.config.lists(0, self.blocks, self.is_causal)
        found = torch.zeros(self.blocks, self.blocks, dtype=torch.bool)
        found[torch.arange(self.blocks).repeat_interleave(lists.counts.flatten()), lists.indices.long()] = True
        return found

    @property
    def computed(self) -> int:
        """The number of blocks that are computed."""
        return int(self.mask().sum())

    @property
    def visible(self) -> int:
        """The number of blocks of dense attention."""
        return self.blocks * (self.blocks + 1) // 2 if self.is_causal else self.blocks**2

    def text(self) -> str:
        """The blocks that are read as ``#``, a line for each query block."""
        return "\n".join("".join("#" if x else "." for x in row) for row in self.mask().tolist())


def check_size(name: str, value: int, most: int) -> None:
    """Raise if a size is not from 1 to ``most``."""
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be from 1 to {most:,}, got {value:,}")
