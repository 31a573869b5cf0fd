"""The Hopper kernels over block lists: the tables are those of the portable kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, find_block_tables
from dilated_attention_pytorch.backends.gpu.launch import launch_one, multiprocessors
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, RowStatistics, row_strides
from dilated_attention_pytorch.backends.gpu.running import is_running
from dilated_attention_pytorch.backends.hopper import persistent
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, HopperConfig, configs
from dilated_attention_pytorch.backends.hopper.kernels.block_dkv import block_dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_dq import block_dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.hopper.persistent import GradientInputs, aligned, nonzero_scale
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


def _launch(
    kernel: Any, problem: Problem, table: BlockTable, tensors: tuple[Tensor, ...], numbers: tuple[float, ...],
    config: HopperConfig, **mode: Any,
) -> None:  # fmt: skip
    """One launch over all blocks of 128 rows of all heads that the result has."""
    rows, size, by_keys = table.rows.shape[0], problem.blocks.block_size, kernel is block_dkv_kernel
    heads = problem.key_heads if by_keys else problem.heads
    items = rows * (size // ITEM_ROWS) * heads
    # A counter; in the forward also the items that each program has taken.
    taken = torch.zeros(1 + items, dtype=torch.int32, device=table.rows.device)
    mode |= {"BLOCK_SIZE": size, "CAUSAL": problem.is_causal, "RUNNING": is_running(problem, by_keys=by_keys)}
    mode |= persistent.constants(config, tensors[0].shape[-1])
    if items:  # at most one program for each multiprocessor; the programs share the items
        programs = min(items, multiprocessors(taken.device))
        tensors, numbers = (*tensors, *table.tensors, taken), (rows, items, *numbers)
        persistent.with_scratch(lambda: launch_one(kernel, programs, tensors, numbers, mode), programs, taken.device)


def forward(problem: Problem, inputs: Inputs, options: Options, given: Results | None = None) -> Results:
    """The attention of a block-sparse problem, see ``TableBackend.forward``."""
    table = find_block_tables(problem, inputs.query.device, options.chosen).for_queries(options.chosen)
    query, scale = persistent.scaled_query(inputs.query, options.scale)
    query, key, value = aligned(query), aligned(inputs.key), aligned(inputs.value)
    out, lse = portable.results_buffer(query, table.covered, given)
    strides, config = row_strides((query.stride(), key.stride(), value.stride())), configs(query.shape[-1]).forward
    numbers = (*strides, problem.queries, problem.heads, problem.heads_per_key, scale * LOG2_E)
    tensors = query, key, value, out, lse, lse.clone() if is_running(problem) else lse
    _launch(block_forward_kernel, problem, table, tensors, numbers, config, BLOCK_N=config.block)
    return Results(out, lse)


def row_statistics(saved: Saved, options: Options) -> RowStatistics:
    """lse, delta and shifts, see ``TableBackend.row_statistics``."""
    return persistent.row_statistics(saved, options.scale)


def gradients(
    problem: Problem, inputs: Inputs, dout: Tensor, statistics: RowStatistics, options: Options, grads: Inputs | None
) -> Inputs:
    """The gradients of a block-sparse problem, see ``TableBackend.gradients``."""
    tables, scale = find_block_tables(problem, inputs.query.device, options.chosen), options.scale
    read = GradientInputs(*map(aligned, (*inputs, dout)))
    lse, delta, shifts = statistics
    assert shifts is not None
    own, strides, n, heads = configs(read.query.shape[-1]), row_strides(read.strides), problem.queries, problem.heads

    table = tables.for_queries(options.chosen)
    dq = portable.result_buffer(read.query, table.covered, grads and grads.query)
    numbers: tuple[float, ...] = (*strides, n, heads, problem.heads_per_key, scale * LOG2_E, scale)
    _launch(block_dq_kernel, problem, table, (*read, lse, delta, dq), numbers, own.dq, BLOCK_N=own.dq.block)

    table = tables.for_keys(options.chosen)
    dk = portable.result_buffer(read.key, table.covered, grads and grads.key)
    dv = portable.result_buffer(read.value, table.covered, grads and grads.value)
    sizes = n, problem.keys, heads, problem.key_heads, problem.heads_per_key
    numbers = (*strides, *sizes, nonzero_scale(scale) * LOG2_E, scale)
    mode = {"BLOCK_M": own.dkv.block, "OVERLAP": own.dkv.overlap}
    _launch(block_dkv_kernel, problem, table, (*read, shifts, dk, dv), numbers, own.dkv, **mode)
    return Inputs(dq, dk, dv)
