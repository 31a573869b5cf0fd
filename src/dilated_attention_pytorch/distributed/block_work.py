"""The work of a rank in block-sparse attention: lists -> what every rank reads -> messages, and parts to compute.

Rows that a rank sends to another are one message; all ranks count rounds alike. A place is what shares lists: samples of a
sequence, and all heads or one key head with its query heads. The query blocks of a chunk meet the blocks of another chunk,
packed one after the other. Blocks lie on a grid from the start of the sequence, chunks need not: the first block of a chunk
may lack its first rows, and is then met apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.block_schedule import (
    BlockSchedule,
    BlockTransfer,
    Ranges,
    positions_read,
)
from dilated_attention_pytorch.distributed.executor import Part
from dilated_attention_pytorch.distributed.route import Message
from dilated_attention_pytorch.execute import listed as block_tiles
from dilated_attention_pytorch.execute.strided import Positions
from dilated_attention_pytorch.patterns.blocks import BlockSparse, SparsePatternConfig
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.sequences import Span, spans
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Samples and heads that share lists, and where the ranks' rows of their sequence lie."""

    samples: slice
    heads: slice
    key_heads: slice
    first_row: int  # of the sequence within the row of tokens
    schedule: BlockSchedule
    lists: tuple[BlockLists | None, ...]  # by chunk of this rank, None for empty ones
    whole: Shards  # of the row of tokens

    def rows(self, rank: int, number: int, positions: range) -> slice:
        """The rows of a rank that are these positions of one of its chunks."""
        first = self.first_row
        return self.whole.rows_of(rank, number, range(first + positions.start, first + positions.stop))

    def bytes(self, rank: int, head_dim: int, element_size: int) -> int:
        """Bytes of keys and values that a rank receives in a forward."""
        heads, batch = (x.stop - x.start for x in (self.key_heads, self.samples))
        return self.schedule.bytes(rank, key_heads=heads, head_dim=head_dim, element_size=element_size, batch=batch)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Query rows of a chunk that meet packed key rows by lists."""

    rows: tuple[slice, slice, slice]  # samples, rows and heads of the queries
    keys: slice  # of the packed rows
    positions: range  # of the query rows, counted from the start of their first block
    lists: BlockLists
    is_causal: bool
    places: range  # of the query rows in the sequence
    packed: Ranges  # the places of all packed rows, of which ``keys`` are some
    first_row: int  # of the sequence within the row of tokens


@dataclass(frozen=True, slots=True, eq=False)
class BlockWork:
    """Steps and messages of a rank; see ``executor.Work``."""

    places: tuple[BlockPlace, ...]
    ticks: tuple[tuple[Message | None, Message | None], ...]
    local_steps: tuple[tuple[tuple[slice, slice, slice], tuple[Step, ...]], ...]  # with samples, rows and heads of the keys
    received_steps: dict[tuple[int, int], tuple[Step, ...]]  # by tick and number of the part
    sent_rows: dict[tuple[int, int], Tensor]  # the same: which rows of this rank
    positions: Tensor | None = None  # (B, N), of the whole sequence: what causality goes by under an order
    dropout: Dropout | None = None

    def numel(self, message: Message, row_shape: torch.Size) -> int:
        """Elements of a message."""
        return sum(map(math.prod, self._shapes(message, row_shape)))

    def pack_(self, message: Message, flat: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the rows of a message."""
        for number, place, packed in self._parts(message, flat, key.shape[2:]):
            rows = self.sent_rows[message.tick, number]
            for x, some in zip((key, value), packed, strict=True):
                torch.index_select(x[place.samples, :, place.key_heads], 1, rows, out=some)

    def add_(self, message: Message, flat: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that have come home for a message of this rank."""
        for number, place, packed in self._parts(message, flat, dk.shape[2:]):
            rows = self.sent_rows[message.tick, number]
            for x, some in zip((dk, dv), packed, strict=True):
                x[place.samples, :, place.key_heads].index_add_(1, rows, some.to(x.dtype))

    def local(self, key: Tensor, value: Tensor) -> Iterator[Part]:
        """The parts with own keys."""
        for columns, steps in self.local_steps:
            yield from self._computed(steps, key[columns], value[columns])

    def received(self, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[Part]:
        """The parts with the keys of a message."""
        for number, _, (k, v) in self._parts(message, flat, row_shape):
            yield from self._computed(self.received_steps[message.tick, number], k, v)

    def _computed(self, steps: Sequence[Step], k: Tensor, v: Tensor) -> Iterator[Part]:
        for step in steps:
            options: dict[str, Any] = {
                "is_causal": step.is_causal,
                "originals": self._originals(step),
                "dropout": self._placed_dropout(step, k.device),
            }
            attend_, add_gradients_ = (
                partial(x, step.lists, step.positions, **options) for x in (block_tiles.attend_, block_tiles.add_gradients_)
            )
            yield Part(step.rows, (k[:, step.keys], v[:, step.keys]), attend_, add_gradients_)

    def _originals(self, step: Step) -> Positions | None:
        """The original positions of queries and keys: every rank knows the order, so none travels."""
        if self.positions is None:
            return None
        some = self.positions[step.rows[0]]
        keys = torch.cat([some[:, x.start : x.stop] for x in step.packed], 1)[:, step.keys]
        return some[:, step.places.start : step.places.stop], keys

    def _placed_dropout(self, step: Step, device: torch.device) -> block_tiles.PlacedDropout | None:
        if self.dropout is None:
            return None
        samples, _, heads = step.rows
        keys = torch.cat([torch.arange(x.start, x.stop, device=device) for x in step.packed])[step.keys]
        queries = torch.arange(step.places.start, step.places.stop, device=device)
        return block_tiles.PlacedDropout(self.dropout.at(samples.start, step.first_row, heads.start), queries, keys)

    def _shapes(self, message: Message, row_shape: torch.Size) -> Iterator[tuple[int, ...]]:
        for place_number, transfer in message.parts:
            place = self.places[place_number]
            batch, heads = place.samples.stop - place.samples.start, place.key_heads.stop - place.key_heads.start
            yield 2, batch, transfer.rows, heads, row_shape[-1]

    def _parts(self, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[tuple[int, BlockPlace, Tensor]]:
        """Number, place and view (2, B, rows, heads, D) of every part of a message: first the keys, then the values."""
        first = 0
        shapes = self._shapes(message, row_shape)
        for number, ((place, _), shape) in enumerate(zip(message.parts, shapes, strict=True)):
            last = first + math.prod(shape)
            yield number, self.places[place], flat[first:last].view(shape)
            first = last


def named_blocks(lists: BlockLists) -> Ranges:
    """The key blocks that lists name, as runs.

    >>> named_blocks(BlockLists.from_mask(torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]).bool(), 64))
    (range(0, 2), range(3, 4))
    """
    named = lists.named().to(torch.int8)
    edges = torch.diff(named, prepend=named.new_zeros(1), append=named.new_zeros(1)).nonzero().squeeze(1).tolist()
    return tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def blocks_of(positions: range, block_size: int) -> range:
    """The blocks that hold these positions, which are not none."""
    return range(positions.start // block_size, -(-positions.stop // block_size))


def static_places(
    pattern: BlockSparse,
    shards: Shards,
    rank: int,
    shape: tuple[int, int, int],
    *,
    is_causal: bool,
    lengths: tuple[int, ...] | None,
    cu_seqlens: tuple[int, ...] | None,
) -> tuple[BlockPlace, ...]:
    """The places of a pattern that does not depend on content; ``shape`` is batch, query heads, key heads."""
    size = pattern.block_size
    given = pattern.given_causal if is_causal else pattern.given
    config = None if given is not None else SparsePatternConfig.from_spec(pattern.spec)
    places = []
    for span in spans(shape[0], shards.length, shards.length, lengths, cu_seqlens):
        blocks, within = -(-span.length // size), shards.within(range(span.keys.start, span.keys.stop))
        corner = None if given is None else given.part(0, blocks)
        for samples, queries, keys in shared(span, shape, (1, 1) if given is None else tuple(given.counts.shape[:2])):
            some = None if corner is None else corner.of_samples(samples).of_heads(queries)
            read, own = [], []
            for p, chunks in enumerate(within.chunks):
                lists = [_lists(some or config, blocks_of(c, size), blocks, is_causal) if c else None for c in chunks]
                named = [() if x is None else named_blocks(x) for x in lists]
                read.append(positions_read(chunks, named, size, span.length, is_causal=is_causal))
                if p == rank:
                    own = lists
            schedule = BlockSchedule(within, tuple(read))
            places.append(BlockPlace(samples, queries, keys, span.keys.start, schedule, tuple(own), shards))
    return tuple(places)


def _lists(source: BlockLists | SparsePatternConfig | None, rows: range, blocks: int, is_causal: bool) -> BlockLists:
    """The lists of some query blocks, of a mask or by a rule."""
    assert source is not None
    if isinstance(source, BlockLists):
        return source.rows(rows.start, rows.stop)
    return source.lists(rows.start, blocks, is_causal, rows.stop)


def shared(span: Span, shape: tuple[int, int, int], lists: tuple[int, ...]) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, query heads and key heads that share lists, of which there are so many by sample and by query head."""
    _, heads, key_heads = shape
    group = heads // key_heads
    samples = range(span.samples.start, span.samples.stop)
    for some in [span.samples] if lists[0] == 1 else [slice(b, b + 1) for b in samples]:
        if lists[1] == 1:
            yield some, slice(0, heads), slice(0, key_heads)
        else:
            for g in range(key_heads):
                yield some, slice(g * group, (g + 1) * group), slice(g, g + 1)


