"""Chunks of many tokens against a cache: tiles of a stock kernel, with positions that the host reads once.

The rows that a cache holds are packed keys, like the rows of a message from another rank. Samples at the same position
with equally many tokens are computed together.

Shape letters: B batch, n rows of a chunk, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.loop import StockCalls, Sums, TileKernel, attend_, partial_limit, positive_scale
from dilated_attention_pytorch.execute.step import CacheTensors
from dilated_attention_pytorch.execute.strided import StridedTiles
from dilated_attention_pytorch.plan.held import HeldBranch, HeldRows
from dilated_attention_pytorch.plan.tiles import compile_plan
from dilated_attention_pytorch.values import Inputs, Results

# Keys and values (b, rows, G, D) of the open segment of a branch: of each head its rows, one after the other.
BranchRows = tuple[Tensor, Tensor]
# The attention of tokens of these samples, which are all at this position.
AttendSamples = Callable[[Sequence[int], int, Inputs], Results]


def held_rows(branch: HeldBranch, storage: CacheTensors, samples: Sequence[int], position: int) -> BranchRows | None:
    """The rows that a branch holds of samples that are all at this position; views of the storage where possible."""
    count = -(-(position % branch.segment_length) // branch.dilation_rate)
    if count == 0:
        return None
    start = branch.slot(position - position % branch.segment_length)
    before_end = min(count, branch.first_row + branch.slots - start)

    def rows(x: Tensor) -> Tensor:
        x = x if len(samples) == len(x) else x[list(samples)]
        own = x[:, :, start : start + before_end]
        if before_end < count:
            own = torch.cat((own, x[:, :, branch.first_row : branch.first_row + count - before_end]), 2)
        return own.transpose(1, 2)

    return rows(storage.keys), rows(storage.values)


def attend_chunk(
    held: HeldRows, position: int, inputs: Inputs, rows: Sequence[BranchRows | None], scale: float, kernel: TileKernel
) -> Results:
    """The causal attention of the tokens from ``position`` on, given the rows that each branch holds of earlier tokens."""
    query, scale, _ = positive_scale(inputs.query, scale)
    inputs, how = inputs._replace(query=query), StockCalls(kernel, scale, partial_limit(query))
    sums, (n, key_heads) = Sums.like(query), inputs.key.shape[1:3]
    for branch, own in zip(held.branches, rows, strict=True):
        pattern, w = branch.pattern, branch.segment_length
        start = position % w
        # Inside of one segment, only the position modulo the rate matters. So the cache of plans finds the plan again.
        first = start if start + n > w else start % branch.dilation_rate
        chunk = range(first, first + n)
        plan = compile_plan(pattern, chunk.stop, key_heads, is_causal=True, queries=chunk, keys=chunk)
        attend_(StridedTiles(plan), inputs, sums, how)
        if own is not None:
            stop = min(start + n, w)
            sizes = pattern, stop, key_heads
            plan = compile_plan(*sizes, is_causal=True, queries=range(start, stop), keys=range(start))
            at = slice(0, stop - start)
            tokens = Inputs(query[:, at], *own)
            attend_(StridedTiles(plan, packed=True), tokens, Sums(sums.out[:, at], sums.lse_bnh[:, at]), how)
    return sums.results(query.dtype)


def equal_samples(positions: Sequence[int], lengths: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """The samples with tokens, by position and number of tokens.

    >>> equal_samples([0, 4, 0], [5, 5, 5])
    {(0, 5): [0, 2], (4, 5): [1]}
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sample, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        if length > 0:
            found[position, length].append(sample)
    return dict(found)


def chunk(inputs: Inputs, at: tuple[Sequence[int], Sequence[int]], attend_samples: AttendSamples) -> Results:
    """The attention of a chunk, ``at`` the position and with the length of each sample, one set of samples at a time."""
    query = inputs.query
    batch, n, heads, _ = query.shape
    sets = equal_samples(*at)
    if list(sets.values()) == [list(range(batch))] and next(iter(sets))[1] == n:
        return attend_samples(range(batch), next(iter(sets))[0], inputs)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full((batch, heads, n), -torch.inf, dtype=accumulate_dtype(query.dtype), device=query.device)
    for (position, length), samples in sets.items():
        own = Inputs(*(x[samples, :length] for x in inputs))
        out[samples, :length], lse[samples, :, :length] = attend_samples(samples, position, own)
    return Results(out, lse)
