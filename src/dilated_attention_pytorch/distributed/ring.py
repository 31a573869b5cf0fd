"""``attention`` over a sharded sequence: check the call, agree with the other ranks, choose a transport, execute."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call, CallOptions, Sharding, check_no_forward_derivative, make_call
from dilated_attention_pytorch.distributed.adaptive import adaptive_sequences
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, agree_once, arguments_of, reporting
from dilated_attention_pytorch.distributed.cost import choose_transport, costs_of
from dilated_attention_pytorch.distributed.executor import RankCall, RingAttention
from dilated_attention_pytorch.distributed.groups import resolve_group
from dilated_attention_pytorch.distributed.heads import exchange_heads, why_not_heads
from dilated_attention_pytorch.distributed.messages import RankPlan
from dilated_attention_pytorch.distributed.own_rows import (
    OwnRows,
    fused_backend,
    fused_step,
    is_detached,
    sharding_of,
    stock_backend,
    whole_problem,
)
from dilated_attention_pytorch.distributed.rank_plans import block_plan, dilated_plan, static_block_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.distributed.wire import Wire
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs, Options


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def sharded_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Dilated | BlockSparse, **options: Unpack[CallOptions]
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)`` of this rank's rows, see ``attention``. Where heads are exchanged, lse is None unless asked for."""
    given, layout = options.get("group"), options.get("layout")
    sharding = given if isinstance(given, Sharding) else Sharding(given, "contiguous" if layout is None else layout)
    group = resolve_group(sharding.group)
    with reporting(sharding):
        call, inputs = make_call(query, key, value, pattern, **options)
        check_no_forward_derivative(inputs)
        _check_rows(call, group)
        request = Request.of(call)
        kernel = backends.stock_kernel(stock_backend(call.backend, request), request)
        fused = fused_backend(call, request)
        wire = Wire(group, call.device)
        inputs = inputs.rows_contiguous()
        arguments, seed = arguments_of(call, inputs), _own_seed(call)
    shards, seed = _agree(call, arguments, seed, wire)
    # From here on, every rank takes the same decisions.
    _check_order(call, shards)
    problem = whole_problem(call, shards.length)
    plan = _plan(call, problem, shards, inputs, wire)
    transport = _transport(call, plan, shards)
    if transport == "ulysses":
        return exchange_heads(call, inputs, shards, wire)
    branches = [problem.of_branch(i) for i in range(len(problem.dilated.branches))] if is_detached(call) else []
    rank_call = RankCall(
        plan=plan,
        branches=tuple(make_plan(call, branch, shards, wire.rank, call.device) for branch in branches),
        wire=wire,
        ahead=None if transport == "allgather" else 1,
        kernel=kernel,
        options=_options(call, seed),
        comm_dtype=accumulate_dtype(call.dtype) if sharding.comm_dtype is None else sharding.comm_dtype,
        fused=None if fused is None else fused_step(call, fused, OwnRows.of(problem, shards, wire.rank)),
    )
    out, lse = RingAttention.apply(*inputs, rank_call)  # type: ignore[no-untyped-call]
    return out, lse


def _check_rows(call: Call, group: dist.ProcessGroup) -> None:
    """Raise if this rank's tensors are not a shard."""
    layout, n = sharding_of(call).layout, call.queries
    if n != call.keys:
        raise ValueError(f"a shard has as many queries as keys, got {n} and {call.keys}; decoding is for one device")
    if not isinstance(layout, Shards):
        return
    rank, world = watch_of(group).rank, watch_of(group).world
    if layout.world_size != world:
        raise ValueError(f"layout has shards for {layout.world_size} ranks, the group has {world}")
    own = layout.rows(rank)
    if n != own:
        whole = "; these look like whole sequences, not shards: use shard_sequence" if n == layout.length else ""
        raise ValueError(f"layout gives rank {rank} a shard of {own} rows, its tensors have {n}{whole}")


def _own_seed(call: Call) -> int:
    """The seed of dropout that the user gave, or a new one, which the ranks take from their first rank."""
    if call.dropout_p == 0.0:
        return 0
    if call.seed is not None:
        return int(call.seed)
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device=call.device))


