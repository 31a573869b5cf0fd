"""What ranks would do, in one process: a simulated ring, whose memory is measured, and the traffic for ``explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.targets import is_fake, without_fakes
from dilated_attention_pytorch.call import Call, Sharding, make_call
from dilated_attention_pytorch.distributed.cost import (
    choice_of,
    choose_transport,
    costs_of,
    received_by_rank,
)
from dilated_attention_pytorch.distributed.executor import RankCall, RingAttention
from dilated_attention_pytorch.distributed.messages import RankPlan
from dilated_attention_pytorch.distributed.own_rows import (
    FusedGradients,
    FusedStep,
    OwnRows,
    fused_backend,
    fused_step,
    stock_backend,
)
from dilated_attention_pytorch.distributed.ring import make_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.wire import Parcel
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.loop import RowGradients, Sums
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.counts import has_values, real_tensors
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options, Results


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that one rank had of each kind during a forward, and during a backward if it was asked for.

    ``buffers + partials`` is the most that a forward had allocated at a time, and ``grad_buffers + grad_partials`` the most
    of a backward. The allocator counts them. Tensors on the meta device have none: the bytes of tensors are counted there,
    without the memory that kernels take for themselves.
    """

    rank: int
    rows: int
    query: int
    key_value: int
    buffers: int  # for messages, both directions
    # Output and lse in the accumulation type and as returned, the query with the other sign if the scale is negative, and
    # the partial results of one kernel call.
    partials: int
    received: int  # the sum over all messages, which do not exist at the same time
    means: int = 0  # of an adaptive pattern: the means from which the rank chooses, before it attends
    # Of a backward, None if it was not asked for.
    grad_buffers: int | None = None  # for keys, values and their gradients, both directions
    # Gradients in the accumulation type, copies of rows, and the partial results of one kernel call. None as well if fused
    # kernels, which cannot run on the meta device, would compute it.
    grad_partials: int | None = None
    grad_received: int | None = None  # keys and values again, and the gradients of what the rank sent


class _Turn(AbstractContextManager[Any]):
    """A turn of ranks that cannot fail."""

    def __enter__(self) -> _Turn:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left to do."""

    def completed_by(self, drain: Callable[[], None]) -> AbstractContextManager[None]:
        """No message is under way after an error."""
        return nullcontext()


@dataclass(slots=True)
class SimulatedWire:
    """A transport within one process: what a rank receives is packed from the shards of the others.

    Gradients that would return from other ranks are zero.
    """

    plans: list[RankPlan]  # by rank
    shards: list[Inputs]
    received: int = 0
    lag: int = 0
    buffers: dict[int, int] = field(default_factory=dict)  # bytes by storage

    def turn(self, direction: str) -> _Turn:
        """Count from zero."""
        self.received = 0
        self.buffers.clear()
        return _Turn()

    def now(self) -> None:
        """Nothing runs beside the caller."""

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Pack as the sending rank would, into the buffers of the receiving one."""
        for parcel in (*sends, *receives):
            storage = parcel.rows.untyped_storage()
            self.buffers[storage._cdata] = storage.nbytes()
        for parcel in sends:
            if parcel.pack is not None:
                parcel.pack()  # for its memory: the rows are not read
        for parcel in receives:
            sent, _ = self.plans[parcel.peer].ticks[parcel.message.tick]
            if parcel.message.target == parcel.peer:  # a message of this rank, whose gradients return
                parcel.rows.zero_()
            else:
                assert sent is not None
                sent.pack_(parcel.rows, self.shards[parcel.peer])
            self.received += parcel.rows.numel() * parcel.rows.element_size()
        return lambda: None


