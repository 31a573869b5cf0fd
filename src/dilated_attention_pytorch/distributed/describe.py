"""What the ranks of a sharded call would send one another, for ``explain``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call, Sharding
from dilated_attention_pytorch.distributed.cost import choose_transport, costs_of, waits
from dilated_attention_pytorch.distributed.own_rows import fused_backend, stock_backend
from dilated_attention_pytorch.distributed.plans import make_plan, with_choice
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class ShardedTraffic:
    """What ranks would send one another in a forward, if each had an equal share of the sequence."""

    world_size: int
    layout: str
    transport: str  # that transport="auto" takes
    bytes: int  # to the rank that receives most
    waits: int  # one after the other
    own_rows: str  # the backend of a rank's queries with its own keys
    other_rows: str  # and with those of other ranks

    def __str__(self) -> str:
        ranks = f"shards    {self.world_size} rank(s), {self.layout}: "
        own = f"own rows  {self.own_rows}"
        if not self.bytes:
            return f"{ranks}nothing is sent\n{own}"
        sent = f"{self.transport}, {self.bytes / 2**20:,.2f} MiB to a rank, which waits {self.waits} time(s)"
        return f"{ranks}{sent}\n{own}; rows of others {self.other_rows}"


def describe_sharding(call: Call, tensors: tuple[Tensor, Tensor], world_size: int, layout: str) -> ShardedTraffic:
    """The traffic of a call on one device, if so many ranks shared its sequence evenly; ``tensors`` are query and key."""
    sharding = Sharding(None, layout)
    sharding.check()
    sharding.check_pattern(call.pattern)
    if call.queries != call.keys:
        raise ValueError(f"a shard has as many queries as keys, got {call.queries} and {call.keys}; leave out world_size")
    adaptive = isinstance(call.pattern, BlockSparse) and call.pattern.is_adaptive
    if adaptive and (call.lengths is not None or call.cu_seqlens is not None):
        raise ValueError(
            "what an adaptive pattern sends follows from the content of each sequence: leave out world_size, or explain "
            "one sequence at a time, without lengths and cu_seqlens"
        )
    problem, options = operators.problem_and_options(call, *tensors)
    shards, request, call = Shards.even(call.keys, world_size, layout), Request.of(call), replace(call, sharding=sharding)
    plan = make_plan(call, with_choice(problem, options.chosen), shards, 0, torch.device("cpu"))
    costs = costs_of(call, plan, shards)
    transport = choose_transport(costs)
    if transport == "ulysses":  # each rank has whole sequences
        own = others = backends.choose(call.backend, request).name
        received = costs.ulysses_bytes or 0
    else:
        others = stock_backend(call.backend, request)
        own, received = fused_backend(call, request) or others, costs.bytes
    return ShardedTraffic(world_size, layout, transport, received, waits(transport, costs), own, others)
