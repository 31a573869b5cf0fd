"""The backends of a rank's tiles. Fused kernels may compute own queries with own keys, before messages are merged.

Fused kernels take contiguous shards only: there, each row of a branch is in one tile, as launch tables have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.execute.loop import RowGradients, Sums
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options, Results, Upstream

# "auto" takes the Hopper kernels from this many branches. They write the rows of all branches once, while stock operators
# merge call by call. For one branch, cuDNN's kernels are faster. Milliseconds, sdpa / hopper, forward and backward of
# 262,144 tokens, 8 heads of size 64, bf16, ranks that share one H200 (results/h200_ring_backends.json):
#   ranks                          1            2             4
#   w = 2048 * 4**i, r = 4**i   18.8 / 15.3   23.5 / 18.0    32.7 / 29.4
#   w = N, r = 4                71.1 / 76.2  115.5 / 119.2  131.8 / 132.9
HOPPER_FROM_BRANCHES = 2


def stock_backend(backend: str, request: Request) -> str:
    """The backend of stock kernels that computes tiles, always those with keys of other ranks."""
    if backend == "reference":
        raise ValueError("backend 'reference' needs whole sequences: leave out group, or use 'auto'")
    reasons = backends.find("sdpa").why_not(request)
    if backend == "sdpa" and reasons:
        raise ValueError("backend 'sdpa' cannot serve this call:\n" + "\n".join(f"  {reason}" for reason in reasons))
    return "eager" if backend == "eager" or reasons else "sdpa"


def fused_backend(call: Call, request: Request, layout: str | Shards) -> str | None:
    """The backend whose fused kernels compute own queries with own keys; None if stock kernels do.

    ``"auto"`` takes the Hopper kernels where they are possible and faster. Ranks on different GPUs may therefore choose
    differently, which changes nothing that travels. A backend that is asked for and cannot serve the call is an error.
    """
    if call.backend == "auto":
        branches = len(call.pattern.branches) if isinstance(call.pattern, Dilated) else 0
        possible = branches >= HOPPER_FROM_BRANCHES and not _why_not("hopper", call, request, layout)
        return "hopper" if possible else None
    if call.backend not in ("hopper", "triton"):
        return None
    reasons = _why_not(call.backend, call, request, layout)
    if reasons:
        raise ValueError(f"backend {call.backend!r} cannot serve this call:\n" + "\n".join(f"  {x}" for x in reasons))
    return call.backend


def _why_not(backend: str, call: Call, request: Request, layout: str | Shards) -> list[str]:
    reasons = backends.find(backend).why_not(request)
    if isinstance(call.pattern, BlockSparse):
        reasons.append("blocks of sharded sequences go through 'sdpa' or 'eager'")
    if any(len(chunks) > 1 for chunks in layout.chunks) if isinstance(layout, Shards) else layout == "zigzag":
        reasons.append("fused kernels take contiguous shards, got the zigzag layout")
    if is_detached(call) or request.dropout_p > 0.0 or request.masks_by_position:
        reasons.append("detached mixing, dropout and causal orders of sharded sequences go through 'sdpa' or 'eager'")
    return reasons


def is_detached(call: Call) -> bool:
    """Whether the backward needs the output of each branch, because mixing weights of several branches are constants."""
    return call.detach_mixing and isinstance(call.pattern, Dilated) and len(call.pattern.branches) > 1


@dataclass(frozen=True, slots=True)
class OwnRows(Problem):
    """The problem of a rank's own queries and keys, as fused kernels read it. Lengths are of the whole sequence."""

    shards: Shards = Shards(())
    rank: int = 0

    @staticmethod
    def of(problem: Problem, shards: Shards, rank: int) -> OwnRows:
        """The rows of a rank in a problem of the whole sequence."""
        rows, sizes = shards.rows(rank), (problem.heads, problem.key_heads, problem.lengths, problem.cu_seqlens)
        return OwnRows(problem.pattern, problem.is_causal, problem.batch, rows, rows, *sizes, shards=shards, rank=rank)

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The rows that this rank has of each sequence, with their plans, which count positions of the whole sequence."""
        return _plans(self)

    def attend_(self, backend: str, inputs: Inputs, sums: Sums, scale: float) -> None:
        """Write the results into ``sums``, which have no content yet."""
        if self.plans():
            with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]  # Triton uses the current device
                lse = backends.find(backend).forward(self, inputs, Options(scale), out=sums.out).lse
            sums.lse_bnh.copy_(lse.transpose(1, 2))

    def write_gradients_(
        self, backend: str, inputs: Inputs, rows: RowGradients, grads: Inputs, scale: float
    ) -> None:  # fmt: skip
        """Write the gradients into ``grads`` (float32), which have no content yet."""
        if self.plans():
            lse, dlse = (None if x is None else x.transpose(1, 2).contiguous() for x in (rows.lse_bnh, rows.dlse_bnh))
            assert lse is not None
            results, upstream = Results(rows.out, lse), Upstream(rows.dout, dlse)
            with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
                backends.find(backend).backward(self, inputs, results, upstream, Options(scale), grads=grads)


@lru_cache(maxsize=64)
def _plans(problem: OwnRows) -> tuple[tuple[Span, Plan], ...]:
    shards, found = problem.shards, []
    (own,) = shards.chunks[problem.rank]
    whole = Problem.spans(problem)
    return tuple(found)
