"""Warp-specialised kernels for Hopper GPUs over launch tables. Importing this module does not import triton."""

from __future__ import annotations

import importlib.util

import torch

from dilated_attention_pytorch.backends.request import ORDER_REASON, Request

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = range(24, 129, 8)


BLOCK_SIZES = (128, 256)


def why_not_blocks(block_size: int, queries: int, keys: int) -> list[str]:
    """Further reasons, for a block-sparse pattern."""
    reasons = []
    if block_size not in BLOCK_SIZES:
        reasons.append(f"Hopper kernels take blocks of {' or '.join(map(str, BLOCK_SIZES))}, got {block_size}")
    if queries != keys:
        reasons.append(f"Hopper kernels over blocks take as many queries as keys, got {queries} and {keys}")
    return reasons


def why_not(request: Request) -> list[str]:
    """Reasons why the kernels cannot serve a request."""
    if request.device != "cuda":
        return [f"Hopper kernels run on CUDA tensors, got {request.device}"]
    reasons = []
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed; it comes with PyTorch for CUDA on Linux")
    if request.capability[0] != 9:
        reasons.append(f"Hopper kernels need compute capability 9.0, this GPU has {request.capability}")
    if request.dtype not in DTYPES:
        reasons.append(f"Hopper kernels take {', '.join(map(str, DTYPES))}, got {request.dtype}")
    if request.head_dim not in HEAD_DIMS:
        reasons.append(f"Hopper kernels take head sizes from 24 to 128 in steps of 8, got {request.head_dim}")
    if request.dropout_p > 0.0:
        reasons.append(f"Hopper kernels have no dropout, got dropout_p = {request.dropout_p}")
    if request.ordered:
        reasons.append(ORDER_REASON)
    return reasons
