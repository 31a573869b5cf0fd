"""Launches of the decoding kernel: one token per sample, with the rows of a cache or with those of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.append import append_kernel
from dilated_attention_pytorch.backends.gpu.kernels.decode import decode_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one, multiprocessors
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, exact_products, padded
from dilated_attention_pytorch.backends.gpu.tables import keep_for_device
from dilated_attention_pytorch.execute.step import CacheTensors, held_tables
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldRows
from dilated_attention_pytorch.values import Inputs, Results

BLOCK_BYTES = 2**14  # of the keys that a program reads at a time, and as many of values
PROGRAMS = 8  # for each multiprocessor: one sample of 12 heads gives work to a whole GPU
MOST_PARTIALS = 64  # of a key head, which one program merges
WARPS = 4


class _Rows(NamedTuple):
    """The rows that a token meets, and where the kernel finds them."""

    keys: Tensor
    values: Tensor
    strides: tuple[int, ...]  # of samples, rows and heads, of keys and then of values
    table: Tensor  # see execute/step.py
    most_rows: int  # of a key head, over all branches
    position: int = 0  # of the token, unless a cache knows it
    cache: CacheTensors | None = None
    valid: Tensor | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Token:
    """The sizes of a token. Steps with equal ones have equal launches."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    most_rows: int
    branches: int
    is_cached: bool
    has_valid: bool
    is_bounded: bool
    is_exact: bool  # float32 products are not rounded


@lru_cache(maxsize=64)
def _launch_of(token: _Token) -> tuple[int, int, int, dict[str, Any]]:
    """The programs and the partial results of a key head, the width of one, and the constants of the kernel."""
    block_d, heads = padded(token.head_dim), token.heads // token.key_heads
    block_n = max(16, BLOCK_BYTES // (block_d * token.dtype.itemsize))
    programs = PROGRAMS * multiprocessors(token.device) // (token.batch * token.key_heads)
    partials = max(1, min(-(-token.most_rows // block_n), MOST_PARTIALS))
    splits = max(1, min(programs, partials))
    constants = {
        "HEADS": heads, "ROWS": 1 if heads == 1 else max(16, power_of_two(heads)), "D": token.head_dim,
        "BLOCK_D": block_d, "BLOCK_N": block_n, "BLOCK_S": power_of_two(partials), "LANES": power_of_two(token.branches),
        "CACHED": token.is_cached, "HAS_VALID": token.has_valid, "BOUNDED": token.is_bounded,
        "PRECISION": "ieee" if token.is_exact else "tf32", "num_warps": WARPS,
    }  # fmt: skip
    return splits, partials, block_d + 1, constants


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least this number, and at least 2."""
    return max(2, 1 << (least - 1).bit_length())


@lru_cache(maxsize=64)
def _table(pattern: Dilated, key_heads: int, device: torch.device) -> Tensor:
    return held_tables(HeldRows.of(pattern, key_heads, 1), device)[0]


def step(
    held: HeldRows, storage: CacheTensors, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``execute.step.step`` in one launch."""
    b, g, n, _ = storage.keys.stride()
    rows = _Rows(
        storage.keys, storage.values, (b, n, g, b, n, g), storage.table, storage.keys.shape[2],
        cache=storage, valid=valid, max_tokens=held.max_tokens,
    )  # fmt: skip
    device = query.device.index
    if device is None or device == torch.cuda.current_device():
        return _launch(rows, Inputs(query, key, value), scale)
    with torch.cuda.device(device):  # Triton launches on the current device
        return _launch(rows, Inputs(query, key, value), scale)


def append_(held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
    """``execute.step.append_`` in one launch, and what counts the tokens."""
    (batch, n, key_heads, head_dim), rows = key.shape, storage.keys.shape[2]
    if n == 0:
        return
    seen = storage.tokens_seen
    counts = torch.full_like(seen, n) if lengths is None else lengths.to(seen, non_blocking=True).clamp(0, n)
    if held.max_tokens is not None:
        counts = torch.minimum(counts, held.max_tokens - seen)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    tensors = key, value, storage.keys, storage.values, seen, counts, storage.table, storage.branch
    numbers = storage.table.shape[1], rows, key_heads, *key.stride()[:3], *value.stride()[:3]
    constants = {"D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_R": 32}
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        launch_one(append_kernel, -(-rows // 32) * batch * key_heads, tensors, numbers, constants)
    seen.add_(counts)
    storage.rolled_back.sub_(counts).clamp_(min=0)


def last_row(pattern: Dilated, inputs: Inputs, scale: float) -> Results:
    """The attention of the last row of a sequence: ``query`` (B, 1, H, D), ``key`` and ``value`` (B, M, G, D)."""
    (query, key, value), length = inputs, inputs.key.shape[1]
    most_rows = sum(-(-min(w, length) // r) for w, r in pattern.branches)
    table = _table(pattern, key.shape[2], key.device)
    keep_for_device(table, (table,))
    # The distance of samples grows with every token. One sample has none, so that its launch is found again.
    strides = [x for own in (key, value) for x in (own.stride(0) if len(own) > 1 else 0, *own.stride()[1:3])]
    rows = _Rows(key, value, tuple(strides), table, most_rows, length - 1)
    return Results(*_launch(rows, Inputs(query, key[:, -1:], value[:, -1:]), scale))


def _launch(rows: _Rows, token: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Launch the kernel for tokens (B, 1, heads, D). Results are (B, 1, H, D) and (B, H, 1)."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in token)
    (batch, _, heads, head_dim), key_heads, device, branches = query.shape, key.shape[2], query.device, rows.table.shape[1]
    is_cached, has_valid, is_bounded = rows.cache is not None, rows.valid is not None, rows.max_tokens is not None
    sizes = batch, heads, key_heads, head_dim, query.dtype, device, rows.most_rows, branches
    splits, partials, width, constants = _launch_of(_Token(*sizes, is_cached, has_valid, is_bounded, exact_products(query)))
    out = torch.empty((batch, 1, heads, head_dim), dtype=query.dtype, device=device)
    lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=device)
    partial = torch.empty((batch, heads, partials, width), dtype=torch.float32, device=device)
    if rows.cache is None:  # the kernel does not read what stands for the tensors of a cache
        seen = rolled_back = rows.table
        arrived = torch.zeros(batch * (key_heads + 1), dtype=torch.int32, device=device)
    else:
        seen, rolled_back, arrived = rows.cache.tokens_seen, rows.cache.rolled_back, rows.cache.arrived
    valid = seen if rows.valid is None else rows.valid
    tensors = (
        query, key, value, rows.keys, rows.values, seen, rolled_back, valid, out, lse, partial, arrived, rows.table
    )  # fmt: skip
    strides = (*(x for own in (query, key, value) for x in own.stride()[::2]), *rows.strides)
    numbers = (batch, branches, splits, partials, key_heads, rows.max_tokens or 0, *strides, scale * LOG2_E)
    launch_one(decode_kernel, splits * batch * key_heads, tensors, numbers, constants, (rows.position,))
    return out, lse
