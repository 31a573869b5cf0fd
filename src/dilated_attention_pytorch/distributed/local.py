"""A rank's own queries and keys through the fused kernels, which write where the tiles of messages are added afterwards.

Only for contiguous shards: there each row of a branch is in one tile, as launch tables have it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.distributed.shards import Shards
from dilated_attention_pytorch.patterns import Dilated
from dilated_attention_pytorch.plan import Plan, compile_plan
from dilated_attention_pytorch.spans import Span, spans


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """What kernels ask of a ``problem.Problem``, for the rows of one rank with themselves."""

    pattern: Dilated
    is_causal: bool
    shards: Shards
    rank: int
    batch: int
    heads: int
    key_heads: int
    lengths: tuple[int, ...] | None
    cu_seqlens: tuple[int, ...] | None

    @property
    def queries(self) -> int:
        """Rows of this rank."""
        return self.shards.rows(self.rank)

    @property
    def keys(self) -> int:
        """The same rows."""
        return self.queries

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The rows that this rank has of each sequence, with their plans, which count positions of the whole sequence."""
        return _plans(self)


@lru_cache(maxsize=64)
def _plans(problem: LocalProblem) -> tuple[tuple[Span, Plan], ...]:
    (mine,), found = problem.shards.chunks[problem.rank], []
    length = problem.shards.length
    for span in spans(problem.batch, length, length, problem.lengths, problem.cu_seqlens):
        start = max(mine.start, span.keys.start)
        positions = range(start - span.keys.start, min(mine.stop, span.keys.stop) - span.keys.start)
        if positions:
            rows = slice(start - mine.start, start - mine.start + len(positions))
            plan = compile_plan(
                problem.pattern, span.length, problem.key_heads, is_causal=problem.is_causal, queries=positions,
                keys=positions,
            )  # fmt: skip
            found.append((Span(span.samples, rows, rows), plan))
    return tuple(found)


def _run(backend: str) -> Any:
    """The module that launches the kernels of a backend; importing it imports triton."""
    return importlib.import_module(f"dilated_attention_pytorch.backends.{backend}.run")


def attend_(
    problem: LocalProblem,
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    *,
    scale: float,
    **_stock: Any,  # how stock operators compute tiles: every part of a call is told
) -> None:
    """Write ``out`` (float32) and ``lse``, which hold nothing yet."""
    if problem.plans():
        lse = _run(backend).forward(problem, query, key, value, scale=scale, out=out)[1]
        lse_bnh.copy_(lse.transpose(1, 2))


def add_gradients_(
    problem: LocalProblem,
    backend: str,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    **_stock: Any,  # how stock operators compute tiles: every part of a call is told
) -> None:
    """Write ``grads`` (dq, dk, dv, float32), which hold nothing yet; ``by_row`` is dout, out and lse (B, n, H)."""
    if problem.plans():
        dout, out, lse_bnh = by_row
        lse, dlse = (None if x is None else x.transpose(1, 2).contiguous() for x in (lse_bnh, dlse_bnh))
        _run(backend).backward(problem, dout, dlse, *qkv, out, lse, scale=scale, detach_mixing=False, grads=grads)
