"""The problem of a sharded call, and the backends of a rank's tiles.

Fused kernels compute own queries with own keys, chunk by chunk: there, each row of a branch is in one tile, as launch
tables have it. The tiles between different chunks, and between own queries and each message, are added to these results.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.gpu.running import (
    BlockSpan,
    RunningBlocks,
    RunningProblem,
    RunningTiles,
    running_tiles,
)
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call, Sharding, check_blocks_fit
from dilated_attention_pytorch.distributed.messages import Message, RankPlan
from dilated_attention_pytorch.distributed.rank_plans import BlockStep, DilatedStep
from dilated_attention_pytorch.execute.loop import RowGradients, Sums
from dilated_attention_pytorch.lengths import host_cu_seqlens, host_samples
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.problem import BlockRule, Problem, find_problem
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


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
    starts, lengths = host_samples(call.starts, call.lengths, length)
    sequences = lengths, host_cu_seqlens(call.cu_seqlens, length), None, starts
    sizes = call.batch, length, length, call.heads, call.key_heads
    return find_problem(pattern, call.plan_is_causal, *sizes, *sequences)


def stock_backend(backend: str, request: Request) -> str:
    """The backend of stock kernels, which computes the tiles that fused kernels do not compute."""
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
    """The backend whose fused kernels compute the tiles of ranks; None if stock kernels do.

    ``"auto"`` takes the Hopper kernels where they are possible. A forward of a message takes 0.76 to 1.00 of the time of
    stock operators, a backward 0.77 to 1.11 (results/h200_messages.json). Ranks on different GPUs may therefore choose
    differently, which changes nothing that travels. A backend that is asked for and cannot serve the call is an error.
    """
    if call.backend == "auto":
        return None if _why_not("hopper", call, request) else "hopper"
    if call.backend not in ("hopper", "triton"):
        return None
    _raise_if(_why_not(call.backend, call, request), call.backend)
    return call.backend


def _why_not(backend: str, call: Call, request: Request) -> list[str]:
    reasons = backends.find(backend).why_not(request)
    if isinstance(call.pattern, BlockSparse) and (call.pattern.is_adaptive or _differs_by_head(call.pattern)):
        reasons.append("block lists of sharded sequences that differ by head go through 'sdpa' or 'eager'")
    if is_detached(call) or request.dropout_p > 0.0 or request.masks_by_position:
        reasons.append("detached mixing, dropout and causal orders of sharded sequences go through 'sdpa' or 'eager'")
    return reasons


def _differs_by_head(pattern: BlockSparse) -> bool:
    return pattern.given is not None and pattern.given.counts.shape[1] > 1


def fused_step(call: Call, backend: str | None, rows: OwnRows) -> FusedStep | None:
    """The fused kernels of a rank, whose shards are known now; None if stock kernels compute the tiles."""
    if backend is None:
        return None
    reasons = []
    if backend == "hopper" and isinstance(rows.pattern, BlockRule):
        size = rows.blocks.block_size
        if not _begin_with_blocks(rows.shards, size, rows.cu_seqlens, rows.starts):
            reasons.append(f"Hopper kernels take chunks that begin at multiples of {size}, the block size")
    if call.backend == "auto" and reasons:
        return None
    _raise_if(reasons, backend)
    return FusedStep(rows, backend)


@lru_cache(maxsize=64)
def _begin_with_blocks(
    shards: Shards, block_size: int, cu_seqlens: tuple[int, ...] | None, starts: tuple[int, ...] | None
) -> bool:
    """Whether all chunks of all ranks begin with a block of their sequence: every rank finds the same."""
    begins = [chunk.start for chunks in shards.chunks for chunk in chunks if chunk]
    if starts is not None:
        return all(begin <= start or (begin - start) % block_size == 0 for start in set(starts) for begin in begins)
    firsts = cu_seqlens or (0,)
    return all((begin - firsts[max(0, bisect_right(firsts, begin) - 1)]) % block_size == 0 for begin in begins)


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
        rows, sequences = shards.rows(rank), (problem.lengths, problem.cu_seqlens, None, problem.starts)
        sizes = problem.batch, rows, rows, problem.heads, problem.key_heads
        return OwnRows(problem.pattern, problem.is_causal, *sizes, *sequences, shards=shards, rank=rank)

    def spans(self) -> tuple[Span, ...]:
        """The rows that this rank has of each sequence."""
        return tuple(span for span, _ in self.plans())

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The same with their plans, which count positions of the whole sequence. Each chunk meets itself."""
        chunks = self.shards.chunks[self.rank]
        return _plans(self) if len(chunks) == 1 else _plans_of_chunks(self)


