"""The element types that attention takes, and the type in which it accumulates."""

from __future__ import annotations

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of lse and of sums over partial results: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
