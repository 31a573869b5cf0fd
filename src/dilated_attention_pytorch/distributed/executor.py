"""Executing a schedule: rows go round, tiles are merged as they come, gradients go home.

In round ``t`` a rank sends packed rows of its keys and values to the rank ``t`` after it and computes with those of the
rank ``t`` before it; the next round is already under way. All ranks go through all rounds, so that the messages between any
two of them have one order. Partial results and gradients on their way are float32 (float64 for float64 inputs).

Shape letters as in tiles.py; n rows of this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch import tiles
from dilated_attention_pytorch.backends import eager, sdpa
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.distributed.schedule import Schedule, Transfer, make_schedule
from dilated_attention_pytorch.distributed.shards import Shards
from dilated_attention_pytorch.merge import accumulate_dtype
from dilated_attention_pytorch.patterns import Dilated
from dilated_attention_pytorch.plan import Plan, compile_plan
from dilated_attention_pytorch.spans import host_cu_seqlens, host_lengths, spans
from dilated_attention_pytorch.tiles import TileKernel


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of the batch and this rank's place in its schedule."""

    samples: slice
    schedule: Schedule
    rank: int
    starts: tuple[int, ...]  # the first row of each of this rank's chunks

    def chunk(self, number: int) -> tuple[slice, slice]:
        """Samples and rows of one of this rank's chunks."""
        start = self.starts[number]
        return self.samples, slice(start, start + len(self.schedule.shards.chunks[self.rank][number]))

    def rows(self, positions: range) -> tuple[slice, slice]:
        """Samples and rows of this rank that hold these positions."""
        for start, chunk in zip(self.starts, self.schedule.shards.chunks[self.rank], strict=True):
            if positions.start in chunk:
                first = start + positions.start - chunk.start
                return self.samples, slice(first, first + len(positions))
        raise AssertionError(f"rank {self.rank} does not hold {positions}")

    def packing(self, transfer: Transfer) -> Plan:
        """The rows of a transfer as tiles with themselves: their heads, first rows and strides."""
        schedule = self.schedule
        return compile_plan(
            schedule.pattern, schedule.shards.length, schedule.key_heads, is_causal=False,
            queries=transfer.positions, keys=transfer.positions,
        ).of_branch(transfer.branch)  # fmt: skip

    def message(self, transfer: Transfer, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for keys and values, (2, B, rows, G, D)."""
        samples = self.samples.stop - self.samples.start
        return torch.zeros((2, samples, transfer.rows, *like.shape[2:]), dtype=dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class _Ring:
    """The sequences of a call and the group that holds them."""

    sequences: tuple[_Sequence, ...]
    group: dist.ProcessGroup

    def only(self, branch: int) -> _Ring:
        """The same for one branch alone."""
        return replace(self, sequences=tuple(replace(s, schedule=s.schedule.only(branch)) for s in self.sequences))

    def post(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> list[dist.Work]:
        """Start messages to and from ranks of the group."""
        everyone = dist.get_process_group_ranks(self.group)
        operations = [dist.P2POp(dist.isend, tensor, everyone[peer], self.group) for tensor, peer in sends]
        operations += [dist.P2POp(dist.irecv, tensor, everyone[peer], self.group) for tensor, peer in receives]
        return dist.batch_isend_irecv(operations) if operations else []


@dataclass(frozen=True, slots=True)
class _Message:
    """Keys and values of a transfer, or their gradients: (2, B, rows, G, D)."""

    sequence: _Sequence
    transfer: Transfer
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """Messages of a round that are under way; what is sent stays here until it has left."""

    work: list[dist.Work]
    sent: list[_Message]
    received: list[_Message]


def _rounds(ring: _Ring, key: Tensor, value: Tensor) -> Iterator[_Round]:
    """The rounds in order, each complete, the next one under way; the first is under way when this returns."""
    by_number: dict[int, tuple[list[_Message], list[_Message]]] = defaultdict(lambda: ([], []))
    for sequence in ring.sequences:
        for number, sends, receives in sequence.schedule.rounds(sequence.rank):
            for side, transfers in zip(by_number[number], (sends, receives), strict=True):
                side += [_Message(sequence, transfer, key[:0]) for transfer in transfers]  # rows come when they are needed

    def start(number: int) -> _Round:
        sent, received = (
            [replace(m, rows=m.sequence.message(m.transfer, key, key.dtype)) for m in side] for side in by_number[number]
        )
        for m in sent:
            place, plan = m.sequence.rows(m.transfer.positions), m.sequence.packing(m.transfer)
            for x, packed in zip((key, value), m.rows, strict=True):
                for apart, together in tiles.packed_views(plan, x[place], packed):
                    together.copy_(apart)
        targets, sources = [(m.rows, m.transfer.target) for m in sent], [(m.rows, m.transfer.source) for m in received]
        return _Round(ring.post(targets, sources), sent, received)

    def rest(current: _Round) -> Iterator[_Round]:
        for number in range(2, world):
            following = start(number)
            yield _finished(current)
            current = following
        yield _finished(current)

    world = dist.get_world_size(ring.group)
    return rest(start(1)) if world > 1 else iter(())


def _finished(current: _Round) -> _Round:
    for work in current.work:
        work.wait()
    return current


def _forward(
    ring: _Ring, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: TileKernel
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse (B, n, H)``, both in the accumulation type."""
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    options: dict[str, Any] = {"scale": scale, "kernel": kernel, "limit": tiles.part_limit(query)}
    rounds = _rounds(ring, key, value)
    for sequence in ring.sequences:
        for a, b, plan in sequence.schedule.local(sequence.rank):
            rows, columns = sequence.chunk(a), sequence.chunk(b)
            tiles.attend_(plan, query[rows], key[columns], value[columns], out[rows], lse_bnh[rows], **options)
    for current in rounds:
        for m in current.received:
            for a, plan in m.sequence.schedule.remote(m.transfer):
                rows = m.sequence.chunk(a)
                k, v = m.rows
                tiles.attend_(plan, query[rows], k, v, out[rows], lse_bnh[rows], **options, packed=True)
    return out, lse_bnh


def _add_all_gradients_(
    ring: _Ring,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    kernel: TileKernel,
) -> None:
    (query, key, value), (dq, dk, dv) = qkv, grads
    options: dict[str, Any] = {"scale": scale, "kernel": kernel, "limit": tiles.part_limit(query)}

    def at(rows: tuple[slice, slice]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        dout, out, lse_bnh = by_row
        return (dout[rows], out[rows], lse_bnh[rows]), None if dlse_bnh is None else dlse_bnh[rows]

    rounds = _rounds(ring, key, value)
    for sequence in ring.sequences:
        for a, b, plan in sequence.schedule.local(sequence.rank):
            rows, columns = sequence.chunk(a), sequence.chunk(b)
            some = query[rows], key[columns], value[columns]
            tiles.add_gradients_(plan, *at(rows), some, (dq[rows], dk[columns], dv[columns]), **options)
    home: list[_Round] = []
    for current in rounds:
        back = [replace(m, rows=m.sequence.message(m.transfer, key, dk.dtype)) for m in current.received]
        for m, gradient in zip(current.received, back, strict=True):
            for a, plan in m.sequence.schedule.remote(m.transfer):
                rows = m.sequence.chunk(a)
                k, v = m.rows
                tiles.add_gradients_(
                    plan, *at(rows), (query[rows], k, v), (dq[rows], *gradient.rows), **options, packed=True
                )
        returned = [replace(m, rows=m.sequence.message(m.transfer, key, dk.dtype)) for m in current.sent]
        work = ring.post([(m.rows, m.transfer.source) for m in back], [(m.rows, m.transfer.target) for m in returned])
        home.append(_Round(work, back, returned))
        if len(home) > 1:
            _add_returned_(home.pop(0), dk, dv)
    for last in home:
        _add_returned_(last, dk, dv)


def _add_returned_(current: _Round, dk: Tensor, dv: Tensor) -> None:
    for m in _finished(current).received:
        place, plan = m.sequence.rows(m.transfer.positions), m.sequence.packing(m.transfer)
        for grad, packed in zip((dk, dv), m.rows, strict=True):
            for apart, together in tiles.packed_views(plan, grad[place], packed):
                apart.add_(together)


@dataclass(frozen=True, slots=True)
class _Call:
    """What does not change between forward and backward."""

    ring: _Ring
    branches: int
    scale: float
    detach_mixing: bool
    kernel: TileKernel


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        positive, scale, _ = tiles.positive_scale(query, call.scale)
        out, lse_bnh = _forward(call.ring, positive, key, value, scale, call.kernel)
        out, lse = out.to(query.dtype), lse_bnh.transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        positive, scale, sign = tiles.positive_scale(query, call.scale)
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (query, key, value))
        # Every rank takes part, also one whose result nobody used.
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        lse_bnh = lse.transpose(1, 2).contiguous()
        dlse_bnh = None if dlse is None else dlse.transpose(1, 2).contiguous()
        qkv = positive, key, value
        # With constant mixing weights, delta comes from the branch's own output, which is computed again.
        for ring in map(call.ring.only, range(call.branches)) if call.detach_mixing else [call.ring]:
            some_out = _forward(ring, *qkv, scale, call.kernel)[0].to(out.dtype) if call.detach_mixing else out
            _add_all_gradients_(ring, (dout, some_out, lse_bnh), dlse_bnh, qkv, (dq, dk, dv), scale, call.kernel)
        return (dq * sign).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


def resolve_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group over whose ranks a sequence is sharded."""
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim == 1:
            return group.get_group()
        if "cp" in names:
            return group.get_group("cp")
        raise ValueError(
            f"a device mesh must have one dimension or one named 'cp' (context parallel), got {group.ndim} dimensions "
            f"named {names}; pass mesh['name']"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {group!r} (this rank may not be a member)")
    return group


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    mixing_gradient: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's rows: see ``attention``, which has checked the arguments that one rank can check."""
    group = resolve_group(group)
    if pattern.torchscale_padding:  # every tile of a row would count its zero keys
        raise ValueError("a sharded sequence has no torchscale_padding; use a pattern without it, or one device")
    if dropout_p > 0.0:
        raise ValueError(f"a sharded sequence has no dropout yet (dropout_p = {dropout_p}); use dropout_p=0, or one device")
    if backend not in ("auto", "sdpa", "eager"):
        raise ValueError(
            f"the tiles of a sharded sequence go through 'sdpa' or 'eager', got backend={backend!r}; use 'auto'"
        )
    request = Request.of(query, dropout_p=0.0)
    kernel = (eager.kernel if backend == "eager" or sdpa.why_not(request) else sdpa.kernel)(request)
    facts = (
        query.shape[0], *query.shape[2:], *key.shape[2:], str(query.dtype), pattern.spec, is_causal, scale,
        None if lengths is None else lengths.tolist(), None if cu_seqlens is None else cu_seqlens.tolist(),
        mixing_gradient, layout,
    )  # fmt: skip
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (query.shape[1], key.shape[1], facts), group=group)
    for rank, (n, m, others) in enumerate(everyone):
        if n != m or others != everyone[0][2]:
            raise ValueError(
                "all ranks must call with as many queries as keys and with the same batch, heads, head size, type, "
                "pattern, is_causal, scale, lengths, cu_seqlens, mixing_gradient and layout; "
                f"rank 0 has {everyone[0]}, rank {rank} has {everyone[rank]}"
            )
    shards = Shards.of([n for n, _, _ in everyone], layout)
    ring = _ring(shards, pattern, query.shape[0], key.shape[2], is_causal, lengths, cu_seqlens, group)
    detached = mixing_gradient == "detached" and len(pattern.branches) > 1
    call = _Call(ring, len(pattern.branches), scale, detached, kernel)
    out, lse = _RingAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out, lse


def _ring(
    shards: Shards,
    pattern: Dilated,
    batch: int,
    key_heads: int,
    is_causal: bool,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    group: dist.ProcessGroup,
) -> _Ring:
    rank, n = dist.get_rank(group), shards.length
    chunks = shards.chunks[rank]
    sequences = []
    for span in spans(batch, n, n, host_lengths(lengths, n), host_cu_seqlens(cu_seqlens, n)):
        rows = range(span.keys.start, span.keys.stop)
        starts = tuple(
            sum(map(len, chunks[:a])) + min(max(rows.start - chunk.start, 0), len(chunk)) for a, chunk in enumerate(chunks)
        )
        schedule = make_schedule(pattern, shards.within(rows), key_heads, is_causal=is_causal)
        sequences.append(_Sequence(span.samples, schedule, rank, starts))
    return _Ring(tuple(sequences), group)
