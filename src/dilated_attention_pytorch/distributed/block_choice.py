"""Adaptive block patterns across ranks: each chooses for its own queries, then asks the others for what it chose.

The choice needs the mean query and the mean key of every block. Blocks may be shared by ranks, so the sums of rows are
added up over all ranks: one number in ``block_size`` of the queries and keys. A request is a bit (a byte) for every block
of the rank that is asked.

Shape letters: B samples of a sequence, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.distributed.block_schedule import (
    BlockSchedule,
    Ranges,
    joined,
    overlap,
    positions_read,
)
from dilated_attention_pytorch.distributed.block_work import BlockPlace, blocks_of, named_blocks, shared
from dilated_attention_pytorch.distributed.route import Message
from dilated_attention_pytorch.distributed.transport import Parcel, Wire, failure
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.patterns.rules import add_to_blocks_, best_blocks
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.shards import Shards


def adaptive_places(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    shards: Shards,
    wire: Wire,
    scale: float,
    *,
    is_causal: bool,
    lengths: tuple[int, ...] | None,
    cu_seqlens: tuple[int, ...] | None,
) -> tuple[BlockPlace, ...]:
    """The places of a pattern that depends on content: of other ranks' lists they know what is asked of this one."""
    (batch, _, heads, _), key_heads, size = query.shape, key.shape[2], pattern.block_size
    config, shape = SparsePatternConfig.from_spec(pattern.spec), (batch, heads, key_heads)
    every = list(spans(batch, shards.length, shards.length, lengths, cu_seqlens))
    means = _means(query, key, every, shards, wire, size)
    found = []
    for span, (q_mean, k_mean) in zip(every, means, strict=True):
        blocks, within = -(-span.length // size), shards.within(range(span.keys.start, span.keys.stop))
        rows = config.rows(0, blocks, is_causal)
        chosen: list[BlockLists | None] = []
        for chunk in within.chunks[wire.rank]:
            if not chunk:
                chosen.append(None)
                continue
            mine = slice(chunk.start // size, -(-chunk.stop // size))
            budget = rows[mine].budget.long()
            best = best_blocks(q_mean[:, :, mine], k_mean, rows[mine].to(query.device), scale, int(budget.max())).cpu()
            starts = torch.arange(best[..., 0].numel()).view(best.shape[:3]) * best.shape[3]
            chosen.append(BlockLists(budget.expand(starts.shape), starts, best.flatten(), size, blocks, mine.start))
        for samples, queries, keys in shared(span, shape, (batch, heads)):
            sample = slice(samples.start - span.samples.start, samples.stop - span.samples.start)
            lists = tuple(None if x is None else x.of_samples(sample).of_heads(queries) for x in chosen)
            named = [() if x is None else named_blocks(x) for x in lists]
            read: list[Ranges] = [()] * shards.world_size
            read[wire.rank] = positions_read(within.chunks[wire.rank], named, size, span.length, is_causal=is_causal)
            schedule = BlockSchedule(within, tuple(read))
            found.append(BlockPlace(samples, queries, keys, span.keys.start, schedule, lists, shards))
    return _with_requests(found, wire, size, query.device)


def _means(
    query: Tensor, key: Tensor, every: list[Span], shards: Shards, wire: Wire, size: int
) -> list[tuple[Tensor, Tensor]]:
    """For every sequence the means (B, H, blocks, D) and (B, G, blocks, D) of its blocks, whoever holds them."""
    heads, both = query.shape[2], query.shape[2] + key.shape[2]
    shapes = [(s.samples.stop - s.samples.start, -(-s.length // size), both, query.shape[3]) for s in every]
    counts = [b * blocks * h * d for b, blocks, h, d in shapes]
    flat = torch.zeros(sum(counts), dtype=accumulate_dtype(query.dtype), device=query.device)
    sums = [x.view(shape) for x, shape in zip(torch.split(flat, counts), shapes, strict=True)]
    for span, some in zip(every, sums, strict=True):
        first = span.keys.start
        for number, chunk in enumerate(shards.within(range(first, span.keys.stop)).chunks[wire.rank]):
            if chunk:
                rows = shards.rows_of(wire.rank, number, range(first + chunk.start, first + chunk.stop))
                for x, part in ((query, some[:, :, :heads]), (key, some[:, :, heads:])):
                    add_to_blocks_(part, x[span.samples, rows].detach(), chunk.start, size)
    _sum_over_ranks_(flat, wire)
    means = []
    for span, some in zip(every, sums, strict=True):
        sizes = torch.full((some.shape[1], 1, 1), float(size), dtype=flat.dtype, device=flat.device)
        sizes[-1] = span.length - (some.shape[1] - 1) * size
        mean = (some / sizes).transpose(1, 2)
        means.append((mean[:, :heads], mean[:, heads:]))
    return means


def _sum_over_ranks_(flat: Tensor, wire: Wire) -> None:
    if len(wire.global_ranks) == 1:
        return
    total = flat.cpu() if wire.staged else flat
    try:
        dist.all_reduce(total, group=wire.group)
    except RuntimeError as error:
        raise failure(f"rank {wire.rank} could not add up the means of blocks with the others", error) from error
    if wire.staged:
        flat.copy_(total)


def _asked(place: BlockPlace, rank: int, size: int) -> list[range]:
    """The blocks of each of a rank's chunks, which bits of a request stand for."""
    return [blocks_of(chunk, size) if chunk else range(0) for chunk in place.schedule.shards.chunks[rank]]


def _with_requests(places: list[BlockPlace], wire: Wire, size: int, device: torch.device) -> tuple[BlockPlace, ...]:
    """The places with what the other ranks read of this one's rows."""
    rank, world = wire.rank, len(wire.global_ranks)
    sends, receives = [], []
    mine = sum(len(blocks) for place in places for blocks in _asked(place, rank, size))
    for p in range(world):
        if p == rank:
            continue
        bits = []
        for place in places:
            for chunk, blocks in zip(place.schedule.shards.chunks[p], _asked(place, p, size), strict=True):
                some = torch.zeros(len(blocks), dtype=torch.uint8)
                for x in overlap(place.schedule.read[rank], chunk) if chunk else ():
                    wanted = blocks_of(x, size)
                    some[wanted.start - blocks.start : wanted.stop - blocks.start] = 1
                bits.append(some)
        request = torch.cat(bits) if bits else torch.zeros(0, dtype=torch.uint8)
        sends.append(Parcel(Message(rank, p, 0, "the choice of blocks", ()), "requests", p, request.to(device)))
        arrival = torch.empty(mine, dtype=torch.uint8, device=device)
        receives.append(Parcel(Message(p, rank, 0, "the choice of blocks", ()), "requests", p, arrival))
    wire.start(sends, receives, wire.now())()
    asked = {parcel.peer: parcel.rows.cpu() for parcel in receives}
    result, first = [], 0
    for place in places:
        read: list[list[range]] = [[] for _ in range(world)]
        for chunk, blocks in zip(place.schedule.shards.chunks[rank], _asked(place, rank, size), strict=True):
            for p, bits_of_p in asked.items():
                for b in bits_of_p[first : first + len(blocks)].nonzero().flatten().tolist():
                    start = (blocks.start + b) * size
                    read[p].append(range(max(start, chunk.start), min(start + size, chunk.stop)))
            first += len(blocks)
        known = [place.schedule.read[rank] if p == rank else joined(some) for p, some in enumerate(read)]
        result.append(replace(place, schedule=BlockSchedule(place.schedule.shards, tuple(known))))
    return tuple(result)
