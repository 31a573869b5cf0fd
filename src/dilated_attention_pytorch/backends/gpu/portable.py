"""Launches of the portable kernels over a launch plan, and of the kernel that computes delta; memory for results.

The Hopper backend uses the latter two, and the launches that only add partial results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.backward import delta_kernel, dkv_kernel, dq_kernel
from dilated_attention_pytorch.backends.gpu.kernels.forward import forward_kernel
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, launch_one
from dilated_attention_pytorch.backends.gpu.launch_plan import SUM_ROWS, LaunchPlan
from dilated_attention_pytorch.plan import dropout
from dilated_attention_pytorch.values import Inputs, Results, Saved

LOG2_E = math.log2(math.e)
# Of each tensor that is read. The last stride is 1.
Strides = tuple[tuple[int, ...], ...]
_DELTA_ROWS = 64  # of a program that computes delta


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Rows of queries and keys per block, warps per program, depth of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    # How float32 is multiplied if PyTorch's precision is "highest". "tf32x3" computes a product as three TF32 products on
    # tensor cores, with errors like those of float32. "ieee" uses no tensor cores.
    float32: str = "tf32x3"


@dataclass(frozen=True, slots=True)
class TritonConfigs:
    """One configuration per kernel."""

    forward: TritonConfig
    dq: TritonConfig
    dkv: TritonConfig


def padded(head_dim: int) -> int:
    """The head size of a block: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


# For launches that only add partial results.
SUM = TritonConfig(block_m=SUM_ROWS, block_n=SUM_ROWS, warps=4, stages=1)


class TileOptions(NamedTuple):
    """What the launches over a launch plan depend on besides its tables. Every call makes one, so it is a tuple."""

    head_dim: int
    strides: Strides
    config: TritonConfig
    scale: float = 1.0
    dropout_p: float = 0.0
    placed: bool = False  # dropout counts places of the ordered sequence
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
        "D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "WIDE": step * max(config.block_m, config.block_n) >= 2**31, "PRECISION": config.float32 if exact else "tf32",
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip


def _launches(
    kernel: Any, plan: LaunchPlan, how: TileOptions, numbers: tuple[float, ...], **constants: Any
) -> tuple[KernelLaunch, ...]:
    problem = plan.problem
    step = max(problem.dilated.dilation_rates) * max(*row_strides(how.strides), problem.heads * how.head_dim)
    constants |= {"IN_FOURS": how.in_fours, "PLACED": how.placed, "DROPOUT": how.dropout_p > 0.0}
    launches = []
    for one in plan.launches:
        config = how.config if one.attends else SUM
        mode = {"ATTEND": one.attends, "FINAL": one.final, "RUNNING": one.running}
        mode |= tile_constants(how.head_dim, how.exact, config, step)
        tables = one.table, plan.layout, plan.offsets
        all_numbers = (one.table.shape[0], *row_strides(how.strides), *numbers, *keep_numbers(how.dropout_p))
        launches.append(KernelLaunch(kernel, one.programs, tables, all_numbers, {**constants, **mode}))
    return tuple(launches)


def _sizes(plan: LaunchPlan) -> tuple[int, ...]:
    problem = plan.problem
    return problem.heads, problem.key_heads, problem.heads_per_key, plan.bundles, problem.keys - problem.queries


def forward_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, partial out and lse2, out, lse, seed and places."""
    numbers = plan.problem.queries, *_sizes(plan), abs(how.scale) * LOG2_E
    return _launches(forward_kernel, plan, how, numbers, NEGATIVE=how.scale < 0)


def dq_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, dout, lse, delta, partial dq, dq, seed and places."""
    numbers = plan.problem.queries, *_sizes(plan), how.scale * LOG2_E, how.scale
    return _launches(dq_kernel, plan, how, numbers)


def dkv_launches(plan: LaunchPlan, how: TileOptions) -> tuple[KernelLaunch, ...]:
    """Over query, key, value, dout, lse, delta, partial dk and dv, dk, dv, seed and places."""
    numbers = plan.problem.queries, plan.problem.keys, *_sizes(plan), how.scale * LOG2_E, how.scale
    return _launches(dkv_kernel, plan, how, numbers)


class RowStatistics(NamedTuple):
    """One number per query row and head, (B, H, N) float32, or what is made of such numbers.

    delta and shifts may have a dimension in front, of branches: with detached mixing each has its own.
    """

    lse: Tensor
    delta: Tensor  # dout . out - dlse
    shifts: Tensor | None = None  # (B, H, N, 16) bfloat16: both as the Hopper kernels read them, see hopper/kernels/dkv.py

    @property
    def own_deltas(self) -> bool:
        """Whether each branch has its own."""
        return self.delta.dim() == 4


def row_statistics(saved: Saved, shifts: Tensor | None = None, inverse_scale: float = 0.0) -> RowStatistics:
    """lse and delta; ``shifts`` are written if they are given, see ``delta_kernel``."""
    out, lse, dout, dlse = saved
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        words = delta if shifts is None else shifts.view(torch.int32)
        tensors = dout, out, delta if dlse is None else dlse.contiguous(), lse, delta, words
        numbers = (*dout.stride()[:3], batch * n * heads, n, heads, inverse_scale)
        has = {"HAS_DLSE": dlse is not None, "HAS_SHIFTS": shifts is not None}
        constants = {"D": d, "BLOCK_D": padded(d), "BLOCK": _DELTA_ROWS, **has}
        launch_one(delta_kernel, -(-batch * n * heads // _DELTA_ROWS), tensors, numbers, constants)
    return RowStatistics(lse, delta, shifts)


def result_buffer(like: Tensor, covered: bool, given: Tensor | None = None) -> Tensor:
    """The given tensor, or one in the shape and type of ``like``; 0 unless kernels write every row (``covered``)."""
    if given is not None:
        return given
    make = torch.empty if covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def results_buffer(query: Tensor, covered: bool, given: Results | None) -> Results:
    """The given results, or memory for out and for lse in float32; 0 and -inf unless kernels write every row."""
    if given is not None:
        return given
    batch, n, heads, _ = query.shape
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    return Results(result_buffer(query, covered), lse if covered else lse.fill_(-torch.inf))


def _partial_buffer(like: Tensor, plan: LaunchPlan, fill: float, *width: int) -> Tensor:
    """Partial results in float32, rows of ``width`` elements; filled if some of the rows are not written."""
    partial = torch.empty((plan.partial_rows, *width), dtype=torch.float32, device=like.device)
    return partial if plan.complete else partial.fill_(fill)


def forward_buffers(query: Tensor, plan: LaunchPlan, given: Results | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of out and of lse (base 2), out and lse, which may be given: what a forward writes."""
    partial = _partial_buffer(query, plan, 0.0, query.shape[-1]), _partial_buffer(query, plan, -torch.inf)
    return *partial, *results_buffer(query, plan.covered, given)


def dq_buffers(query: Tensor, plan: LaunchPlan, grads: Inputs | None) -> tuple[Tensor, Tensor]:
    """Partial results of dq, and dq, which may be given."""
    return _partial_buffer(query, plan, 0.0, query.shape[-1]), result_buffer(query, plan.covered, grads and grads.query)


def dkv_buffers(k: Tensor, v: Tensor, plan: LaunchPlan, grads: Inputs | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of dk and of dv, dk and dv, which may be given."""
    partial = _partial_buffer(k, plan, 0.0, k.shape[-1]), _partial_buffer(v, plan, 0.0, v.shape[-1])
    dk = result_buffer(k, plan.covered, grads and grads.key)
    return *partial, dk, result_buffer(v, plan.covered, grads and grads.value)
