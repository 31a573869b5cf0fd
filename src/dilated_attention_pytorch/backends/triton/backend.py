"""Fused kernels in Triton, for GPUs from Ampere on. Importing this module does not import triton; running it does."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.backends.request import ORDER_REASON, Request

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend(TableBackend):
    """The portable kernels."""

    name = "triton"
    kernels_are = "Triton"

    def why_not(self, request: Request) -> list[str]:
        """The reasons why the kernels cannot serve a request."""
        reasons = []
        if not request.described and importlib.util.find_spec("triton") is None:
            reasons.append("the package triton is not installed; it comes with PyTorch for CUDA on Linux")
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if request.device != "cuda" and not (interpreted and request.device == "cpu"):
            reasons.append(f"Triton kernels run on CUDA tensors, got {request.device}")
        if request.device == "cuda" and request.capability < (8, 0):
            reasons.append(f"Triton kernels need compute capability 8.0, this GPU has {request.capability}")
        if request.dtype not in DTYPES:
            reasons.append(f"Triton kernels take {', '.join(map(str, DTYPES))}, got {request.dtype}")
        if request.head_dim > MAX_HEAD_DIM:
            reasons.append(f"Triton kernels take head sizes up to {MAX_HEAD_DIM}, got {request.head_dim}")
        if request.masks_by_position and request.block_size is not None:
            reasons.append(ORDER_REASON)
        return reasons

    def kernels(self, *, dilated: bool) -> ModuleType:
        """The kernels over launch tables, or over block lists."""
        from dilated_attention_pytorch.backends.triton import block_run, run  # they import triton

        return run if dilated else block_run


TRITON = TritonBackend()
