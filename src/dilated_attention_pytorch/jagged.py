"""Jagged nested tensors: a batch of sequences of different lengths, packed one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_jagged(*tensors: Any) -> bool:
    """Whether one of these is a nested tensor with ``layout=torch.jagged``."""
    return any(isinstance(x, Tensor) and x.layout == torch.jagged for x in tensors)


def pack(**tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Nested tensors (B, sequence, ...) of the same lengths as tensors (1, total, ...), and ``cu_seqlens``.

    >>> x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    >>> (packed,), cu_seqlens = pack(x=x)
    >>> packed.shape, cu_seqlens
    (torch.Size([1, 5, 4]), tensor([0, 2, 5]))
    """
    names = ", ".join(tensors)
    offsets: Tensor | None = None
    for name, x in tensors.items():
        if not is_jagged(x):
            raise TypeError(f"{names} must all be jagged nested tensors if one is, {name} is not; use torch.nested")
        if x._ragged_idx != 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"the sequence must be dimension 1 of a nested tensor, as in (batch, sequence, heads, head size); that of "
                f"{name} is {x._ragged_idx}; use transpose"  # type: ignore[attr-defined]
            )
        if x.lengths() is not None:  # type: ignore[attr-defined]
            raise ValueError(f"{name} is a nested tensor with gaps between its sequences; use x.contiguous()")
        own: Tensor = x.offsets()  # type: ignore[attr-defined]
        offsets = own if offsets is None else offsets
        # Tensors that were made one by one have offsets of their own, which are compared: this waits for a GPU.
        if own is not offsets and not torch.equal(own, offsets):
            raise ValueError(
                f"the sequences of {names} must have the same lengths, those of {name} differ; call once for each sequence"
            )
    assert offsets is not None
    return [x.values().unsqueeze(0) for x in tensors.values()], offsets


def unpack(x: Tensor, offsets: Tensor, dim: int = 1) -> Tensor:
    """The nested tensor whose sequences are packed along ``dim`` of a tensor (1, ...). It undoes ``pack``."""
    return torch.nested.nested_tensor_from_jagged(x.squeeze(0), offsets, jagged_dim=dim)
