"""Launches of the decoding kernel: one token per sample, with the rows of a cache or with those of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.decode import decode_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one
from dilated_attention_pytorch.backends.gpu.portable import LOG2_E, padded
from dilated_attention_pytorch.backends.gpu.tables import keep_for_device
from dilated_attention_pytorch.execute.step import CacheTensors, held_tables
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.held import HeldRows
from dilated_attention_pytorch.values import Inputs, Results

_BLOCK_BYTES = 2**14  # of the keys of one program: one sample of 12 heads gives work to a whole GPU


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows that a token meets, and where the kernel finds them."""

    keys: Tensor
    values: Tensor
    strides: tuple[int, ...]  # of samples, rows and heads, of keys and then of values
    table: Tensor  # see execute/step.py
    counts: tuple[int, ...]  # the most rows of a key head in each branch
    position: int = 0  # of the token, unless a cache knows it
    cache: CacheTensors | None = None
    valid: Tensor | None = None
    max_tokens: int | None = None


@lru_cache(maxsize=64)
def _blocks(counts: tuple[int, ...], block_n: int, device: torch.device) -> Tensor:
    """The branch and the first row of each block, for branches with so many rows."""
    blocks = [(branch, first) for branch, count in enumerate(counts) for first in range(0, count, block_n)]
    return torch.tensor(blocks, dtype=torch.int32, device="cpu").to(device)


@lru_cache(maxsize=64)
def _table(pattern: Dilated, key_heads: int, device: torch.device) -> Tensor:
    return held_tables(HeldRows.of(pattern, key_heads, 1), device)[0]


def step(
    held: HeldRows, storage: CacheTensors, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``execute.step.step`` in one launch."""
    b, g, n, _ = storage.keys.stride()
    counts = tuple(branch.segment_rows for branch in held.branches)
    rows = _Rows(
        storage.keys, storage.values, (b, n, g) * 2, storage.table, counts,
        cache=storage, valid=valid, max_tokens=held.max_tokens,
    )  # fmt: skip
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        return _launch(rows, Inputs(query, key, value), scale)


def last_row(pattern: Dilated, inputs: Inputs, scale: float) -> Results:
    """The attention of the last row of a sequence: ``query`` (B, 1, H, D), ``key`` and ``value`` (B, M, G, D)."""
    (query, key, value), length = inputs, inputs.key.shape[1]
    counts = tuple(-(-min(w, length) // r) for w, r in pattern.branches)
    table = _table(pattern, key.shape[2], key.device)
    keep_for_device(table, (table,))
    rows = _Rows(key, value, (*key.stride()[:3], *value.stride()[:3]), table, counts, length - 1)
    out, lse = _launch(rows, Inputs(query[:, 0], key[:, -1], value[:, -1]), scale)
    return Results(out.unsqueeze(1), lse.unsqueeze(-1))


def _launch(rows: _Rows, token: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in token)
    (batch, heads, head_dim), key_heads, device = query.shape, key.shape[1], query.device
    block_d = padded(head_dim)
    block_n = max(16, _BLOCK_BYTES // (block_d * key.element_size()))
    blocks = _blocks(rows.counts, block_n, device)
    keep_for_device(blocks, (blocks,))
    count = len(blocks)
    out = torch.empty((batch, heads, head_dim), dtype=query.dtype, device=device)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=device)
    partial_out = torch.empty((batch, heads, count, block_d), dtype=torch.float32, device=device)
    partial_lse = torch.empty((batch, heads, count), dtype=torch.float32, device=device)
    arrived = torch.zeros(batch * (key_heads + 1), dtype=torch.int32, device=device)
    # The kernel does not read what stands for the tensors of a cache.
    seen, rolled_back = (rows.table, rows.table) if rows.cache is None else rows.cache[2:4]
    valid = seen if rows.valid is None else rows.valid
    tensors = (
        query, key, value, rows.keys, rows.values, seen, rolled_back, valid, out, lse, partial_out, partial_lse, arrived,
        rows.table, blocks,
    )  # fmt: skip
    sizes = batch, len(rows.counts), count, key_heads, rows.max_tokens or 0
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *rows.strides)
    constants = {
        "HEADS": heads // key_heads, "D": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n, "BLOCK_S": 32,
        "CACHED": rows.cache is not None, "HAS_VALID": rows.valid is not None, "BOUNDED": rows.max_tokens is not None,
    }  # fmt: skip
    numbers = (*sizes, *strides, scale * LOG2_E)
    launch_one(decode_kernel, count * batch * key_heads, tensors, numbers, constants, (rows.position,))
    return out, lse
