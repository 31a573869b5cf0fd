"""The plan of a rank: what its sequences send and receive, and the steps that it computes.

Dilated attention packs rows into messages by strided copies. Block-sparse attention sends all rows for another rank in one
message. In a step, the query blocks of a chunk meet key blocks of another chunk, packed one after the other. Blocks are on
a grid from the start of the sequence, and chunks need not be: the first block of a chunk may lack its first rows, and then
has steps of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.bounded import BoundedCache
from dilated_attention_pytorch.distributed.listed_shards import ListedShards, listed_sequences
from dilated_attention_pytorch.distributed.messages import RankPlan, Section, SequenceShards, Step, make_ticks
from dilated_attention_pytorch.distributed.schedules import BlockTransfer, DilatedSchedule, Ranges, Transfer, blocks_of
from dilated_attention_pytorch.distributed.traffic import Chunks, Holdings, held_spans, is_one_sequence, messages_by_round
from dilated_attention_pytorch.execute.listed import ListedTiles, PlacedDropout
from dilated_attention_pytorch.execute.strided import CallRows, StridedTiles, packed_rows
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Options

DilatedShards = SequenceShards[DilatedSchedule]


@dataclass(frozen=True, slots=True)
class DilatedStep(Step):
    """The tiles of a plan between query rows of this rank and key rows."""

    plan: Plan
    packed: bool  # the keys are those of a message

    @property
    def bytes(self) -> int:
        """About how much memory the step takes, with its plan."""
        return 512 + 512 * len(self.plan.families)

    def tiles(self, options: Options) -> StridedTiles:
        """The tiles, with the dropout and the positions of a call."""
        samples = self.queries[0]
        dropout = options.dropout and options.dropout.at(samples.start, self.first_row)
        originals = self._originals(options, self.plan.queries, (self.plan.keys,))
        return StridedTiles(self.plan, self.packed, dropout, originals)


@dataclass(frozen=True, slots=True)
class DilatedSection(Section):
    """The rows of a transfer; each head has its own rows, without gaps."""

    sequence: DilatedShards
    transfer: Transfer
    # The plans of the rows, made by the first call that needs them: a plan of many ranks is made without them.
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """About how much memory the section takes with its plans, without the rows that travel."""
        return 3072

    def packing(self) -> Plan:
        """The rows as tiles with themselves, which have their heads, first rows and strides."""
        if "packing" not in self._known:
            schedule, at = self.sequence.schedule, self.transfer.positions
            sizes = schedule.shards.length, schedule.key_heads
            whole = compile_plan(schedule.pattern, *sizes, is_causal=False, queries=at, keys=at)
            self._known["packing"] = whole.of_branch(self.transfer.branch)
        plan: Plan = self._known["packing"]
        return plan

    def _copied_rows(self) -> tuple[tuple[CallRows, CallRows], ...]:
        if "rows" not in self._known:
            samples, _, _ = self.shape
            self._known["rows"] = tuple(packed_rows(self.packing(), samples))
        rows: tuple[tuple[CallRows, CallRows], ...] = self._known["rows"]
        return rows

    def _views(self, x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        own = x[self.sequence.samples, self.sequence.rows(self.transfer.source, self.transfer.positions)]
        return ((in_place.view(own), together.view(packed)) for in_place, together in self._copied_rows())

    def pack_(self, x: Tensor, packed: Tensor) -> None:
        """Copy the rows from a tensor of the sender."""
        for in_place, together in self._views(x, packed):
            together.copy_(in_place)

    def add_(self, x: Tensor, packed: Tensor) -> None:
        """Add the rows to a tensor of the sender."""
        for in_place, together in self._views(x, packed):
            in_place.add_(together)

    def steps(self) -> tuple[DilatedStep, ...]:
        """The tiles of the receiver's queries with the rows."""
        if "steps" not in self._known:
            self._known["steps"] = tuple(self._make_steps())
        steps: tuple[DilatedStep, ...] = self._known["steps"]
        return steps

    def _make_steps(self) -> Iterator[DilatedStep]:
        sequence = self.sequence
        for plan in sequence.schedule.plans(self.transfer):
            queries = sequence.samples, sequence.rows(self.transfer.target, plan.queries)
            yield DilatedStep(queries, (), sequence.dropout_row, plan, packed=True)


