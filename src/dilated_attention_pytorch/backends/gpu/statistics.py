"""What the gradient kernels read by query row: lse, and delta, the part of the softmax gradient that all keys share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.configs import padded
from dilated_attention_pytorch.backends.gpu.kernels.backward import delta_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one
from dilated_attention_pytorch.values import Results, Upstream

_BLOCK = 64  # rows of a program


class RowStatistics(NamedTuple):
    """One number per query row and head, (B, H, N) float32, or what is made of such numbers."""

    lse: Tensor
    delta: Tensor  # dout . out - dlse
    shifts: Tensor | None = None  # (B, H, N, 16) bfloat16: both as the Hopper kernels read them, see hopper/kernels/dkv.py


def row_statistics(
    results: Results, upstream: Upstream, shifts: Tensor | None = None, inverse_scale: float = 0.0
) -> RowStatistics:  # fmt: skip
    """lse and delta; ``shifts`` are written if they are given, see ``delta_kernel``."""
    (out, lse), (dout, dlse) = results, upstream
    batch, n, heads, d = out.shape
    delta = torch.empty((batch, heads, n), dtype=torch.float32, device=out.device)
    if out.numel():
        words = delta if shifts is None else shifts.view(torch.int32)
        tensors = dout, out, delta if dlse is None else dlse.contiguous(), lse, delta, words
        numbers = (*dout.stride()[:3], batch * n * heads, n, heads, inverse_scale)
        has = {"HAS_DLSE": dlse is not None, "HAS_SHIFTS": shifts is not None}
        constants = {"D": d, "BLOCK_D": padded(d), "BLOCK": _BLOCK, **has}
        launch_one(delta_kernel, -(-batch * n * heads // _BLOCK), tensors, numbers, constants)
    return RowStatistics(lse, delta, shifts)
