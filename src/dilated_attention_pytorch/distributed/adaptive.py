"""Adaptive block patterns across ranks: each rank chooses key blocks for its own queries, and asks the others for them.

The choice needs the mean query and the mean key of every block. Several ranks may hold a block, so the sums of its rows are
added over all ranks: one number for ``block_size`` numbers of queries and keys. A request has a byte for every block of the
rank that is asked.

Shape letters: B samples of a sequence, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.rank_plans import ChunkLists, ListedShards, read_by, sharing
from dilated_attention_pytorch.distributed.schedules import BlockSchedule, Ranges, blocks_of, joined, overlap
from dilated_attention_pytorch.distributed.wire import Parcel, Wire
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.adaptive import add_to_blocks_, best_blocks
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs


def adaptive_sequences(
    problem: Problem, shards: Shards, inputs: Inputs, scale: float, wire: Wire
) -> tuple[ListedShards, ...]:
    """The sequences of a pattern that depends on content. Their schedules have what this rank sends and receives."""
    sequences = []
    for span, means in _means(problem, shards, inputs, wire):
        within = shards.within(range(span.keys.start, span.keys.stop))
        chunks = within.chunks[wire.rank]
        chosen = tuple(_choice(problem, span, chunk, means, scale) for chunk in chunks)
        for samples, heads, key_heads in sharing(problem, span, (problem.batch, problem.heads)):
            sample = slice(samples.start - span.samples.start, samples.stop - span.samples.start)
            lists: ChunkLists = tuple(None if x is None else x.of_samples(sample).of_heads(heads) for x in chosen)
            read: list[Ranges] = [()] * shards.world_size
            read[wire.rank] = read_by(problem, chunks, lists, span.length)
            schedule = BlockSchedule(within, tuple(read))
            sequences.append(ListedShards(samples, key_heads, span.keys.start, shards, schedule, heads, lists))
    return _with_requests(sequences, problem.blocks.block_size, wire)


def _choice(problem: Problem, span: Span, chunk: range, means: tuple[Tensor, Tensor], scale: float) -> BlockLists | None:
    """The lists of a chunk's query blocks, by the means of all blocks."""
    if not chunk:
        return None
    (q_mean, k_mean), size, config = means, problem.blocks.block_size, problem.blocks.config
    assert config is not None
    blocks, own = -(-span.length // size), blocks_of(chunk, size)
    rows = config.rows(0, blocks, problem.is_causal)[own.start : own.stop]
    budget = rows.budget.long()
    queries = q_mean[:, :, own.start : own.stop]
    best = best_blocks(queries, k_mean, rows.to(q_mean.device), scale, int(budget.max())).cpu()
    starts = torch.arange(best[..., 0].numel(), device="cpu").view(best.shape[:3]) * best.shape[3]
    return BlockLists(budget.expand(starts.shape), starts, best.flatten(), size, blocks, own.start)


def _means(problem: Problem, shards: Shards, inputs: Inputs, wire: Wire) -> Iterator[tuple[Span, tuple[Tensor, Tensor]]]:
    """The sequences, each with the means (B, H, blocks, D) and (B, G, blocks, D) of its blocks on all ranks."""
    query, key, size, heads = inputs.query, inputs.key, problem.blocks.block_size, problem.heads
    spans = problem.spans()
    shapes = [
        (s.samples.stop - s.samples.start, -(-s.length // size), heads + problem.key_heads, query.shape[3]) for s in spans
    ]
    counts = [b * blocks * h * d for b, blocks, h, d in shapes]
    flat = torch.zeros(sum(counts), dtype=accumulate_dtype(query.dtype), device=query.device)
    sums = [x.view(shape) for x, shape in zip(torch.split(flat, counts), shapes, strict=True)]
    for span, own in zip(spans, sums, strict=True):
        first = span.keys.start
        for chunk in shards.within(range(first, span.keys.stop)).chunks[wire.rank]:
            if chunk:
                rows = shards.rows_of(wire.rank, range(first + chunk.start, first + chunk.stop))
                for x, x_sums in ((query, own[:, :, :heads]), (key, own[:, :, heads:])):
                    add_to_blocks_(x_sums, x[span.samples, rows].detach(), chunk.start, size)
    if len(wire.global_ranks) > 1:
        total = flat.cpu() if wire.staged else flat
        with wire.watch.waiting("add up the means of blocks with the others"):
            dist.all_reduce(total, group=wire.group)
        flat.copy_(total)  # the same tensor, unless it went through the host
    for span, own in zip(spans, sums, strict=True):
        sizes = torch.full((own.shape[1], 1, 1), float(size), dtype=flat.dtype, device=flat.device)
        sizes[-1] = span.length - (own.shape[1] - 1) * size
        mean = (own / sizes).transpose(1, 2)
        yield span, (mean[:, :heads], mean[:, heads:])


def _with_requests(sequences: list[ListedShards], size: int, wire: Wire) -> tuple[ListedShards, ...]:
    """The sequences with what the other ranks read of this rank's rows."""
    rank, name, sends, receives = wire.rank, "the choice of blocks", [], []
    own_chunks = [chunk for sequence in sequences for chunk in sequence.schedule.shards.chunks[rank]]
    asked = sum(len(blocks_of(chunk, size)) for chunk in own_chunks)
    for p in range(len(wire.global_ranks)):
        if p != rank:
            request = _request(sequences, size, rank, p).to(wire.device)
            sends.append(Parcel(Message(rank, p, 0, name), "requests", p, request))
            arrival = torch.empty(asked, dtype=torch.uint8, device=wire.device)
            receives.append(Parcel(Message(p, rank, 0, name), "requests", p, arrival))
    wire.start(sends, receives, wire.now())()
    requests = {parcel.peer: parcel.rows.cpu() for parcel in receives}
    result, first = [], 0
    for sequence in sequences:
        schedule = sequence.schedule
        read: list[list[range]] = [list(ranges) for ranges in schedule.read]
        for chunk in schedule.shards.chunks[rank]:
            blocks = blocks_of(chunk, size)
            for p, request in requests.items():
                for b in request[first : first + len(blocks)].nonzero().flatten().tolist():
                    start = (blocks.start + b) * size
                    read[p].append(range(max(start, chunk.start), min(start + size, chunk.stop)))
            first += len(blocks)
        result.append(replace(sequence, schedule=replace(schedule, read=tuple(map(joined, read)))))
    return tuple(result)


def _request(sequences: list[ListedShards], size: int, rank: int, peer: int) -> Tensor:
    """One byte for every block of another rank's chunks: whether this rank reads it."""
    wanted = [torch.zeros(0, dtype=torch.uint8, device="cpu")]
    for sequence in sequences:
        for chunk in sequence.schedule.shards.chunks[peer]:
            blocks = blocks_of(chunk, size)
            wanted.append(torch.zeros(len(blocks), dtype=torch.uint8, device="cpu"))
            for x in overlap(sequence.schedule.read[rank], chunk) if chunk else ():
                named = blocks_of(x, size)
                wanted[-1][named.start - blocks.start : named.stop - blocks.start] = 1
    return torch.cat(wanted)
