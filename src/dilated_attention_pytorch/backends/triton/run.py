"""The portable kernels over launch tables. Each level of partial results is a launch, and the last writes the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.launch import launch
from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
from dilated_attention_pytorch.backends.gpu.portable import RowStatistics, Strides, TileOptions, TritonConfig, TritonConfigs
from dilated_attention_pytorch.backends.triton.configs import configs
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved


def capability(x: Tensor) -> tuple[int, int]:
    """Of the GPU that holds ``x``; the interpreter takes the configurations for Hopper."""
    return torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)


def _configs(x: Tensor, options: Options) -> TritonConfigs:
    return configs(capability(x), x.dtype, x.shape[-1], dropout=options.dropout is not None)


def _tile_options(query: Tensor, strides: Strides, config: TritonConfig, options: Options) -> TileOptions:
    dropout_p = 0.0 if options.dropout is None else options.dropout.p
    placed = options.places is not None
    return TileOptions(query.shape[-1], strides, config, options.scale, dropout_p, placed, portable.exact_products(query))


def _seed_and_places(options: Options, unused: Tensor) -> tuple[Tensor, Tensor]:
    """What kernels read for dropout; any tensor if they do not."""
    seed: Tensor = unused if options.dropout is None else options.dropout.seed
    return seed, unused if options.places is None else options.places


def forward(problem: Problem, inputs: Inputs, options: Options, given: Results | None = None) -> Results:
    """The attention of a dilated problem, see ``TableBackend.forward``."""
    query, key, value = inputs
    config = _configs(query, options).forward
    plan = find_launch_plan(problem, block=config.block_m, by_keys=False, head_dim=query.shape[-1], device=query.device)
    *partial, out, lse = portable.forward_buffers(query, plan, given)
    how = _tile_options(query, (query.stride(), key.stride(), value.stride()), config, options)
    tensors = (query, key, value, *partial, out, lse, *_seed_and_places(options, lse))
    launch(plan.once(portable.forward_launches, how), tensors)
    return Results(out, lse)


def row_statistics(saved: Saved, options: Options) -> RowStatistics:
    """lse and delta, see ``TableBackend.row_statistics``."""
    return portable.row_statistics(saved)


def gradients(
    problem: Problem, inputs: Inputs, dout: Tensor, statistics: RowStatistics, options: Options, grads: Inputs | None
) -> Inputs:
    """The gradients of a dilated problem, see ``TableBackend.gradients``."""
    (query, key, value), (lse, delta, _) = inputs, statistics
    chosen = _configs(query, options)
    sizes: dict[str, Any] = {"head_dim": query.shape[-1], "device": query.device, "own_deltas": statistics.own_deltas}
    read = query, key, value, dout, lse, delta
    strides = query.stride(), key.stride(), value.stride(), dout.stride()
    optional = _seed_and_places(options, lse)

    def by_query() -> Tensor:
        plan = find_launch_plan(problem, block=chosen.dq.block_m, by_keys=False, **sizes)
        buffers = portable.dq_buffers(query, plan, grads)
        how = _tile_options(query, strides, chosen.dq, options)
        launch(plan.once(portable.dq_launches, how), (*read, *buffers, *optional))
        return buffers[-1]

    def by_key() -> tuple[Tensor, ...]:
        plan = find_launch_plan(problem, block=chosen.dkv.block_n, by_keys=True, **sizes)
        buffers = portable.dkv_buffers(key, value, plan, grads)
        how = _tile_options(query, strides, chosen.dkv, options)
        launch(plan.once(portable.dkv_launches, how), (*read, *buffers, *optional))
        return buffers[-2:]

    # One after the other: the partial results of dq are freed before those of dk and dv are allocated.
    return Inputs(by_query(), *by_key())
