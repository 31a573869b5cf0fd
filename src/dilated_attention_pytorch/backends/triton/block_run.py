"""The portable kernels over block lists: one launch forward; delta, dq, and dk with dv backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, find_block_tables
from dilated_attention_pytorch.backends.gpu.kernels.block_backward import block_dkv_kernel, block_dq_kernel
from dilated_attention_pytorch.backends.gpu.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, RowStatistics, TritonConfig, TritonConfigs, row_strides
from dilated_attention_pytorch.backends.gpu.running import is_running
from dilated_attention_pytorch.backends.triton.configs import block_configs
from dilated_attention_pytorch.backends.triton.run import capability
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


def _configs(x: Tensor, block_size: int) -> TritonConfigs:
    return block_configs(capability(x), x.dtype, x.shape[-1], block_size)


def _constants(problem: Problem, read: tuple[Tensor, ...], config: TritonConfig, options: Options) -> dict[str, Any]:
    """The constants of all kernels; ``read`` are the inputs of rows (B, N, H, D)."""
    query = read[0]
    step = max(*row_strides(x.stride() for x in read), *(x.shape[2] * x.shape[3] for x in read))
    mode = {"BLOCK_SIZE": problem.blocks.block_size, "CAUSAL": problem.is_causal, "DROPOUT": options.dropout is not None}
    mode |= {"RUNNING": is_running(problem)}
    return portable.tile_constants(query.shape[-1], portable.exact_products(query), config, step) | mode


def _launch(
    kernel: Any, table: BlockTable, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[float, ...],
    constants: dict[str, Any], options: Options,
) -> None:  # fmt: skip
    """One launch of ``programs`` programs for each row of the table."""
    rows = table.rows.shape[0]
    if rows * programs:
        seed, p = (table.starts, 0.0) if options.dropout is None else (options.dropout.seed, options.dropout.p)
        numbers = (rows, *numbers, *portable.keep_numbers(p))
        launch_one(kernel, rows * programs, (*tensors, *table.tensors, seed), numbers, constants)


def forward(problem: Problem, inputs: Inputs, options: Options, given: Results | None = None) -> Results:
    """The attention of a block-sparse problem, see ``TableBackend.forward``."""
    query, size, scale = inputs.query, problem.blocks.block_size, options.scale
    config, (n, heads) = _configs(query, size).forward, query.shape[1:3]
    table = find_block_tables(problem, query.device, options.chosen).for_queries(options.chosen)
    out, lse = portable.results_buffer(query, table.covered, given)
    strides = row_strides(x.stride() for x in inputs)
    numbers = (*strides, n, heads, problem.heads_per_key, abs(scale) * LOG2_E)
    constants = _constants(problem, inputs, config, options) | {"NEGATIVE": scale < 0}
    programs = size // config.block_m * heads
    _launch(block_forward_kernel, table, programs, (*inputs, out, lse), numbers, constants, options)
    return Results(out, lse)


def row_statistics(saved: Saved, options: Options) -> RowStatistics:
    """lse and delta, see ``TableBackend.row_statistics``."""
    return portable.row_statistics(saved)


def gradients(
    problem: Problem, inputs: Inputs, dout: Tensor, statistics: RowStatistics, options: Options, grads: Inputs | None
) -> Inputs:
    """The gradients of a block-sparse problem, see ``TableBackend.gradients``."""
    (query, key, value), size, scale = inputs, problem.blocks.block_size, options.scale
    configs, (n, heads), m, key_heads = _configs(query, size), query.shape[1:3], problem.keys, problem.key_heads
    tables, read = find_block_tables(problem, query.device, options.chosen), (*inputs, dout)
    lse, delta, _ = statistics
    tensors, strides = (*read, lse, delta), row_strides(x.stride() for x in read)
    factors = problem.heads_per_key, scale * LOG2_E, scale

    table = tables.for_queries(options.chosen)
    dq = portable.result_buffer(query, table.covered, grads and grads.query)
    numbers: tuple[float, ...] = (*strides, n, heads, *factors)
    constants, programs = _constants(problem, read, configs.dq, options), size // configs.dq.block_m * heads
    _launch(block_dq_kernel, table, programs, (*tensors, dq), numbers, constants, options)

    table = tables.for_keys(options.chosen)
    dk = portable.result_buffer(key, table.covered, grads and grads.key)
    dv = portable.result_buffer(value, table.covered, grads and grads.value)
    numbers = (*strides, n, m, heads, key_heads, *factors)
    constants, programs = _constants(problem, read, configs.dkv, options), size // configs.dkv.block_n * key_heads
    constants["RUNNING"] = is_running(problem, by_keys=True)
    _launch(block_dkv_kernel, table, programs, (*tensors, dk, dv), numbers, constants, options)
    return Inputs(dq, dk, dv)
