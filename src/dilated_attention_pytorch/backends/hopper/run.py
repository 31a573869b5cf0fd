"""The Hopper kernels over launch tables. Launches that only add partial results are those of the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.buffers import dkv_buffers, dq_buffers, forward_buffers
from dilated_attention_pytorch.backends.gpu.configs import padded
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, launch
from dilated_attention_pytorch.backends.gpu.launch_plan import Launch, LaunchPlan, find_launch_plan
from dilated_attention_pytorch.backends.gpu.portable import (
    LOG2_E,
    SUM,
    Strides,
    TileOptions,
    dkv_launches,
    dq_launches,
    forward_launches,
    row_strides,
)
from dilated_attention_pytorch.backends.gpu.statistics import RowStatistics
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, HopperConfig, configs, joint_config
from dilated_attention_pytorch.backends.hopper.kernels.common import PART_FACTS, in_fours
from dilated_attention_pytorch.backends.hopper.kernels.dkv import dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.dq import dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.hopper.kernels.joint import joint_kernel
from dilated_attention_pytorch.backends.hopper.persistent import (
    aligned,
    constants,
    multiprocessors,
    nonzero_scale,
    row_statistics,
    scaled_query,
    with_scratch,
)
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Upstream

# Kernels that add partial results have room in shared memory for the layout entries of this many, or of a larger power of 2.
LEAST_PARTIALS = 8

# In turns launches that attend (True), and portable ones that only add partial results.
_Launches = tuple[tuple[bool, tuple[KernelLaunch, ...]], ...]


class GradientInputs(NamedTuple):
    """The tensors of rows that gradient kernels read."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor

    @property
    def strides(self) -> Strides:
        """Of each."""
        return self.query.stride(), self.key.stride(), self.value.stride(), self.dout.stride()


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """What the launches over a launch plan depend on besides its tables."""

    head_dim: int
    strides: Strides
    config: HopperConfig
    scale: float


