"""The plan of a rank in block-sparse attention: block lists -> what every rank reads -> messages and steps.

All rows that a rank sends to another are one message. In a step, the query blocks of a chunk meet key blocks of another
chunk, packed one after the other. Blocks are on a grid from the start of the sequence, and chunks need not be: the first
block of a chunk may lack its first rows, and then has steps of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.block_schedule import (
    BlockSchedule,
    BlockTransfer,
    Ranges,
    blocks_of,
    positions_read,
)
from dilated_attention_pytorch.distributed.messages import RankPlan, Section, SequenceShards, Step, make_ticks
from dilated_attention_pytorch.execute.listed import ListedTiles, PlacedDropout
from dilated_attention_pytorch.execute.strided import Positions
from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Options

ChunkLists = tuple[BlockLists | None, ...]  # by chunk of a rank; None for an empty chunk


@dataclass(frozen=True, slots=True, eq=False)
class ListedShards(SequenceShards[BlockSchedule]):
    """Samples and heads of a sequence that share block lists, with the lists of this rank."""

    query_heads: slice
    lists: ChunkLists


@dataclass(frozen=True, slots=True, eq=False)
class BlockStep(Step):
    """Query rows of a chunk that meet packed key rows by lists."""

    lists: BlockLists
    rows: range  # the query rows, counted from the start of their first block
    is_causal: bool
    query_positions: range
    packed: Ranges  # the positions of the packed rows
    within: slice  # the packed rows of this step

    def tiles(self, options: Options) -> ListedTiles:
        """The tiles, with the dropout and the positions of a call."""
        return ListedTiles(self.lists, self.rows, self.is_causal, self._dropout(options), self._originals(options))

    def _originals(self, options: Options) -> Positions | None:
        """The original positions of queries and keys."""
        if options.positions is None:
            return None
        positions, queries = options.positions[self.queries[0]], self.query_positions
        keys = torch.cat([positions[:, x.start : x.stop] for x in self.packed], 1)[:, self.within]
        return positions[:, queries.start : queries.stop], keys

    def _dropout(self, options: Options) -> PlacedDropout | None:
        if options.dropout is None:
            return None
        samples, _, heads = self.queries
        device, queries = self.lists.indices.device, self.query_positions
        keys = torch.cat([torch.arange(x.start, x.stop, device=device) for x in self.packed])[self.within]
        dropout = options.dropout.at(samples.start, self.first_row, heads.start)
        return PlacedDropout(dropout, torch.arange(queries.start, queries.stop, device=device), keys)


@dataclass(frozen=True, slots=True, eq=False)
class BlockSection(Section):
    """The rows of a transfer, one after the other."""

    rows: Tensor | None  # of the sender's tensors, if this rank is the sender
    received: tuple[BlockStep, ...]  # if this rank is the receiver

    def pack_(self, x: Tensor, packed: Tensor) -> None:
        """Copy the rows from a tensor of the sender."""
        assert self.rows is not None
        torch.index_select(x[self.sequence.samples, :, self.sequence.key_heads], 1, self.rows, out=packed)

    def add_(self, x: Tensor, packed: Tensor) -> None:
        """Add the rows to a tensor of the sender."""
        assert self.rows is not None
        x[self.sequence.samples, :, self.sequence.key_heads].index_add_(1, self.rows, packed.to(x.dtype))

    def steps(self) -> tuple[BlockStep, ...]:
        """What the receiver's queries compute with the rows."""
        return self.received


def named_blocks(lists: BlockLists | None) -> Ranges:
    """The key blocks that lists name, as runs.

    >>> named_blocks(BlockLists.from_mask(torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]).bool(), 64))
    (range(0, 2), range(3, 4))
    """
    if lists is None:
        return ()
    named = lists.named().to(torch.int8)
    edges = torch.diff(named, prepend=named.new_zeros(1), append=named.new_zeros(1)).nonzero().squeeze(1).tolist()
    return tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def read_by(problem: Problem, chunks: Sequence[range], lists: ChunkLists, length: int) -> Ranges:
    """The positions of a sequence that a rank with these chunks and lists reads."""
    named = [named_blocks(x) for x in lists]
    return positions_read(chunks, named, problem.blocks.block_size, length, is_causal=problem.is_causal)


