"""Nested tensors as packed rows: jagged ones, and those with strides, which ``nn.TransformerEncoder`` makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.jagged import is_jagged, pack, unpack


def is_nested(*tensors: Any) -> bool:
    """Whether one of these is a nested tensor."""
    return any(isinstance(x, Tensor) and x.is_nested for x in tensors)


def packed_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
    """The rows (total, embedding) of each tensor, and ``cu_seqlens``. Equal arguments give one tensor of rows."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if is_nested(x) and x.dim() != 3:
            raise ValueError(f"a nested {name} must be (batch, sequence, embedding), got {x.dim()} dimensions")
    first: dict[int, str] = {}
    for name, x in named.items():
        first.setdefault(id(x), name)
    distinct = {name: named[name] for name in first.values()}
    rows, cu_seqlens = pack(**distinct) if is_jagged(*distinct.values()) else _pack_strided(distinct)
    by_name = dict(zip(distinct, (x.squeeze(0) for x in rows), strict=True))
    return [by_name[first[id(x)]] for x in named.values()], cu_seqlens


def nested_like(x: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The rows as a nested tensor of the same layout and lengths."""
    if is_jagged(x):
        return unpack(rows, cu_seqlens)
    return torch.nested.as_nested_tensor(list(torch.split(rows, cu_seqlens.diff().tolist())))


def _pack_strided(tensors: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """``jagged.pack`` for nested tensors with strides. The host knows their lengths."""
    rows, all_lengths = [], {}
    for name, x in tensors.items():
        if not x.is_nested:
            raise TypeError(f"query, key and value must all be nested tensors if one is, {name} is not; use torch.nested")
        sequences = x.unbind()
        rows.append(torch.cat(sequences).unsqueeze(0))
        all_lengths[name] = [len(sequence) for sequence in sequences]
    lengths = all_lengths["query"]
    if any(other != lengths for other in all_lengths.values()):
        raise ValueError(
            f"nested query, key and value must have the same lengths, got {all_lengths}; call for each sequence"
        )
    return rows, torch.tensor([0, *lengths], device="cpu").cumsum(0)
