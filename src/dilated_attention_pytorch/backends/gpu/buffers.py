"""Memory for results and partial results, filled only where nothing else writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.launch_plan import LaunchPlan


def result_buffer(like: Tensor, covered: bool) -> Tensor:
    """A result in the shape and type of ``like``; 0 unless kernels write every row (``covered``)."""
    make = torch.empty if covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def lse_buffer(query: Tensor, covered: bool) -> Tensor:
    """lse (B, H, N) in float32; -inf unless kernels write every row (``covered``)."""
    batch, n, heads, _ = query.shape
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    return lse if covered else lse.fill_(-torch.inf)


def partial_buffer(like: Tensor, plan: LaunchPlan, fill: float, width: int | None) -> Tensor:
    """Partial results in float32, rows of ``width`` elements; filled if some of the rows are not written."""
    shape = (plan.partial_rows,) if width is None else (plan.partial_rows, width)
    if plan.complete:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    return torch.full(shape, fill, dtype=torch.float32, device=like.device)


def forward_buffers(query: Tensor, plan: LaunchPlan, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of out and of lse (base 2), out, which may be given, and lse: what a forward writes."""
    partial_out = partial_buffer(query, plan, 0.0, query.shape[-1])
    partial_lse2 = partial_buffer(query, plan, -torch.inf, None)
    lse = lse_buffer(query, plan.covered)
    return partial_out, partial_lse2, result_buffer(query, plan.covered) if out is None else out, lse


def dq_buffers(query: Tensor, plan: LaunchPlan, dq: Tensor | None) -> tuple[Tensor, Tensor]:
    """Partial results of dq, and dq, which may be given."""
    return partial_buffer(query, plan, 0.0, query.shape[-1]), result_buffer(query, plan.covered) if dq is None else dq


def dkv_buffers(
    key: Tensor, value: Tensor, plan: LaunchPlan, dkv: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of dk and of dv, dk and dv, which may be given."""
    partial = partial_buffer(key, plan, 0.0, key.shape[-1]), partial_buffer(value, plan, 0.0, value.shape[-1])
    dk, dv = (result_buffer(key, plan.covered), result_buffer(value, plan.covered)) if dkv is None else dkv
    return *partial, dk, dv
