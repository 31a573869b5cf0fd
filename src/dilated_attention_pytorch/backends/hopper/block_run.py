"""Launching the Hopper kernels over block lists: the tables are those of the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, Config, configs
from dilated_attention_pytorch.backends.hopper.kernels.block_dkv import block_dkv_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_dq import block_dq_kernel
from dilated_attention_pytorch.backends.hopper.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.hopper.run import (
    aligned,
    constants,
    launch_persistent,
    nonzero_scale,
    row_statistics,
    scaled_query,
)
from dilated_attention_pytorch.backends.triton.block_run import forward_buffers, result_buffer
from dilated_attention_pytorch.backends.triton.run import LOG2_E, row_strides


def _launch(
    kernel: Any,
    config: Config,
    table: BlockTable,
    heads: int,
    tensors: tuple[Tensor, ...],
    read: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    block_size: int,
    **mode: Any,
) -> None:
    """One launch over all blocks of 128 rows of all heads; ``read`` are the inputs of rows (B, N, H, D)."""
    rows = table.rows.shape[0]
    items = rows * (block_size // ITEM_ROWS) * heads
    numbers = (rows, items, *row_strides(x.stride() for x in read), *numbers)
    # A counter; in the forward also what each program has taken.
    taken = torch.zeros(1 + items, dtype=torch.int32, device=table.rows.device)
    fixed = {"BLOCK_SIZE": block_size, **mode, **constants(config, read[0].shape[-1])}
    launch_persistent(kernel, items, (*tensors, *table.tensors, taken), numbers, fixed)


def forward(
    table: BlockTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int,
    is_causal: bool,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; the table is by query block."""
    query, scale = scaled_query(query, scale)
    read, chosen = (aligned(query), aligned(key), aligned(value)), config or configs(query.shape[-1]).forward
    (n, heads), group = query.shape[1:3], query.shape[2] // key.shape[2]
    out, lse = forward_buffers(table, query)
    _launch(
        block_forward_kernel, chosen, table, heads, (*read, out, lse), read, (n, heads, group, scale * LOG2_E), block_size,
        BLOCK_N=chosen.block, CAUSAL=is_causal,
    )  # fmt: skip
    return out, lse


def dq(
    table: BlockTable,
    read: tuple[Tensor, ...],
    statistics: tuple[Tensor, ...],
    *,
    block_size: int,
    is_causal: bool,
    scale: float,
    config: Config | None = None,
) -> Tensor:
    """The gradient of the queries; ``read`` is query, key, value, dout, ``statistics`` lse, delta and shifts."""
    query, key, *_ = read
    chosen, (n, heads) = config or configs(query.shape[-1]).dq, query.shape[1:3]
    result = result_buffer(query, table)
    numbers = (n, heads, heads // key.shape[2], scale * LOG2_E, scale)
    _launch(
        block_dq_kernel, chosen, table, heads, (*read, *statistics[:2], result), read, numbers, block_size,
        BLOCK_N=chosen.block, CAUSAL=is_causal,
    )  # fmt: skip
    return result


def dkv(
    table: BlockTable,
    read: tuple[Tensor, ...],
    statistics: tuple[Tensor, ...],
    *,
    block_size: int,
    is_causal: bool,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values; the table is by key block."""
    query, key, value, _ = read
    chosen, (n, heads), (m, key_heads) = config or configs(query.shape[-1]).dkv, query.shape[1:3], key.shape[1:3]
    dk, dv = result_buffer(key, table), result_buffer(value, table)
    numbers = (n, m, heads, key_heads, heads // key_heads, nonzero_scale(scale) * LOG2_E, scale)
    _launch(
        block_dkv_kernel, chosen, table, key_heads, (*read, statistics[2], dk, dv), read, numbers, block_size,
        BLOCK_M=chosen.block, OVERLAP=chosen.overlap, CAUSAL=is_causal,
    )  # fmt: skip
    return dk, dv


def backward(
    by_query: BlockTable,
    by_key: Callable[[], BlockTable],
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``; options: block_size, is_causal, scale."""
    read = tuple(map(aligned, (query, key, value, dout)))
    statistics = row_statistics(dout, out, dlse, lse, scale=options["scale"])
    return dq(by_query, read, statistics, **options), *dkv(by_key(), read, statistics, **options)
