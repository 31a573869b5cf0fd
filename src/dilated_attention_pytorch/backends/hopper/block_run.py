"""Launching the Hopper kernels over block lists: the tables are those of the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.hopper.block_dkv import block_dkv_kernel
from dilated_attention_pytorch.backends.hopper.block_dq import block_dq_kernel
from dilated_attention_pytorch.backends.hopper.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.hopper.configs import ITEM_ROWS, Config, configs
from dilated_attention_pytorch.backends.hopper.run import aligned, forward_scale, launch_persistent, list_constants
from dilated_attention_pytorch.backends.triton import block_run as portable
from dilated_attention_pytorch.backends.triton.block_tables import BlockTable
from dilated_attention_pytorch.backends.triton.run import LOG2_E, row_delta


def _launch(
    kernel: Any,
    table: BlockTable,
    heads: int,
    tensors: tuple[Tensor, ...],
    read: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    block_size: int,
    constants: dict[str, Any],
) -> None:
    """One launch over all blocks of rows of all heads; ``read`` are the inputs of rows (B, N, H, D)."""
    rows = table.rows.shape[0]
    items = rows * (block_size // ITEM_ROWS) * heads
    strides = tuple(stride for x in read for stride in x.stride()[:3])
    constants = {"BLOCK_SIZE": block_size, **constants}
    launch_persistent(kernel, items, (*tensors, *table.tensors), (rows, items, *strides, *numbers), constants)


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
    query, scale = forward_scale(query, scale)
    read = aligned(query), aligned(key), aligned(value)
    (_, n, heads, head_dim), chosen = query.shape, config or configs(query.shape[-1]).forward
    out, lse = portable.forward_buffers(table, query)
    numbers = (n, heads, heads // key.shape[2], scale * LOG2_E)
    constants = {"BLOCK_N": chosen.block, "CAUSAL": is_causal, **list_constants(chosen, head_dim)}
    _launch(block_forward_kernel, table, heads, (*read, out, lse), read, numbers, block_size, constants)
    return out, lse
