"""The work of a rank in dilated attention: the messages of a route, packed by strided copies, and its tiles.

Shape letters as in tiles.py; n rows of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed import local
from dilated_attention_pytorch.distributed.executor import Part
from dilated_attention_pytorch.distributed.local import LocalProblem
from dilated_attention_pytorch.distributed.route import Message, Place, Route
from dilated_attention_pytorch.distributed.schedule import Transfer
from dilated_attention_pytorch.execute import loop as tiles
from dilated_attention_pytorch.execute.strided import packed_views
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.tiles import Plan


@dataclass(frozen=True, slots=True)
class DilatedWork:
    """A route, executed; see ``executor.Work``."""

    route: Route
    fused: tuple[LocalProblem, str] | None = None  # own keys through the fused kernels of this backend
    dropout: Dropout | None = None
    positions: Tensor | None = None  # (B, N), of the whole sequence: what causality goes by under an order

    @property
    def ticks(self) -> tuple[tuple[Message | None, Message | None], ...]:
        """What is sent and what is received."""
        return self.route.ticks

    def numel(self, message: Message, row_shape: torch.Size) -> int:
        """Elements of a message."""
        return sum(map(math.prod, self._shapes(message, row_shape)))

    def pack_(self, message: Message, flat: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the rows of a message from the keys and values of the rank that sends it."""
        for apart, together in self._packed(message, flat, key, value):
            together.copy_(apart)

    def add_(self, message: Message, flat: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that have come home for a message of this rank."""
        for apart, together in self._packed(message, flat, dk, dv):
            apart.add_(together)

    def local(self, key: Tensor, value: Tensor) -> Iterator[Part]:
        """The tiles of own queries and keys."""
        if self.fused is not None:
            whole = slice(None), slice(None)
            yield Part(whole, (key, value), *(partial(x, *self.fused) for x in (local.attend_, local.add_gradients_)))
            return
        rank = self.route.rank
        for place in self.route.places:
            for a, b, plan in place.schedule.local(rank):
                columns = place.chunk(rank, b)
                yield self._part(place, a, plan, (key[columns], value[columns]), packed=False)

    def received(self, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[Part]:
        """The tiles of a message."""
        for place, transfer, (k, v) in self._parts(message, flat, row_shape):
            for a, plan in place.schedule.remote(transfer):
                yield self._part(place, a, plan, (k, v), packed=True)

    def _part(self, place: Place, chunk: int, plan: Plan, keys: tuple[Tensor, Tensor], *, packed: bool) -> Part:
        dropout = self.dropout and self.dropout.at(place.samples.start, place.first_row)
        positions = None
        if self.positions is not None:  # every rank knows the order: no position travels
            positions = tuple(self.positions[place.samples, x.start : x.stop] for x in (plan.queries, plan.keys))
        options: dict[str, Any] = {"dropout": dropout, "positions": positions, "packed": packed}
        attend_, add_gradients_ = (partial(x, plan, **options) for x in (tiles.attend_, tiles.add_gradients_))
        return Part(place.chunk(self.route.rank, chunk), keys, attend_, add_gradients_)

    def _shapes(self, message: Message, row_shape: torch.Size) -> Iterator[tuple[int, ...]]:
        for number, transfer in message.parts:
            yield 2, self.route.places[number].batch, transfer.rows, *row_shape

    def _parts(self, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[tuple[Place, Transfer, Tensor]]:
        """The parts of a message, each with a view (2, B, rows, G, D) of it: first the keys, then the values."""
        first = 0
        for (number, transfer), shape in zip(message.parts, self._shapes(message, row_shape), strict=True):
            last = first + math.prod(shape)
            yield self.route.places[number], transfer, flat[first:last].view(shape)
            first = last

    def _packed(self, message: Message, flat: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views: rows where they lie in the tensors of the sender, and in the message."""
        for place, transfer, packed in self._parts(message, flat, key.shape[2:]):
            rows, plan = place.rows(message.source, transfer.positions), place.packing(transfer)
            for x, some in zip((key, value), packed, strict=True):
                yield from packed_views(plan, x[rows], some)
