"""The problem of a sharded call, and the backends of a rank's tiles.

Fused kernels may compute own queries with own keys, before messages are merged. They take contiguous shards only: there,
each row of a branch is in one tile, as launch tables have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call, Sharding, check_blocks_fit
from dilated_attention_pytorch.execute.loop import RowGradients, Sums
from dilated_attention_pytorch.lengths import host_cu_seqlens, host_lengths
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import BlockRule, Problem, find_problem
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options, Saved

# "auto" takes the Hopper kernels from this many branches. They write the rows of all branches once, while stock operators
# merge call by call. For one branch, cuDNN's kernels are faster. Milliseconds, sdpa / hopper, forward and backward of
# 262,144 tokens, 8 heads of size 64, bf16, ranks that share one H200 (results/h200_ring_backends.json):
#   ranks                          1            2             4
#   w = 2048 * 4**i, r = 4**i   18.8 / 15.3   23.5 / 18.0    32.7 / 29.4
#   w = N, r = 4                71.1 / 76.2  115.5 / 119.2  131.8 / 132.9
HOPPER_FROM_BRANCHES = 2


def sharding_of(call: Call) -> Sharding:
    """The sharding of a sharded call."""
    assert call.sharding is not None
    return call.sharding


def whole_problem(call: Call, length: int) -> Problem:
    """The problem of a sharded call over the whole sequence, for which the arguments are checked."""
    check_blocks_fit(call, length, length)
    pattern: str | BlockRule = call.plan_pattern.spec
    if isinstance(call.pattern, BlockSparse):
        given = call.pattern.given_causal if call.plan_is_causal else call.pattern.given
        pattern = BlockRule(call.pattern.block_size, call.pattern.config, given)
    sequences = host_lengths(call.lengths, length), host_cu_seqlens(call.cu_seqlens, length)
    sizes = call.batch, length, length, call.heads, call.key_heads
    return find_problem(pattern, call.plan_is_causal, *sizes, *sequences)


def stock_backend(backend: str, request: Request) -> str:
    """The backend of stock kernels that computes tiles, always those with keys of other ranks."""
    if backend == "reference":
        raise ValueError("backend 'reference' needs whole sequences: leave out group, or use 'auto'")
    reasons = backends.find("sdpa").why_not(request)
    if backend == "sdpa":
        _raise_if(reasons, backend)
    return "eager" if backend == "eager" or reasons else "sdpa"


def _raise_if(reasons: list[str], backend: str) -> None:
    if reasons:
        raise ValueError(f"backend {backend!r} cannot serve this call:\n" + "\n".join(f"  {x}" for x in reasons))


def fused_backend(call: Call, request: Request) -> str | None:
    """The backend whose fused kernels compute own queries with own keys; None if stock kernels do.

    ``"auto"`` takes the Hopper kernels where they are possible and faster. Ranks on different GPUs may therefore choose
    differently, which changes nothing that travels. A backend that is asked for and cannot serve the call is an error.
    """
    if call.backend == "auto":
        branches = len(call.pattern.branches) if isinstance(call.pattern, Dilated) else 0
        possible = branches >= HOPPER_FROM_BRANCHES and not _why_not("hopper", call, request)
        return "hopper" if possible else None
    if call.backend not in ("hopper", "triton"):
        return None
    _raise_if(_why_not(call.backend, call, request), call.backend)
    return call.backend


def _why_not(backend: str, call: Call, request: Request) -> list[str]:
    reasons, layout = backends.find(backend).why_not(request), sharding_of(call).layout
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows(Problem):
    """The problem of a rank's own queries and keys, as fused kernels read it. Lengths count the whole sequence."""

    shards: Shards
    rank: int

    @staticmethod
    def of(problem: Problem, shards: Shards, rank: int) -> OwnRows:
        """The rows of a rank in a problem of the whole sequence."""
        rows, sizes = shards.rows(rank), (problem.heads, problem.key_heads, problem.lengths, problem.cu_seqlens)
        return OwnRows(problem.pattern, problem.is_causal, problem.batch, rows, rows, *sizes, shards=shards, rank=rank)

    def spans(self) -> tuple[Span, ...]:
        """The rows that this rank has of each sequence."""
        return tuple(span for span, _ in self.plans())

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The same with their plans, which count positions of the whole sequence."""
        return _plans(self)


@lru_cache(maxsize=64)
def _plans(problem: OwnRows) -> tuple[tuple[Span, Plan], ...]:
    (own,), length, found = problem.shards.chunks[problem.rank], problem.shards.length, []
    for span in spans(problem.batch, length, length, problem.lengths, problem.cu_seqlens):
        start, stop = max(own.start, span.keys.start), min(own.stop, span.keys.stop)
        if start < stop:
            rows = slice(start - own.start, stop - own.start)
            at = range(start - span.keys.start, stop - span.keys.start)
            sizes = span.length, problem.key_heads
            plan = compile_plan(problem.dilated, *sizes, is_causal=problem.is_causal, queries=at, keys=at)
            found.append((Span(span.samples, rows, rows), plan))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class FusedStep:
    """Own queries with own keys through the fused kernels of a backend. It comes before all other steps."""

    rows: OwnRows
    backend: str

    def attend_(self, inputs: Inputs, sums: Sums, scale: float) -> None:
        """Write the results into ``sums``, which have no content yet."""
        if self.rows.plans():
            lse = self._kernels.forward(self.rows, inputs, Options(scale), out=sums.out).lse
            sums.lse_bnh.copy_(lse.transpose(1, 2))

    def write_gradients_(self, inputs: Inputs, rows: RowGradients, grads: Inputs, scale: float) -> None:
        """Write the gradients into ``grads`` (float32), which have no content yet."""
        if self.rows.plans():
            dlse = None if rows.dlse_bnh is None else rows.dlse_bnh.transpose(1, 2).contiguous()
            saved = Saved(rows.out, rows.lse_bnh.transpose(1, 2).contiguous(), rows.dout, dlse)
            self._kernels.backward(self.rows, inputs, saved, Options(scale), grads=grads)

    @property
    def _kernels(self) -> TableBackend:
        return cast(TableBackend, backends.find(self.backend))
