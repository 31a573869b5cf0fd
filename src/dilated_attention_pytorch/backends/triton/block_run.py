"""Launching the kernels over block lists: one launch forward; delta, dq, dk and dv backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable
from dilated_attention_pytorch.backends.gpu.kernels.block_backward import block_dkv_kernel, block_dq_kernel
from dilated_attention_pytorch.backends.gpu.kernels.block_forward import block_forward_kernel
from dilated_attention_pytorch.backends.gpu.launch import launch_one
from dilated_attention_pytorch.backends.triton.configs import Config, Configs, block_configs
from dilated_attention_pytorch.backends.triton.run import (
    LOG2_E,
    capability,
    exact_products,
    keep_numbers,
    row_statistics,
    row_strides,
    tile_constants,
)


def _configs(x: Tensor, block_size: int) -> Configs:
    return block_configs(capability(x), x.dtype, x.shape[-1], block_size)


def result_buffer(like: Tensor, table: BlockTable) -> Tensor:
    """A result: 0 only where no block writes it."""
    make = torch.empty if table.covered else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device)


def forward_buffers(table: BlockTable, query: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse: -inf only where no block writes it."""
    batch, n, heads, _ = query.shape
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=query.device)
    return result_buffer(query, table), lse if table.covered else lse.fill_(-torch.inf)


def _launch(
    kernel: Any,
    table: BlockTable,
    heads: int,
    block: int,
    tensors: tuple[Tensor, ...],
    read: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    config: Config,
    block_size: int,
    dropout_p: float,
    seed: Tensor | None,
    **mode: bool,
) -> None:
    """One launch of programs of ``block`` rows for each of the heads; ``read`` are the inputs of rows (B, N, H, D)."""
    programs = table.rows.shape[0] * (block_size // block) * heads
    if not programs:
        return
    strides = row_strides(x.stride() for x in read)
    step = max(*strides, *(x.shape[2] * x.shape[3] for x in read))
    constants = tile_constants(read[0].shape[-1], exact_products(read[0]), config, step)
    constants |= {"BLOCK_SIZE": block_size, "DROPOUT": dropout_p > 0.0, **mode}
    numbers = table.rows.shape[0], *strides, *numbers, *keep_numbers(dropout_p)
    launch_one(kernel, programs, (*tensors, *table.tensors, table.starts if seed is None else seed), numbers, constants)


def forward(
    table: BlockTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``; the table is by query block."""
    config, (n, heads) = _configs(query, block_size).forward, query.shape[1:3]
    out, lse = forward_buffers(table, query)
    read = query, key, value
    numbers = n, heads, heads // key.shape[2], abs(scale) * LOG2_E
    _launch(
        block_forward_kernel, table, heads, config.block_m, (*read, out, lse), read, numbers, config, block_size,
        dropout_p, seed, CAUSAL=is_causal, NEGATIVE=scale < 0,
    )  # fmt: skip
    return out, lse


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
    *,
    block_size: int,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``."""
    configs, (n, heads), (m, key_heads) = _configs(query, block_size), query.shape[1:3], key.shape[1:3]
    read, statistics = (query, key, value, dout), row_statistics(dout, out, dlse, lse)
    factors = heads // key_heads, scale * LOG2_E, scale
    dq = result_buffer(query, by_query)
    _launch(
        block_dq_kernel, by_query, heads, configs.dq.block_m, (*read, *statistics, dq), read, (n, heads, *factors),
        configs.dq, block_size, dropout_p, seed, CAUSAL=is_causal,
    )  # fmt: skip
    table = by_key()
    dk, dv = result_buffer(key, table), result_buffer(value, table)
    _launch(
        block_dkv_kernel, table, key_heads, configs.dkv.block_n, (*read, *statistics, dk, dv), read,
        (n, m, heads, key_heads, *factors), configs.dkv, block_size, dropout_p, seed, CAUSAL=is_causal,
    )  # fmt: skip
    return dq, dk, dv