def make_work(places: tuple[BlockPlace, ...], rank: int, world: int, *, is_causal: bool, device: torch.device) -> BlockWork:
    """The work of a rank: one message to and from every other rank that has something to send."""
    local = []
    for place in places:
        for number, chunk in enumerate(place.schedule.shards.chunks[rank]):
            if chunk:
                steps = tuple(_steps(place, rank, (chunk,), number, is_causal, device))
                local.append(((place.samples, place.rows(rank, number, chunk), place.key_heads), steps))
    ticks: list[tuple[Message | None, Message | None]] = []
    received_steps, sent_rows = {}, {}
    for t in range(1, world):
        ends = (rank, (rank + t) % world), ((rank - t) % world, rank)
        sides: list[Message | None] = []
        for source, target in ends:
            parts = tuple((x, y) for x, place in enumerate(places) for y in place.schedule.transfers(source, target))
            sides.append(Message(source, target, t - 1, f"round {t}", parts) if parts else None)
        sent, received = sides
        for number, (x, transfer) in enumerate(sent.parts if sent else ()):
            sent_rows[t - 1, number] = _rows(places[x], transfer, device)
        for number, (x, transfer) in enumerate(received.parts if received else ()):
            received_steps[t - 1, number] = tuple(_steps(places[x], rank, transfer.ranges, None, is_causal, device))
        ticks.append((sent, received))
    return BlockWork(places, tuple(ticks), tuple(local), received_steps, sent_rows)


