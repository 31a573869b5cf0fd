"""Warp-specialised kernels for Hopper GPUs. Importing this module does not import triton; running it does."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.request import ORDER_REASON, Request

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = range(24, 129, 8)
BLOCK_SIZES = (128, 256)


class HopperBackend(TableBackend):
    """The kernels that use the tensor memory accelerator and groups of warps with different tasks."""

    name = "hopper"
    kernels_are = "warp-specialised"

    def why_not(self, request: Request) -> list[str]:
        """The reasons why the kernels cannot serve a request."""
        reasons = []
        if request.device != "cuda":
            reasons.append(f"Hopper kernels run on CUDA tensors, got {request.device}")
        if not request.described and importlib.util.find_spec("triton") is None:
            reasons.append("the package triton is not installed; it comes with PyTorch for CUDA on Linux")
        if request.device == "cuda" and request.capability[0] != 9:
            reasons.append(f"Hopper kernels need compute capability 9.0, this GPU has {request.capability}")
        if request.dtype not in DTYPES:
            reasons.append(f"Hopper kernels take {', '.join(map(str, DTYPES))}, got {request.dtype}")
        if request.head_dim not in HEAD_DIMS:
            reasons.append(f"Hopper kernels take head sizes from 24 to 128 in steps of 8, got {request.head_dim}")
        if request.dropout_p > 0.0:
            reasons.append(f"Hopper kernels have no dropout, got dropout_p = {request.dropout_p}")
        if request.masks_by_position and request.block_size is not None:
            reasons.append(ORDER_REASON)
        if request.block_size not in (None, *BLOCK_SIZES):
            reasons.append(f"Hopper kernels take blocks of {' or '.join(map(str, BLOCK_SIZES))}, got {request.block_size}")
        if not request.square:  # lengths are not part of the message: a compiler may know them only as symbols
            reasons.append("Hopper kernels over blocks take as many queries as keys")
        return reasons

    def kernels(self, *, dilated: bool) -> ModuleType:
        """The kernels over launch tables, or over block lists."""
        from dilated_attention_pytorch.backends.hopper import block_run, run  # they import triton

        return run if dilated else block_run


HOPPER = HopperBackend()
