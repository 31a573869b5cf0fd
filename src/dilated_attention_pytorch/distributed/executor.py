"""Executing a rank's work: rows go round, tiles are merged as they come, gradients go home.

At every tick a rank sends packed rows of its keys and values to one rank and computes with those of another; the next tick
is already under way. Partial results are float32 (float64 for float64 inputs), gradients on their way have ``comm_dtype``.

Shape letters as in tiles.py; n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.route import Message
from dilated_attention_pytorch.distributed.transport import Parcel, Transport
from dilated_attention_pytorch.execute import loop as tiles
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.execute.merge import accumulate_dtype


def _part_limit(query: Tensor) -> int:
    """The most elements of a partial result: half of what one device takes, because here are message buffers as well."""
    return max(2**18, query.numel() // 16)


@dataclass(frozen=True, slots=True)
class Part:
    """Query rows of this rank that meet some keys: its own, or those of a message."""

    rows: tuple[slice, ...]  # of the queries: samples, rows, perhaps heads
    keys: tuple[Tensor, Tensor]  # views of keys and values, or of their gradients
    attend_: Callable[..., None]  # (q, k, v, out, lse_bnh, **options)
    add_gradients_: Callable[..., None]  # (by_row, dlse_bnh, qkv, grads, **options)


class Work(Protocol):
    """What a rank sends, receives and computes in a call: ``dilated.DilatedWork``, ``block_work.BlockWork``."""

    @property
    def ticks(self) -> tuple[tuple[Message | None, Message | None], ...]:
        """What is sent and what is received, tick by tick, numbered alike on every rank."""

    def numel(self, message: Message, row_shape: torch.Size) -> int:
        """Elements of a message of keys and values whose rows have a shape (G, D)."""

    def pack_(self, message: Message, flat: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the rows of a message from the keys and values of the rank that sends it."""

    def add_(self, message: Message, flat: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that have come home for a message of this rank."""

    def local(self, key: Tensor, value: Tensor) -> Iterator[Part]:
        """The parts with own keys and values (or their gradients)."""

    def received(self, message: Message, flat: Tensor, row_shape: torch.Size) -> Iterator[Part]:
        """The parts with the keys and values of a message (or their gradients, in the same order)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A rank's part of a call: the same forward and backward."""

    work: Work
    alone: tuple[Work, ...]  # one per branch, if each one's output is needed on its own (detached mixing)
    transport: Transport
    ahead: int | None  # messages that are under way while one is computed with; None: all of them from the start
    scale: float
    kernel: TileKernel
    comm_dtype: torch.dtype

    def options(self, query: Tensor) -> dict[str, Any]:
        """How tiles are computed."""
        return {"scale": self.scale, "kernel": self.kernel, "limit": _part_limit(query)}


class Buffers:
    """Room for messages of one direction, used in turn: message ``tick`` has the place of message ``tick - count``."""

    def __init__(self, messages: list[Message], count: int, work: Work, like: Tensor, dtype: torch.dtype) -> None:
        self._count = count
        self._sizes = {m.tick: work.numel(m, like.shape[2:]) for m in messages}
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
    """The messages of a rank: keys and values come, gradients go back, a bounded number at a time."""

    def __init__(self, job: Job, work: Work, key: Tensor, value: Tensor, *, gradients: bool) -> None:
        self._transport, self._work, self._ticks = job.transport, work, work.ticks
        self._ahead = len(work.ticks) if job.ahead is None else job.ahead
        sent = [message for message, _ in work.ticks if message is not None]
        received = [message for _, message in work.ticks if message is not None]
        self._key, self._value = key, value

        def room(messages: list[Message], dtype: torch.dtype) -> Buffers:
            return Buffers(messages, self._ahead + 1, work, key, dtype)

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
                pack = partial(self._work.pack_, sent, flat, self._key, self._value)
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
                self._work.add_(sent, self.coming_home.flat(sent), dk, dv)


def forward(job: Job, work: Work, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Exchange]:
    """``out`` and ``lse (B, n, H)``, both in the accumulation type; the scale is positive."""
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    options = job.options(query)

    def attend_(parts: Iterable[Part]) -> None:
        for part in parts:
            part.attend_(query[part.rows], *part.keys, out[part.rows], lse_bnh[part.rows], **options)

    exchange = Exchange(job, work, key, value, gradients=False)
    attend_(work.local(key, value))
    for _, message in exchange.received():
        if message is not None:
            attend_(work.received(message, exchange.incoming.flat(message), key.shape[2:]))
    return out, lse_bnh, exchange


def add_gradients_(
    job: Job,
    work: Work,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of all tiles to ``grads`` (dq, dk, dv); ``by_row`` is dout, out and lse (B, n, H)."""
    (query, key, value), (dq, dk, dv) = qkv, grads
    (dout, out, lse_bnh), options = by_row, job.options(query)

    def add_(parts: Iterable[Part], gradients: Iterable[Part]) -> None:
        for part, gradient in zip(parts, gradients, strict=True):
            at, dlse = part.rows, None if dlse_bnh is None else dlse_bnh[part.rows]
            some, some_grads = (query[at], *part.keys), (dq[at], *gradient.keys)
            part.add_gradients_((dout[at], out[at], lse_bnh[at]), dlse, some, some_grads, **options)

    exchange = Exchange(job, work, key, value, gradients=True)
    add_(work.local(key, value), work.local(dk, dv))
    for tick, message in exchange.received():
        if message is not None:
            come, going = exchange.incoming.flat(message), exchange.going_home.flat(message).zero_()
            add_(work.received(message, come, key.shape[2:]), work.received(message, going, key.shape[2:]))
        exchange.send_home(tick, dk, dv)
    exchange.finish(dk, dv)


class RingAttention(torch.autograd.Function):
    """Tiles forward, their gradients backward; every rank takes part in both."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: Job) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse (B, H, n)``."""
        positive, scale, _ = tiles.positive_scale(query, job.scale)
        # Not kept: the buffers of the exchange.
        out, lse_bnh = forward(replace(job, scale=scale), job.work, positive, key, value)[:2]
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
        for work in job.alone or (job.work,):
            some_out = forward(job, work, *qkv)[0].to(out.dtype) if job.alone else out
            add_gradients_(job, work, (dout, some_out, lse_bnh), dlse_bnh, qkv, (dq, dk, dv))
        if sign != 1.0:
            dq *= sign
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "second derivatives of a sharded call are not supported; one device with backend='reference' has them"
        )
