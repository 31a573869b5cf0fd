"""Messages between ranks: which rows travel together and when, and what a rank computes with them.

All ranks count ticks alike: the message of a tick has the same number at both ends, also if other ranks have none then. All
ranks handle their messages in this one order, so no ranks wait for each other in a cycle, whatever their shards are.

A sequence of a batch is the whole row of tokens, the valid rows of padded samples, or a packed document.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.schedules import BlockSchedule, DilatedSchedule, Ranges
from dilated_attention_pytorch.execute.loop import TileSet
from dilated_attention_pytorch.execute.strided import Positions
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options

Schedule = TypeVar("Schedule", DilatedSchedule, BlockSchedule)


@dataclass(frozen=True, slots=True)
class SequenceShards(Generic[Schedule]):
    """A sequence of the batch, and where the ranks have its rows in their tensors."""

    samples: slice
    key_heads: slice
    first_row: int  # of the sequence within the row of tokens
    shards: Shards  # of the row of tokens
    schedule: Schedule  # of the sequence, whose positions count from 0
    padding: int = field(default=0, kw_only=True)  # rows in front of the sample, which dropout does not count

    @property
    def dropout_row(self) -> int:
        """The number of position 0 in dropout: its row, without the padding in front."""
        return self.first_row - self.padding

    def shape(self, rows: int) -> tuple[int, int, int]:
        """Samples, rows and key heads of so many rows."""
        return self.samples.stop - self.samples.start, rows, self.key_heads.stop - self.key_heads.start

    def rows(self, rank: int, positions: range) -> slice:
        """The rows of a rank's tensors at these positions of the sequence."""
        return self.shards.rows_of(rank, range(self.first_row + positions.start, self.first_row + positions.stop))

    def received(self, rank: int) -> int:
        """The rows times samples and key heads that a rank receives in a forward."""
        return math.prod(self.shape(self.schedule.received_rows(rank)))

    def bytes(self, rank: int, head_dim: int, element_size: int) -> int:
        """The bytes of keys and values that a rank receives in a forward."""
        return 2 * self.received(rank) * head_dim * element_size


@dataclass(frozen=True, slots=True)
class Step:
    """Query rows of this rank with key rows, and the tiles between them."""

    queries: tuple[slice, ...]  # samples, rows and possibly heads of the query tensor
    keys: tuple[slice, ...]  # of the key tensor of this rank, or of a section of a message
    first_row: int  # of the sequence within the row of tokens, without the padding in front

    @property
    def bytes(self) -> int:
        """About how much memory the step takes."""
        return 512

    def tiles(self, options: Options) -> TileSet:
        """The tiles, with the dropout and the positions of a call. Positions do not travel: every rank knows the order."""
        raise NotImplementedError

    def _originals(self, options: Options, queries: range, keys: Ranges, within: slice = slice(None)) -> Positions | None:
        """The original positions of the queries, and of the keys ``within`` these."""
        if options.positions is None:
            return None
        positions = options.positions[self.queries[0], self.first_row :]  # queries and keys count from the first row
        packed = [positions[:, x.start : x.stop] for x in keys]
        together = packed[0] if len(packed) == 1 else torch.cat(packed, 1)  # strided tiles need the view
        return positions[:, queries.start : queries.stop], together[:, within]


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one sequence in a message."""

    sequence: SequenceShards[Any]
    transfer: Any

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples, rows and key heads."""
        return self.sequence.shape(self.transfer.rows)

    @property
    def bytes(self) -> int:
        """About how much memory the section takes, without the rows that travel."""
        return 512

    def pack_(self, x: Tensor, packed: Tensor) -> None:
        """Copy the rows from a tensor (B, n, G, D) of the sender."""
        raise NotImplementedError

    def add_(self, x: Tensor, packed: Tensor) -> None:
        """Add the rows to a tensor (B, n, G, D) of the sender."""
        raise NotImplementedError

    def steps(self) -> Iterable[Step]:
        """What the receiver computes with the rows."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Message:
    """Rows of keys and values that travel together; their gradients return."""

    source: int
    target: int
    tick: int
    name: str  # for errors
    sections: tuple[Section, ...] = ()

    def numel(self, head_dim: int) -> int:
        """The number of elements."""
        return sum(2 * math.prod(section.shape) * head_dim for section in self.sections)

    def views(self, flat: Tensor, head_dim: int) -> Iterator[tuple[Section, Tensor]]:
        """The sections, each with its view (2, B, rows, heads, D) of the message, in which all keys precede all values."""
        both, first = flat.view(2, -1), 0
        for section in self.sections:
            shape = (*section.shape, head_dim)
            yield section, both[:, first : first + math.prod(shape)].view(2, *shape)
            first += math.prod(shape)

    def pack_(self, flat: Tensor, inputs: Inputs) -> None:
        """Copy the rows from the keys and values of the sender."""
        for section, packed in self.views(flat, inputs.key.shape[-1]):
            section.pack_(inputs.key, packed[0])
            section.pack_(inputs.value, packed[1])

    def add_(self, flat: Tensor, grads: Inputs) -> None:
        """Add returned gradients to those of the sender."""
        for section, packed in self.views(flat, grads.key.shape[-1]):
            section.add_(grads.key, packed[0])
            section.add_(grads.value, packed[1])

    def steps(self, flat: Tensor, head_dim: int) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """The steps of the receiver, each with its keys and values (or their gradients)."""
        for section, (keys, values) in self.views(flat, head_dim):
            for step in section.steps():
                yield step, keys[step.keys], values[step.keys]


Tick = tuple[Message | None, Message | None]  # what a rank sends and what it receives


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """What one rank sends, receives and computes in a call."""

    sequences: tuple[SequenceShards[Any], ...]  # of which this rank holds rows
    ticks: tuple[Tick, ...]
    own: tuple[Step, ...]  # steps with own keys
    # The most rows times samples and key heads that any rank receives, or an upper bound. It is the same on every rank.
    most_received: int = 0

    @property
    def bytes(self) -> int:
        """About how much memory the plan takes."""
        sections = sum(x.bytes for tick in self.ticks for message in tick if message is not None for x in message.sections)
        shards: int = sum(x.schedule.shards.world_size for x in self.sequences)
        return 512 * len(self.ticks) + 16 * shards + sections + sum(step.bytes for step in self.own)


# Cuts the transfers of one round, each with its sequence, into messages.
Split = Callable[[list[tuple[Any, Any]]], Iterable[tuple[Section, ...]]]


def make_ticks(
    rank: int, sequences: Sequence[SequenceShards[Any]], counts: Sequence[int], split: Split
) -> tuple[Tick, ...]:
    """The messages of a rank. ``counts`` has the number of ticks of rounds 1, 2, ..., the same on every rank."""
    world = len(counts) + 1
    by_ends: dict[tuple[int, int], list[tuple[Any, Any]]] = defaultdict(list)
    for sequence in sequences:
        for transfer in sequence.schedule.of_rank(rank):
            by_ends[transfer.source, transfer.target].append((sequence, transfer))
    ticks: list[Tick] = []
    for t, count in ((t, count) for t, count in enumerate(counts, start=1) if count):
        sides: list[list[Message | None]] = []
        for ends in ((rank, (rank + t) % world), ((rank - t) % world, rank)):
            messages: list[Message | None] = [
                Message(*ends, len(ticks) + s, f"round {t}, message {s + 1}", sections)
                for s, sections in enumerate(split(by_ends[ends]))
            ]
            assert len(messages) <= count, (t, len(messages), count)
            sides.append(messages + [None] * (count - len(messages)))
        ticks += zip(*sides, strict=True)
    return tuple(ticks)
