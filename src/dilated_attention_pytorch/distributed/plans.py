"""The problem of a sharded call over the whole sequence, and the plan of a rank for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilated_attention_pytorch.call import Call, Sharding, check_blocks_fit
from dilated_attention_pytorch.distributed.messages import RankPlan
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan, static_block_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import BlockRule, Problem, find_problem
from dilated_attention_pytorch.plan.sequences import host_cu_seqlens, host_lengths
from dilated_attention_pytorch.shards import Shards


def sharding_of(call: Call) -> Sharding:
    """The sharding of a sharded call."""
    assert call.sharding is not None
    return call.sharding


def whole_problem(call: Call, length: int) -> Problem:
    """The problem of a sharded call over the whole sequence, for which the arguments are checked."""
    check_blocks_fit(call, length, length)
    pattern: str | BlockRule = call.plan_pattern.spec
    if isinstance(call.pattern, BlockSparse):
        given = call.pattern.given_causal if call.plan_is_causal else call.pattern.given
        pattern = BlockRule(call.pattern.block_size, call.pattern.config, given)
    sequences = host_lengths(call.lengths, length), host_cu_seqlens(call.cu_seqlens, length)
    sizes = call.batch, length, length, call.heads, call.key_heads
    return find_problem(pattern, call.plan_is_causal, *sizes, *sequences)


def with_choice(problem: Problem, chosen: Tensor | None) -> Problem:
    """A problem of one sequence whose adaptive pattern is replaced by the blocks that it chose."""
    if chosen is None:
        return problem
    ((_, lists),) = lists_of(problem, chosen, torch.device("cpu"))
    return replace(problem, pattern=BlockRule(problem.blocks.block_size, None, lists))


def bucket_size(call: Call, shards: Shards) -> int:
    """The rows of a message."""
    return sharding_of(call).bucket_size or default_bucket_size(shards, call.device.type)


def make_plan(call: Call, problem: Problem, shards: Shards, rank: int, device: torch.device) -> RankPlan:
    """The plan of a rank for a pattern that does not depend on content, with indices on this device."""
    if isinstance(problem.pattern, Dilated):
        return dilated_plan(problem, shards, rank, bucket_size(call, shards))
    return static_block_plan(problem, shards, rank, device)
