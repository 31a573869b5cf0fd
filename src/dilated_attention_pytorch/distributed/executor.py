"""Executing a route: rows go round, tiles are merged as they come, gradients go home.

At every tick a rank sends packed rows of its keys and values to one rank and computes with those of another; the next tick
is already under way. Partial results are float32 (float64 for float64 inputs), gradients on their way have ``comm_dtype``.

Shape letters as in tiles.py; n rows of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import tiles
from dilated_attention_pytorch.distributed.route import Message, Place, Route
from dilated_attention_pytorch.distributed.schedule import Transfer
from dilated_attention_pytorch.distributed.transport import Parcel, Transport
from dilated_attention_pytorch.dropout import Dropout
from dilated_attention_pytorch.merge import accumulate_dtype
from dilated_attention_pytorch.pieces import packed_views
from dilated_attention_pytorch.plan import Plan
from dilated_attention_pytorch.tiles import TileKernel


def _part_limit(query: Tensor) -> int:
    """The most elements of a partial result: half of what one device takes, because here are message buffers as well."""
    return max(2**18, query.numel() // 16)


@dataclass(frozen=True, slots=True)
class Job:
    """A rank's part of a call: the same forward and backward."""

    route: Route
    alone: tuple[Route, ...]  # one per branch, if each one's output is needed on its own (detached mixing)
    transport: Transport
    ahead: int | None  # messages that are under way while one is computed with; None: all of them from the start
    scale: float
    kernel: TileKernel
    comm_dtype: torch.dtype
    dropout: Dropout | None
    positions: Tensor | None  # (B, N), of the whole sequence: what causality goes by under an order

    def options(self, place: Place, plan: Plan, query: Tensor) -> dict[str, Any]:
        """How the tiles of a plan of a sequence are computed."""
        positions = None
        if self.positions is not None:  # every rank knows the order: no position travels
            positions = tuple(self.positions[place.samples, x.start : x.stop] for x in (plan.queries, plan.keys))
        return {
            "scale": self.scale,
            "kernel": self.kernel,
            "dropout": self.dropout and self.dropout.at(place.samples.start, place.first_row),
            "limit": _part_limit(query),
            "positions": positions,
        }


def _shapes(route: Route, message: Message, row_shape: torch.Size) -> Iterator[tuple[int, ...]]:
    for number, transfer in message.parts:
        yield 2, route.places[number].batch, transfer.rows, *row_shape