def _rows(place: BlockPlace, transfer: BlockTransfer, device: torch.device) -> Tensor:
    rows = (place.rows(transfer.source, transfer.chunk, x) for x in transfer.ranges)
    return torch.cat([torch.arange(x.start, x.stop) for x in rows]).to(device)


def _steps(
    place: BlockPlace, rank: int, ranges: Ranges, own: int | None, is_causal: bool, device: torch.device
) -> Iterator[Step]:
    """All queries of this rank over packed positions of one chunk, its own one of that number or another rank's."""
    for number, (queries, lists) in enumerate(zip(place.schedule.shards.chunks[rank], place.lists, strict=True)):
        if lists is None or (is_causal and ranges[0].start > queries.start and number != own):
            continue
        for rows, keys, skipped, some, causal in _meetings(lists, queries, ranges, is_causal and number == own):
            if some.indices.numel():
                places = range(queries.start + rows.start, queries.start + rows.stop)
                at = (place.samples, place.rows(rank, number, places), place.heads)
                yield Step(
                    at, keys, range(skipped, skipped + len(rows)), some.to(device), causal, places, ranges, place.first_row
                )


def _meetings(
    lists: BlockLists, queries: range, ranges: Ranges, is_causal: bool
) -> Iterator[tuple[range, slice, int, BlockLists, bool]]:
    """Rows of the chunk, packed keys, rows missing of the first query block, lists, whether causal.

    Causal is only a chunk with itself. Chunks that are not aligned: queries 5 to 11 meet themselves in blocks of 4; the
    first block has 3 rows, and is a square of its own.

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
    pieces = []
    if head:
        pieces.append((slice(0, head), torch.tensor([ranges[0].start // size])))
    if total > head:
        rest = [range(ranges[0].start + head, ranges[0].stop), *ranges[1:]]
        runs = [blocks_of(x, size) for x in rest if x]
        pieces.append((slice(head, total), torch.cat([torch.arange(x.start, x.stop) for x in runs])))
    if not is_causal:
        for keys, blocks in pieces:
            yield range(count), keys, queries.start % size, lists.among(blocks), False
        return
    first, stop = lists.first, lists.first + lists.query_blocks
    if head:
        keys, blocks = pieces.pop(0)
        yield range(head), keys, 0, lists.rows(first, first + 1).among(blocks), True
        if count > head:
            yield range(head, count), keys, 0, lists.rows(first + 1, stop).among(blocks), False
            first += 1
    for keys, blocks in pieces:
        yield range(head, count), keys, 0, lists.rows(first, stop).among(blocks), True


@lru_cache(maxsize=16)
def static_work(
    pattern: BlockSparse,
    shards: Shards,
    rank: int,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    is_causal: bool,
    lengths: tuple[int, ...] | None,
    cu_seqlens: tuple[int, ...] | None,
) -> BlockWork:
    """The work of a rank for a pattern that does not depend on content."""
    places = static_places(pattern, shards, rank, shape, is_causal=is_causal, lengths=lengths, cu_seqlens=cu_seqlens)
    return make_work(places, rank, shards.world_size, is_causal=is_causal, device=device)