def stages(config: HopperConfig, head_dim: int, partials: int) -> int:
    """Blocks in flight. The layout entries of many partial results take the shared memory of some of them."""
    entry_bytes = max(0, partials - LEAST_PARTIALS) * 2 * int(PART_FACTS.value) * 8
    block_bytes = 2 * config.block * padded(head_dim) * 2
    return config.stages - -(-entry_bytes // block_bytes)


def _table_constants(how: ItemOptions, one: Launch) -> dict[str, Any]:
    # Few different numbers, so that few kernels are compiled.
    partials = max(LEAST_PARTIALS, triton.next_power_of_2(one.children)) if one.children else 0
    depth = stages(how.config, how.head_dim, partials)
    return {**constants(how.config, how.head_dim), "STAGES": depth, "FINAL": one.final, "PARTS": partials}


def _launches(
    kernel: Any,
    sums: Callable[[LaunchPlan, TileOptions], tuple[KernelLaunch, ...]],
    plan: LaunchPlan,
    how: ItemOptions,
    numbers: tuple[float, ...],
    **mode: Any,
) -> _Launches:
    """The launches that attend, and those that only add partial results, which are ``sums`` of the portable kernels."""
    launches: list[tuple[bool, KernelLaunch]] = []
    portable = sums(plan, TileOptions(how.head_dim, how.strides, SUM, in_fours=in_fours(how.head_dim)))
    for one, portable_launch in zip(plan.launches, portable, strict=True):
        if not one.attends:
            launches.append((False, portable_launch))
            continue
        number = sum(attends for attends, _ in launches)
        programs = min(one.programs, multiprocessors(one.table.device))
        counts = one.table.shape[0], one.programs, *((number,) if kernel is joint_kernel else ())
        tables = one.table, plan.layout, plan.offsets
        # Launches that add partial results begin before the one before is done, and wait before they read them. The first
        # launch of a share reads the results of other kernels, so it does not begin early.
        early = one.children > 0 and not one.begins_share
        all_constants = {**mode, **_table_constants(how, one), "launch_pdl": early}
        all_numbers = (*counts, *row_strides(how.strides), *numbers)
        launches.append((True, KernelLaunch(kernel, programs, tables, all_numbers, all_constants)))
    return tuple((attends, tuple(one for _, one in run)) for attends, run in groupby(launches, key=itemgetter(0)))


def _heads(plan: LaunchPlan) -> tuple[int, ...]:
    problem = plan.problem
    return problem.heads, problem.key_heads, problem.heads_per_key, plan.bundles


def _forward_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers = plan.problem.queries, *_heads(plan), how.scale * LOG2_E
    return _launches(forward_kernel, forward_launches, plan, how, numbers, BLOCK_N=how.config.block)


def _dq_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers = plan.problem.queries, *_heads(plan), how.scale * LOG2_E, how.scale
    return _launches(dq_kernel, dq_launches, plan, how, numbers, BLOCK_N=how.config.block)


def _by_key_numbers(plan: LaunchPlan, scale: float) -> tuple[float, ...]:
    return plan.problem.queries, plan.problem.keys, *_heads(plan), nonzero_scale(scale) * LOG2_E, scale


def _dkv_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers, config = _by_key_numbers(plan, how.scale), how.config
    return _launches(dkv_kernel, dkv_launches, plan, how, numbers, BLOCK_M=config.block, OVERLAP=config.overlap)


def _joint_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers = _by_key_numbers(plan, how.scale)
    return _launches(joint_kernel, dkv_launches, plan, how, numbers, BLOCK_M=how.config.block)


def _attending(launches: _Launches) -> tuple[KernelLaunch, ...]:
    return tuple(one for attends, run in launches if attends for one in run)


def _launch(launches: _Launches, tensors: tuple[Tensor, ...], portable: tuple[Tensor, ...]) -> None:
    """Launch all in order. Those that only add take ``portable``, of which they read no inputs."""

    def in_order() -> None:
        for attends, run in launches:
            launch(run, tensors if attends else portable)

    with_scratch(in_order, sum(one.programs for one in _attending(launches)), tensors[0].device)


def _plan(problem: Problem, x: Tensor, *, by_keys: bool, separate: bool = False) -> LaunchPlan:
    return find_launch_plan(
        problem, block=ITEM_ROWS, by_keys=by_keys, head_dim=x.shape[-1], device=x.device, separate=separate
    )  # fmt: skip


def forward(
    problem: Problem, inputs: Inputs, options: Options, out: Tensor | None = None, config: HopperConfig | None = None
) -> Results:
    """The attention of a dilated problem, see ``TableBackend.forward``."""
    query, scale = scaled_query(inputs.query, options.scale)
    query, key, value = aligned(query), aligned(inputs.key), aligned(inputs.value)
    plan = _plan(problem, query, by_keys=False)
    *partial, out, lse = forward_buffers(query, plan, out)
    strides = query.stride(), key.stride(), value.stride()
    how = ItemOptions(query.shape[-1], strides, config or configs(query.shape[-1]).forward, scale)
    tensors = (query, key, value, *partial, out, lse)
    _launch(plan.once(_forward_launches, how), tensors, (*tensors, lse, lse))
    return Results(out, lse)


def dq(
    problem: Problem,
    read: GradientInputs,
    statistics: RowStatistics,
    scale: float,
    result: Tensor | None = None,
    config: HopperConfig | None = None,
) -> Tensor:
    """The gradient of the queries, written to ``result`` if that is given."""
    lse, delta, _ = statistics
    plan, head_dim = _plan(problem, read.query, by_keys=False), read.query.shape[-1]
    tensors = (*read, lse, delta, *dq_buffers(read.query, plan, result))
    how = ItemOptions(head_dim, read.strides, config or configs(head_dim).dq, scale)
    _launch(plan.once(_dq_launches, how), tensors, (*tensors, lse, lse))
    return tensors[-1]


def dkv(
    problem: Problem,
    read: GradientInputs,
    shifts: Tensor,
    scale: float,
    results: tuple[Tensor, Tensor] | None = None,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values, written to ``results`` if these are given."""
    plan, head_dim = _plan(problem, read.query, by_keys=True), read.query.shape[-1]
    buffers = dkv_buffers(read.key, read.value, plan, results)
    how = ItemOptions(head_dim, read.strides, config or configs(head_dim).dkv, scale)
    _launch(plan.once(_dkv_launches, how), (*read, shifts, *buffers), (*read, shifts, shifts, *buffers, shifts, shifts))
    return buffers[-2:]


def joint(
    problem: Problem,
    read: GradientInputs,
    shifts: Tensor,
    scale: float,
    config: HopperConfig,
    grads: Inputs | None = None,
) -> Inputs:
    """All gradients by one kernel, written to ``grads`` if these are given."""
    query = read.query
    plan = _plan(problem, query, by_keys=True, separate=True)
    launches = plan.once(_joint_launches, ItemOptions(query.shape[-1], read.strides, config, scale))
    sums = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    rows = -(-query.shape[:3].numel() // 4) * 4  # the second view is aligned then, so that one kernel is compiled for all
    counters = torch.zeros(rows + len(_attending(launches)), dtype=torch.int32, device=query.device)

    def by_key() -> tuple[Tensor, Tensor]:
        buffers = dkv_buffers(read.key, read.value, plan, None if grads is None else (grads.key, grads.value))
        tensors = (*read, shifts, *buffers, sums, counters, counters[rows:])
        _launch(launches, tensors, (*read, shifts, shifts, *buffers, shifts, shifts))
        return buffers[-2:]

    dk, dv = by_key()  # partial results are freed before dq is allocated
    dq = torch.empty_like(query, memory_format=torch.contiguous_format) if grads is None else grads.query
    return Inputs(torch.mul(sums, scale, out=dq), dk, dv)


def backward(
    problem: Problem,
    inputs: Inputs,
    results: Results,
    upstream: Upstream,
    options: Options,
    grads: Inputs | None = None,
) -> Inputs:
    """The gradients of a dilated problem, see ``TableBackend.backward``."""
    statistics = row_statistics(results, upstream, options.scale)
    read = GradientInputs(*map(aligned, (*inputs, upstream.dout)))
    assert statistics.shifts is not None
    if config := joint_config(problem, read.query.shape[-1]):
        return joint(problem, read, statistics.shifts, options.scale, config, grads)
    by_query, by_key = (None, None) if grads is None else (grads.query, (grads.key, grads.value))
    return Inputs(
        dq(problem, read, statistics, options.scale, by_query),
        *dkv(problem, read, statistics.shifts, options.scale, by_key),
    )
