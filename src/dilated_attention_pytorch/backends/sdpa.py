"""Tiles through PyTorch's own fused attention operators: the one file that calls private aten operators.

Only operators that return lse are used. A test pins their signatures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import DROPOUT_REASON, ORDER_REASON, Request, StockBackend
from dilated_attention_pytorch.execute.loop import TileKernel

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # The operator reads lse with the strides its own forward gives it: heads innermost.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


def _as_forward_returns_it(out: Tensor) -> Tensor:
    """The same values in the layout of an operator's own output: (U, rows, heads, D) in memory."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.shape[2] == k.shape[2] == 1:  # cuDNN refuses this one shape
        return _flash_forward(q, k, v, causal, scale)
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:-1])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[2] == k.shape[2] == 1:
        return _flash_backward(dout, q, k, v, out, lse, causal, scale)
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    # PyTorch caches compiled cuDNN graphs by the strides of q, k and v alone. If dout and out had other strides than in an
    # earlier call, its graph would be used and the gradients would be wrong without an error. So both get the strides of
    # q; if they differ, all three are copied.
    if not dout.stride() == out.stride() == q.stride():
        dout, out, q = map(_as_forward_returns_it, (dout, out, q))
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), no_seed, no_seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, no_seed, no_seed, scale=scale
    )
    return dq, dk, dv


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    # The operator wants rows of lse padded to whole warps.
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, _as_forward_returns_it(out), padded, no_seed, no_seed, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _cpu_why_not(request: Request) -> list[str]:
    return [] if request.device == "cpu" else [f"CPU flash runs on CPU tensors, got {request.device}"]


def _cuda_why_not(
    name: str, capability: tuple[int, int], dtypes: tuple[torch.dtype, ...], multiple: int, most: int
) -> Callable[[Request], list[str]]:
    def why_not(request: Request) -> list[str]:
        if request.device != "cuda":
            return [f"{name} runs on CUDA tensors, got {request.device}"]
        reasons = []
        if request.capability < capability:
            reasons.append(f"{name} needs compute capability {capability}, this GPU has {request.capability}")
        if request.dtype not in dtypes:
            reasons.append(f"{name} takes {', '.join(map(str, dtypes))}, got {request.dtype}")
        if request.head_dim % multiple or request.head_dim > most:
            reasons.append(f"{name} takes head sizes up to {most} in steps of {multiple}, got {request.head_dim}")
        return reasons

    return why_not


_flash_takes = _cuda_why_not("flash", (8, 0), _HALF, 8, 256)
_efficient_takes = _cuda_why_not("memory-efficient", (5, 0), (torch.float32, *_HALF), 8, 1024)


def _flash_why_not(request: Request) -> list[str]:
    reasons = _flash_takes(request)
    little_shared_memory = (8, 6) <= request.capability <= (8, 9) or request.capability[0] == 12
    if 192 < request.head_dim <= 224 and little_shared_memory:
        gpu = f"compute capability {request.capability}"
        reasons.append(f"flash has no backward for head sizes 193 to 224 on GPUs of {gpu}, got {request.head_dim}")
    return reasons


def _efficient_why_not(request: Request) -> list[str]:
    reasons = _efficient_takes(request)
    if request.dtype == torch.bfloat16 and request.device == "cuda" and request.capability < (8, 0):
        reasons.append(
            f"memory-efficient takes bfloat16 from compute capability (8, 0) on, this GPU has {request.capability}"
        )
    return reasons


# In the order of preference.
KERNELS: tuple[tuple[TileKernel, Callable[[Request], list[str]]], ...] = (
    (TileKernel("CPU flash", _cpu_forward, _cpu_backward), _cpu_why_not),
    (TileKernel("cuDNN", _cudnn_forward, _cudnn_backward), _cuda_why_not("cuDNN", (8, 0), _HALF, 8, 128)),
    (TileKernel("flash", _flash_forward, _flash_backward), _flash_why_not),
    (TileKernel("memory-efficient", _efficient_forward, _efficient_backward), _efficient_why_not),
)


def _why_not(request: Request) -> list[str]:
    """No reason if one of the operators can serve the request, else the reasons of all."""
    if request.dropout_p > 0.0:
        return [DROPOUT_REASON.format(p=request.dropout_p)]
    if request.masks_by_position:
        return [ORDER_REASON]
    refusals = [reasons(request) for _, reasons in KERNELS]
    return [] if not all(refusals) else [reason for reasons in refusals for reason in reasons]


def _kernel(request: Request) -> TileKernel:
    """The first operator that can serve the request."""
    return next(kernel for kernel, reasons in KERNELS if not reasons(request))


SDPA = StockBackend("sdpa", _why_not, _kernel)
