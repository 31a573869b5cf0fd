"""A rank's own queries and keys through the fused kernels, which write where the tiles of messages are added afterwards.

Only for contiguous shards: there each row of a branch is in one tile, as launch tables have it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards

# "auto" takes the Hopper kernels from this many branches. They write the rows of all branches once, where stock operators
# merge call by call, and of one branch cuDNN's kernels are the faster ones. Milliseconds, sdpa / hopper, forward and
# backward of 262,144 tokens, 8 heads of size 64, bf16, ranks that share one H200 (results/h200_ring_backends.json):
#   ranks                          1            2             4
#   w = 2048 * 4**i, r = 4**i   18.8 / 15.3   23.5 / 18.0    32.7 / 29.4
#   w = N, r = 4                71.1 / 76.2  115.5 / 119.2  131.8 / 132.9
HOPPER_FROM_BRANCHES = 2


def stock_backend(backend: str, request: Request) -> str:
    """The backend of stock operators that computes tiles, always those with keys of other ranks."""
    backends.check_name(backend)
    if backend == "reference":
        raise ValueError("backend 'reference' needs whole sequences: leave out group, or use 'auto'")
    reasons = backends.why_not("sdpa", request)
    if backend == "sdpa" and reasons:
        raise ValueError("backend 'sdpa' cannot serve this call:\n" + "\n".join(f"  {reason}" for reason in reasons))
    return "eager" if backend == "eager" or reasons else "sdpa"


def fused_backend(
    backend: str, request: Request, pattern: Dilated | BlockSparse, layout: str | Shards, *, detached: bool
) -> str | None:
    """The backend whose fused kernels compute own queries with own keys, or None: then tiles do, as with keys of others.

    ``"auto"`` takes the Hopper kernels where they can and are faster, so ranks on different GPUs may choose differently:
    that is harmless, because it changes nothing that travels. One that is asked for and cannot is a ValueError.
    """
    if backend == "auto":
        branches = len(pattern.branches) if isinstance(pattern, Dilated) else 0
        enough = branches >= HOPPER_FROM_BRANCHES
        return "hopper" if enough and not _why_not("hopper", request, pattern, layout, detached) else None
    if backend not in ("hopper", "triton"):
        return None
    reasons = _why_not(backend, request, pattern, layout, detached)
    if reasons:
        raise ValueError(f"backend {backend!r} cannot serve this call:\n" + "\n".join(f"  {x}" for x in reasons))
    return backend


def _why_not(
    backend: str, request: Request, pattern: Dilated | BlockSparse, layout: str | Shards, detached: bool
) -> list[str]:
    reasons = backends.why_not(backend, request)
    if isinstance(pattern, BlockSparse):
        reasons.append("blocks of sharded sequences go through 'sdpa' or 'eager'")
    if any(len(chunks) > 1 for chunks in layout.chunks) if isinstance(layout, Shards) else layout == "zigzag":
        reasons.append("fused kernels take contiguous shards, got the zigzag layout")
    if detached or request.dropout_p > 0.0 or request.ordered:
        reasons.append("detached mixing, dropout and causal orders of sharded sequences go through 'sdpa' or 'eager'")
    return reasons


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
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
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
        with torch.cuda.device_of(dout):  # type: ignore[no-untyped-call]
            _run(backend).backward(problem, dout, dlse, *qkv, out, lse, scale=scale, detach_mixing=False, grads=grads)
