"""The Hopper kernels over launch tables. Launches that only add partial results are those of the portable kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, launch, multiprocessors
from dilated_attention_pytorch.backends.gpu.launch_plan import Launch, LaunchPlan, find_launch_plan
from dilated_attention_pytorch.backends.gpu.portable import (
    LOG2_E,
    SUM,
    RowStatistics,
    Strides,
    TileOptions,
    padded,
    row_strides,
)
from dilated_attention_pytorch.backends.gpu.running import RunningProblem
from dilated_attention_pytorch.backends.hopper import persistent
from dilated_attention_pytorch.backends.hopper.configs import (
    ITEM_ROWS,
    MOST_LINES,
    HopperConfig,
    configs,
    forward_config,
    joint_config,
)
from dilated_attention_pytorch.backends.hopper.kernels.common import PART_FACTS, in_fours
from dilated_attention_pytorch.backends.hopper.kernels.dkv import dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.dq import dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.hopper.kernels.joint import joint_kernel
from dilated_attention_pytorch.backends.hopper.persistent import GradientInputs, aligned, nonzero_scale
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

# Kernels that add partial results have room in shared memory for the layout entries of this many, or of a larger power of 2.
LEAST_PARTIALS = 8


class _Launches(NamedTuple):
    """The launches of a call, in their order."""

    runs: tuple[tuple[bool, tuple[KernelLaunch, ...]], ...]  # in turns those that attend (True), and those that only add
    attending: int  # how many launches attend
    programs: int  # of all of these


class ItemOptions(NamedTuple):
    """What the launches over a launch plan depend on besides its tables. Every call makes one, so it is a tuple."""

    head_dim: int
    strides: Strides
    config: HopperConfig
    scale: float


def stages(config: HopperConfig, head_dim: int, partials: int) -> int:
    """Blocks in flight. The layout entries of many partial results take the shared memory of some of them."""
    entry_bytes = max(0, partials - LEAST_PARTIALS) * 2 * int(PART_FACTS.value) * 8
    block_bytes = 2 * config.block * padded(head_dim) * 2
    return config.stages - -(-entry_bytes // block_bytes)


def _constants(how: ItemOptions, one: Launch) -> dict[str, Any]:
    # Few different numbers, so that few kernels are compiled.
    partials = max(LEAST_PARTIALS, triton.next_power_of_2(one.children)) if one.children else 0
    depth = stages(how.config, how.head_dim, partials)
    # Launches that add partial results begin before the one before is done, and wait before they read them. The first launch
    # of a share reads the results of other kernels, so it does not begin early.
    early = one.children > 0 and not one.begins_share
    own = {"STAGES": depth, "FINAL": one.final, "PARTS": partials, "launch_pdl": early}
    return {**persistent.constants(how.config, how.head_dim), **own}


def _launches(
    kernel: Any, sums: Callable[[LaunchPlan, TileOptions], tuple[KernelLaunch, ...]], plan: LaunchPlan,
    how: ItemOptions, numbers: tuple[float, ...], **mode: Any,
) -> _Launches:  # fmt: skip
    """The launches that attend, and those that only add partial results, which are ``sums`` of the portable kernels."""
    launches: list[tuple[bool, KernelLaunch]] = []
    adding = sums(plan, TileOptions(how.head_dim, how.strides, SUM, in_fours=in_fours(how.head_dim)))
    for one, portable_launch in zip(plan.launches, adding, strict=True):
        if not one.attends:
            launches.append((False, portable_launch))
            continue
        number = sum(attends for attends, _ in launches)
        # The programs of the joint kernel take the next item that no program has taken. Others have an order of items.
        taken = (number,) if kernel is joint_kernel else (len(one.order),)
        orders = () if kernel is joint_kernel else (one.order,)
        programs = min(one.programs, multiprocessors(one.table.device) * how.config.programs)
        tables = one.table, plan.layout, plan.offsets, *orders
        all_numbers = one.table.shape[0], one.programs, *taken, *row_strides(how.strides), *numbers
        launches.append((True, KernelLaunch(kernel, programs, tables, all_numbers, {**mode, **_constants(how, one)})))
    runs = tuple((attends, tuple(one for _, one in run)) for attends, run in groupby(launches, key=itemgetter(0)))
    attending = [one.programs for attends, one in launches if attends]
    return _Launches(runs, len(attending), sum(attending))


def _heads(plan: LaunchPlan) -> tuple[int, ...]:
    return plan.problem.heads, plan.problem.key_heads, plan.problem.heads_per_key, plan.bundles


def _forward_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers = plan.problem.queries, *_heads(plan), how.scale * LOG2_E
    mode = {"BLOCK_N": how.config.block, "WHOLE": _is_whole(plan, how), "PROGRAMS": how.config.programs}
    return _launches(forward_kernel, portable.forward_launches, plan, how, numbers, **mode)


def _is_whole(plan: LaunchPlan, how: ItemOptions) -> bool:
    """Whether one descriptor of each tensor serves all tiles of a launch, where this was measured to be faster."""
    block = math.lcm(ITEM_ROWS, how.config.block)
    return (
        plan.bundles == 0
        and all(0 < one.common_rows <= how.config.whole_rows and one.common_rows % block == 0 for one in plan.launches)
        and how.head_dim == padded(how.head_dim)
        and _are_lines(plan.problem, how.head_dim, how.strides)
    )


def _are_lines(problem: Problem, head_dim: int, strides: Strides) -> bool:
    """Whether the samples of every tensor are lines of equal length for ``whole_descriptor``, with coordinates of 31 bits."""
    sizes = (problem.queries, problem.heads), *[(problem.keys, problem.key_heads)] * 2
    return all(
        (problem.batch == 1 or sample % row == 0)
        and (heads - 1) * head + head_dim <= row
        and (problem.batch - 1) * (sample // row) + rows <= MOST_LINES
        and row < 2**31
        for (rows, heads), (sample, row, head, _) in zip(sizes, strides, strict=True)
    )


def _dq_launches(plan: LaunchPlan, how: ItemOptions) -> _Launches:
    numbers = plan.problem.queries, *_heads(plan), how.scale * LOG2_E, how.scale
    return _launches(dq_kernel, portable.dq_launches, plan, how, numbers, BLOCK_N=how.config.block)


def _dkv_launches(plan: LaunchPlan, how: ItemOptions, joint: bool, scaled: bool = False) -> _Launches:
    sizes = plan.problem.queries, plan.problem.keys, *_heads(plan)
    numbers = (*sizes, nonzero_scale(how.scale) * LOG2_E, how.scale)
    own = {"SCALED": scaled} if joint else {"OVERLAP": how.config.overlap}
    mode = {"BLOCK_M": how.config.block, **own}
    return _launches(joint_kernel if joint else dkv_kernel, portable.dkv_launches, plan, how, numbers, **mode)


def _launch(launches: _Launches, tensors: tuple[Tensor, ...], adding: tuple[Tensor, ...]) -> None:
    """Launch all in order. Those that only add partial results take the tensors ``adding``, and read no inputs."""

    def in_order() -> None:
        for attends, run in launches.runs:
            launch(run, tensors if attends else adding)

    persistent.with_scratch(in_order, launches.programs, tensors[0].device)


def _plan(
    problem: Problem, x: Tensor, *, by_keys: bool, programs: int = 1, separate: bool = False, own_deltas: bool = False
) -> LaunchPlan:  # fmt: skip
    d, device = x.shape[-1], x.device
    own: dict[str, Any] = {"separate": True} if separate else {"persistent": multiprocessors(device) * programs}
    own["own_deltas"] = own_deltas
    return find_launch_plan(problem, block=ITEM_ROWS, by_keys=by_keys, head_dim=d, device=device, **own)


def forward(
    problem: Problem, inputs: Inputs, options: Options, given: Results | None = None, config: HopperConfig | None = None
) -> Results:
    """The attention of a dilated problem, see ``TableBackend.forward``."""
    query, scale = persistent.scaled_query(inputs.query, options.scale)
    query, key, value = aligned(query), aligned(inputs.key), aligned(inputs.value)
    d = query.shape[-1]
    config = config or forward_config(problem, d)
    plan = _plan(problem, query, by_keys=False, programs=config.programs)
    *partial, out, lse = portable.forward_buffers(query, plan, given)
    strides = query.stride(), key.stride(), value.stride()
    how = ItemOptions(d, strides, config, scale)
    tensors = (query, key, value, *partial, out, lse)
    _launch(plan.once(_forward_launches, how), tensors, (*tensors, lse, lse))
    return Results(out, lse)


def _shifts(statistics: RowStatistics) -> Tensor:
    assert statistics.shifts is not None, "these are the statistics of another backend"
    return statistics.shifts


def dq(
    problem: Problem, read: GradientInputs, statistics: RowStatistics, scale: float,
    grads: Inputs | None = None, config: HopperConfig | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the queries, written to ``grads`` if these are given."""
    lse, delta, _ = statistics
    plan, d = _plan(problem, read.query, by_keys=False, own_deltas=statistics.own_deltas), read.query.shape[-1]
    tensors = (*read, lse, delta, *portable.dq_buffers(read.query, plan, grads))
    how = ItemOptions(d, read.strides, config or configs(d).dq, scale)
    _launch(plan.once(_dq_launches, how), tensors, (*tensors, lse, lse))
    return tensors[-1]


