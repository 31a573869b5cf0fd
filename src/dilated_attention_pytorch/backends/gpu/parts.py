"""Merging kept parts: tables of where every part's rows belong, and the launches that read them.

The tables are made once for a problem and the strides of its parts. Addresses are new with every call: they are arguments
of a launch, so nothing is copied from the host and a captured graph holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.merge import BATCH, addresses_kernel, merge_kernel, sum_kernel
from dilated_attention_pytorch.backends.gpu.launch import FUSED
from dilated_attention_pytorch.backends.gpu.tables import keep_for_device
from dilated_attention_pytorch.backends.triton.configs import padded
from dilated_attention_pytorch.execute.strided import Cut

# One entry: the rows of one head of the result that one part has. Kernels read it by these numbers (merge.py).
COLUMNS = (
    "first",  # 0, rows of the result
    "stop",
    "first_sample",
    "samples",
    "tiles",
    "tile_step",  # 5
    "tile_magic",
    "tile_shift",
    "row_stride",
    "row_magic",
    "row_shift",  # 10
    "rows",
    "first_unit",
    "units",
    "part",
    "part_start",  # 15, elements of the part
    "part_unit_stride",
    "part_row_stride",
    "lse_start",
    "lse_unit_stride",
    "lse_row_stride",  # 20
    "zero_keys",
)
# Elements of a program's block of rows, its most rows, and its warps. Not tuned.
_BLOCK_ELEMENTS, _MOST_ROWS, WARPS = 8192, 128, 4


@dataclass(frozen=True, slots=True)
class _Table:
    """Entries by head of the result, on one device."""

    entries: Tensor  # (entries, COLUMNS) int64
    first: Tensor  # (heads + 1,) int64: entries of each head


def division(divisor: int) -> tuple[int, int]:
    """``(magic, shift)`` with ``x // divisor == x * magic >> shift`` for x from 0 to 2**31 - 1; magic has 32 bits.

    >>> magic, shift = division(12)
    >>> all(x // 12 == x * magic >> shift for x in (0, 11, 12, 143, 2**31 - 5, 2**31 - 1))
    True
    """
    bits = (divisor - 1).bit_length()
    return -(-(2 ** (31 + bits)) // divisor), 31 + bits


# Strides (unit, head, row) of a part or of its lse.
_Strides = tuple[int, ...]


@lru_cache(maxsize=64)
def _table(
    cuts: tuple[Cut, ...],
    by_keys: bool,
    strides: tuple[_Strides, ...],
    lse_strides: tuple[_Strides, ...],
    device: torch.device,
) -> _Table:
    """The entries of the parts of several cuts, one part for each piece, in their order."""
    placed = [both for cut in cuts for both in cut.pieces()]
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(_heads(cuts[0], by_keys))]
    for part, (span, piece) in enumerate(placed):
        family = piece.family
        rows = family.k_rows if by_keys else family.q_rows
        stride = family.row_stride if rows > 1 else 1  # one row has no other, so its stride may be too large a number
        extent = (rows - 1) * stride + 1
        step = family.tile_step if family.tiles > 1 else extent
        span_rows = span.keys if by_keys else span.queries
        part_unit, part_head, part_row = strides[part]
        lse_unit, lse_head, lse_row = lse_strides[part] if lse_strides else (0, 0, 0)
        for index, (head, row) in enumerate(piece.places(by_keys=by_keys)):
            first = span_rows.start + row
            lists[head].append((
                first, first + (family.tiles - 1) * step + extent, span.samples.start + piece.samples.start,
                len(piece.samples), family.tiles, step, *division(step), stride, *division(stride), rows,
                piece.units.start, len(piece.units), part, index * part_head, part_unit, part_row, index * lse_head,
                lse_unit, lse_row, family.zero_keys,
            ))  # fmt: skip
    first_entries = [0]
    for entries in lists:
        first_entries.append(first_entries[-1] + len(entries))
    table = torch.tensor([entry for entries in lists for entry in entries], dtype=torch.int64)
    return _Table(table.reshape(-1, len(COLUMNS)).to(device), torch.tensor(first_entries).to(device))


def _heads(cut: Cut, by_keys: bool) -> int:
    return cut.problem.key_heads if by_keys else cut.problem.heads


@lru_cache(maxsize=256)
def longest_list(cut: Cut, by_keys: bool) -> int:
    """The most entries of a head: what a program has to look at."""
    count = [0] * _heads(cut, by_keys)
    for _, piece in cut.pieces():
        for head, _ in piece.places(by_keys=by_keys):
            count[head] += 1
    return max(count, default=0)


def block_sizes(head_dim: int) -> dict[str, int]:
    """The rows and columns of a program's block."""
    return {"BLOCK": min(_MOST_ROWS, _BLOCK_ELEMENTS // padded(head_dim)), "BLOCK_D": padded(head_dim)}


def _addresses(tensors: list[Tensor]) -> Tensor:
    batch = BATCH.value
    values = [x.data_ptr() for x in tensors]
    values += values[-1:] * (-len(values) % batch)
    table = torch.empty(len(values), dtype=torch.int64, device=tensors[0].device)
    for start in range(0, len(values), batch):
        addresses_kernel[(1,)](table[start:], tuple(values[start : start + batch]), **FUSED)
    return table


def _strides(parts: list[Tensor]) -> tuple[_Strides, ...]:
    return tuple(part.stride()[:3] for part in parts)


def _launch(
    kernel: Any,
    cuts: tuple[Cut, ...],
    by_keys: bool,
    parts: list[Tensor],
    parts_lse: list[Tensor],
    results: tuple[Tensor, ...],
    number: float,
) -> None:
    """One launch over blocks of rows of the first of ``results`` (B, N, H, D)."""
    batch, n, heads, d = results[0].shape
    if not results[0].numel():
        return
    assert all(part.dtype == results[0].dtype and part.stride(-1) == 1 for part in parts)
    table = _table(cuts, by_keys, _strides(parts), _strides(parts_lse), results[0].device)
    keep_for_device(table, (table.entries, table.first))
    size = results[0].element_size()
    aligned = math.gcd(16, *(x.data_ptr() for x in parts), *(s * size for each in _strides(parts) for s in each))
    sizes = block_sizes(d)
    kernel[(triton.cdiv(n, sizes["BLOCK"]) * heads * batch,)](
        _addresses(parts + parts_lse), table.entries, table.first, *results, number, n, heads,
        D=d, ALIGNED=aligned // size, num_warps=WARPS, **sizes, **FUSED,
    )  # fmt: skip


def merge_parts(cut: Cut, parts: list[Tensor], parts_lse: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))`` of the parts (U, heads, rows, D) and (U, heads, rows) of all pieces."""
    batch, n, heads, _ = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=like.device)
    if not parts:
        return out.zero_(), lse.fill_(-torch.inf)
    _launch(merge_kernel, (cut,), False, parts, parts_lse, (out, lse), len(parts))
    return out, lse


def sum_parts(cuts: list[Cut], parts: list[Tensor], like: Tensor, *, by_keys: bool, factor: float = 1.0) -> Tensor:
    """``factor`` times the sum of the parts of all pieces of all cuts, in the shape and type of ``like``."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not parts:
        return out.zero_()
    _launch(sum_kernel, tuple(cuts), by_keys, parts, [], (out,), factor)
    return out
