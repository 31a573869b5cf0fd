"""The Hopper kernels over block lists: the tables are those of the portable kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, find_block_tables
from dilated_attention_pytorch.backends.gpu.buffers import lse_buffer, result_buffer
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, RowStatistics, Strides, row_strides
from dilated_attention_pytorch.backends.hopper import persistent
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, configs
from dilated_attention_pytorch.backends.hopper.kernels.block_dkv import block_dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_dq import block_dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.hopper.persistent import GradientInputs, aligned, nonzero_scale
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


def _launch(
    kernel: Any, problem: Problem, table: BlockTable, tensors: tuple[Tensor, ...], strides: Strides,
    numbers: tuple[float, ...], constants: dict[str, Any],
) -> None:  # fmt: skip
    """One launch over all blocks of 128 rows of all heads that the result has."""
    rows, size = table.rows.shape[0], problem.blocks.block_size
    heads = problem.key_heads if kernel is block_dkv_kernel else problem.heads
    items = rows * (size // ITEM_ROWS) * heads
    # A counter; in the forward also the items that each program has taken.
    taken = torch.zeros(1 + items, dtype=torch.int32, device=table.rows.device)
    constants = {"BLOCK_SIZE": size, "CAUSAL": problem.is_causal, **constants}
    numbers = (rows, items, *row_strides(strides), *numbers)
    persistent.launch_persistent(kernel, items, (*tensors, *table.tensors, taken), numbers, constants)


def attend(
    problem: Problem, table: BlockTable, inputs: Inputs, scale: float, out: Tensor | None = None
) -> Results:  # fmt: skip
    """The attention over a table by query block."""
    query, scale = persistent.scaled_query(inputs.query, scale)
    query, key, value = aligned(query), aligned(inputs.key), aligned(inputs.value)
    out, lse = result_buffer(query, table.covered) if out is None else out, lse_buffer(query, table.covered)
    strides, config = (query.stride(), key.stride(), value.stride()), configs(query.shape[-1]).forward
    numbers = problem.queries, problem.heads, problem.heads_per_key, scale * LOG2_E
    constants = {"BLOCK_N": config.block, **persistent.constants(config, query.shape[-1])}
    _launch(block_forward_kernel, problem, table, (query, key, value, out, lse), strides, numbers, constants)
    return Results(out, lse)


def dq(
    problem: Problem, table: BlockTable, read: GradientInputs, statistics: RowStatistics, scale: float,
    result: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the queries; the table is by query block."""
    query, config = read.query, configs(read.query.shape[-1]).dq
    result = result_buffer(query, table.covered) if result is None else result
    numbers = problem.queries, problem.heads, problem.heads_per_key, scale * LOG2_E, scale
    constants = {"BLOCK_N": config.block, **persistent.constants(config, query.shape[-1])}
    tensors = (*read, statistics.lse, statistics.delta, result)
    _launch(block_dq_kernel, problem, table, tensors, read.strides, numbers, constants)
    return result


def dkv(
    problem: Problem, table: BlockTable, read: GradientInputs, shifts: Tensor, scale: float,
    results: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of keys and values; the table is by key block."""
    key, value, config = read.key, read.value, configs(read.query.shape[-1]).dkv
    dk, dv = (result_buffer(key, table.covered), result_buffer(value, table.covered)) if results is None else results
    sizes = problem.queries, problem.keys, problem.heads, problem.key_heads, problem.heads_per_key
    numbers = (*sizes, nonzero_scale(scale) * LOG2_E, scale)
    fixed = persistent.constants(config, read.query.shape[-1])
    constants = {"BLOCK_M": config.block, "OVERLAP": config.overlap, **fixed}
    _launch(block_dkv_kernel, problem, table, (*read, shifts, dk, dv), read.strides, numbers, constants)
    return dk, dv


def forward(problem: Problem, inputs: Inputs, options: Options, out: Tensor | None = None) -> Results:
    """The attention of a block-sparse problem, see ``TableBackend.forward``."""
    table = find_block_tables(problem, inputs.query.device, options.chosen).for_queries(options.chosen)
    return attend(problem, table, inputs, options.scale, out)


def backward(problem: Problem, inputs: Inputs, saved: Saved, options: Options, grads: Inputs | None = None) -> Inputs:
    """The gradients of a block-sparse problem, see ``TableBackend.backward``."""
    tables, scale = find_block_tables(problem, inputs.query.device, options.chosen), options.scale
    read = GradientInputs(*map(aligned, (*inputs, saved.dout)))
    statistics = persistent.row_statistics(saved, scale)
    assert statistics.shifts is not None
    by_query, by_key = (None, None) if grads is None else (grads.query, (grads.key, grads.value))
    dquery = dq(problem, tables.for_queries(options.chosen), read, statistics, scale, by_query)
    return Inputs(dquery, *dkv(problem, tables.for_keys(options.chosen), read, statistics.shifts, scale, by_key))
