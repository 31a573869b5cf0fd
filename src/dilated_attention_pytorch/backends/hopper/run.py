"""Launching the Hopper kernels: the tables, buffers and sums of parts are those of the portable Triton kernels."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.launch import Call, launch, launch_one
from dilated_attention_pytorch.backends.gpu.tables import Launch, Work, work
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, Config, configs, joint_config
from dilated_attention_pytorch.backends.hopper.kernels.common import PART_FACTS, in_fours
from dilated_attention_pytorch.backends.hopper.kernels.dkv import dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.dq import dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.hopper.kernels.joint import joint_kernel
from dilated_attention_pytorch.backends.triton import configs as portable
from dilated_attention_pytorch.backends.triton import run
from dilated_attention_pytorch.execute.loop import positive_scale
from dilated_attention_pytorch.plan.problem import Problem

# Per thread at the start, without and with a third group: 12 or 16 warps share 65,536. Groups then take some from the others.
START_REGISTERS = 168, 128
# Of a program, for descriptors: two places of 128 bytes for each of up to five tensors and one for the sums of dq, or two for
# each of three tensors in each of two passes.
_SCRATCH_BYTES = 1536
# Kernels that add parts have room in shared memory for what is known of this many, or of a larger power of 2.
LEAST_PARTS = 8

_Strides = tuple[tuple[int, ...], ...]  # of each tensor that is read
# In turns those that attend (True) and those that only add up parts.
_Calls = tuple[tuple[bool, tuple[Call, ...]], ...]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: Tensor) -> Tensor:
    """The tensor memory accelerator reads rows at multiples of 16 bytes; other layouts (rare) are copied once."""
    stride_b, stride_n, stride_h, _ = x.stride()
    # 16 is a power of 2: it divides all of them if it divides the bits that any of them has.
    fits = (x.data_ptr() | (stride_b | stride_n | stride_h) * x.element_size()) % 16 == 0 and stride_n > 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # contiguous() may return x itself


def with_scratch(call: Callable[[], None], programs: int, device: torch.device) -> None:
    """Launch kernels of so many programs that make descriptors; the allocator of other code stays what it is."""
    # All of it before the first launch, which waits for whatever had this memory before; each launch has its own, because
    # the programs of the next begin before the last of this one are done.
    memory = torch.empty(programs * _SCRATCH_BYTES, dtype=torch.int8, device=device)
    left = memory.numel()

    def scratch(size: int, alignment: int, stream: int | None) -> int:
        nonlocal left
        left -= size
        assert left >= 0, "more descriptors than the kernels are known to make"
        return memory.data_ptr() + left

    def inside() -> None:
        triton.set_allocator(scratch)
        call()

    contextvars.copy_context().run(inside)


def launch_persistent(
    kernel: Any, items: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], constants: dict[str, Any]
) -> None:
    """One program for each multiprocessor, which share the items."""
    if items:
        programs = min(items, _multiprocessors(tensors[0].device))
        with_scratch(lambda: launch_one(kernel, programs, tensors, numbers, constants), programs, tensors[0].device)


def _launch(calls: _Calls, tensors: tuple[Tensor, ...], portable: tuple[Tensor, ...]) -> None:
    """Launches that attend, and by ``portable`` kernels those that only add up parts, with tensors of their own: of the
    inputs and what else they could attend with, they read nothing."""

    def in_order() -> None:
        for attends, some in calls:
            launch(some, tensors if attends else portable)

    with_scratch(in_order, sum(call.programs for call in _attending(calls)), tensors[0].device)


def _attending(calls: _Calls) -> tuple[Call, ...]:
    return tuple(call for attends, some in calls if attends for call in some)


def constants(config: Config, head_dim: int) -> dict[str, Any]:
    """What all Hopper kernels are specialised on."""
    return {
        "D": head_dim,
        "BLOCK_D": portable.padded(head_dim),
        "STAGES": config.stages,
        "HELD": config.held,
        "num_warps": 4,
        "maxnreg": START_REGISTERS[config.helpers],
    }


def stages(config: Config, head_dim: int, parts: int) -> int:
    """Blocks in flight: what is known of many parts takes the room of some."""
    known_bytes = max(0, parts - LEAST_PARTS) * 2 * int(PART_FACTS.value) * 8
    block_bytes = 2 * config.block * portable.padded(head_dim) * 2
    return config.stages - -(-known_bytes // block_bytes)


def _table_constants(config: Config, head_dim: int, one: Launch) -> dict[str, Any]:
    # Few different numbers, so that few kernels are compiled.
    parts = max(LEAST_PARTS, triton.next_power_of_2(one.children)) if one.children else 0
    return {**constants(config, head_dim), "STAGES": stages(config, head_dim, parts), "FINAL": one.final, "PARTS": parts}


def _calls(
    kernel: Any,
    sums: Callable[[Work, run.Tiles], tuple[Call, ...]],
    todo: Work,
    head_dim: int,
    strides: _Strides,
    config: Config,
    numbers: tuple[float, ...],
    **mode: Any,
) -> _Calls:
    """The launches that attend, and those that only add up parts, which are ``sums`` of the portable kernels."""
    calls: list[tuple[bool, Call]] = []
    portable_calls = sums(todo, run.Tiles(head_dim, strides, run.SUM, in_fours=in_fours(head_dim)))
    for one, portable_call in zip(todo.launches, portable_calls, strict=True):
        if not one.attends:
            calls.append((False, portable_call))
            continue
        number = sum(attends for attends, _ in calls)
        programs = min(one.programs, _multiprocessors(one.table.device))
        counts = one.table.shape[0], one.programs, *((number,) if kernel is joint_kernel else ())
        tables = one.table, todo.layout, todo.offsets
        # Those that add parts begin before the one before is done, and wait there. The first reads what others wrote.
        early = one.children > 0 and not one.begins_share
        all_constants = {**mode, **_table_constants(config, head_dim, one), "launch_pdl": early}
        calls.append((True, Call(kernel, programs, tables, (*counts, *run.row_strides(strides), *numbers), all_constants)))
    return tuple((attends, tuple(call for _, call in some)) for attends, some in groupby(calls, key=itemgetter(0)))


def _forward_calls(todo: Work, head_dim: int, strides: _Strides, scale: float, config: Config) -> _Calls:
    problem = todo.problem
    numbers = (
        problem.queries, problem.heads, problem.key_heads, problem.heads // problem.key_heads, todo.groups,
        scale * run.LOG2_E,
    )  # fmt: skip
    return _calls(forward_kernel, run.forward_calls, todo, head_dim, strides, config, numbers, BLOCK_N=config.block)


def _dq_calls(todo: Work, head_dim: int, strides: _Strides, scale: float, config: Config) -> _Calls:
    problem = todo.problem
    numbers = (
        problem.queries, problem.heads, problem.key_heads, problem.heads // problem.key_heads, todo.groups,
        scale * run.LOG2_E, scale,
    )  # fmt: skip
    return _calls(dq_kernel, run.dq_calls, todo, head_dim, strides, config, numbers, BLOCK_N=config.block)


def _by_key_calls(
    kernel: Any, todo: Work, head_dim: int, strides: _Strides, scale: float, config: Config, **mode: Any
) -> _Calls:
    problem = todo.problem
    numbers = (
        problem.queries, problem.keys, problem.heads, problem.key_heads, problem.heads // problem.key_heads, todo.groups,
        nonzero_scale(scale) * run.LOG2_E, scale,
    )  # fmt: skip
    return _calls(kernel, run.dkv_calls, todo, head_dim, strides, config, numbers, BLOCK_M=config.block, **mode)


def _dkv_calls(todo: Work, head_dim: int, strides: _Strides, scale: float, config: Config) -> _Calls:
    return _by_key_calls(dkv_kernel, todo, head_dim, strides, scale, config, OVERLAP=config.overlap)


def _joint_calls(todo: Work, head_dim: int, strides: _Strides, scale: float, config: Config) -> _Calls:
    return _by_key_calls(joint_kernel, todo, head_dim, strides, scale, config)


def nonzero_scale(scale: float) -> float:
    """A scale to divide lse by. Scores that a smaller one makes are 0 to the precision of lse."""
    return math.copysign(max(abs(scale), 1e-30), scale)


def row_statistics(
    dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """lse, delta, and both as (B, H, N, 16) bfloat16 shifts (dkv.py)."""
    shifts = torch.empty((*lse.shape, 16), dtype=torch.bfloat16, device=lse.device)
    delta = run.launch_delta(dout, out, dlse, lse, shifts.view(torch.int32), 1 / nonzero_scale(scale))
    return lse, delta, shifts


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
    todo = work(problem, block=ITEM_ROWS, by_keys=False, head_dim=query.shape[-1], device=query.device)
    tensors = (query, key, value, *run.forward_buffers(problem, query, todo, out))
    strides = query.stride(), key.stride(), value.stride()
    lse = tensors[-1]
    _launch(todo.once(_forward_calls, query.shape[-1], strides, scale, chosen), tensors, (*tensors, lse, lse))
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
    todo = work(problem, block=ITEM_ROWS, by_keys=False, head_dim=query.shape[-1], device=query.device)
    tensors = (query, key, value, dout, lse, delta, *run.dq_buffers(query, todo, result))
    strides = query.stride(), key.stride(), value.stride(), dout.stride()
    _launch(todo.once(_dq_calls, query.shape[-1], strides, scale, chosen), tensors, (*tensors, lse, lse))
    return tensors[-1]


def dkv(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shifts: Tensor,
    *,
    scale: float,
    results: tuple[Tensor, Tensor] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values given ``row_statistics``' shifts, written to ``results`` if these are given."""
    chosen = config or configs(query.shape[-1]).dkv
    todo = work(problem, block=ITEM_ROWS, by_keys=True, head_dim=query.shape[-1], device=query.device)
    buffers = run.dkv_buffers(key, value, todo, results)
    strides = query.stride(), key.stride(), value.stride(), dout.stride()
    calls = todo.once(_dkv_calls, query.shape[-1], strides, scale, chosen)
    read = query, key, value, dout, shifts
    _launch(calls, (*read, *buffers), (*read, shifts, *buffers, shifts, shifts))
    return buffers[-2:]


