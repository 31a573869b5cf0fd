"""Adaptive block patterns across ranks: each rank chooses key blocks for its own queries, and asks the others for them.

The choice needs the mean queries of a rank's own blocks and the mean keys of all blocks that its queries may read.
``means`` has the rules by which they travel. Besides them, a rank holds two messages, a limited number of scores, and the
key means of one head in float64. The mean of a block is computed by one rank, in the order of one device, so it has the
same bits on all ranks.

Everything up to the choice is computed on the device of the tensors. The host waits once, for the chosen blocks and the
requests together.

Shape letters: B samples of a sequence, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.listed_shards import ListedShards, read_by, sharing
from dilated_attention_pytorch.distributed.means import HeldSequence, held_sequences
from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.schedules import BlockSchedule, Ranges, blocks_of, joined
from dilated_attention_pytorch.distributed.wire import Parcel, Wire
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.adaptive import best_blocks, block_means
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs

# By rank: tensors that are sent to it, or into which its message is copied.
Copies = defaultdict[int, list[Tensor]]


@dataclass(frozen=True, slots=True)
class ChunkMeans:
    """The mean queries of a chunk of this rank."""

    positions: range
    blocks: range  # of which it holds rows
    owned: range  # which start in it
    queries: Tensor  # (B, H, blocks, D)
    shared: tuple[Tensor, ...]  # queries and keys (B, rows, heads, D) of its last block, if other chunks hold rows of it


@dataclass(frozen=True, slots=True)
class SequenceMeans:
    """The means of a sequence that a rank needs."""

    sequence: HeldSequence
    chunks: tuple[ChunkMeans, ...]  # ascending
    keys: Tensor  # (B, G, blocks, D): of the blocks that its queries may read

    @staticmethod
    def empty(sequence: HeldSequence, rank: int, inputs: Inputs) -> SequenceMeans:
        """Memory for the means and for the rows of shared blocks."""
        size, chunks, (heads, head_dim) = sequence.block_size, [], inputs.query.shape[2:]
        dtype = accumulate_dtype(inputs.query.dtype)
        for chunk in sequence.chunks_of(rank):
            blocks, owned = blocks_of(chunk, size), sequence.owned(chunk)
            stop = min(owned.stop * size, sequence.span.length)  # of the last block
            rows = stop - (owned.stop - 1) * size if owned and stop > chunk.stop else 0
            shared = [x.new_empty((sequence.samples, rows, *x.shape[2:])) for x in (inputs.query, inputs.key) if rows]
            queries = inputs.query.new_empty((sequence.samples, heads, len(blocks), head_dim), dtype=dtype)
            chunks.append(ChunkMeans(chunk, blocks, owned, queries, tuple(shared)))
        shape = sequence.samples, inputs.key.shape[2], sequence.reach()[rank], head_dim
        return SequenceMeans(sequence, tuple(chunks), inputs.key.new_empty(shape, dtype=dtype))

    def owner(self, block: int) -> ChunkMeans:
        """The chunk in which a block starts."""
        return next(chunk for chunk in self.chunks if block in chunk.owned)


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Which blocks of a chunk of this rank another rank reads: a byte for every sample, key head and block."""

    peer: int
    chunk: range
    asked: Tensor  # (B, G, blocks)

    def ranges(self, block_size: int) -> Iterator[tuple[int, int, range]]:
        """The samples, key heads and positions of the chunk that are read."""
        first = self.chunk.start // block_size
        edges = torch.nn.functional.pad(self.asked, (1, 1)).diff(dim=-1).nonzero().tolist()
        for (sample, head, begin), (_, _, end) in zip(edges[::2], edges[1::2], strict=True):
            start, stop = (first + begin) * block_size, (first + end) * block_size
            yield sample, head, range(max(start, self.chunk.start), min(stop, self.chunk.stop))