def listed_sequences(problem: Problem, shards: Shards, rank: int) -> tuple[ListedShards, ...]:
    """The sequences of a pattern that does not depend on content."""
    rule, found = problem.blocks, []
    for span in problem.spans():
        blocks, within = -(-span.length // rule.block_size), shards.within(range(span.keys.start, span.keys.stop))
        given = None if rule.given is None else rule.given.part(0, blocks)
        for samples, heads, key_heads in sharing(problem, span, (1, 1) if given is None else given.counts.shape[:2]):
            source = rule.config if given is None else given.of_samples(samples).of_heads(heads)
            read: list[Ranges] = []
            own: ChunkLists = ()
            for p, chunks in enumerate(within.chunks):
                lists = tuple(_lists(problem, source, chunk, blocks) for chunk in chunks)
                read.append(read_by(problem, chunks, lists, span.length))
                own = lists if p == rank else own
            schedule = BlockSchedule(within, tuple(read))
            found.append(ListedShards(samples, key_heads, span.keys.start, shards, schedule, heads, own))
    return tuple(found)


def _lists(
    problem: Problem, source: BlockLists | SparsePatternConfig | None, chunk: range, blocks: int
) -> BlockLists | None:
    """The lists of a chunk's query blocks, given or by a rule, in a sequence of so many blocks."""
    if not chunk or source is None:
        return None
    rows = blocks_of(chunk, problem.blocks.block_size)
    if isinstance(source, BlockLists):
        return source.rows(rows.start, rows.stop)
    return source.lists(rows.start, blocks, problem.is_causal, rows.stop)


def sharing(problem: Problem, span: Span, lists: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, query heads and key heads that share lists; ``lists`` counts lists by sample and by query head."""
    samples, per_key = [span.samples], problem.heads_per_key
    if lists[0] > 1:
        samples = [slice(b, b + 1) for b in range(span.samples.start, span.samples.stop)]
    for own in samples:
        if lists[1] == 1:
            yield own, slice(0, problem.heads), slice(0, problem.key_heads)
        else:
            for g in range(problem.key_heads):
                yield own, slice(g * per_key, (g + 1) * per_key), slice(g, g + 1)


def block_plan(
    sequences: tuple[ListedShards, ...], problem: Problem, rank: int, world: int, device: torch.device
) -> RankPlan:
    """The plan of a rank, with one message to and from every other rank."""
    maker = _Steps(rank, problem.is_causal, device)

    def split(transfers: list[tuple[ListedShards, BlockTransfer]]) -> list[tuple[BlockSection, ...]]:
        sections = tuple(maker.section(sequence, transfer) for sequence, transfer in transfers)
        return [sections] if sections else []

    own = tuple(
        step
        for sequence in sequences
        for chunk in sequence.schedule.shards.chunks[rank]
        if chunk
        for step in maker.steps(sequence, (chunk,), (sequence.samples, sequence.rows(rank, chunk), sequence.key_heads))
    )
    return RankPlan(sequences, make_ticks(rank, sequences, [1] * (world - 1), split), own)


@lru_cache(maxsize=16)
def static_block_plan(problem: Problem, shards: Shards, rank: int, device: torch.device) -> RankPlan:
    """The plan of a rank for a pattern that does not depend on content."""
    return block_plan(listed_sequences(problem, shards, rank), problem, rank, shards.world_size, device)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Makes the sections and steps of a rank."""

    rank: int
    is_causal: bool
    device: torch.device

    def section(self, sequence: ListedShards, transfer: BlockTransfer) -> BlockSection:
        """The section of a transfer, with what this rank does with it."""
        if transfer.source == self.rank:
            slices = (sequence.rows(self.rank, x) for x in transfer.ranges)
            rows = torch.cat([torch.arange(x.start, x.stop) for x in slices]).to(self.device)
            return BlockSection(sequence, transfer, rows, ())
        packed = slice(None), slice(0, transfer.rows), slice(None)
        return BlockSection(sequence, transfer, None, tuple(self.steps(sequence, transfer.ranges, packed)))

    def steps(self, sequence: ListedShards, ranges: Ranges, at: tuple[slice, slice, slice]) -> Iterator[BlockStep]:
        """All queries of this rank with the packed positions of one chunk, which are at these rows of a key tensor."""
        samples, packed, heads = at
        for queries, lists in zip(sequence.schedule.shards.chunks[self.rank], sequence.lists, strict=True):
            is_own = ranges == (queries,)
            if lists is None or (self.is_causal and ranges[0].start > queries.start and not is_own):
                continue
            for rows, keys, skipped, own_lists, causal in _meetings(lists, queries, ranges, self.is_causal and is_own):
                if not own_lists.indices.numel():
                    continue
                positions = queries[rows.start : rows.stop]
                yield BlockStep(
                    queries=(sequence.samples, sequence.rows(self.rank, positions), sequence.query_heads),
                    keys=(samples, slice(packed.start + keys.start, packed.start + keys.stop), heads),
                    lists=own_lists.to(self.device),
                    rows=range(skipped, skipped + len(rows)),
                    is_causal=causal,
                    query_positions=positions,
                    packed=ranges,
                    within=keys,
                    first_row=sequence.first_row,
                )


def _meetings(
    lists: BlockLists, queries: range, ranges: Ranges, is_causal: bool
) -> Iterator[tuple[range, slice, int, BlockLists, bool]]:
    """Rows of the chunk, packed keys, rows that the first query block lacks, lists, and whether the tiles are causal.

    Only a chunk with itself is causal. Chunks need not be aligned: queries 5 to 11 meet themselves in blocks of 4, and the
    first block, which has 3 rows, is a square of its own.

    >>> lists = BlockLists.from_mask(torch.ones(2, 3).bool(), 4)
    >>> for rows, keys, _, _, causal in _meetings(lists, range(5, 12), (range(5, 12),), True):
    ...     print(rows, keys, causal)
    range(0, 3) slice(0, 3, None) True
    range(3, 7) slice(0, 3, None) False
    range(3, 7) slice(3, 7, None) True
    """
    size, count, total = lists.block_size, len(queries), sum(map(len, ranges))
    missing = ranges[0].start % size
    head = min(size - missing, len(ranges[0])) if missing else 0  # rows of the first key block
    packed = []
    if head:
        packed.append((slice(0, head), torch.tensor([ranges[0].start // size])))
    if total > head:
        whole = [blocks_of(x, size) for x in (ranges[0][head:], *ranges[1:]) if x]
        packed.append((slice(head, total), torch.cat([torch.arange(x.start, x.stop) for x in whole])))
    if not is_causal:
        for keys, blocks in packed:
            yield range(count), keys, queries.start % size, lists.among(blocks), False
        return
    first, stop = lists.first, lists.first + lists.query_blocks
    if head:
        keys, blocks = packed.pop(0)
        yield range(head), keys, 0, lists.rows(first, first + 1).among(blocks), True
        if count > head:
            yield range(head, count), keys, 0, lists.rows(first + 1, stop).among(blocks), False
            first += 1
    for keys, blocks in packed:
        yield range(head, count), keys, 0, lists.rows(first, stop).among(blocks), True
