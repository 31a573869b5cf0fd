"""A chunk of tokens against a cache, through fused kernels.

The tokens of the chunk meet each other as those of a rank do. The rows that the cache holds are packed keys of a
``RunningProblem``, read from their slots. Importing this module does not import triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.gpu.running import RunningProblem, RunningTiles
from dilated_attention_pytorch.execute.step import CacheTensors
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldBranch, HeldRows
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.plan.tiles import Plan, TileFamily, compile_plan
from dilated_attention_pytorch.values import Inputs, Options, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProblem(Problem):
    """The tokens from position ``start`` on, with each other."""

    start: int

    def spans(self) -> tuple[Span, ...]:
        """All rows of all samples."""
        return (Span(slice(0, self.batch), slice(0, self.queries), slice(0, self.keys)),)

    def plans(self) -> tuple[tuple[Span, Plan], ...]:
        """The same with their plan."""
        at = range(self.start, self.start + self.queries)
        (span,) = self.spans()
        return ((span, compile_plan(self.dilated, at.stop, self.key_heads, is_causal=True, queries=at, keys=at)),)


def equivalent_start(pattern: Dilated, position: int, tokens: int) -> int:
    """A small position from which as many tokens meet each other in the same way, so that tables are found again.

    Where the tokens are inside of one segment, only the position of the first one modulo the rate matters.

    >>> equivalent_start(Dilated([64, 2**40], [1, 16]), 2**35 + 83, tokens=10)
    3
    """
    inside = [position % w + tokens <= w for w, _ in pattern.branches]
    periods = [r if within and w % r == 0 else w for within, (w, r) in zip(inside, pattern.branches, strict=True)]
    start = position % lcm(*periods)
    for within, (w, r) in zip(inside, pattern.branches, strict=True):
        same = start % w % r == position % w % r and start % w + tokens <= w if within else start % w == position % w
        if not same:
            return position % lcm(*pattern.segment_lengths)
    return start


def can_attend(held: HeldRows, position: int, tokens: int) -> bool:
    """Whether the positions of a chunk are small enough for the kernels, which count in 32 bits."""
    return equivalent_start(held.pattern, position, tokens) + tokens < 2**31


def _tiles(branch: HeldBranch, number: int, position: int, tokens: int, key_heads: int) -> Iterator[list[TileFamily]]:
    """The tokens at ``position`` with the rows that a branch holds, in order of slots: two sets if these begin again."""
    w, start = branch.segment_length, position % branch.segment_length
    if start == 0:
        return
    stop = min(start + tokens, w)
    sizes = branch.pattern, stop, key_heads
    plan = compile_plan(*sizes, is_causal=True, queries=range(start, stop), keys=range(start))
    slot = branch.slot(position - start)
    before_end = branch.first_row + branch.slots - slot
    families = [replace(f, branch=number, q_start=f.q_start - start) for f in plan.families]
    yield [replace(f, k_start=slot, k_rows=min(f.k_rows, before_end)) for f in families]
    yield [replace(f, k_start=branch.first_row, k_rows=f.k_rows - before_end) for f in families if f.k_rows > before_end]


def held_problem(chunk: ChunkProblem, held: HeldRows, samples: Sequence[int], position: int) -> RunningProblem | None:
    """The tokens of a chunk with the rows that a cache holds of these samples; None if it holds none.

    Rows count over all samples and key heads of the storage.
    """
    tiles = []
    for number, branch in enumerate(held.branches):
        for families in _tiles(branch, number, position, chunk.queries, held.key_heads):
            for row, sample in enumerate(samples):
                first = sample * held.key_heads * held.rows
                own = tuple(replace(f, k_start=first + f.k_start) for f in families)
                tiles += [RunningTiles(row, own, packed=True)] if own else []
    return RunningProblem.of(chunk, tiles, keys=0) if tiles else None


def attend_chunk(
    held: HeldRows, storage: CacheTensors, samples: Sequence[int], position: int, inputs: Inputs, scale: float,
    backend: TableBackend,
) -> Results:  # fmt: skip
    """The causal attention of tokens of these samples, which are all at ``position``."""
    (batch, n, heads, _), key_heads, query = inputs.query.shape, inputs.key.shape[2], inputs.query
    start = equivalent_start(held.pattern, position, n)
    chunk = ChunkProblem(held.pattern, True, batch, n, n, heads, key_heads, start=start)
    earlier = held_problem(chunk, held, samples, position)
    if earlier is None:
        return backend.forward(chunk, inputs, Options(scale))
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=torch.float32, device=query.device)
    backend.forward(chunk, inputs, Options(scale), Results(out, lse))
    rows = Inputs(query, *(_by_row(x, batch) for x in (storage.keys, storage.values)))
    backend.forward(earlier, rows, Options(scale), Results(out, lse))
    return Results(out.to(query.dtype), lse)


def _by_row(x: Tensor, batch: int) -> Tensor:
    """Storage (B, G, S, D) as rows of key heads (batch, rows, G, D), in which samples have no distance."""
    _, key_heads, rows, head_dim = x.shape
    return x.as_strided((batch, rows, key_heads, head_dim), (0, head_dim, rows * head_dim, 1))