def _agree(call: Call, arguments: Arguments, seed: int, wire: Wire) -> tuple[Shards, int]:
    """The shards of all ranks and their common seed of dropout, after they have compared all other arguments."""
    layout, rows, every = sharding_of(call).layout, call.queries, [call.queries]
    draws = call.dropout_p > 0.0 and call.seed is None
    if len(wire.global_ranks) > 1:
        if isinstance(layout, Shards) and not draws:
            agree_once(wire.group, arguments, rows)
        else:
            every, first = agree(wire.group, arguments, rows, seed if draws else 0)
            seed = first if draws else seed
        wire.begin_call(arguments)
    if isinstance(layout, Shards):
        return layout, seed
    _check_sharded(call, every)
    return Shards.of(every, layout), seed


def _check_sharded(call: Call, rows: list[int]) -> None:
    """Raise if every rank seems to have passed the whole sequence."""
    n, world = rows[0], len(rows)
    ends = call.lengths if call.lengths is None or call.starts is None else call.starts + call.lengths
    longest = 0 if ends is None or not call.batch else int(ends.max())
    end = 0 if call.cu_seqlens is None else int(call.cu_seqlens[-1])
    for name, last, is_whole in (("lengths", longest, 0 < longest <= n), ("cu_seqlens", end, 0 < end == n)):
        if world > 1 and set(rows) == {n} and is_whole:
            got = f"each of {world} ranks has {n} rows, together {n * world}, but {name} ends at {last}; use shard_sequence"
            padded = f"If the rest is padding, say which rows ranks hold: layout=Shards.of([{n}] * {world}, ...)"
            raise ValueError(f"these look like whole sequences, not shards: {got}. {padded}")


def _check_order(call: Call, shards: Shards) -> None:
    """Raise if the order is not over the rows of all ranks together."""
    if call.order is not None and len(call.order) != shards.length:
        rows = [shards.rows(rank) for rank in range(shards.world_size)]
        whole = "; these look like whole sequences, not shards" if set(rows) == {len(call.order)} else ""
        ranks = f"the {len(rows)} rank(s) have {shards.length} rows together{whole}"
        way_out = "use shard_sequence(x, group, order=order)"
        raise ValueError(f"the order is over {len(call.order)} positions, {ranks}; {way_out}")


def make_plan(call: Call, problem: Problem, shards: Shards, rank: int, device: torch.device) -> RankPlan:
    """The plan of a rank for a pattern that does not depend on content, with indices on this device."""
    if isinstance(problem.pattern, Dilated):
        rows = sharding_of(call).bucket_size or default_bucket_size(shards, call.device.type)
        return dilated_plan(problem, shards, rank, rows)
    return static_block_plan(problem, shards, rank, device)


def _is_adaptive(call: Call) -> bool:
    return isinstance(call.pattern, BlockSparse) and call.pattern.is_adaptive


def _plan(call: Call, problem: Problem, shards: Shards, inputs: Inputs, wire: Wire) -> RankPlan:
    if not _is_adaptive(call):
        return make_plan(call, problem, shards, wire.rank, call.device)
    with wire.turn("choice of blocks"):
        sequences = adaptive_sequences(problem, shards, inputs, call.scale, wire)
    return block_plan(sequences, problem, wire.rank, shards.world_size, call.device)


def _transport(call: Call, plan: RankPlan, shards: Shards) -> str:
    """How rows travel."""
    transport = sharding_of(call).transport
    if transport == "auto":  # for an adaptive pattern, no rank knows how much the others receive
        return "ring" if _is_adaptive(call) else choose_transport(costs_of(call, plan, shards))
    reasons = why_not_heads(call, shards) if transport == "ulysses" else []
    if reasons:
        raise ValueError("heads cannot be exchanged (transport='ulysses'):\n" + "\n".join(f"  {x}" for x in reasons))
    return transport


def _options(call: Call, seed: int) -> Options:
    positions = None
    if call.order is not None and call.masks_by_position:  # rows at any place may be visible: tiles are masked by position
        positions = call.order.positions.expand(call.batch, -1)
    return Options(call.scale, Dropout(call.dropout_p, seed) if call.dropout_p > 0.0 else None, positions)