@lru_cache(maxsize=4)
def _plans_of_chunks(problem: OwnRows) -> tuple[tuple[Span, Plan], ...]:
    found, first = [], 0
    for chunk in problem.shards.chunks[problem.rank]:
        others = range(chunk.start), range(chunk.stop, problem.shards.length)
        for span, plan in _plans(replace(problem, shards=Shards(((chunk,), others)), rank=0)):
            rows = slice(first + span.queries.start, first + span.queries.stop)
            found.append((Span(span.samples, rows, rows), plan))
        first += len(chunk)
    return tuple(found)


@lru_cache(maxsize=4)  # a rank holds few problems at a time, and the plans of 2,000 documents take about 10 MB
def _plans(problem: OwnRows) -> tuple[tuple[Span, Plan], ...]:
    (own,), length, found = problem.shards.chunks[problem.rank], problem.shards.length, []
    for span in spans(problem.batch, length, length, problem.lengths, problem.cu_seqlens, own, problem.starts):
        start, stop = max(own.start, span.keys.start), min(own.stop, span.keys.stop)
        if start < stop:
            rows = slice(start - own.start, stop - own.start)
            at = range(start - span.keys.start, stop - span.keys.start)
            sizes = span.length, problem.key_heads
            plan = compile_plan(problem.dilated, *sizes, is_causal=problem.is_causal, queries=at, keys=at)
            found.append((Span(span.samples, rows, rows), plan))
    return tuple(found)


@lru_cache(maxsize=4)  # as above: a cache must not keep many plans
def _messages(plan: RankPlan, own: Problem) -> dict[int, tuple[Problem, ...]]:
    """The tiles of messages by tick, as far as ``received`` has made them."""
    return {}


def received(plan: RankPlan, tick: int, own: Problem) -> tuple[Problem, ...]:
    """The tiles of a rank's queries with the rows of the message of a tick."""
    made = _messages(plan, own)
    if tick not in made:
        made[tick] = _make_received(plan, tick, own)
    return made[tick]


def _make_received(plan: RankPlan, tick: int, own: Problem) -> tuple[Problem, ...]:
    _, message = plan.ticks[tick]
    assert message is not None
    tiles: list[RunningTiles] = []
    blocks: list[RunningBlocks] = []
    first = 0
    for section in message.sections:
        samples, rows, _ = section.shape
        for step in section.steps():
            at, queries = step.queries[:2]
            if isinstance(step, DilatedStep):
                tiles += running_tiles(step.plan, range(at.start, at.stop), queries.start, first, rows)
            elif isinstance(step, BlockStep):
                keys = slice(first + step.keys[1].start, first + step.keys[1].stop)
                span = BlockSpan(at, queries, keys, step.rows, rows)
                shared = any(_share(span, other.span)[1] for other in blocks)
                blocks.append(RunningBlocks.of(own, span, step.lists, step.is_causal, True, shared))
        first += samples * rows
    return (RunningProblem.of(own, tiles, keys=0),) if tiles else tuple(blocks)


@lru_cache(maxsize=4)
def _across(plan: RankPlan, own: Problem) -> tuple[Problem, ...]:
    """The tiles between different chunks of a rank, if it has several: those of the zigzag layout."""
    tiles: list[RunningTiles] = []
    for step in plan.own:
        assert isinstance(step, DilatedStep)
        if step.plan.queries != step.plan.keys:
            (at, queries), (_, keys) = step.queries, step.keys
            tiles += running_tiles(step.plan, range(at.start, at.stop), queries.start, keys.start)
    return (RunningProblem.of(own, tiles, keys=own.keys),) if tiles else ()


@lru_cache(maxsize=4)
def _own_blocks(plan: RankPlan, own: Problem) -> tuple[Problem, ...]:
    """The block lists of a rank's queries with its own keys. Those that share rows with others are added to these."""
    steps = [step for step in plan.own if isinstance(step, BlockStep)]
    found: list[RunningBlocks] = []
    for step in sorted(steps, key=lambda step: step.queries[1] != step.keys[1]):
        (at, queries, _), (_, keys, _) = step.queries, step.keys
        span = BlockSpan(at, queries, keys, step.rows, 0)
        shared = [any(sides) for sides in zip(*(_share(span, other.span) for other in found), strict=True)] or [False] * 2
        found.append(RunningBlocks.of(own, span, step.lists, step.is_causal, *shared))
    return tuple(found)


def _share(x: Span, y: Span) -> tuple[bool, bool]:
    """Whether two spans have query rows of a sample in common, and key rows."""
    pairs = (x.samples, y.samples), (x.queries, y.queries), (x.keys, y.keys)
    samples, queries, keys = (bool(a.start < b.stop and b.start < a.stop) for a, b in pairs)
    return samples and queries, samples and keys


