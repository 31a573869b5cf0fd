"""The problem of a call: everything that decides which tiles are computed, as plain hashable data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan


@dataclass(frozen=True, slots=True)
class BlockRule:
    """A block-sparse pattern as a plan reads it: the lists follow from a configuration, or they are given."""

    block_size: int
    config: SparsePatternConfig | None  # None if lists are given
    given: BlockLists | None = None  # for the whole sequence; compared by identity


@dataclass(frozen=True, slots=True)
class Problem:
    """Pattern and sizes of a call. Equal problems have equal plans and launch tables, which are made once."""

    pattern: Dilated | BlockRule
    is_causal: bool
    batch: int
    queries: int  # rows of the query tensor
    keys: int  # rows of the key tensor
    heads: int
    key_heads: int
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    branch: int | None = None  # only this one of the pattern's branches, if not None
    starts: tuple[int, ...] | None = None  # the first row of each sample, which then has a length

    @property
    def heads_per_key(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def dilated(self) -> Dilated:
        """The pattern of a dilated problem."""
        assert isinstance(self.pattern, Dilated)
        return self.pattern

    @property
    def blocks(self) -> BlockRule:
        """The pattern of a block-sparse problem."""
        assert isinstance(self.pattern, BlockRule)
        return self.pattern

    def of_branch(self, branch: int) -> Problem:
        """The same problem for one branch."""
        return replace(self, branch=branch)

    def spans(self) -> tuple[Span, ...]:
        """The sequences of the batch."""
        return tuple(spans(self.batch, self.queries, self.keys, self.lengths, self.cu_seqlens, starts=self.starts))

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The sequences of a dilated problem, each with its plan."""
        return _plans(self)


@lru_cache(maxsize=256)
def find_problem(pattern: str | BlockRule, *fields: Any) -> Problem:
    """The problem with these fields; a dilated pattern is given by its ``spec``.

    Equal arguments give the same object, which caches find again without comparing fields.
    """
    return Problem(Dilated.from_spec(pattern) if isinstance(pattern, str) else pattern, *fields)


@lru_cache(maxsize=256)
def _plans(problem: Problem) -> tuple[tuple[Span, Plan], ...]:
    plans = []
    for span in problem.spans():
        plan = compile_plan(
            problem.dilated, span.length, problem.key_heads, is_causal=problem.is_causal, queries=span.positions
        )
        plans.append((span, plan if problem.branch is None else plan.of_branch(problem.branch)))
    return tuple(plans)
