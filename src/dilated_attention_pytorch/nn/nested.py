"""Nested tensors as packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_nested(*tensors: Any) -> bool:
    """Whether one of these is a nested tensor."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def packed_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
    """The rows (total, embedding) of each tensor, and ``cu_seqlens`` on the host, which is the same for all.

    Equal arguments give the same tensor object of rows. Offsets of a jagged tensor on a GPU cost a device synchronisation.
    """
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_nested(x):
            raise TypeError(f"query, key and value must all be nested tensors, got a {type(x).__name__} as {name}")
        if x.dim() != 3 or (x.layout == torch.jagged and not isinstance(x.shape[2], int)):
            raise ValueError(f"a nested {name} must be (batch, sequence, embedding), ragged in dimension 1 only")
        if id(x) not in rows:
            rows[id(x)] = _rows(x)
    first = rows[id(query)][1]
    for name, x in (("key", key), ("value", value)):
        if not torch.equal(rows[id(x)][1], first):
            raise ValueError(
                f"nested query and {name} must have the same lengths, got {first.diff().tolist()} and "
                f"{rows[id(x)][1].diff().tolist()}; call once for each sequence"
            )
    return [rows[id(x)][0] for x in (query, key, value)], first


def nested_like(x: Any, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The rows as a nested tensor of the same layout and lengths."""
    if x.layout == torch.jagged:
        offsets = x.offsets() if x.lengths() is None else cu_seqlens.to(rows.device)
        return torch.nested.nested_tensor_from_jagged(rows, offsets)
    return torch.nested.as_nested_tensor(list(torch.split(rows, cu_seqlens.diff().tolist())))


def _rows(x: Any) -> tuple[Tensor, Tensor]:
    if x.layout == torch.jagged:
        if x.lengths() is not None:  # rows between the sequences, as torch.nested.narrow makes them
            x = x.contiguous()
        return x.values(), x.offsets().cpu()
    lengths = [len(sequence) for sequence in x.unbind()]
    return torch.cat(x.unbind()), torch.tensor([0, *lengths], device="cpu").cumsum(0)
