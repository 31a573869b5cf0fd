"""Memory for results and partial results, filled only where nothing else writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.launch_plan import LaunchPlan
from dilated_attention_pytorch.values import Inputs


def result_buffer(like: Tensor, covered: bool, given: Tensor | None = None) -> Tensor:
    """The given tensor, or one in the shape and type of ``like``; 0 unless kernels write every row (``covered``)."""
    if given is not None:
        return given
    make = torch.empty if covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def lse_buffer(query: Tensor, covered: bool) -> Tensor:
    """lse (B, H, N) in float32; -inf unless kernels write every row (``covered``)."""
    batch, n, heads, _ = query.shape
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    return lse if covered else lse.fill_(-torch.inf)


def _partial_buffer(like: Tensor, plan: LaunchPlan, fill: float, *width: int) -> Tensor:
    """Partial results in float32, rows of ``width`` elements; filled if some of the rows are not written."""
    partial = torch.empty((plan.partial_rows, *width), dtype=torch.float32, device=like.device)
    return partial if plan.complete else partial.fill_(fill)


def forward_buffers(query: Tensor, plan: LaunchPlan, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of out and of lse (base 2), out, which may be given, and lse: what a forward writes."""
    partial = _partial_buffer(query, plan, 0.0, query.shape[-1]), _partial_buffer(query, plan, -torch.inf)
    return *partial, result_buffer(query, plan.covered, out), lse_buffer(query, plan.covered)


def dq_buffers(query: Tensor, plan: LaunchPlan, grads: Inputs | None) -> tuple[Tensor, Tensor]:
    """Partial results of dq, and dq, which may be given."""
    return _partial_buffer(query, plan, 0.0, query.shape[-1]), result_buffer(query, plan.covered, grads and grads.query)


def dkv_buffers(
    key: Tensor, value: Tensor, plan: LaunchPlan, grads: Inputs | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial results of dk and of dv, dk and dv, which may be given."""
    partial = _partial_buffer(key, plan, 0.0, key.shape[-1]), _partial_buffer(value, plan, 0.0, value.shape[-1])
    dk = result_buffer(key, plan.covered, grads and grads.key)
    return *partial, dk, result_buffer(value, plan.covered, grads and grads.value)
