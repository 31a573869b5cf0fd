"""Launching the kernels: buffers, tables, one launch for the parts and one for the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch import dropout
from dilated_attention_pytorch.backends.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from dilated_attention_pytorch.backends.triton.configs import Config, Configs, configs, padded
from dilated_attention_pytorch.backends.triton.forward import forward_kernel
from dilated_attention_pytorch.backends.triton.launch import launch
from dilated_attention_pytorch.backends.triton.tables import SUM_ROWS, Work, work
from dilated_attention_pytorch.problem import Problem

LOG2_E = math.log2(math.e)
# For launches that only add up parts.
SUM = Config(block_m=SUM_ROWS, block_n=SUM_ROWS, warps=4, stages=1)


def capability(x: Tensor) -> tuple[int, int]:
    """Of the GPU that holds ``x``; the interpreter takes what is shipped for Hopper."""
    return torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)


def _configs(x: Tensor) -> Configs:
    return configs(capability(x), x.dtype, x.shape[-1])


def _constants(problem: Problem, x: Tensor, config: Config, dropout_p: float, strides: tuple[int, ...]) -> dict[str, Any]:
    """What all kernels over tiles are specialised on."""
    step = max(problem.pattern.dilation_rates) * max(*strides, problem.heads * x.shape[-1])
    return {"DROPOUT": dropout_p > 0.0, **tile_constants(x, config, step)}


def tile_constants(x: Tensor, config: Config, step: int) -> dict[str, Any]:
    """What kernels are specialised on for rows of ``x`` that are ``step`` elements apart."""
    # float32 products are exact to float32 unless the caller allowed less for all of PyTorch.
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        "D": x.shape[-1],
        "BLOCK_D": padded(x.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WIDE": step * max(config.block_m, config.block_n) >= 2**31,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def keep_numbers(dropout_p: float) -> tuple[int, float]:
    """Below which word a pair is dropped, and what the weights of the others are multiplied by."""
    return dropout.threshold(dropout_p), 1.0 / (1.0 - dropout_p)


def part_buffer(like: Tensor, todo: Work, fill: float, width: int | None) -> Tensor:
    """A buffer for partial results: filled only where rows of it may stay unwritten."""
    shape = (todo.part_rows,) if width is None else (todo.part_rows, width)
    if todo.complete:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    return torch.full(shape, fill, dtype=torch.float32, device=like.device)


def result_buffer(like: Tensor, todo: Work) -> Tensor:
    """A result: 0 only where no tile writes it."""
    make = torch.empty if todo.covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def each_launch(todo: Work, config: Config, call: Callable[..., None]) -> None:
    """``call(config, programs, table, ATTEND=..., FINAL=...)`` for every launch."""
    for one in todo.launches:
        call(config if one.attends else SUM, one.programs, one.table, ATTEND=one.attends, FINAL=one.final)


def launch_forward(
    problem: Problem,
    todo: Work,
    tensors: tuple[Tensor, ...],
    config: Config,
    programs: int,
    table: Tensor,
    /,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    positions: Tensor | None = None,
    **mode: bool,
) -> None:
    """One launch over ``tensors``: query, key, value, parts, parts_lse2, out, lse."""
    query, key, value, *_, lse = tensors
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    optional = lse if seed is None else seed, lse if positions is None else positions
    numbers = (
        table.shape[0], *strides,
        problem.queries, problem.heads, problem.key_heads, problem.heads // problem.key_heads, todo.groups,
        problem.keys - problem.queries, abs(scale) * LOG2_E, *keep_numbers(dropout_p),
    )  # fmt: skip
    constants = {"NEGATIVE": scale < 0, "ORDERED": positions is not None, **mode}
    constants |= _constants(problem, query, config, dropout_p, strides)
    launch(forward_kernel, programs, (*tensors, table, todo.layout, todo.offsets, *optional), numbers, constants)


def forward_buffers(
    problem: Problem, query: Tensor, todo: Work, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parts of out and lse (base 2), out and lse: what a forward writes."""
    lse = torch.empty((problem.batch, problem.heads, problem.queries), dtype=torch.float32, device=query.device)
    if not todo.covered:
        lse.fill_(-torch.inf)
    parts, parts_lse2 = part_buffer(query, todo, 0.0, query.shape[-1]), part_buffer(query, todo, -torch.inf, None)
    return parts, parts_lse2, result_buffer(query, todo) if out is None else out, lse


def forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, out: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; options: scale, dropout_p, seed, positions (B, N).

    ``out`` is written if it is given, contiguous and of any type; rows that no tile has stay what they are.
    """
    config = _configs(query).forward
    todo = work(problem, block=config.block_m, by_keys=False, device=query.device)
    *parts, out, lse = forward_buffers(problem, query, todo, out)

    def call(*which: Any, **mode: Any) -> None:
        launch_forward(problem, todo, (query, key, value, *parts, out, lse), *which, **options, **mode)

    each_launch(todo, config, call)
    return out, lse


def _launch_backward(
    kernel: Any,
    problem: Problem,
    todo: Work,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    config: Config,
    programs: int,
    table: Tensor,
    /,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    positions: Tensor | None = None,
    **mode: bool,
) -> None:
    query, key, value, dout, lse, *_ = tensors
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *dout.stride()[:3])
    optional = lse if seed is None else seed, lse if positions is None else positions
    numbers = (
        table.shape[0], *strides, *sizes,
        problem.heads, problem.key_heads, problem.heads // problem.key_heads, todo.groups,
        problem.keys - problem.queries, scale * LOG2_E, scale, *keep_numbers(dropout_p),
    )  # fmt: skip
    constants = {"ORDERED": positions is not None, **mode, **_constants(problem, query, config, dropout_p, strides)}
    launch(kernel, programs, (*tensors, table, todo.layout, todo.offsets, *optional), numbers, constants)


def launch_dq(problem: Problem, todo: Work, tensors: tuple[Tensor, ...], *which: Any, **options: Any) -> None:
    """One launch over ``tensors``: query, key, value, dout, lse, delta, parts, dq."""
    _launch_backward(dq_kernel, problem, todo, tensors, (problem.queries,), *which, **options)


def launch_dkv(problem: Problem, todo: Work, tensors: tuple[Tensor, ...], *which: Any, **options: Any) -> None:
    """One launch over ``tensors``: query, key, value, dout, lse, delta, parts of dk and of dv, dk, dv."""
    _launch_backward(dkv_kernel, problem, todo, tensors, (problem.queries, problem.keys), *which, **options)


def dq_buffers(query: Tensor, todo: Work, dq: Tensor | None) -> tuple[Tensor, Tensor]:
    """Parts of dq, and dq, which may be given."""
    return part_buffer(query, todo, 0.0, query.shape[-1]), result_buffer(query, todo) if dq is None else dq


def dkv_buffers(
    key: Tensor, value: Tensor, todo: Work, dkv: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parts of dk and of dv, dk and dv, which may be given."""
    parts = part_buffer(key, todo, 0.0, key.shape[-1]), part_buffer(value, todo, 0.0, value.shape[-1])
    dk, dv = (result_buffer(key, todo), result_buffer(value, todo)) if dkv is None else dkv
    return *parts, dk, dv


def portable_gradients(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` given ``delta``, written to ``grads`` if they are given."""
    chosen = _configs(query)
    inputs = query, key, value, dout, lse, delta

    def by_query() -> Tensor:
        todo = work(problem, block=chosen.dq.block_m, by_keys=False, device=query.device)
        tensors = (*inputs, *dq_buffers(query, todo, grads and grads[0]))
        each_launch(todo, chosen.dq, lambda *which, **mode: launch_dq(problem, todo, tensors, *which, **options, **mode))
        return tensors[-1]

    def by_key() -> tuple[Tensor, ...]:
        todo = work(problem, block=chosen.dkv.block_n, by_keys=True, device=query.device)
        tensors = (*inputs, *dkv_buffers(key, value, todo, grads and grads[1:]))
        each_launch(todo, chosen.dkv, lambda *which, **mode: launch_dkv(problem, todo, tensors, *which, **options, **mode))
        return tensors[-2:]

    # One after the other, so that the parts of dq are gone before those of dk and dv exist.
    dq, (dk, dv) = by_query(), by_key()
    return dq, dk, dv


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
    detach_mixing: bool = False,
    forward: Callable[..., tuple[Tensor, Tensor]] = forward,
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] = portable_gradients,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``, by the kernels of ``forward`` and ``gradients``.

    They are written to ``grads`` if these are given, which is not for detached mixing.
    """
    if not detach_mixing or len(problem.pattern.branches) == 1:
        return gradients(problem, dout, query, key, value, lse, row_delta(dout, out, dlse), grads=grads, **options)
    assert grads is None, "sums of branches are made here"
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    sums: list[Tensor] = []
    for branch in range(len(problem.pattern.branches)):
        alone = problem.only(branch)
        delta = row_delta(dout, forward(alone, query, key, value, **options)[0], dlse)
        grads = gradients(alone, dout, query, key, value, lse, delta, **options)
        sums = [x + y.float() for x, y in zip(sums, grads, strict=True)] if sums else [y.float() for y in grads]
    dq, dk, dv = (x.to(query.dtype) for x in sums)
    return dq, dk, dv


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = dout . out - dlse, (B, H, N)."""
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        block = 64
        lse_gradient = delta if dlse is None else dlse.contiguous()
        numbers = (*dout.stride()[:3], batch * n * heads, n, heads)
        constants = {"D": d, "BLOCK_D": padded(d), "BLOCK": block, "HAS_DLSE": dlse is not None}
        programs = triton.cdiv(batch * n * heads, block)
        launch(delta_kernel, programs, (dout, out, lse_gradient, delta), numbers, constants)
    return delta
