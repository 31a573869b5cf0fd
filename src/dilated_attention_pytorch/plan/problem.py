"""One call, as plain hashable data: everything that decides which tiles are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.sequences import Span, host_cu_seqlens, host_lengths, spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan


@dataclass(frozen=True, slots=True)
class Problem:
    """Pattern and sizes of a call. Equal problems have equal plans, launch tables and part layouts, made once."""

    pattern: Dilated
    is_causal: bool
    batch: int
    queries: int  # rows of the query tensor
    keys: int  # rows of the key tensor
    heads: int
    key_heads: int
    lengths: tuple[int, ...] | None
    cu_seqlens: tuple[int, ...] | None
    branch: int | None = None  # only this one of the pattern's branches, if not None

    @staticmethod
    def of(
        query: Tensor, key: Tensor, pattern: str, is_causal: bool, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> Problem:
        """The problem that these arguments pose; ``lengths`` and ``cu_seqlens`` are read, which waits for a GPU."""
        (batch, n, heads, _), (m, key_heads) = query.shape, key.shape[1:3]
        sequences = host_lengths(lengths, m), host_cu_seqlens(cu_seqlens, m)
        return _problem(pattern, is_causal, batch, n, m, heads, key_heads, *sequences)

    def only(self, branch: int) -> Problem:
        """The same problem for one branch alone."""
        return replace(self, branch=branch)

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The sequences of the batch, each with its plan."""
        return _plans(self)


@lru_cache(maxsize=256)
def _problem(pattern: str, *fields: Any) -> Problem:
    """Of equal problems the same object, which caches find again without comparing fields."""
    return Problem(Dilated.from_spec(pattern), *fields)


@lru_cache(maxsize=256)
def _plans(problem: Problem) -> tuple[tuple[Span, Plan], ...]:
    found = spans(problem.batch, problem.queries, problem.keys, problem.lengths, problem.cu_seqlens)
    plans = []
    for span in found:
        plan = compile_plan(
            problem.pattern, span.length, problem.key_heads, is_causal=problem.is_causal, queries=span.positions
        )
        plans.append((span, plan if problem.branch is None else plan.of_branch(problem.branch)))
    return tuple(plans)
