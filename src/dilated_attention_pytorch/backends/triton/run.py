"""Launching the kernels: buffers, tables, a launch for each level of parts, the last one for the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.backward import delta_kernel, dkv_kernel, dq_kernel
from dilated_attention_pytorch.backends.gpu.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.gpu.launch import Call, launch, launch_one
from dilated_attention_pytorch.backends.gpu.tables import SUM_ROWS, Work, work
from dilated_attention_pytorch.backends.triton.configs import Config, Configs, configs, padded
from dilated_attention_pytorch.plan import dropout
from dilated_attention_pytorch.plan.problem import Problem

LOG2_E = math.log2(math.e)
# For launches that only add up parts.
SUM = Config(block_m=SUM_ROWS, block_n=SUM_ROWS, warps=4, stages=1)


def capability(x: Tensor) -> tuple[int, int]:
    """Of the GPU that holds ``x``; the interpreter takes what is shipped for Hopper."""
    return torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)


def _configs(x: Tensor) -> Configs:
    return configs(capability(x), x.dtype, x.shape[-1])


def exact_products(x: Tensor) -> bool:
    """float32 products are as exact as float32 unless the caller allowed less for all of PyTorch."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def tile_constants(head_dim: int, exact: bool, config: Config, step: int) -> dict[str, Any]:
    """What kernels are specialised on for rows that are ``step`` elements apart."""
    return {
        "D": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WIDE": step * max(config.block_m, config.block_n) >= 2**31,
        "PRECISION": config.float32 if exact else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def row_strides(strides: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The strides of sample, row and head of each tensor, without those of elements, which are 1."""
    return tuple(stride for each in strides for stride in each[:3])


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


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the calls over a problem's tiles depend on besides its tables."""

    head_dim: int
    strides: tuple[tuple[int, ...], ...]  # of each tensor that is read
    config: Config
    scale: float = 1.0
    dropout_p: float = 0.0
    ordered: bool = False
    exact: bool = False
    in_fours: bool = False  # how columns of parts lie, see primitives.load_parts


def _calls(kernel: Any, todo: Work, how: Tiles, numbers: tuple[float, ...], **constants: Any) -> tuple[Call, ...]:
    """One call for each launch."""
    problem = todo.problem
    step = max(problem.pattern.dilation_rates) * max(*row_strides(how.strides), problem.heads * how.head_dim)
    constants |= {"IN_FOURS": how.in_fours, "ORDERED": how.ordered, "DROPOUT": how.dropout_p > 0.0}
    calls = []
    for one in todo.launches:
        config = how.config if one.attends else SUM
        mode = {"ATTEND": one.attends, "FINAL": one.final, **tile_constants(how.head_dim, how.exact, config, step)}
        tables = one.table, todo.layout, todo.offsets
        calls.append(Call(kernel, one.programs, tables, (one.table.shape[0], *numbers), {**constants, **mode}))
    return tuple(calls)


def forward_calls(todo: Work, how: Tiles) -> tuple[Call, ...]:
    """Over query, key, value, parts, parts_lse2, out, lse, seed and positions."""
    problem = todo.problem
    numbers = (
        *row_strides(how.strides), problem.queries, problem.heads, problem.key_heads,
        problem.heads // problem.key_heads, todo.groups, problem.keys - problem.queries,
        abs(how.scale) * LOG2_E, *keep_numbers(how.dropout_p),
    )  # fmt: skip
    return _calls(forward_kernel, todo, how, numbers, NEGATIVE=how.scale < 0)


def _backward_calls(kernel: Any, todo: Work, how: Tiles, *sizes: int) -> tuple[Call, ...]:
    problem = todo.problem
    numbers = (
        *row_strides(how.strides), *sizes, problem.heads, problem.key_heads,
        problem.heads // problem.key_heads, todo.groups, problem.keys - problem.queries,
        how.scale * LOG2_E, how.scale, *keep_numbers(how.dropout_p),
    )  # fmt: skip
    return _calls(kernel, todo, how, numbers)


def dq_calls(todo: Work, how: Tiles) -> tuple[Call, ...]:
    """Over query, key, value, dout, lse, delta, parts, dq, seed and positions."""
    return _backward_calls(dq_kernel, todo, how, todo.problem.queries)


def dkv_calls(todo: Work, how: Tiles) -> tuple[Call, ...]:
    """Over query, key, value, dout, lse, delta, parts of dk and of dv, dk, dv, seed and positions."""
    return _backward_calls(dkv_kernel, todo, how, todo.problem.queries, todo.problem.keys)


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
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    positions: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; positions are (B, N).

    ``out`` is written if it is given, contiguous and of any type; rows that no tile has stay what they are.
    """
    config = _configs(query).forward
    todo = work(problem, block=config.block_m, by_keys=False, head_dim=query.shape[-1], device=query.device)
    *parts, out, lse = forward_buffers(problem, query, todo, out)
    strides, ordered = (query.stride(), key.stride(), value.stride()), positions is not None
    how = Tiles(query.shape[-1], strides, config, scale, dropout_p, ordered, exact_products(query))
    optional = lse if seed is None else seed, lse if positions is None else positions
    launch(todo.once(forward_calls, how), (query, key, value, *parts, out, lse, *optional))
    return out, lse


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


def row_statistics(dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse, and delta = dout . out - dlse, (B, H, N)."""
    return lse, launch_delta(dout, out, dlse, lse, None, 0.0)


def launch_delta(
    dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor, shifts: Tensor | None, inverse_scale: float
) -> Tensor:
    """delta; ``shifts`` are written if they are given, see ``delta_kernel``."""
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        block = 64
        tensors = dout, out, delta if dlse is None else dlse.contiguous(), lse, delta, delta if shifts is None else shifts
        numbers = (*dout.stride()[:3], batch * n * heads, n, heads, inverse_scale)
        has = {"HAS_DLSE": dlse is not None, "HAS_SHIFTS": shifts is not None}
        constants = {"D": d, "BLOCK_D": padded(d), "BLOCK": block, **has}
        launch_one(delta_kernel, -(-batch * n * heads // block), tensors, numbers, constants)
    return delta


def portable_gradients(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: tuple[Tensor, Tensor],
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    positions: Tensor | None = None,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` given lse and delta, written to ``grads`` if they are given."""
    chosen, (lse, _) = _configs(query), statistics
    inputs = query, key, value, dout, *statistics
    optional = lse if seed is None else seed, lse if positions is None else positions
    strides = query.stride(), key.stride(), value.stride(), dout.stride()
    options = scale, dropout_p, positions is not None, exact_products(query)

    def by_query() -> Tensor:
        todo = work(problem, block=chosen.dq.block_m, by_keys=False, head_dim=query.shape[-1], device=query.device)
        buffers = dq_buffers(query, todo, grads and grads[0])
        how = Tiles(query.shape[-1], strides, chosen.dq, *options)
        launch(todo.once(dq_calls, how), (*inputs, *buffers, *optional))
        return buffers[-1]

    def by_key() -> tuple[Tensor, ...]:
        todo = work(problem, block=chosen.dkv.block_n, by_keys=True, head_dim=query.shape[-1], device=query.device)
        buffers = dkv_buffers(key, value, todo, grads and grads[1:])
        how = Tiles(query.shape[-1], strides, chosen.dkv, *options)
        launch(todo.once(dkv_calls, how), (*inputs, *buffers, *optional))
        return buffers[-2:]

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
    statistics: Callable[..., tuple[Tensor, ...]] = row_statistics,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``, by the kernels of ``forward`` and ``gradients``.

    ``gradients`` read the ``statistics`` of rows, which are lse and delta unless others are asked for. The gradients
    are written to ``grads`` if these are given, which is not for detached mixing.
    """
    if not detach_mixing or len(problem.pattern.branches) == 1:
        return gradients(problem, dout, query, key, value, statistics(dout, out, dlse, lse), grads=grads, **options)
    assert grads is None, "sums of branches are made here"
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    sums: list[Tensor] = []
    for branch in range(len(problem.pattern.branches)):
        alone = problem.only(branch)
        own = statistics(dout, forward(alone, query, key, value, **options)[0], dlse, lse)
        grads = gradients(alone, dout, query, key, value, own, **options)
        sums = [x + y.float() for x, y in zip(sums, grads, strict=True)] if sums else [y.float() for y in grads]
    dq, dk, dv = (x.to(query.dtype) for x in sums)
    return dq, dk, dv