@BoundedCache
def dilated_plan(problem: Problem, shards: Shards, rank: int, bucket_size: int) -> RankPlan:
    """The plan of a rank, for a problem of the whole sequence. It has the sequences of which the rank holds rows.

    16 positions on two ranks, where all rows meet: each rank sends 8 rows, 3 in a message.

    >>> from dilated_attention_pytorch import Dilated
    >>> problem, shards = Problem(Dilated([16], [1]), False, 1, 16, 16, 1, 1), Shards.of([8, 8], "contiguous")
    >>> plan = dilated_plan(problem, shards, rank=0, bucket_size=3)
    >>> [(sent.name, [section.transfer.positions for section in sent.sections]) for sent, _ in plan.ticks]
    [('round 1, message 1', [range(0, 3)]), ('round 1, message 2', [range(3, 6)]), ('round 1, message 3', [range(6, 8)])]
    """
    sequences: list[DilatedShards] = []
    for span in held_spans(problem, shards, rank):
        rows = range(span.keys.start, span.keys.stop)
        sizes = shards.within(rows), problem.key_heads, problem.is_causal
        schedule = DilatedSchedule(problem.dilated, *sizes, problem.branch)
        at = span.samples, slice(0, problem.key_heads), rows.start
        sequences.append(SequenceShards(*at, shards, schedule, padding=span.padding))
    holdings, world = Holdings.of(problem, shards), shards.world_size
    counts = messages_by_round(holdings, world, bucket_size)
    most = int(holdings.received(world, is_causal=problem.is_causal).max()) * problem.key_heads

    def split(transfers: list[tuple[DilatedShards, Transfer]]) -> Iterator[tuple[DilatedSection, ...]]:
        """The transfers of one round, cut into messages of ``bucket_size`` rows; the last message may be shorter."""
        sections: list[DilatedSection] = []
        room = bucket_size
        for sequence, transfer in transfers:
            remainder: Transfer | None = transfer
            while remainder is not None:
                first, remainder = remainder.split(problem.dilated.dilation_rates[transfer.branch], room)
                sections.append(DilatedSection(sequence, first))
                room -= first.rows
                if room == 0:
                    yield tuple(sections)
                    sections, room = [], bucket_size
        if sections:
            yield tuple(sections)

    def own() -> Iterator[DilatedStep]:
        for sequence in sequences:
            for plan in sequence.schedule.own_plans(rank):
                queries, keys = ((sequence.samples, sequence.rows(rank, x)) for x in (plan.queries, plan.keys))
                yield DilatedStep(queries, keys, sequence.dropout_row, plan, packed=False)

    return RankPlan(tuple(sequences), make_ticks(rank, sequences, counts, split), tuple(own()), most)


def positions_of(ranges: Iterable[range | slice], device: torch.device | str = "cpu") -> Tensor:
    """The numbers of ranges, one after the other."""
    return torch.cat([torch.arange(x.start, x.stop, device=device) for x in ranges])


@dataclass(frozen=True, slots=True, eq=False)
class BlockStep(Step):
    """Query rows of a chunk that meet packed key rows by lists."""

    lists: BlockLists
    rows: range  # the query rows, counted from the start of their first block
    is_causal: bool
    query_positions: range
    packed: Ranges  # the positions of the packed rows
    within: slice  # the packed rows of this step

    @property
    def bytes(self) -> int:
        """About how much memory the step takes, with its lists."""
        return 1024 + sum(x.nbytes for x in (self.lists.counts, self.lists.starts, self.lists.indices))

    def tiles(self, options: Options) -> ListedTiles:
        """The tiles, with the dropout and the positions of a call."""
        dropout, (samples, _, heads), device = None, self.queries, self.lists.indices.device
        if options.dropout is not None:
            queries, keys = positions_of([self.query_positions], device), positions_of(self.packed, device)[self.within]
            dropout = PlacedDropout(options.dropout.at(samples.start, self.first_row, heads.start), queries, keys)
        originals = self._originals(options, self.query_positions, self.packed, self.within)
        return ListedTiles(self.lists, self.rows, self.is_causal, dropout, originals)