@dataclass(frozen=True, slots=True)
class FusedStep:
    """The tiles of a rank through the fused kernels of a backend: own queries with own keys, then with each message."""

    rows: OwnRows
    backend: str

    def sums(self, query: Tensor) -> Sums:
        """The neutral element of the merge, with lse in the order of kernels."""
        batch, n, heads, _ = query.shape
        lse = torch.full((batch, heads, n), -torch.inf, dtype=torch.float32, device=query.device)
        return Sums(torch.zeros(query.shape, dtype=torch.float32, device=query.device), lse.transpose(1, 2))

    def attend_(self, plan: RankPlan, inputs: Inputs, sums: Sums, scale: float) -> None:
        """Write the results of own keys into ``sums``, which have no content yet."""
        for problem in self.own_problems(plan):
            self.run_(problem, inputs, sums, scale)

    def attend_message_(
        self, plan: RankPlan, message: Message, flat: Tensor, inputs: Inputs, sums: Sums, scale: float
    ) -> None:
        """Merge the results of a message into ``sums``."""
        for problem in received(plan, message.tick, self.sizes):
            self.run_(problem, received_inputs(inputs, flat), sums, scale)

    def run_(self, problem: Problem, inputs: Inputs, sums: Sums, scale: float) -> None:
        """Run the kernels of one problem."""
        self.kernels.forward(problem, inputs, Options(scale), Results(sums.out, sums.lse_bnh.transpose(1, 2)))

    def gradients(self, plan: RankPlan, inputs: Inputs, rows: RowGradients, grads: Inputs, scale: float) -> FusedGradients:
        """The backward of a call, given its merged results. It adds to ``grads`` (float32), which have no content yet."""
        dlse = None if rows.dlse_bnh is None else rows.dlse_bnh.transpose(1, 2).contiguous()
        saved, options = Saved(rows.out, rows.lse_bnh.transpose(1, 2).contiguous(), rows.dout, dlse), Options(scale)
        statistics = self.kernels.row_statistics(self.rows, saved, options)
        return FusedGradients(self, plan, inputs, rows.dout, statistics, grads, options)

    def own_problems(self, plan: RankPlan) -> tuple[Problem, ...]:
        """Own queries with own keys, in the order in which they are computed."""
        if not isinstance(self.rows.pattern, Dilated):
            return _own_blocks(plan, self.sizes)
        own: tuple[Problem, ...] = (self.rows,) if self.rows.plans() else ()
        return own + _across(plan, self.sizes)

    @property
    def kernels(self) -> TableBackend:
        """The backend."""
        return cast(TableBackend, backends.find(self.backend))

    @property
    def sizes(self) -> Problem:
        """The problem of the rows without their positions, which is quickly compared."""
        rows = self.rows
        return Problem(rows.pattern, rows.is_causal, rows.batch, rows.queries, rows.keys, rows.heads, rows.key_heads)


@dataclass(frozen=True, slots=True)
class FusedGradients:
    """The backward of a rank's tiles through fused kernels."""

    step: FusedStep
    plan: RankPlan
    inputs: Inputs
    dout: Tensor
    statistics: Any
    grads: Inputs
    options: Options

    def write_own_(self) -> None:
        """Write the gradients of own queries with own keys."""
        for problem in self.step.own_problems(self.plan):
            self._run_(problem, self.inputs, self.grads)

    def add_message_(self, message: Message, arrived: Tensor, returning: Tensor) -> None:
        """Add the gradients of a message's tiles to those of the queries, and write those of its rows to ``returning``."""
        problems = received(self.plan, message.tick, self.step.sizes)
        key_heads, head_dim = self.inputs.key.shape[2:]
        written = sum(x.key_rows for x in problems if isinstance(x, RunningBlocks) and not x.running_keys)
        if 2 * written * key_heads * head_dim != returning.numel():
            returning.zero_()
        for problem in problems:
            self._run_(problem, received_inputs(self.inputs, arrived), received_inputs(self.grads, returning))

    def _run_(self, problem: Problem, inputs: Inputs, grads: Inputs) -> None:
        self.step.kernels.gradients(problem, inputs, self.dout, self.statistics, self.options, grads)


def received_inputs(own: Inputs, flat: Tensor) -> Inputs:
    """Own queries, and the keys and values of a message. Their rows count over all samples, so samples have no distance."""
    batch, _, heads, head_dim = own.key.shape
    keys, values = flat.view(2, 1, -1, heads, head_dim).expand(-1, batch, -1, -1, -1)
    return Inputs(own.query, keys, values)
