"""Launches of the decoding kernel: one token per sample, with the rows of a cache or with those of a sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.append import advance_kernel, append_kernel
from dilated_attention_pytorch.backends.gpu.kernels.decode import decode_kernel
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, launch, launch_one, multiprocessors
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
APPEND_ROWS = 64  # that a program copies
_NO_STRIDES = (0, 0, 0, 1)  # of a token that is not read


class _Token(NamedTuple):
    """The sizes of a token and of the rows that it meets. Steps with equal ones have equal launches."""

    shape: tuple[int, ...]  # of the query, (B, 1, H, D)
    dtype: torch.dtype
    device: torch.device
    key_heads: int
    strides: tuple[tuple[int, ...], ...]  # of query, key and value
    row_strides: tuple[int, ...]  # of rows and heads, of keys and then of values
    most_rows: int  # of a key head, over all branches
    branches: int
    scale: float
    max_tokens: int | None
    is_cached: bool
    has_valid: bool
    is_exact: bool  # float32 products are not rounded


class _TokenLaunch(NamedTuple):
    """The launch of a token, and the shape of its partial results."""

    launch: KernelLaunch
    partial_shape: tuple[int, ...]


def _block_rows(head_dim: int, dtype: torch.dtype) -> int:
    """The rows that a program reads at a time."""
    return max(16, BLOCK_BYTES // (padded(head_dim) * dtype.itemsize))


@lru_cache(maxsize=256)
def _launch_of(token: _Token) -> _TokenLaunch:
    batch, _, all_heads, head_dim = token.shape
    block_d, heads, block_n = padded(head_dim), all_heads // token.key_heads, _block_rows(head_dim, token.dtype)
    programs = PROGRAMS * multiprocessors(token.device) // (batch * token.key_heads)
    partials = max(1, min(-(-token.most_rows // block_n), MOST_PARTIALS))
    splits = max(1, min(programs, partials))
    constants = {
        "HEADS": heads, "ROWS": 1 if heads == 1 else max(16, power_of_two(heads)), "D": head_dim,
        "BLOCK_D": block_d, "BLOCK_N": block_n, "BLOCK_S": power_of_two(partials), "LANES": power_of_two(token.branches),
        "CACHED": token.is_cached, "HAS_VALID": token.has_valid, "BOUNDED": token.max_tokens is not None,
        "PRECISION": "ieee" if token.is_exact else "tf32", "num_warps": WARPS,
    }  # fmt: skip
    strides = (*(x for own in token.strides for x in own[::2]), *token.row_strides)
    counts = batch, token.branches, splits, partials, token.key_heads, token.max_tokens or 0
    numbers = (*counts, *strides, token.scale * LOG2_E)
    launch = KernelLaunch(decode_kernel, splits * batch * token.key_heads, (), numbers, constants)
    return _TokenLaunch(launch, (batch, all_heads, partials, block_d + 1))


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
    device = query.device
    if device.index is None or device.index == torch.cuda.current_device():
        return _step(held, storage, Inputs(query, key, value), valid, scale)
    with torch.cuda.device(device):  # Triton launches on the current device
        return _step(held, storage, Inputs(query, key, value), valid, scale)


def _step(
    held: HeldRows, storage: CacheTensors, token: Inputs, valid: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, key, value = token = _elements_adjacent(token)
    keys, values, seen, rolled_back, table, _, arrived = storage
    (_, key_heads, most_rows, head_dim), branches = keys.shape, len(held.branches)
    row_strides = head_dim, most_rows * head_dim  # the storage is contiguous
    found = _launch_of(_Token(
        query.shape, query.dtype, query.device, key_heads, (query.stride(), key.stride(), value.stride()),
        row_strides * 2, most_rows, branches, scale, held.max_tokens, True, valid is not None, exact_products(query),
    ))  # fmt: skip
    state = keys, values, seen, rolled_back, seen if valid is None else valid
    return _launch(found, token, state, arrived, table, (0, *[key_heads * most_rows * head_dim] * 2))


def append_(held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
    """``execute.step.append_`` in two launches: one copies rows, one counts tokens."""
    (batch, n, key_heads, head_dim), rows = key.shape, storage.keys.shape[2]
    if n == 0:
        return
    seen, most = storage.tokens_seen, held.max_tokens or 0
    own = seen if lengths is None else lengths.to(seen, non_blocking=True)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    tensors = key, value, storage.keys, storage.values, seen, own, storage.table, storage.branch
    numbers = most, storage.table.shape[1], rows, key_heads, *key.stride()[:3], *value.stride()[:3]
    mode = {"HAS_LENGTHS": lengths is not None, "BOUNDED": held.max_tokens is not None}
    constants = {**mode, "D": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_R": APPEND_ROWS}
    with torch.cuda.device_of(key):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        launch_one(append_kernel, -(-rows // APPEND_ROWS) * batch * key_heads, tensors, numbers, constants, (n,))
        launch_one(advance_kernel, batch, (seen, storage.rolled_back, own), (most,), mode, (n,))


def last_row(pattern: Dilated, inputs: Inputs, scale: float) -> Results:
    """The attention of the last row of a sequence: ``query`` (B, 1, H, D), ``key`` and ``value`` (B, M, G, D)."""
    (query, key, value), length = inputs, inputs.key.shape[1]
    query = query if query.stride(-1) == 1 else query.contiguous()
    (batch, _, key_heads, _), branches = key.shape, pattern.branches
    table = _table(pattern, key_heads, key.device)
    keep_for_device(table, (table,))
    # Whole blocks, and no more than decide about the launch: it is found again while a sequence grows.
    block = _block_rows(query.shape[3], query.dtype)
    blocks = -(-sum([-(-min(w, length) // r) for w, r in branches]) // block)
    most_rows = min(blocks, MOST_PARTIALS) * block
    (k_b, *k_strides, _), (v_b, *v_strides, _) = key.stride(), value.stride()
    changing = (length - 1, k_b, v_b) if batch > 1 else (length - 1, 0, 0)
    found = _launch_of(_Token(
        query.shape, query.dtype, query.device, key_heads, (query.stride(), _NO_STRIDES, _NO_STRIDES),
        (*k_strides, *v_strides), most_rows, len(branches), scale, None, False, False, exact_products(query),
    ))  # fmt: skip
    arrived = torch.zeros(batch * (key_heads + 1), dtype=torch.int32, device=key.device)
    # The kernel reads neither a token to be appended nor what stands for the tensors of a cache.
    state = key, value, table, table, table
    return Results(*_launch(found, Inputs(query, key, value), state, arrived, table, changing))


def _elements_adjacent(token: Inputs) -> Inputs:
    """The same rows, with elements one after the other."""
    if token.query.stride(-1) == token.key.stride(-1) == token.value.stride(-1) == 1:
        return token
    return Inputs(*(x.contiguous() for x in token))


def _launch(
    found: _TokenLaunch, token: Inputs, state: tuple[Tensor, ...], arrived: Tensor, table: Tensor, changing: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for tokens (B, 1, heads, D). Results are (B, 1, H, D) and (B, H, 1).

    ``state`` has the keys, values, positions, rolled back tokens and valid samples. ``changing`` are the position, which a
    cache knows itself, and the distances of samples in keys and values.
    """
    query, device = token.query, token.query.device
    batch, _, heads, head_dim = query.shape
    out = torch.empty((batch, 1, heads, head_dim), dtype=query.dtype, device=device)
    lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=device)
    partial = torch.empty(found.partial_shape, dtype=torch.float32, device=device)
    launch((found.launch,), (*token, *state, out, lse, partial, arrived, table), changing)
    return out, lse
