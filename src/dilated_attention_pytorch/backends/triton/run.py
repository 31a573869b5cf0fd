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
from dilated_attention_pytorch.backends.triton.tables import Work, work
from dilated_attention_pytorch.problem import Problem

_LOG2_E = math.log2(math.e)


def _configs(x: Tensor) -> Configs:
    capability = torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)
    return configs(capability, x.dtype, x.shape[-1])


def _constants(problem: Problem, x: Tensor, config: Config, dropout_p: float, strides: tuple[int, ...]) -> dict[str, Any]:
    """What all kernels over tiles are specialised on."""
    step = max(problem.pattern.dilation_rates) * max(*strides, problem.heads * x.shape[-1])
    # float32 products are exact to float32 unless the caller allowed less for all of PyTorch.
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        "D": x.shape[-1],
        "BLOCK_D": padded(x.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "DROPOUT": dropout_p > 0.0,
        "WIDE": step * max(config.block_m, config.block_n) >= 2**31,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _keep(dropout_p: float) -> tuple[int, float]:
    return dropout.threshold(dropout_p), 1.0 / (1.0 - dropout_p)


def _parts(like: Tensor, todo: Work, fill: float, width: int | None) -> Tensor:
    """A buffer for partial results: filled only where rows of it may stay unwritten."""
    shape = (todo.part_rows,) if width is None else (todo.part_rows, width)
    if todo.complete:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    return torch.full(shape, fill, dtype=torch.float32, device=like.device)


def _result(like: Tensor, todo: Work) -> Tensor:
    make = torch.empty if todo.covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def _launch(todo: Work, call: Callable[..., None]) -> None:
    """``call(programs, table, ATTEND=..., FINAL=...)`` for the parts, then for the result."""
    if todo.part_programs:
        call(todo.part_programs, todo.parts, ATTEND=True, FINAL=False)
    if todo.final_programs:
        call(todo.final_programs, todo.final, ATTEND=todo.attends, FINAL=True)


def forward(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``."""
    config = _configs(query).forward
    todo = work(problem, block=config.block_m, by_keys=False, device=query.device)
    out = _result(query, todo)
    lse_shape = (problem.batch, problem.heads, problem.queries)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=query.device)
    if not todo.covered:
        lse.fill_(-torch.inf)
    parts, parts_lse2 = _parts(query, todo, 0.0, query.shape[-1]), _parts(query, todo, -torch.inf, None)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    constants = _constants(problem, query, config, dropout_p, strides)

    def call(programs: int, table: Tensor, **mode: bool) -> None:
        forward_kernel[(programs,)](
            query, key, value, parts, parts_lse2, out, lse, table, todo.layout, todo.offsets, lse if seed is None else seed,
            table.shape[0], *strides, problem.queries, problem.heads, problem.key_heads,
            problem.heads // problem.key_heads, todo.groups, problem.keys - problem.queries,
            abs(scale) * _LOG2_E, *_keep(dropout_p), NEGATIVE=scale < 0, **mode, **constants,
        )  # fmt: skip

    _launch(todo, call)
    return out, lse


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
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    detach_mixing: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` from the merged ``out`` and ``lse``."""
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "seed": seed}
    if not detach_mixing or len(problem.pattern.branches) == 1:
        delta = _delta(dout, out, dlse)
        return _backward(problem, dout, query, key, value, lse, delta, **options)
    # With constant mixing weights, delta comes from the branch's own output, which is computed again.
    sums: list[Tensor] = []
    for branch in range(len(problem.pattern.branches)):
        alone = problem.only(branch)
        delta = _delta(dout, forward(alone, query, key, value, **options)[0], dlse)
        grads = _backward(alone, dout, query, key, value, lse, delta, **options)
        sums = [x + y.float() for x, y in zip(sums, grads, strict=True)] if sums else [y.float() for y in grads]
    dq, dk, dv = (x.to(query.dtype) for x in sums)
    return dq, dk, dv


def _backward(
    problem: Problem,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _configs(query)
    group = problem.heads // problem.key_heads
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *dout.stride()[:3])
    scalars = (problem.keys - problem.queries, scale * _LOG2_E, scale, *_keep(dropout_p))
    head_dim = query.shape[-1]

    def by_query() -> Tensor:
        todo = work(problem, block=chosen.dq.block_m, by_keys=False, device=query.device)
        dq, parts = _result(query, todo), _parts(query, todo, 0.0, head_dim)
        constants = _constants(problem, query, chosen.dq, dropout_p, strides)

        def call(programs: int, table: Tensor, **mode: bool) -> None:
            dq_kernel[(programs,)](
                query, key, value, dout, lse, delta, parts, dq, table, todo.layout, todo.offsets,
                lse if seed is None else seed, table.shape[0], *strides, problem.queries, problem.heads, problem.key_heads,
                group, todo.groups, *scalars, **mode, **constants,
            )  # fmt: skip

        _launch(todo, call)
        return dq

    def by_key() -> tuple[Tensor, Tensor]:
        todo = work(problem, block=chosen.dkv.block_n, by_keys=True, device=query.device)
        dk, dv = _result(key, todo), _result(value, todo)
        dk_parts, dv_parts = _parts(key, todo, 0.0, head_dim), _parts(value, todo, 0.0, head_dim)
        constants = _constants(problem, query, chosen.dkv, dropout_p, strides)

        def call(programs: int, table: Tensor, **mode: bool) -> None:
            dkv_kernel[(programs,)](
                query, key, value, dout, lse, delta, dk_parts, dv_parts, dk, dv, table, todo.layout, todo.offsets,
                lse if seed is None else seed, table.shape[0], *strides, problem.queries, problem.keys, problem.heads,
                problem.key_heads, group, todo.groups, *scalars, **mode, **constants,
            )  # fmt: skip

        _launch(todo, call)
        return dk, dv

    # One after the other, so that the parts of dq are gone before those of dk and dv exist.
    return by_query(), *by_key()


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = dout . out - dlse, (B, H, N)."""
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        block = 64
        delta_kernel[(triton.cdiv(batch * n * heads, block),)](
            dout, out, delta if dlse is None else dlse.contiguous(), delta, *dout.stride()[:3], batch * n * heads, n, heads,
            D=d, BLOCK_D=padded(d), BLOCK=block, HAS_DLSE=dlse is not None,
        )  # fmt: skip
    return delta
