"""Cached tensors that a device reads: they must not be freed or reused while it does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Owners of the tables that captured graphs read when they are replayed. They live as long as the process.
_CAPTURED: list[object] = []


def keep_for_device(owner: object, tensors: Iterable[Tensor]) -> None:
    """Note that the current stream reads these tensors of ``owner``; those that are not on a GPU are skipped."""
    # The indices of an adaptive pattern are a meta tensor: each call has its own.
    tensors = [tensor for tensor in tensors if tensor.device.type == "cuda"]
    if not tensors:
        return
    # Tables may leave the cache while the GPU still reads them, on another stream than they were made on.
    stream = torch.cuda.current_stream(tensors[0].device)
    for tensor in tensors:
        tensor.record_stream(stream)
    if torch.cuda.is_current_stream_capturing() and not any(owner is captured for captured in _CAPTURED):
        _CAPTURED.append(owner)