@dataclass(frozen=True, slots=True, eq=False)
class BlockSection(Section):
    """The rows of a transfer, one after the other."""

    rows: Tensor  # of the sender's tensors, if this rank is the sender
    received: tuple[BlockStep, ...]  # if this rank is the receiver

    @property
    def bytes(self) -> int:
        """About how much memory the section takes, without the rows that travel."""
        return 512 + self.rows.nbytes + sum(step.bytes for step in self.received)

    def pack_(self, x: Tensor, packed: Tensor) -> None:
        """Copy the rows from a tensor of the sender."""
        torch.index_select(x[self.sequence.samples, :, self.sequence.key_heads], 1, self.rows, out=packed)

    def add_(self, x: Tensor, packed: Tensor) -> None:
        """Add the rows to a tensor of the sender."""
        x[self.sequence.samples, :, self.sequence.key_heads].index_add_(1, self.rows, packed.to(x.dtype))

    def steps(self) -> tuple[BlockStep, ...]:
        """What the receiver's queries compute with the rows."""
        return self.received


@BoundedCache
def static_block_plan(problem: Problem, shards: Shards, rank: int, device: torch.device) -> RankPlan:
    """The plan of a rank for a pattern that does not depend on content."""
    sequences = listed_sequences(problem, shards, rank)
    if is_one_sequence(problem):
        reach = max((x.schedule.reach for x in sequences), default=0)
        most = max(sum(x.received(p) for x in sequences) for p in range(shards.world_size))
    else:  # a rank does not know the lists of sequences that it does not hold
        chunks = Chunks.of(problem, shards)
        reach, most = chunks.reach, chunks.most_others(is_causal=problem.is_causal) * problem.key_heads
    return replace(block_plan(sequences, problem, rank, shards.world_size, device, reach), most_received=most)


def block_plan(
    sequences: tuple[ListedShards, ...], problem: Problem, rank: int, world: int, device: torch.device,
    reach: int | None = None,
) -> RankPlan:  # fmt: skip
    """The plan of a rank, with at most one message to and from every other rank that is not farther than ``reach``."""

    def steps(sequence: ListedShards, ranges: Ranges, keys: tuple[slice, slice, slice]) -> Iterator[BlockStep]:
        return _block_steps(sequence, ranges, keys, rank, problem.is_causal, device)

    def section(sequence: ListedShards, transfer: BlockTransfer) -> BlockSection:
        if transfer.source == rank:
            rows = positions_of(sequence.rows(rank, x) for x in transfer.ranges).to(device)
            return BlockSection(sequence, transfer, rows, ())
        packed = slice(None), slice(0, transfer.rows), slice(None)
        return BlockSection(
            sequence, transfer, torch.empty(0, device="cpu"), tuple(steps(sequence, transfer.ranges, packed))
        )

    def split(transfers: list[tuple[ListedShards, BlockTransfer]]) -> list[tuple[BlockSection, ...]]:
        return [tuple(section(*one) for one in transfers)] if transfers else []

    own = (
        step
        for sequence in sequences
        for chunk in sequence.schedule.shards.chunks[rank]
        if chunk
        for step in steps(sequence, (chunk,), (sequence.samples, sequence.rows(rank, chunk), sequence.key_heads))
    )
    counts = [int(reach is None or min(t, world - t) <= reach) for t in range(1, world)]
    return RankPlan(sequences, make_ticks(rank, sequences, counts, split), tuple(own))


def _block_steps(
    sequence: ListedShards, ranges: Ranges, at: tuple[slice, ...], rank: int, is_causal: bool, device: torch.device
) -> Iterator[BlockStep]:
    """All queries of this rank with the packed positions of one chunk, which are at these rows of a key tensor."""
    samples, packed, heads = at
    for queries, lists in zip(sequence.schedule.shards.chunks[rank], sequence.lists, strict=True):
        is_own = ranges == (queries,)
        if lists is None or (is_causal and ranges[0].start > queries.start and not is_own):
            continue
        for rows, keys, skipped, own_lists, causal in _meetings(lists, queries, ranges, is_causal and is_own):
            if own_lists.indices.numel():
                positions = queries[rows.start : rows.stop]
                query_rows = sequence.samples, sequence.rows(rank, positions), sequence.query_heads
                key_rows = samples, slice(packed.start + keys.start, packed.start + keys.stop), heads
                tiles = own_lists.to(device), range(skipped, skipped + len(rows)), causal
                yield BlockStep(query_rows, key_rows, sequence.dropout_row, *tiles, positions, ranges, keys)


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
        packed.append((slice(0, head), torch.tensor([ranges[0].start // size], device="cpu")))
    if total > head:
        whole = [blocks_of(x, size) for x in (ranges[0][head:], *ranges[1:]) if x]
        packed.append((slice(head, total), positions_of(whole)))
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
