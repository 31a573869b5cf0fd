"""Execution of a rank's plan: rows travel, tiles are merged as rows arrive, gradients return.

At every tick, a rank sends packed rows of its keys and values to one rank, and computes with the rows of another. The next
tick is already under way. Results are accumulated in float32 (float64 for float64 inputs), and gradients travel in
``comm_dtype``.

Shape letters: B batch, n rows of this rank, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.messages import Message, RankPlan, Step
from dilated_attention_pytorch.distributed.own_rows import FusedStep
from dilated_attention_pytorch.distributed.wire import Parcel, Transport
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute import loop
from dilated_attention_pytorch.execute.loop import RowGradients, StockCalls, Sums, TileKernel, positive_scale
from dilated_attention_pytorch.values import Inputs, Options, Saved

# A step, and its keys and values or their gradients.
StepKeys = tuple[Step, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call as one rank executes it, forward and backward."""

    plan: RankPlan
    branches: tuple[RankPlan, ...]  # one plan per branch, if the backward needs the output of each (detached mixing)
    wire: Transport
    ahead: int | None  # messages that are under way while one is computed with; None starts all of them at once
    kernel: TileKernel
    options: Options  # with dropout and positions of the whole sequence
    comm_dtype: torch.dtype
    fused: FusedStep | None = None  # computes all tiles, if fused kernels do

    def stock(self, query: Tensor) -> StockCalls:
        """How stock kernels compute tiles, with partial results of half the size as on one device: messages need memory."""
        return StockCalls(self.kernel, self.options.scale, max(2**18, query.numel() // 16))


class Buffers:
    """Memory for the messages of one direction, used in turn: message ``tick`` reuses that of message ``tick - count``."""

    def __init__(self, messages: list[Message], count: int, like: Tensor, dtype: torch.dtype) -> None:
        self._count = count
        self._sizes = {message.tick: message.numel(like.shape[-1]) for message in messages}
        most: dict[int, int] = defaultdict(int)
        for tick, size in self._sizes.items():
            most[tick % count] = max(most[tick % count], size)
        self._flat = {slot: torch.empty(size, dtype=dtype, device=like.device) for slot, size in most.items()}

    @property
    def bytes(self) -> int:
        """The memory of all of them."""
        return sum(x.numel() * x.element_size() for x in self._flat.values())

    def flat(self, message: Message) -> Tensor:
        """The tensor of a message."""
        return self._flat[message.tick % self._count][: self._sizes[message.tick]]


class Exchange:
    """The messages of a rank: keys and values arrive and gradients return, a bounded number at a time."""

    def __init__(self, call: RankCall, plan: RankPlan, inputs: Inputs, *, gradients: bool) -> None:
        self._wire, self._inputs, self._ticks = call.wire, inputs, plan.ticks
        self._ahead = len(plan.ticks) if call.ahead is None else call.ahead
        sent, received = ([tick[side] for tick in plan.ticks if tick[side] is not None] for side in (0, 1))

        def room(messages: list[Any], dtype: torch.dtype) -> Buffers:
            return Buffers(messages, self._ahead + 1, inputs.key, dtype)

        dtype = inputs.key.dtype
        self.outgoing, self.incoming = room(sent, dtype), room(received, dtype)
        self.going_home, self.coming_home = (room(x if gradients else [], call.comm_dtype) for x in (received, sent))
        self._start = call.wire.now()
        self._under_way: list[Callable[[], None]] = []
        self._computed: list[tuple[int, Any]] = []
        self._returning: list[tuple[int, Callable[[], None]]] = []
        self._posted = 0
        self._post()

    @property
    def bytes(self) -> int:
        """The memory of all buffers."""
        return sum(x.bytes for x in (self.outgoing, self.incoming, self.going_home, self.coming_home))

    def _post(self) -> None:
        """Start the messages of the next ticks."""
        while self._posted < len(self._ticks) and len(self._under_way) < self._ahead:
            sent, received = self._ticks[self._posted]
            sends, receives = [], []
            if sent is not None:
                flat = self.outgoing.flat(sent)
                sends.append(Parcel(sent, "keys and values", sent.target, flat, partial(sent.pack_, flat, self._inputs)))
            if received is not None:
                receives.append(Parcel(received, "keys and values", received.source, self.incoming.flat(received)))
            self._under_way.append(self._wire.start(sends, receives, self._start))
            self._posted += 1

    def received(self) -> Iterator[tuple[int, Message | None]]:
        """By tick: the message that has arrived, while the next ones are under way."""
        for tick, (_, message) in enumerate(self._ticks):
            wait = self._under_way.pop(0)
            self._post()
            wait()
            yield tick, message

    def drain(self) -> None:
        """Send and receive the remaining keys and values, so that no message of a forward stays under way."""
        while self._under_way:
            wait = self._under_way.pop(0)
            self._post()
            wait()

    def send_home(self, tick: int, grads: Inputs) -> None:
        """Send the gradients of a tick's message, and add those that have returned for earlier messages."""
        self._computed.append((tick, self._wire.now()))
        self._return_(self._wire.lag, self._ahead, grads)

    def finish(self, grads: Inputs) -> None:
        """Send and add the remaining gradients."""
        self._return_(0, 0, grads)

    def _return_(self, waiting: int, under_way: int, grads: Inputs) -> None:
        while len(self._computed) > waiting:
            tick, after = self._computed.pop(0)
            sent, received = self._ticks[tick]
            sends, receives = [], []
            if received is not None:
                sends.append(Parcel(received, "gradients", received.source, self.going_home.flat(received)))
            if sent is not None:
                receives.append(Parcel(sent, "gradients", sent.target, self.coming_home.flat(sent)))
            self._returning.append((tick, self._wire.start(sends, receives, after)))
        while len(self._returning) > under_way:
            tick, wait = self._returning.pop(0)
            wait()
            sent, _ = self._ticks[tick]
            if sent is not None:
                sent.add_(self.coming_home.flat(sent), grads)


def _own_keys(plan: RankPlan, inputs: Inputs) -> Iterator[StepKeys]:
    """The steps with own keys and values (or their gradients)."""
    return ((step, inputs.key[step.keys], inputs.value[step.keys]) for step in plan.own)


def forward(call: RankCall, plan: RankPlan, inputs: Inputs, exchange: Exchange) -> Sums:
    """The results of this rank's rows; the scale of the call is positive."""
    how, fused = call.stock(inputs.query), call.fused
    sums = Sums.like(inputs.query) if fused is None else fused.sums(inputs.query)

    def attend_(steps: Iterable[StepKeys]) -> None:
        for step, key, value in steps:
            at = step.queries
            own = Sums(sums.out[at], sums.lse_bnh[at])
            loop.attend_(step.tiles(call.options), Inputs(inputs.query[at], key, value), own, how)

    if fused is not None:
        fused.attend_(plan, inputs, sums, call.options.scale)
    else:
        attend_(_own_keys(plan, inputs))
    for _, message in exchange.received():
        if message is not None and fused is not None:
            fused.attend_message_(plan, message, exchange.incoming.flat(message), inputs, sums, call.options.scale)
        elif message is not None:
            attend_(message.steps(exchange.incoming.flat(message), inputs.key.shape[-1]))
    return sums


def add_gradients_(call: RankCall, plan: RankPlan, inputs: Inputs, rows: RowGradients, grads: Inputs) -> None:
    """Add the gradients of all tiles to ``grads``."""
    how, head_dim = call.stock(inputs.query), inputs.key.shape[-1]

    def add_(steps: Iterable[StepKeys], gradients: Iterable[StepKeys]) -> None:
        for (step, key, value), (_, dk, dv) in zip(steps, gradients, strict=True):
            at = step.queries
            own, own_grads = Inputs(inputs.query[at], key, value), Inputs(grads.query[at], dk, dv)
            loop.add_gradients_(step.tiles(call.options), own, rows.at(at), own_grads, how)

    exchange = Exchange(call, plan, inputs, gradients=True)
    fused = None if call.fused is None else call.fused.gradients(plan, inputs, rows, grads, call.options.scale)
    if fused is not None:
        fused.write_own_()
    else:
        add_(_own_keys(plan, inputs), _own_keys(plan, grads))
    for tick, message in exchange.received():
        if message is not None:
            arrived, returning = exchange.incoming.flat(message), exchange.going_home.flat(message)
            if fused is not None:
                fused.add_message_(message, arrived, returning)
            else:
                add_(message.steps(arrived, head_dim), message.steps(returning.zero_(), head_dim))
        exchange.send_home(tick, grads)
    exchange.finish(grads)


class RingAttention(torch.autograd.Function):
    """The attention of a rank's rows. Every rank takes part forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: RankCall) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse (B, H, n)``."""
        with call.wire.turn("forward") as turn:
            positive, scale, _ = positive_scale(query, call.options.scale)
            scaled, inputs = replace(call, options=replace(call.options, scale=scale)), Inputs(positive, key, value)
            exchange = Exchange(scaled, call.plan, inputs, gradients=False)
            with turn.completed_by(exchange.drain):
                out, lse = forward(scaled, call.plan, inputs, exchange).results(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the three tensors."""
        return *_Gradients.apply(ctx.call, dout, dlse, *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """dq, dk and dv as a function of their own, whose derivative is refused and not silently missing."""

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with call.wire.turn("backward"):
            return _gradients(call, dout, dlse, *saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "second derivatives of a sharded call are not supported; one device with backend='reference' has them"
        )


def _gradients(call: RankCall, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    query, key, value, out, lse = saved
    positive, scale, sign = positive_scale(query, call.options.scale)
    call = replace(call, options=replace(call.options, scale=scale))
    inputs = Inputs(positive, key, value)
    grads = Inputs(*(torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in inputs))
    # Every rank takes part, also one whose result is not used.
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    rows = RowGradients.of(Saved(out, lse, dout, dlse))
    for plan in call.branches or (call.plan,):
        if call.branches:
            # With constant mixing weights, delta comes from the branch's own output, which is computed again.
            exchange = Exchange(call, plan, inputs, gradients=False)
            rows = rows._replace(out=forward(call, plan, inputs, exchange).out.to(out.dtype))
        add_gradients_(call, plan, inputs, rows, grads)
    if sign != 1.0:
        grads.query.mul_(sign)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))
