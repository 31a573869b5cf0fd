"""The Hopper kernels over block lists: the tables are those of the portable kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, find_block_tables
from dilated_attention_pytorch.backends.gpu.buffers import lse_buffer, result_buffer
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, row_strides
from dilated_attention_pytorch.backends.gpu.statistics import RowStatistics
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, HopperConfig, configs
from dilated_attention_pytorch.backends.hopper.kernels.block_dkv import block_dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_dq import block_dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.hopper.persistent import (
    aligned,
    constants,
    launch_persistent,
    nonzero_scale,
    row_statistics,
    scaled_query,
)
from dilated_attention_pytorch.backends.hopper.run import GradientInputs
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Upstream


def _constants(problem: Problem, config: HopperConfig, head_dim: int) -> dict[str, Any]:
    return {"BLOCK_SIZE": problem.blocks.block_size, "CAUSAL": problem.is_causal, **constants(config, head_dim)}


def _launch(
    kernel: Any,
    table: BlockTable,
    heads: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    fixed: dict[str, Any],
) -> None:
    """One launch over all blocks of 128 rows of all heads."""
    rows = table.rows.shape[0]
    items = rows * (fixed["BLOCK_SIZE"] // ITEM_ROWS) * heads
    # A counter; in the forward also the items that each program has taken.
    taken = torch.zeros(1 + items, dtype=torch.int32, device=table.rows.device)
    launch_persistent(kernel, items, (*tensors, *table.tensors, taken), (rows, items, *numbers), fixed)


def attend(
    problem: Problem, table: BlockTable, inputs: Inputs, scale: float, out: Tensor | None = None
) -> Results:  # fmt: skip
    """The attention over a table by query block."""
    query, scale = scaled_query(inputs.query, scale)
    read, config = tuple(map(aligned, (query, inputs.key, inputs.value))), configs(query.shape[-1]).forward
    n, heads = query.shape[1:3]
    out = result_buffer(query, table.covered) if out is None else out
    lse = lse_buffer(query, table.covered)
    numbers = (*row_strides(x.stride() for x in read), n, heads, problem.heads_per_key, scale * LOG2_E)
    fixed = {"BLOCK_N": config.block, **_constants(problem, config, query.shape[-1])}
    _launch(block_forward_kernel, table, heads, (*read, out, lse), numbers, fixed)
    return Results(out, lse)


def dq(
    problem: Problem,
    table: BlockTable,
    read: GradientInputs,
    statistics: RowStatistics,
    scale: float,
    result: Tensor | None = None,
) -> Tensor:
    """The gradient of the queries; the table is by query block."""
    query = read.query
    config, (n, heads) = configs(query.shape[-1]).dq, query.shape[1:3]
    result = result_buffer(query, table.covered) if result is None else result
    numbers = (*row_strides(read.strides), n, heads, problem.heads_per_key, scale * LOG2_E, scale)
    fixed = {"BLOCK_N": config.block, **_constants(problem, config, query.shape[-1])}
    _launch(block_dq_kernel, table, heads, (*read, statistics.lse, statistics.delta, result), numbers, fixed)
    return result


def dkv(
    problem: Problem,
    table: BlockTable,
    read: GradientInputs,
    shifts: Tensor,
    scale: float,
    results: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values; the table is by key block."""
    query, key, value, _ = read
    config, (n, heads), (m, key_heads) = configs(query.shape[-1]).dkv, query.shape[1:3], key.shape[1:3]
    dk, dv = (result_buffer(key, table.covered), result_buffer(value, table.covered)) if results is None else results
    sizes = n, m, heads, key_heads, problem.heads_per_key
    numbers = (*row_strides(read.strides), *sizes, nonzero_scale(scale) * LOG2_E, scale)
    fixed = {"BLOCK_M": config.block, "OVERLAP": config.overlap, **_constants(problem, config, query.shape[-1])}
    _launch(block_dkv_kernel, table, key_heads, (*read, shifts, dk, dv), numbers, fixed)
    return dk, dv


def forward(problem: Problem, inputs: Inputs, options: Options, out: Tensor | None = None) -> Results:
    """The attention of a block-sparse problem, see ``TableBackend.forward``."""
    table = find_block_tables(problem, inputs.query.device, options.chosen).for_queries(options.chosen)
    return attend(problem, table, inputs, options.scale, out)


def backward(
    problem: Problem,
    inputs: Inputs,
    results: Results,
    upstream: Upstream,
    options: Options,
    grads: Inputs | None = None,
) -> Inputs:
    """The gradients of a block-sparse problem, see ``TableBackend.backward``."""
    tables, scale = find_block_tables(problem, inputs.query.device, options.chosen), options.scale
    read = GradientInputs(*map(aligned, (*inputs, upstream.dout)))
    statistics = row_statistics(results, upstream, scale)
    assert statistics.shifts is not None
    by_query, by_key = (None, None) if grads is None else (grads.query, (grads.key, grads.value))
    return Inputs(
        dq(problem, tables.for_queries(options.chosen), read, statistics, scale, by_query),
        *dkv(problem, tables.for_keys(options.chosen), read, statistics.shifts, scale, by_key),
    )