def dkv(
    problem: Problem, read: GradientInputs, statistics: RowStatistics, scale: float,
    grads: Inputs | None = None, config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of keys and values, written to ``grads`` if these are given."""
    plan, d = _plan(problem, read.query, by_keys=True, own_deltas=statistics.own_deltas), read.query.shape[-1]
    shifts = _shifts(statistics)
    buffers = portable.dkv_buffers(read.key, read.value, plan, grads)
    how = ItemOptions(d, read.strides, config or configs(d).dkv, scale)
    _launch(
        plan.once(_dkv_launches, how, False), (*read, shifts, *buffers), (*read, shifts, shifts, *buffers, shifts, shifts)
    )
    return buffers[-2:]


def joint(
    problem: Problem, read: GradientInputs, statistics: RowStatistics, scale: float, config: HopperConfig,
    grads: Inputs | None = None,
) -> Inputs:  # fmt: skip
    """All gradients by one kernel, written to ``grads`` if these are given.

    The kernel adds dq to float32 sums, which are the given gradient itself if that is float32.
    """
    query, shifts = read.query, _shifts(statistics)
    in_place = grads is not None and grads.query.dtype == torch.float32
    plan = _plan(problem, query, by_keys=True, separate=True, own_deltas=statistics.own_deltas)
    launches = plan.once(_dkv_launches, ItemOptions(query.shape[-1], read.strides, config, scale), True, in_place)
    if grads is None or not in_place:
        sums = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    else:
        sums = grads.query if isinstance(problem, RunningProblem) else grads.query.zero_()
    rows = -(-query.shape[:3].numel() // 4) * 4  # the second view is aligned then, so that one kernel is compiled for all
    counters = torch.zeros(rows + launches.attending, dtype=torch.int32, device=query.device)

    def by_key() -> tuple[Tensor, Tensor]:
        buffers = portable.dkv_buffers(read.key, read.value, plan, grads)
        tensors = (*read, shifts, *buffers, sums, counters, counters[rows:])
        _launch(launches, tensors, (*read, shifts, shifts, *buffers, shifts, shifts))
        return buffers[-2:]

    dk, dv = by_key()  # partial results are freed before dq is allocated
    if in_place:
        return Inputs(sums, dk, dv)
    dq = torch.empty_like(query, memory_format=torch.contiguous_format) if grads is None else grads.query
    return Inputs(torch.mul(sums, scale, out=dq), dk, dv)


def row_statistics(saved: Saved, options: Options) -> RowStatistics:
    """lse, delta and shifts, see ``TableBackend.row_statistics``."""
    return persistent.row_statistics(saved, options.scale)


def gradients(
    problem: Problem, inputs: Inputs, dout: Tensor, statistics: RowStatistics, options: Options, grads: Inputs | None
) -> Inputs:
    """The gradients of a dilated problem, see ``TableBackend.gradients``."""
    read, scale = GradientInputs(*map(aligned, (*inputs, dout))), options.scale
    if config := joint_config(problem, read.query.shape[-1]):
        return joint(problem, read, statistics, scale, config, grads)
    return Inputs(dq(problem, read, statistics, scale, grads), *dkv(problem, read, statistics, scale, grads))
