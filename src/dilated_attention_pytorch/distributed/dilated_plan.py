"""The plan of a rank in dilated attention: rows are packed into messages by strided copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from dilated_attention_pytorch.distributed.dilated_schedule import (
    DilatedSchedule,
    Transfer,
    make_schedule,
    messages_by_round,
)
from dilated_attention_pytorch.distributed.messages import RankPlan, Section, SequenceShards, Step, make_ticks
from dilated_attention_pytorch.execute.strided import StridedTiles, packed_views
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import Plan, compile_plan
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Options


@dataclass(frozen=True, slots=True)
class DilatedStep(Step):
    """The tiles of a plan between query rows of this rank and key rows."""

    plan: Plan
    packed: bool  # the keys are those of a message

    def tiles(self, options: Options) -> StridedTiles:
        """The tiles, with the dropout and the positions of a call."""
        samples, positions = self.queries[0], None
        if options.positions is not None:
            queries, keys = (options.positions[samples, x.start : x.stop] for x in (self.plan.queries, self.plan.keys))
            positions = queries, keys
        dropout = options.dropout and options.dropout.at(samples.start, self.first_row)
        return StridedTiles(self.plan, self.packed, dropout, positions)


@dataclass(frozen=True, slots=True)
class DilatedSection(Section):
    """The rows of a transfer; each head has its own rows, without gaps."""

    sequence: SequenceShards[DilatedSchedule]
    transfer: Transfer

    def packing(self) -> Plan:
        """The rows as tiles with themselves, which have their heads, first rows and strides."""
        schedule, positions = self.sequence.schedule, self.transfer.positions
        plan = compile_plan(
            schedule.pattern, schedule.shards.length, schedule.key_heads, is_causal=False, queries=positions, keys=positions
        )
        return plan.of_branch(self.transfer.branch)

    def _views(self, x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self.sequence.rows(self.transfer.source, self.transfer.positions)
        return packed_views(self.packing(), x[self.sequence.samples, rows], packed)

    def pack_(self, x: Tensor, packed: Tensor) -> None:
        """Copy the rows from a tensor of the sender."""
        for in_place, together in self._views(x, packed):
            together.copy_(in_place)

    def add_(self, x: Tensor, packed: Tensor) -> None:
        """Add the rows to a tensor of the sender."""
        for in_place, together in self._views(x, packed):
            in_place.add_(together)

    def steps(self) -> Iterator[DilatedStep]:
        """The tiles of the receiver's queries with the rows."""
        sequence = self.sequence
        for plan in sequence.schedule.plans(self.transfer):
            queries = sequence.samples, sequence.rows(self.transfer.target, plan.queries)
            yield DilatedStep(queries, (), sequence.first_row, plan, packed=True)


def _split(
    transfers: list[tuple[SequenceShards[DilatedSchedule], Transfer]], rates: tuple[int, ...], bucket_size: int
) -> Iterator[tuple[DilatedSection, ...]]:
    """The transfers of one round, cut into messages of ``bucket_size`` rows; the last message may be shorter."""
    sections: list[DilatedSection] = []
    room = bucket_size
    for sequence, transfer in transfers:
        remainder: Transfer | None = transfer
        while remainder is not None:
            first, remainder = remainder.split(rates[transfer.branch], room)
            sections.append(DilatedSection(sequence, first))
            room -= first.rows
            if room == 0:
                yield tuple(sections)
                sections, room = [], bucket_size
    if sections:
        yield tuple(sections)


def _own_steps(rank: int, sequences: list[SequenceShards[DilatedSchedule]]) -> Iterator[DilatedStep]:
    for sequence in sequences:
        for plan in sequence.schedule.own_plans(rank):
            queries, keys = ((sequence.samples, sequence.rows(rank, x)) for x in (plan.queries, plan.keys))
            yield DilatedStep(queries, keys, sequence.first_row, plan, packed=False)


@lru_cache(maxsize=64)
def dilated_plan(problem: Problem, shards: Shards, rank: int, bucket_size: int) -> RankPlan:
    """The plan of a rank, for a problem of the whole sequence.

    16 positions on two ranks, where all rows meet: each rank sends 8 rows, 3 in a message.

    >>> from dilated_attention_pytorch import Dilated
    >>> problem, shards = Problem(Dilated([16], [1]), False, 1, 16, 16, 1, 1), Shards.of([8, 8], "contiguous")
    >>> plan = dilated_plan(problem, shards, rank=0, bucket_size=3)
    >>> [(sent.name, [section.transfer.positions for section in sent.sections]) for sent, _ in plan.ticks]
    [('round 1, message 1', [range(0, 3)]), ('round 1, message 2', [range(3, 6)]), ('round 1, message 3', [range(6, 8)])]
    """
    sequences = []
    for span in problem.spans():
        rows = range(span.keys.start, span.keys.stop)
        schedule = make_schedule(problem.dilated, shards.within(rows), problem.key_heads, is_causal=problem.is_causal)
        schedule = schedule.of_branch(problem.branch)
        sequences.append(SequenceShards(span.samples, slice(0, problem.key_heads), rows.start, shards, schedule))
    counts = messages_by_round([sequence.schedule for sequence in sequences], bucket_size) if sequences else []
    split = partial(_split, rates=problem.dilated.dilation_rates, bucket_size=bucket_size)
    return RankPlan(tuple(sequences), make_ticks(rank, sequences, counts, split), tuple(_own_steps(rank, sequences)))
