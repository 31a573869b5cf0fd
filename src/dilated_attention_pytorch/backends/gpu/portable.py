"""Launches of the portable kernels over a launch plan. The Hopper backend uses those that only add partial results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.configs import TritonConfig, padded
from dilated_attention_pytorch.backends.gpu.kernels.backward import dkv_kernel, dq_kernel
from dilated_attention_pytorch.backends.gpu.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch
from dilated_attention_pytorch.backends.gpu.launch_plan import SUM_ROWS, LaunchPlan
from dilated_attention_pytorch.plan import dropout

LOG2_E = math.log2(math.e)
# Of each tensor that is read. The last stride is 1.
Strides = tuple[tuple[int, ...], ...]


# For launches that only add partial results.
SUM = TritonConfig(block_m=SUM_ROWS, block_n=SUM_ROWS, warps=4, stages=1)


class TileOptions(NamedTuple):
    """What the launches over a launch plan depend on besides its tables. Every call makes one, so it is a tuple."""

    head_dim: int
    strides: Strides
    config: TritonConfig
    scale: float = 1.0
    dropout_p: float = 0.0
    ordered: bool = False  # pairs are masked by position
    exact: bool = False  # see exact_products
    in_fours: bool = False  # the order of columns in partial results, see primitives.load_parts


def exact_products(x: Tensor) -> bool:
    """float32 products are as exact as float32 unless the caller allowed less for all of PyTorch."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def row_strides(strides: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The strides of sample, row and head of each tensor, without those of elements, which are 1."""
    return tuple(stride for each in strides for stride in each[:3])


def keep_numbers(dropout_p: float) -> tuple[int, float]:
    """The threshold below which the hash of a pair drops it, and the factor of the weights of other pairs."""
    return dropout.threshold(dropout_p), 1.0 / (1.0 - dropout_p)


def tile_constants(head_dim: int, exact: bool, config: TritonConfig, step: int) -> dict[str, Any]:
    """The constants of kernels for rows that are ``step`` elements apart."""
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


def _launches(
    kernel: Any, plan: LaunchPlan, how: TileOptions, numbers: tuple[float, ...], **constants: Any
) -> tuple[KernelLaunch, ...]:
    problem = plan.problem
    step = max(problem.dilated.dilation_rates) * max(*row_strides(how.strides), problem.heads * how.head_dim)
    constants |= {"IN_FOURS": how.in_fours, "ORDERED": how.ordered, "DROPOUT": how.dropout_p > 0.0}
    launches = []
    for one in plan.launches:
        config = how.config if one.attends else SUM
        mode = {"ATTEND": one.attends, "FINAL": one.final, **tile_constants(how.head_dim, how.exact, config, step)}
        tables = one.table, plan.layout, plan.offsets
        all_numbers = (one.table.shape[0], *row_strides(how.strides), *numbers, *keep_numbers(how.dropout_p))
        launches.append(KernelLaunch(kernel, one.programs, tables, all_numbers, {**constants, **mode}))
    return tuple(launches)


def _sizes(plan: LaunchPlan) -> tuple[int, ...]:
    problem = plan.problem
    heads = problem.heads, problem.key_heads, problem.heads_per_key
    return *heads, plan.bundles, problem.keys - problem.queries


def forward_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, partial out and lse2, out, lse, seed and positions."""
    numbers = plan.problem.queries, *_sizes(plan), abs(how.scale) * LOG2_E
    return _launches(forward_kernel, plan, how, numbers, NEGATIVE=how.scale < 0)


def dq_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, dout, lse, delta, partial dq, dq, seed and positions."""
    numbers = plan.problem.queries, *_sizes(plan), how.scale * LOG2_E, how.scale
    return _launches(dq_kernel, plan, how, numbers)


def dkv_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, dout, lse, delta, partial dk and dv, dk, dv, seed and positions."""
    numbers = plan.problem.queries, plan.problem.keys, *_sizes(plan), how.scale * LOG2_E, how.scale
    return _launches(dkv_kernel, plan, how, numbers)
