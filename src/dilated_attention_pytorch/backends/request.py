"""What a backend needs to know to say whether it can serve a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """The properties of a call that do not depend on the length, so that one compiled graph serves all lengths."""

    device: str  # "cpu", "cuda", ...
    capability: tuple[int, int]  # of a CUDA device, else (0, 0)
    dtype: torch.dtype
    head_dim: int
    dropout_p: float
    ordered: bool = False  # causal under an order: pairs are masked by the positions of their rows

    @staticmethod
    def of(query: Tensor, dropout_p: float, ordered: bool = False) -> Request:
        """The request that a call with this query makes."""
        capability = torch.cuda.get_device_capability(query.device) if query.device.type == "cuda" else (0, 0)
        return Request(query.device.type, capability, query.dtype, query.shape[-1], dropout_p, ordered)


DROPOUT_REASON = (
    "dropout is not supported (dropout_p = {p}); use backend='triton' on a GPU, backend='eager' elsewhere, or dropout_p=0"
)
ORDER_REASON = (
    "is_causal under an order masks pairs by their original positions, which this backend cannot; use backend='eager', or "
    "for a Dilated pattern on a GPU backend='triton'"
)
