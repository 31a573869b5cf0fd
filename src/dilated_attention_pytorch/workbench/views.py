"""What ``show`` draws of a pattern: who meets whom, which rows a head reads, blocks, and the steps of a ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.rank_plans import DilatedSection, DilatedStep, dilated_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards

MOST_TOKENS = 1024  # a picture cannot show more cells


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
        _check("tokens", self.tokens, MOST_TOKENS)
        _check("heads", self.key_heads, MOST_TOKENS)
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
        _check("tokens", self.tokens, MOST_TOKENS * self.config.block_size)
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


@dataclass(frozen=True, slots=True)
class RingSizes:
    """The sizes of a call that decide what ranks compute and send."""

    tokens: int
    heads: int
    key_heads: int
    head_dim: int = 64
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "key_heads", "head_dim"):
            _check(name, getattr(self, name), 2**40)
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key heads, got {self.heads} and {self.key_heads}")


@dataclass(frozen=True, slots=True)
class RingStep:
    """What a rank does in one tick: the message that it sends, the one that it receives, and what it computes."""

    name: str
    target: int | None = None  # the rank that it sends to
    sent_bytes: int = 0
    source: int | None = None  # the rank that it receives from
    received_bytes: int = 0
    pairs: int = 0  # query-key pairs over all query heads


@dataclass(frozen=True, slots=True)
class RingView:
    """The steps of a forward over a ring of ranks. Step 0 computes a rank's own rows, and messages follow.

    >>> view = RingView.of(Dilated([4, 16], [1, 4]), RingSizes(16, 4, 4, head_dim=8), ranks=2)
    >>> [step.pairs for step in view.ranks[0]], view.ranks[0][1].source, view.ranks[0][1].received_bytes
    ([144, 16], 1, 256)
    """

    layout: str
    is_causal: bool
    rows: tuple[int, ...]  # by rank
    ranks: tuple[tuple[RingStep, ...], ...]  # by rank and tick

    @staticmethod
    def of(
        pattern: Dilated, sizes: RingSizes, ranks: int, *, layout: str = "contiguous", is_causal: bool = False,
        bucket_size: int | None = None,
    ) -> RingView:  # fmt: skip
        """The steps of all ranks, from the plans that the ranks themselves execute."""
        _check("ranks", ranks, 4096)
        pattern.check_key_heads(sizes.key_heads)
        if bucket_size is not None:
            _check("bucket_size", bucket_size, 2**40)
        shards = Shards.even(sizes.tokens, ranks, layout)
        bucket_size = default_bucket_size(shards) if bucket_size is None else bucket_size
        problem = Problem(pattern, is_causal, 1, sizes.tokens, sizes.tokens, sizes.heads, sizes.key_heads)
        steps = []
        for rank in range(ranks):
            plan = dilated_plan(problem, shards, rank, bucket_size)
            own = RingStep("own rows", pairs=_pairs(plan.own, problem))
            steps.append((own, *(_step(sent, received, sizes, problem) for sent, received in plan.ticks)))
        return RingView(layout, is_causal, tuple(shards.rows(rank) for rank in range(ranks)), tuple(steps))

    @property
    def steps(self) -> int:
        """The number of steps, the same for all ranks."""
        return len(self.ranks[0])

    def pairs(self) -> list[list[int]]:
        """The pairs by rank and step."""
        return [[step.pairs for step in steps] for steps in self.ranks]

    def balance(self) -> float:
        """The pairs of the mean rank over those of the rank that has most; 1 is even work."""
        totals = [sum(pairs) for pairs in self.pairs()]
        return sum(totals) / len(totals) / max(totals) if max(totals) else 1.0


def _step(sent: Message | None, received: Message | None, sizes: RingSizes, problem: Problem) -> RingStep:
    number = sent or received
    found = [section for section in (received.sections if received else ()) if isinstance(section, DilatedSection)]
    return RingStep(
        "no message" if number is None else number.name,
        target=None if sent is None else sent.target,
        sent_bytes=_bytes(sent, sizes),
        source=None if received is None else received.source,
        received_bytes=_bytes(received, sizes),
        pairs=_pairs((step for section in found for step in section.steps()), problem),
    )


def _bytes(message: Message | None, sizes: RingSizes) -> int:
    return 0 if message is None else message.numel(sizes.head_dim) * sizes.element_bytes


def _pairs(steps: object, problem: Problem) -> int:
    assert hasattr(steps, "__iter__")
    return problem.heads_per_key * sum(step.plan.pairs for step in steps if isinstance(step, DilatedStep))


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be from 1 to {most:,}, got {value:,}")