def adaptive_sequences(
    problem: Problem, shards: Shards, inputs: Inputs, scale: float, wire: Wire
) -> tuple[ListedShards, ...]:
    """The sequences of a pattern that depends on content. Their schedules have what this rank sends and receives."""
    held = held_sequences(problem, shards, wire.rank)
    best, requests = choose_blocks(problem, held, shards, inputs, scale, wire)
    on_host = iter(_on_host([*chain(*best), *(request.asked for request in chain(*requests))]))
    lists = [
        {chunk: _lists(problem, sequence, chunk, next(on_host)) for chunk in sequence.chunks_of(wire.rank)}
        for sequence in held
    ]
    found: list[ListedShards] = []
    for sequence, own_lists, of_sequence in zip(held, lists, requests, strict=True):
        received = [replace(request, asked=next(on_host)) for request in of_sequence]
        found += _listed_shards(problem, shards, sequence, own_lists, received, wire.rank)
    return tuple(found)


def choose_blocks(
    problem: Problem, held: Sequence[HeldSequence], shards: Shards, inputs: Inputs, scale: float, wire: Wire
) -> tuple[list[list[Tensor]], list[list[BlockRequest]]]:
    """For each sequence: the blocks that each chunk of this rank reads, and the requests of other ranks, on the device.

    The host does not wait for the device, apart from messages that travel through host memory.
    """
    with torch.no_grad():
        means = exchange_means(held, shards, inputs, wire)
        best = [[_best(problem, own, chunk, scale) for chunk in own.chunks] for own in means]
        return best, exchange_requests(means, best, wire)


def _listed_shards(
    problem: Problem,
    shards: Shards,
    sequence: HeldSequence,
    lists: dict[range, BlockLists],
    requests: list[BlockRequest],
    rank: int,
) -> Iterator[ListedShards]:
    """A sequence by samples and key heads, with this rank's lists by chunk and the requests of the others."""
    span = sequence.span
    within = shards.within(range(span.keys.start, span.keys.stop))
    chunks = within.chunks[rank]
    by_others: dict[tuple[int, int], dict[int, list[range]]] = defaultdict(lambda: defaultdict(list))
    for request in requests:
        for sample, head, positions in request.ranges(sequence.block_size):
            by_others[sample, head][request.peer].append(positions)
    for samples, heads, key_heads in sharing(problem, span, (problem.batch, problem.heads)):
        sample = samples.start - span.samples.start
        own = tuple(
            lists[chunk].of_samples(slice(sample, sample + 1)).of_heads(heads) if chunk else None for chunk in chunks
        )
        read: list[Ranges] = [()] * shards.world_size
        for peer, ranges in by_others[sample, key_heads.start].items():
            read[peer] = joined(ranges)
        read[rank] = read_by(problem, chunks, own, span.length)
        schedule = BlockSchedule(within, tuple(read))
        at = samples, key_heads, span.keys.start
        yield ListedShards(*at, shards, schedule, heads, own, padding=span.padding)


def exchange_means(held: Sequence[HeldSequence], shards: Shards, inputs: Inputs, wire: Wire) -> list[SequenceMeans]:
    """The means of this rank's query blocks, and of the key blocks that its queries may read."""
    means = [SequenceMeans.empty(sequence, wire.rank, inputs) for sequence in held]

    def rows(sequence: HeldSequence, start: int, stop: int) -> tuple[Tensor, Tensor]:
        first = sequence.span.keys.start
        at = sequence.span.samples, shards.rows_of(wire.rank, range(first + start, first + stop))
        return inputs.query[at].detach(), inputs.key[at].detach()

    _gather_shared_rows(means, rows, wire)
    for own in means:
        for chunk in (x for x in own.chunks if x.owned):
            _compute_means(own, chunk, rows)
    _spread_means(means, wire)
    return means


# The queries and keys of this rank from one position of a sequence to another.
RowsOf = Callable[[HeldSequence, int, int], tuple[Tensor, Tensor]]


