"""Launching the Hopper kernels: the tables, buffers and sums of parts are those of the portable Triton kernels."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, Config, configs
from dilated_attention_pytorch.backends.hopper.dkv import dkv_kernel
from dilated_attention_pytorch.backends.hopper.dq import dq_kernel
from dilated_attention_pytorch.backends.hopper.forward import forward_kernel
from dilated_attention_pytorch.backends.triton import configs as portable
from dilated_attention_pytorch.backends.triton import run
from dilated_attention_pytorch.backends.triton.launch import launch
from dilated_attention_pytorch.backends.triton.tables import Launch, Work, work
from dilated_attention_pytorch.problem import Problem
from dilated_attention_pytorch.tiles import positive_scale

# Per thread at the start: 12 warps share 65,536. The computing ones then take some from the loading one.
_START_REGISTERS = 168
# Kernels that add parts have room in shared memory for what is known of this many, or of a larger power of 2.
LEAST_PARTS = 8


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: Tensor) -> Tensor:
    """The tensor memory accelerator reads rows at multiples of 16 bytes; other layouts (rare) are copied once."""
    strides = [stride * x.element_size() for stride in x.stride()[:3]]
    fits = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides) and strides[1] > 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # contiguous() may return x itself


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for descriptors, for the duration of a launch."""
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())


def with_scratch(call: Callable[[], None]) -> None:
    """Launch kernels that make descriptors; the allocator of other code stays what it is."""

    def inside() -> None:
        triton.set_allocator(_scratch)
        call()

    contextvars.copy_context().run(inside)


def launch_persistent(
    kernel: Any, items: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> None:
    """One program for each multiprocessor, which share the items."""
    if items:
        programs = min(items, _multiprocessors(tensors[0].device))
        with_scratch(lambda: launch(kernel, programs, tensors, numbers, constants))


def _launch(todo: Work, attend: Callable[[Launch], None], add_parts: Callable[[int, Tensor], None]) -> None:
    """All launches, those that only add up parts by ``add_parts``."""

    def both() -> None:
        for one in todo.launches:
            if one.attends:
                attend(one)
            else:
                add_parts(one.programs, one.table)

    with_scratch(both)


def constants(config: Config, x: Tensor) -> dict[str, Any]:
    """What all Hopper kernels are specialised on."""
    return {
        "D": x.shape[-1],
        "BLOCK_D": portable.padded(x.shape[-1]),
        "STAGES": config.stages,
        "HELD": config.held,
        "num_warps": 4,
        "maxnreg": _START_REGISTERS,
    }


def stages(config: Config, parts: int) -> int:
    """Blocks in flight: what is known of many parts takes the room of one."""
    return config.stages - (parts > LEAST_PARTS)


def _table_constants(config: Config, x: Tensor, one: Launch) -> dict[str, Any]:
    # Few different numbers, so that few kernels are compiled.
    parts = max(LEAST_PARTS, triton.next_power_of_2(one.children)) if one.children else 0
    return {**constants(config, x), "STAGES": stages(config, parts), "FINAL": one.final, "PARTS": parts}


def scaled_query(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale: forward kernels mask scores before they scale them."""
    # A scale that float32 cannot hold is 0.
    query, scale, _ = positive_scale(query, scale if abs(scale) > torch.finfo(torch.float32).tiny else 0.0)
    return query, scale


def forward(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; ``out`` is written if it is given, see the portable ``forward``."""
    query, scale = scaled_query(query, scale)
    query, key, value = map(aligned, (query, key, value))
    chosen = config or configs(query.shape[-1]).forward
    todo = work(problem, block=ITEM_ROWS, by_keys=False, device=query.device)
    tensors = (query, key, value, *run.forward_buffers(problem, query, todo, out))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])

    def attend(one: Launch) -> None:
        numbers = (
            one.table.shape[0], one.programs, *strides, problem.queries, problem.heads, problem.key_heads,
            problem.heads // problem.key_heads, todo.groups, scale * run.LOG2_E,
        )  # fmt: skip
        mode = {"BLOCK_N": chosen.block, **_table_constants(chosen, query, one)}
        programs = min(one.programs, _multiprocessors(query.device))
        launch(forward_kernel, programs, (*tensors, one.table, todo.layout, todo.offsets), numbers, mode)

    def add_parts(programs: int, table: Tensor) -> None:
        run.launch_forward(problem, todo, tensors, run.SUM, programs, table, ATTEND=False, FINAL=True)

    _launch(todo, attend, add_parts)
    return tensors[-2:]


def dq(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    result: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """The gradient of the queries given ``delta``, written to ``result`` if that is given."""
    chosen = config or configs(query.shape[-1]).dq
    todo = work(problem, block=ITEM_ROWS, by_keys=False, device=query.device)
    tensors = (query, key, value, dout, lse, delta, *run.dq_buffers(query, todo, result))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *dout.stride()[:3])

    def attend(one: Launch) -> None:
        numbers = (
            one.table.shape[0], one.programs, *strides, problem.queries, problem.heads, problem.key_heads,
            problem.heads // problem.key_heads, todo.groups, scale * run.LOG2_E, scale,
        )  # fmt: skip
        mode = {"BLOCK_N": chosen.block, **_table_constants(chosen, query, one)}
        programs = min(one.programs, _multiprocessors(query.device))
        launch(dq_kernel, programs, (*tensors, one.table, todo.layout, todo.offsets), numbers, mode)

    def add_parts(programs: int, table: Tensor) -> None:
        run.launch_dq(problem, todo, tensors, run.SUM, programs, table, ATTEND=False, FINAL=True)

    _launch(todo, attend, add_parts)
    return tensors[-1]


def dkv(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    results: tuple[Tensor, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values given ``delta``, written to ``results`` if these are given."""
    chosen = config or configs(query.shape[-1]).dkv
    todo = work(problem, block=ITEM_ROWS, by_keys=True, device=query.device)
    tensors = (query, key, value, dout, lse, delta, *run.dkv_buffers(key, value, todo, results))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *dout.stride()[:3])

    def attend(one: Launch) -> None:
        numbers = (
            one.table.shape[0], one.programs, *strides, problem.queries, problem.keys, problem.heads, problem.key_heads,
            problem.heads // problem.key_heads, todo.groups, scale * run.LOG2_E, scale,
        )  # fmt: skip
        mode = {"BLOCK_M": chosen.block, "OVERLAP": chosen.overlap, **_table_constants(chosen, query, one)}
        programs = min(one.programs, _multiprocessors(query.device))
        launch(dkv_kernel, programs, (*tensors, one.table, todo.layout, todo.offsets), numbers, mode)

    def add_parts(programs: int, table: Tensor) -> None:
        run.launch_dkv(problem, todo, tensors, run.SUM, programs, table, ATTEND=False, FINAL=True)

    _launch(todo, attend, add_parts)
    return tensors[-2:]


def _gradients(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = *map(aligned, (dout, query, key, value)), lse, delta
    by_query, by_key = (None, None) if grads is None else (grads[0], grads[1:])
    return dq(problem, *tensors, scale=scale, result=by_query), *dkv(problem, *tensors, scale=scale, results=by_key)


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    detach_mixing: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``."""
    return run.backward(
        problem, dout, dlse, query, key, value, out, lse, scale=scale, detach_mixing=detach_mixing, forward=forward,
        gradients=_gradients, grads=grads,
    )  # fmt: skip