def joint(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shifts: Tensor,
    *,
    scale: float,
    config: Config,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All gradients by one kernel, written to ``grads`` if they are given."""
    todo = work(problem, block=ITEM_ROWS, by_keys=True, head_dim=query.shape[-1], device=query.device, apart=True)
    strides = query.stride(), key.stride(), value.stride(), dout.stride()
    calls = todo.once(_joint_calls, query.shape[-1], strides, scale, config)
    sums = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    rows = -(-query.shape[:3].numel() // 4) * 4  # so that what lies behind is aligned, and one kernel compiled for all
    counters = torch.zeros(rows + len(_attending(calls)), dtype=torch.int32, device=query.device)

    def by_key() -> tuple[Tensor, Tensor]:
        buffers = run.dkv_buffers(key, value, todo, grads and grads[1:])
        read = query, key, value, dout, shifts
        added = sums, counters, counters[rows:]
        _launch(calls, (*read, *buffers, *added), (*read, shifts, *buffers, shifts, shifts))
        return buffers[-2:]

    dk, dv = by_key()  # parts are gone before dq exists
    dq = torch.empty_like(query, memory_format=torch.contiguous_format) if grads is None else grads[0]
    return torch.mul(sums, scale, out=dq), dk, dv


def _gradients(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lse, delta, shifts = statistics
    dout, query, key, value = map(aligned, (dout, query, key, value))
    if config := joint_config(problem, query.shape[-1]):
        return joint(problem, dout, query, key, value, shifts, scale=scale, config=config, grads=grads)
    result, results = (None, None) if grads is None else (grads[0], grads[1:])
    return (
        dq(problem, dout, query, key, value, lse, delta, scale=scale, result=result),
        *dkv(problem, dout, query, key, value, shifts, scale=scale, results=results),
    )


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
        gradients=_gradients, statistics=partial(row_statistics, scale=scale), grads=grads,
    )  # fmt: skip