def _gather_shared_rows(means: Sequence[SequenceMeans], rows: RowsOf, wire: Wire) -> None:
    """Collect the rows of blocks that start in a chunk of this rank and end in others."""
    sends, receives = Copies(list), Copies(list)
    for own in means:
        for chunk in (x for x in own.chunks if x.shared):
            last = (chunk.owned.stop - 1) * own.sequence.block_size
            mine = rows(own.sequence, last, chunk.positions.stop)
            _copy_(mine, [x[:, : y.shape[1]] for x, y in zip(chunk.shared, mine, strict=True)])
        for p, owner, positions in own.sequence.shared_rows():
            block, first = divmod(positions.start, own.sequence.block_size)
            if p == wire.rank:
                sends[owner] += rows(own.sequence, positions.start, positions.stop)
            if owner == wire.rank:
                receives[p] += [x[:, first : first + len(positions)] for x in own.owner(block).shared]
    _exchange(sends, receives, "rows of blocks", wire)


def _compute_means(means: SequenceMeans, chunk: ChunkMeans, rows: RowsOf) -> None:
    """Write the means of the blocks that start in a chunk."""
    size, stop = means.sequence.block_size, chunk.owned.stop - bool(chunk.shared)  # of the blocks without other holders
    tables = chunk.queries[:, :, chunk.owned.start - chunk.blocks.start :], means.keys[:, :, chunk.owned.start :]
    if stop > chunk.owned.start:
        whole = rows(means.sequence, chunk.owned.start * size, min(stop * size, chunk.positions.stop))
        for table, x in zip(tables, whole, strict=True):
            table[:, :, : stop - chunk.owned.start] = block_means(x, 0, size, table.dtype)
    if chunk.shared:
        for table, x in zip(tables, chunk.shared, strict=True):
            table[:, :, len(chunk.owned) - 1, None] = block_means(x, 0, size, table.dtype)


def _spread_means(means: Sequence[SequenceMeans], wire: Wire) -> None:
    """Send the means of this rank's blocks to the ranks that need them, and receive theirs."""
    rank, sends, receives = wire.rank, Copies(list), Copies(list)
    for own in means:
        sequence, reach = own.sequence, own.sequence.reach()
        for p, positions in sequence.chunks:
            owned = sequence.owned(positions)
            for target in reach if p == rank else (rank,):
                stop = min(owned.stop, reach[target])
                if p != target and owned.start < stop:
                    (receives[p] if target == rank else sends[target]).append(own.keys[:, :, owned.start : stop])
        for p, owner, positions in sequence.shared_rows():
            block = positions.start // sequence.block_size
            if owner == rank:
                chunk = own.owner(block)
                sends[p].append(chunk.queries[:, :, block - chunk.blocks.start])
            if p == rank:
                receives[owner] += [x.queries[:, :, 0] for x in own.chunks if x.positions.start == positions.start]
    _exchange(sends, receives, "means of blocks", wire)


def _best(problem: Problem, means: SequenceMeans, chunk: ChunkMeans, scale: float) -> Tensor:
    """The blocks that the queries of a chunk read, (B, H, query blocks, width), without a device synchronisation."""
    config, blocks = problem.blocks.config, means.sequence.blocks
    assert config is not None
    rows = config.rows(chunk.blocks.start, blocks, problem.is_causal, chunk.queries.device, chunk.blocks.stop)
    visible = chunk.blocks.stop if problem.is_causal else blocks
    width = 1 + visible * config.ratio.numerator // config.ratio.denominator  # as ``chosen_shape``
    return best_blocks(chunk.queries, means.keys[:, :, :visible], rows, scale, width)


def _lists(problem: Problem, sequence: HeldSequence, chunk: range, best: Tensor) -> BlockLists:
    """The lists of a chunk's query blocks, from their choice on the host."""
    config, size, blocks = problem.blocks.config, sequence.block_size, sequence.blocks
    assert config is not None
    own = blocks_of(chunk, size)
    budget = config.rows(own.start, blocks, problem.is_causal, stop=own.stop).budget.long()
    starts = torch.arange(best[..., 0].numel(), device="cpu").view(best.shape[:3]) * best.shape[3]
    return BlockLists(budget.expand(starts.shape), starts, best.flatten(), size, blocks, own.start)