def simulate_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    world_size: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str | Shards = "contiguous",
    bucket_size: int | None = None,
    device: str | torch.device | None = None,
    backward: bool = False,
) -> tuple[Tensor, Tensor, tuple[RankMemory, ...]]:
    """``attention`` of whole tensors as ``world_size`` ranks would compute it: out, lse (B, H, N) and each rank's memory.

    Plans, buffers, tiles and the backend are those of ``attention(..., group=Sharding(group, transport="ring"))``, but the
    messages do not leave the process. An adaptive pattern chooses its blocks from the whole tensors. The means and the
    messages by which ranks choose together are counted.

    With ``backward``, a backward runs as well, for its memory and its bytes. The results have no gradients.

    With tensors on the meta device, or fake ones, nothing is computed, and the memory is that of the ``device`` asked for,
    as ``explain`` takes it. Tensors with values are computed on their own device.

    >>> from dilated_attention_pytorch import attention
    >>> q, k, v = torch.randn(3, 1, 4096, 2, 16).unbind(0)
    >>> out, lse, memory = simulate_ring(q, k, v, Dilated([512, 4096], [1, 4]), 4, bucket_size=64)
    >>> torch.allclose(out, attention(q, k, v, Dilated([512, 4096], [1, 4])), atol=1e-5)
    True
    >>> memory[0].rows, memory[0].key_value, memory[0].buffers  # 4 buffers of 64 rows, 2 heads, 16 numbers, key and value
    (1024, 262144, 65536)
    >>> *_, memory = simulate_ring(q, k, v, Dilated([512, 4096], [1, 4]), 4, bucket_size=64, backward=True)
    >>> memory[0].received, memory[0].grad_received  # keys and values again, and as many gradients
    (196608, 393216)
    >>> from dilated_attention_pytorch import BlockSparse, SparsePatternConfig
    >>> window = BlockSparse.from_config(SparsePatternConfig("local_window", 0.125, block_size=64))
    >>> out, lse, memory = simulate_ring(q, k, v, window, 4)
    >>> torch.allclose(out, attention(q, k, v, window), atol=1e-5)
    True
    >>> [rank.received for rank in memory]  # windows of 8 blocks: 4 before a block, 3 behind it; 64 rows of 256 bytes each
    [49152, 114688, 114688, 65536]
    """
    with real_tensors():
        tensors, target = without_fakes(Inputs(query, key, value), device)
        call, inputs = make_call(*tensors, pattern, is_causal=is_causal, scale=scale)
        computed_on = call.device
        elsewhere = target is not None and (target.described or target.device.type != computed_on.type)
        if elsewhere and computed_on.type != "meta":
            raise ValueError(
                f"device describes where tensors without values would be: got device={str(device)!r} for tensors on "
                f"{computed_on}; pass tensors on the meta device, or leave out device"
            )
        request = Request.of(call, target)
        call = call if target is None else replace(call, device=target.device)
        call, problem = _sharded(call, Sharding(None, layout, bucket_size, "ring"), inputs.query, inputs.key)
        shards = layout if isinstance(layout, Shards) else Shards.even(call.queries, world_size, layout)
        if not call.queries == call.keys == shards.length or shards.world_size != world_size:
            got = f"{call.queries} queries, {call.keys} keys, {shards.length} rows on {shards.world_size} ranks"
            raise ValueError(f"a ring of {world_size} ranks has as many queries as keys as rows of shards: got {got}")
        results, memory = _simulated(_Ranks(call, request, problem, shards), inputs, backward)
    if is_fake(query):
        return torch.empty_like(query), query.new_empty(results.lse.shape, dtype=results.lse.dtype), memory
    return *results, memory


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks that are simulated."""

    call: Call
    request: Request
    problem: Problem
    shards: Shards

    def calls(self, own: list[Inputs]) -> Iterator[RankCall]:
        """The call of each rank with its inputs."""
        call, device = self.call, own[0].query.device
        fused, ranks = fused_backend(call, self.request), range(self.shards.world_size)
        kernel = backends.stock_kernel(stock_backend("auto", self.request), self.request)
        make_step = _MetaStep if device.type == "meta" else FusedStep
        # Block numbers of tensors without values are on the host if those of the device asked for would be.
        lists_on = call.device if device.type == "meta" and call.device.type == "cpu" else device
        plans = [make_plan(call, self.problem, self.shards, rank, lists_on) for rank in ranks]
        for rank, plan in enumerate(plans):
            step = fused_step(call, fused, OwnRows.of(self.problem, self.shards, rank))
            step = None if step is None else make_step(step.rows, step.backend)
            returned = accumulate_dtype(call.dtype)
            yield RankCall(plan, (), SimulatedWire(plans, own), 1, kernel, Options(call.scale), returned, step)


def _simulated(ranks: _Ranks, inputs: Inputs, backward: bool) -> tuple[Results, tuple[RankMemory, ...]]:
    """The results of all ranks, one after the other, and the memory of each."""
    call, shards, device = ranks.call, ranks.shards, inputs.query.device
    rows = [rows_of(shards, rank, device) for rank in range(shards.world_size)]
    own = [Inputs(*(x.detach().index_select(1, at) for x in inputs)) for at in rows]
    out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    lse_shape = (call.batch, call.heads, shards.length)
    lse = torch.empty(lse_shape, dtype=accumulate_dtype(call.dtype), device=device)
    memory = []
    for rank, rank_call in enumerate(ranks.calls(own)):
        at, mine = rows[rank], own[rank]
        query_bytes, key_bytes = (x.numel() * x.element_size() for x in mine[:2])
        (out[:, at], lse[:, :, at]), counts = _measured(rank_call, mine, backward)
        buffers, peak, received = counts[0]
        chosen = choice_of(call, ranks.problem, shards, rank)
        fields = query_bytes, 2 * key_bytes, buffers, peak - buffers, received + chosen.received, chosen.held
        of_backward: tuple[int | None, ...] = ()
        if backward:
            buffers, peak, received = counts[1]
            unknown = isinstance(rank_call.fused, _MetaStep)
            of_backward = buffers, None if unknown else peak - buffers, received
        memory.append(RankMemory(rank, len(at), *fields, *of_backward))
    return Results(out, lse), tuple(memory)


@dataclass(frozen=True, slots=True)
class _MetaStep(FusedStep):
    """The memory of a fused step: its partial results. Kernels cannot run on the meta device."""

    def run_(self, problem: Problem, inputs: Inputs, sums: Sums, scale: float) -> None:
        """Make the tensors that the kernels would write besides the results."""
        head_dim, device = inputs.query.shape[-1], inputs.query.device
        if isinstance(problem.pattern, Dilated):  # kernels over block lists have no partial results
            plan = find_launch_plan(problem, block=ITEM_ROWS, by_keys=False, head_dim=head_dim, device=device)
            torch.empty((plan.partial_rows, head_dim + 1), dtype=torch.float32, device=device)

    def gradients(self, plan: RankPlan, inputs: Inputs, rows: RowGradients, grads: Inputs, scale: float) -> FusedGradients:
        """A backward whose memory is not known."""
        return _MetaGradients(self, plan, inputs, rows.dout, None, grads, Options(scale))


class _MetaGradients(FusedGradients):
    def _run_(self, problem: Problem, inputs: Inputs, grads: Inputs) -> None:
        """Nothing: kernels cannot run on the meta device."""


def _measured(call: RankCall, inputs: Inputs, backward: bool) -> tuple[Results, list[tuple[int, int, int]]]:
    """The results of a rank; for its forward and backward the bytes of buffers, of all allocations, and received ones."""
    wire, results, counts = call.wire, [], []
    assert isinstance(wire, SimulatedWire)
    leaves = [x.requires_grad_(backward) for x in inputs]

    def attend() -> None:
        results.append(Results(*RingAttention.apply(*leaves, call)))  # type: ignore[no-untyped-call]

    def differentiate() -> Any:
        return torch.autograd.grad(results[0].out, leaves, dout)

    with torch.set_grad_enabled(backward):
        peak = peak_extra_bytes(attend, inputs.query.device)
        counts.append((sum(wire.buffers.values()), peak, wire.received))
        if backward:
            dout = torch.zeros_like(results[0].out)
            peak = peak_extra_bytes(differentiate, inputs.query.device)
            counts.append((sum(wire.buffers.values()), peak, wire.received))
    return Results(*(x.detach() for x in results[0])), counts


@dataclass(frozen=True, slots=True)
class ShardedTraffic:
    """What ranks would send one another, if each had an equal share of the sequence."""

    world_size: int
    layout: str
    transport: str  # that transport="auto" takes
    bytes: int  # to the rank that receives most
    backward_bytes: int  # the same for a backward: keys and values again, and the gradients of what the rank sent
    waits: int  # of the rank that waits most: messages that it receives one after the other
    own_rows: str  # the backend of a rank's queries with its own keys
    other_rows: str  # and with those of other ranks

    def __str__(self) -> str:
        ranks = f"shards    {self.world_size} rank(s), {self.layout}: "
        own = f"own rows  {self.own_rows}"
        if not self.bytes:
            return f"{ranks}nothing is sent\n{own}"
        sent = f"{self.transport}, {self.bytes / 2**20:,.2f} MiB to a rank, which waits {self.waits} time(s); "
        sent += f"{self.backward_bytes / 2**20:,.2f} MiB in a backward"
        return f"{ranks}{sent}\n{own}; rows of others {self.other_rows}"


def describe_sharding(
    call: Call, request: Request, tensors: tuple[Tensor, Tensor], world_size: int, layout: str
) -> ShardedTraffic:
    """The traffic of a call on one device, if so many ranks shared its sequence evenly; ``tensors`` are query and key."""
    if call.queries != call.keys:
        raise ValueError(f"a shard has as many queries as keys, got {call.queries} and {call.keys}; leave out world_size")
    adaptive = isinstance(call.pattern, BlockSparse) and call.pattern.is_adaptive
    if adaptive and any(x is not None for x in (call.lengths, call.starts, call.cu_seqlens)):
        raise ValueError(
            "what an adaptive pattern sends follows from the content of each sequence: leave out world_size, or explain "
            "one sequence at a time, without lengths, starts and cu_seqlens"
        )
    call, problem = _sharded(call, Sharding(None, layout), *tensors)
    shards = Shards.even(call.keys, world_size, layout)
    plan = make_plan(call, problem, shards, 0, torch.device("cpu"))
    # In a call with an adaptive pattern, no rank knows what the others read.
    transport = "ring" if adaptive else choose_transport(costs_of(call, plan, shards))
    if transport == "ulysses":  # each rank has whole sequences
        own = others = backends.choose(call.backend, request).name
    else:
        stock = stock_backend(call.backend, request)
        own = others = fused_backend(call, request) or stock
    bucket_size = default_bucket_size(shards, call.device.type)
    ranks = received_by_rank(call, problem, shards, plan, transport, bucket_size)
    return ShardedTraffic(
        world_size,
        layout,
        transport,
        bytes=max(rank.forward for rank in ranks),
        backward_bytes=max(rank.backward for rank in ranks),
        waits=max(rank.waits for rank in ranks),
        own_rows=own,
        other_rows=others,
    )


def _sharded(call: Call, sharding: Sharding, query: Tensor, key: Tensor) -> tuple[Call, Problem]:
    """The call as ranks would make it, and its problem; an adaptive pattern is replaced by the blocks that it chose."""
    sharding.check()
    sharding.check_pattern(call.pattern)
    problem, options = operators.problem_and_options(call, query, key)
    if options.chosen is not None:
        if not has_values(options.chosen):
            raise ValueError(
                "an adaptive pattern chooses its blocks by values, so what ranks send is unknown without them: got "
                f"tensors on {query.device}; pass tensors with values, or leave out world_size"
            )
        ((_, lists),) = lists_of(problem, options.chosen, torch.device("cpu"))
        problem = replace(problem, pattern=BlockRule(problem.blocks.block_size, None, lists))
    return replace(call, sharding=sharding), problem