def parts(route: Route, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[tuple[Place, Transfer, Tensor]]:
    """The parts of a message, each with a view (2, B, rows, G, D) of it: first the keys, then the values."""
    first = 0
    for (number, transfer), shape in zip(message.parts, _shapes(route, message, row_shape), strict=True):
        last = first + math.prod(shape)
        yield route.places[number], transfer, flat[first:last].view(shape)
        first = last


def pack_(route: Route, message: Message, flat: Tensor, key: Tensor, value: Tensor) -> None:
    """Copy the rows of a message from the keys and values of the rank that sends it."""
    for place, transfer, packed in parts(route, message, flat, key.shape[2:]):
        rows, plan = place.rows(message.source, transfer.positions), place.packing(transfer)
        for x, some in zip((key, value), packed, strict=True):
            for apart, together in packed_views(plan, x[rows], some):
                together.copy_(apart)


def _add_(route: Route, message: Message, flat: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients that have come home for a message of this rank."""
    for place, transfer, packed in parts(route, message, flat, dk.shape[2:]):
        rows, plan = place.rows(message.source, transfer.positions), place.packing(transfer)
        for grad, some in zip((dk, dv), packed, strict=True):
            for apart, together in packed_views(plan, grad[rows], some):
                apart.add_(together)


class Buffers:
    """Room for messages of one direction, used in turn: message ``tick`` has the place of message ``tick - count``."""

    def __init__(self, messages: list[Message], count: int, route: Route, like: Tensor, dtype: torch.dtype) -> None:
        self._count = count
        self._sizes = {m.tick: sum(map(math.prod, _shapes(route, m, like.shape[2:]))) for m in messages}
        most: dict[int, int] = {}
        for tick, size in self._sizes.items():
            most[tick % count] = max(most.get(tick % count, 0), size)
        self._flat = {slot: torch.empty(size, dtype=dtype, device=like.device) for slot, size in most.items()}

    @property
    def bytes(self) -> int:
        """Memory of all of them."""
        return sum(x.numel() * x.element_size() for x in self._flat.values())

    def flat(self, message: Message) -> Tensor:
        """The message as it travels."""
        return self._flat[message.tick % self._count][: self._sizes[message.tick]]


class Exchange:
    """The messages of a route: keys and values come, gradients go back, a bounded number at a time."""

    def __init__(self, job: Job, route: Route, key: Tensor, value: Tensor, *, gradients: bool) -> None:
        self._transport, self._route, self._ticks = job.transport, route, route.ticks
        self._ahead = len(route.ticks) if job.ahead is None else job.ahead
        sent = [message for message, _ in route.ticks if message is not None]
        received = [message for _, message in route.ticks if message is not None]
        self._key, self._value = key, value

        def room(messages: list[Message], dtype: torch.dtype) -> Buffers:
            return Buffers(messages, self._ahead + 1, route, key, dtype)

        self.outgoing, self.incoming = room(sent, key.dtype), room(received, key.dtype)
        self.going_home, self.coming_home = (room(x if gradients else [], job.comm_dtype) for x in (received, sent))
        self._inputs = job.transport.now()
        self._under_way: list[Callable[[], None]] = []
        self._computed: list[tuple[int, Any]] = []
        self._returning: list[tuple[int, Callable[[], None]]] = []
        self._posted = 0
        self._post()

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(x.bytes for x in (self.outgoing, self.incoming, self.going_home, self.coming_home))

    def _post(self) -> None:
        """Start the messages of the next ticks."""
        while self._posted < len(self._ticks) and len(self._under_way) < self._ahead:
            sent, received = self._ticks[self._posted]
            sends, receives = [], []
            if sent is not None:
                flat = self.outgoing.flat(sent)
                pack = partial(pack_, self._route, sent, flat, self._key, self._value)
                sends.append(Parcel(sent, "keys and values", sent.target, flat, pack))
            if received is not None:
                receives.append(Parcel(received, "keys and values", received.source, self.incoming.flat(received)))
            self._under_way.append(self._transport.start(sends, receives, self._inputs))
            self._posted += 1

    def received(self) -> Iterator[tuple[int, Message | None]]:
        """By tick: the message that has come, while the next ones are under way."""
        for tick, (_, message) in enumerate(self._ticks):
            wait = self._under_way.pop(0)
            self._post()
            wait()
            yield tick, message

    def send_home(self, tick: int, dk: Tensor, dv: Tensor) -> None:
        """Send what has been computed for the message of a tick, and add what has come back of earlier ones."""
        self._computed.append((tick, self._transport.now()))
        self._return_(self._transport.lag, self._ahead, dk, dv)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Send and add the rest."""
        self._return_(0, 0, dk, dv)

    def _return_(self, waiting: int, under_way: int, dk: Tensor, dv: Tensor) -> None:
        while len(self._computed) > waiting:
            tick, after = self._computed.pop(0)
            sent, received = self._ticks[tick]
            sends, receives = [], []
            if received is not None:
                sends.append(Parcel(received, "gradients", received.source, self.going_home.flat(received)))
            if sent is not None:
                receives.append(Parcel(sent, "gradients", sent.target, self.coming_home.flat(sent)))
            self._returning.append((tick, self._transport.start(sends, receives, after)))
        while len(self._returning) > under_way:
            tick, wait = self._returning.pop(0)
            wait()
            sent, _ = self._ticks[tick]
            if sent is not None:
                _add_(self._route, sent, self.coming_home.flat(sent), dk, dv)


def forward(job: Job, route: Route, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Exchange]:
    """``out`` and ``lse (B, n, H)``, both in the accumulation type; the scale is positive."""
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    exchange = Exchange(job, route, key, value, gradients=False)
    for place in route.places:
        for a, b, plan in place.schedule.local(route.rank):
            rows, columns = place.chunk(route.rank, a), place.chunk(route.rank, b)
            tiles.attend_(
                plan, query[rows], key[columns], value[columns], out[rows], lse_bnh[rows], **job.options(place, plan, query)
            )
    for _, message in exchange.received():
        if message is None:
            continue
        for place, transfer, (k, v) in parts(route, message, exchange.incoming.flat(message), key.shape[2:]):
            for a, plan in place.schedule.remote(transfer):
                rows = place.chunk(route.rank, a)
                tiles.attend_(
                    plan, query[rows], k, v, out[rows], lse_bnh[rows], **job.options(place, plan, query), packed=True
                )
    return out, lse_bnh, exchange


def add_gradients_(
    job: Job,
    route: Route,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of a route's tiles to ``grads`` (dq, dk, dv); ``by_row`` is dout, out and lse (B, n, H)."""
    (query, key, value), (dq, dk, dv) = qkv, grads

    def at(rows: tuple[slice, slice]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        dout, out, lse_bnh = by_row
        return (dout[rows], out[rows], lse_bnh[rows]), None if dlse_bnh is None else dlse_bnh[rows]

    exchange = Exchange(job, route, key, value, gradients=True)
    for place in route.places:
        for a, b, plan in place.schedule.local(route.rank):
            rows, columns = place.chunk(route.rank, a), place.chunk(route.rank, b)
            some = query[rows], key[columns], value[columns]
            tiles.add_gradients_(
                plan, *at(rows), some, (dq[rows], dk[columns], dv[columns]), **job.options(place, plan, query)
            )
    for tick, message in exchange.received():
        if message is not None:
            both = [
                parts(route, message, buffers.flat(message), key.shape[2:])
                for buffers in (exchange.incoming, exchange.going_home)
            ]
            exchange.going_home.flat(message).zero_()
            for (place, transfer, (k, v)), (_, _, gradients) in zip(*both, strict=True):
                for a, plan in place.schedule.remote(transfer):
                    rows = place.chunk(route.rank, a)
                    some, some_grads = (query[rows], k, v), (dq[rows], *gradients)
                    tiles.add_gradients_(plan, *at(rows), some, some_grads, **job.options(place, plan, query), packed=True)
        exchange.send_home(tick, dk, dv)
    exchange.finish(dk, dv)


class RingAttention(torch.autograd.Function):
    """Tiles forward, their gradients backward; every rank takes part in both."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: Job) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse (B, H, n)``."""
        positive, scale, _ = tiles.positive_scale(query, job.scale)
        # Not kept: the buffers of the exchange.
        out, lse_bnh = forward(replace(job, scale=scale), job.route, positive, key, value)[:2]
        out, lse = out.to(query.dtype), lse_bnh.transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the three tensors."""
        return *_Gradients.apply(dout, dlse, *ctx.saved_tensors, ctx.job), None  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """dq, dk and dv as a function of their own, so that asking for its derivative is refused and not forgotten."""

    @staticmethod
    def forward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        lse: Tensor, job: Job,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        positive, scale, sign = tiles.positive_scale(query, job.scale)
        job = replace(job, scale=scale)
        qkv = positive, key, value
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in qkv)
        # Every rank takes part, also one whose result nobody used.
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        lse_bnh = lse.transpose(1, 2).contiguous()
        dlse_bnh = None if dlse is None else dlse.transpose(1, 2).contiguous()
        # With constant mixing weights, delta comes from the branch's own output, which is computed again.
        for route in job.alone or (job.route,):
            some_out = forward(job, route, *qkv)[0].to(out.dtype) if job.alone else out
            add_gradients_(job, route, (dout, some_out, lse_bnh), dlse_bnh, qkv, (dq, dk, dv))
        if sign != 1.0:
            dq *= sign
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "second derivatives of a sharded call are not supported; one device with backend='reference' has them"
        )
