"""Block sizes, warps and stages of the kernels: a frozen table, by head size and element size."""

from __future__ import annotations

from dataclasses import replace

import torch

from dilated_attention_pytorch.backends.gpu.portable import TritonConfig, TritonConfigs, padded

_Values = tuple[int, int, int, int] | tuple[int, int, int, int, str]


def _configs(forward: _Values, dq: _Values, dkv: _Values) -> TritonConfigs:
    return TritonConfigs(TritonConfig(*forward), TritonConfig(*dq), TritonConfig(*dkv))


# Keyed by (bytes per element, padded head size); the smallest padded head size that fits is taken.
# Measured on an H200 by benchmarks/tune_triton.py: (4, 64) and (4, 128) in benchmarks/results/h200_tune_float32.json, (2,
# 256) in h200_tune_triton_256_more.json. The other half-precision sizes and the forward of (4, 256) are from sweeps that
# were not kept. The gradients of (4, 256) are not tuned. float32 must not have 64 rows, 8 warps and blocks of 16: Triton
# 3.6 compiles them to products of 8 columns that read foreign memory (docs/kernels.md, "Traps for kernel writers").
_HOPPER = {
    (2, 64): _configs((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    (2, 128): _configs((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
    (2, 256): _configs((128, 64, 8, 2), (128, 32, 8, 1), (32, 32, 4, 2)),
    (4, 64): _configs((128, 64, 8, 2), (128, 32, 8, 1), (32, 128, 8, 1)),
    (4, 128): _configs((128, 32, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
    (4, 256): _configs((32, 32, 8, 1), (32, 16, 8, 1, "ieee"), (16, 32, 8, 1, "ieee")),
}
# With dropout; the rest is as without: benchmarks/results/h200_tune_dropout.json.
_HOPPER_DROPOUT = _HOPPER | {(2, 64): replace(_HOPPER[2, 64], dkv=TritonConfig(32, 64, 4, 3))}
# All other GPUs: these fit into 99 KiB, the least shared memory of a block on any of them. The tests compile them for
# sm_80, sm_89, sm_100 and sm_120. They were not measured.
_OTHER = {
    (2, 64): _configs((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    (2, 128): _configs((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
    (2, 256): _configs((64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (4, 64): _configs((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    (4, 128): _configs((32, 32, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1)),
    (4, 256): _configs((16, 16, 4, 1, "ieee"), (16, 16, 4, 1, "ieee"), (16, 16, 4, 1, "ieee")),
}
# Over block lists, for blocks of 128. Other GPUs have the table above.
_HOPPER_BLOCKS = _HOPPER | {(2, 128): _configs((128, 64, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2))}


def configs(capability: tuple[int, int], dtype: torch.dtype, head_dim: int, *, dropout: bool = False) -> TritonConfigs:
    """The configurations for a GPU, an element type and a head size."""
    table = _OTHER if capability[0] != 9 else _HOPPER_DROPOUT if dropout else _HOPPER
    return table[dtype.itemsize, max(64, padded(head_dim))]


def _within(config: TritonConfig, block_size: int) -> TritonConfig:
    """The same with tiles that divide a block; small tiles need no more than four warps."""
    block_m, block_n = min(config.block_m, block_size), min(config.block_n, block_size)
    if (block_m, block_n) == (config.block_m, config.block_n):
        return config
    return replace(config, block_m=block_m, block_n=block_n, warps=4)


def block_configs(capability: tuple[int, int], dtype: torch.dtype, head_dim: int, block_size: int) -> TritonConfigs:
    """The configurations over lists of blocks of this size; a tile divides a block.

    >>> block_configs((9, 0), torch.bfloat16, 64, 32).forward
    TritonConfig(block_m=32, block_n=32, warps=4, stages=3, float32='tf32x3')
    """
    table = _HOPPER_BLOCKS if capability[0] == 9 else _OTHER
    chosen = table[dtype.itemsize, max(64, padded(head_dim))]
    return TritonConfigs(*(_within(config, block_size) for config in (chosen.forward, chosen.dq, chosen.dkv)))