def exchange_requests(
    means: Sequence[SequenceMeans], best: Sequence[Sequence[Tensor]], wire: Wire
) -> list[list[BlockRequest]]:
    """Send which blocks this rank reads, and receive what the others read of its own: for each sequence."""
    sends, receives, requests = Copies(list), Copies(list), []
    for own, of_chunks in zip(means, best, strict=True):
        sequence, samples, key_heads = own.sequence, own.keys.shape[0], own.keys.shape[1]
        asked = _asked(of_chunks, key_heads, sequence.blocks)
        for p, positions in sequence.chunks:
            readers = [
                x for chunk, x in zip(own.chunks, asked, strict=True) if sequence.may_read(chunk.positions, positions)
            ]
            if p != wire.rank and readers:
                blocks = blocks_of(positions, sequence.block_size)
                sends[p].append(readers[0][:, :, blocks.start : blocks.stop])
        received = [
            BlockRequest(p, x.positions, own.keys.new_empty((samples, key_heads, len(x.blocks)), dtype=torch.uint8))
            for p, last in sequence.last_chunks().items()
            for x in own.chunks
            if p != wire.rank and sequence.may_read(last, x.positions)
        ]
        for request in received:
            receives[request.peer].append(request.asked)
        requests.append(received)
    _exchange(sends, receives, "requests", wire)
    return requests


def _asked(best: Sequence[Tensor], key_heads: int, blocks: int) -> list[Tensor]:
    """By chunk: whether this chunk or a later one reads a block, uint8 (B, G, blocks + 1)."""
    asked: list[Tensor] = []
    for x in reversed(best):
        batch, heads, rows, width = x.shape
        of_heads = x.view(batch, key_heads, heads // key_heads, rows * width)
        # Unused entries of lists name the block after the last one.
        named = torch.zeros((batch, key_heads, blocks + 1), dtype=torch.uint8, device=x.device)
        for h in range(of_heads.shape[2]):
            named.scatter_(2, of_heads[:, :, h].long(), 1)
        asked.insert(0, named | asked[0] if asked else named)
    return asked


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the host, by one copy for which the host waits. Larger elements come first."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    flat = torch.cat([x.flatten().view(torch.uint8) for x in tensors]).cpu() if tensors else torch.empty(0, device="cpu")
    return [x.view(y.dtype).view(y.shape) for x, y in zip(torch.split(flat, sizes), tensors, strict=True)]


def _exchange(sends: Copies, receives: Copies, content: str, wire: Wire) -> None:
    """Copy tensors to and from other ranks. In round t, every rank sends one message to the rank t after it.

    Both ends of a message derive it from the shards. Two messages of each direction are under way at most.
    """
    rank, world = wire.rank, len(wire.global_ranks)
    _copy_(sends.pop(rank, []), receives.pop(rank, []))
    under_way: list[Callable[[], None]] = []
    for t in sorted({(p - rank) % world for p in sends} | {(rank - p) % world for p in receives}):
        target, source, name = (rank + t) % world, (rank - t) % world, f"the choice of blocks, round {t}"
        outgoing, incoming, arrived = [], [], list[Tensor]()
        if target in sends:
            flat, views = _flat_like(sends[target])
            pack = partial(_copy_, sends[target], views)
            outgoing.append(Parcel(Message(rank, target, t, name), content, target, flat, pack))
        if source in receives:
            flat, arrived = _flat_like(receives[source])
            incoming.append(Parcel(Message(source, rank, t, name), content, source, flat))
        wait = wire.start(outgoing, incoming, wire.now())  # the mark comes after the allocation of what is packed
        under_way.append(partial(_finish, wait, arrived, receives.get(source, [])))
        if len(under_way) > 1:
            under_way.pop(0)()
    for finish in under_way:
        finish()


def _flat_like(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Memory for a message with these tensors, and the views of it that have their shapes."""
    flat = tensors[0].new_empty(sum(x.numel() for x in tensors))
    return flat, [x.view(y.shape) for x, y in zip(torch.split(flat, [x.numel() for x in tensors]), tensors, strict=True)]


def _copy_(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for x, y in zip(sources, targets, strict=True):
        y.copy_(x)


def _finish(wait: Callable[[], None], views: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    wait()
    _copy_(views, targets)
