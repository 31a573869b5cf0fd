"""Block sizes, warps and stages of the kernels: a frozen table, by head size and element size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut: rows of queries and keys per block, warps per program, depth of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    # Products of float32, unless PyTorch was allowed less: "tf32x3", three of TF32 on tensor cores for each, with errors
    # like those of float32 itself, or "ieee", without tensor cores.
    float32: str = "tf32x3"


@dataclass(frozen=True, slots=True)
class Configs:
    """One configuration per kernel."""

    forward: Config
    dq: Config
    dkv: Config


# Keyed by (bytes per element, padded head size); the smallest padded head size that fits is taken.
# Measured on an H200 by benchmarks/tune_triton.py: (4, 64) and (4, 128) in benchmarks/results/h200_tune_float32.json, (2,
# 256) in h200_tune_triton_256_more.json. The other half-precision sizes and the forward of (4, 256) are from sweeps that
# were not kept. The gradients of (4, 256) are not tuned. float32 must not have 64 rows, 8 warps and blocks of 16: Triton
# 3.6 compiles them to products of 8 columns that read foreign memory (docs/kernels.md, "Traps for kernel writers").
_HOPPER = {
    (2, 64): Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    (2, 128): Configs(Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 2)),
    (2, 256): Configs(Config(128, 64, 8, 2), Config(128, 32, 8, 1), Config(32, 32, 4, 2)),
    (4, 64): Configs(Config(128, 64, 8, 2), Config(128, 32, 8, 1), Config(32, 128, 8, 1)),
    (4, 128): Configs(Config(128, 32, 8, 2), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    (4, 256): Configs(Config(32, 32, 8, 1), Config(32, 16, 8, 1, "ieee"), Config(16, 32, 8, 1, "ieee")),
}
# Less shared memory: Ampere and Ada. Nothing of it was measured.
_OTHER = {
    (2, 64): Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (2, 128): Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    (2, 256): Configs(Config(64, 32, 8, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    (4, 64): Configs(Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    (4, 128): Configs(Config(32, 32, 4, 1), Config(32, 16, 4, 1), Config(16, 32, 4, 1)),
    (4, 256): Configs(Config(16, 16, 4, 1, "ieee"), Config(16, 16, 4, 1, "ieee"), Config(16, 16, 4, 1, "ieee")),
}

# Over block lists, for blocks of 128; smaller ones cut tiles down. Those of other GPUs are the table above.
_HOPPER_BLOCKS = {
    (2, 64): Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    (2, 128): Configs(Config(128, 64, 8, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 2)),
    (2, 256): _HOPPER[2, 256],
    (4, 64): _HOPPER[4, 64],
    (4, 128): _HOPPER[4, 128],
    (4, 256): _HOPPER[4, 256],
}


def padded(head_dim: int) -> int:
    """The head size of a block: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def configs(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Configs:
    """The configurations for a GPU, an element type and a head size."""
    table = _HOPPER if capability[0] == 9 else _OTHER
    return table[dtype.itemsize, max(64, padded(head_dim))]


def _within(config: Config, block_size: int) -> Config:
    """The same with tiles inside of blocks; small tiles need no more than four warps."""
    block_m, block_n = min(config.block_m, block_size), min(config.block_n, block_size)
    cut = (block_m, block_n) != (config.block_m, config.block_n)
    return replace(config, block_m=block_m, block_n=block_n, warps=4 if cut else config.warps)


def block_configs(capability: tuple[int, int], dtype: torch.dtype, head_dim: int, block_size: int) -> Configs:
    """The configurations over lists of blocks of so many positions; a tile divides a block.

    >>> block_configs((9, 0), torch.bfloat16, 64, 32).forward
    Config(block_m=32, block_n=32, warps=4, stages=3, float32='tf32x3')
    """
    table = _HOPPER_BLOCKS if capability[0] == 9 else _OTHER
    chosen = table[dtype.itemsize, max(64, padded(head_dim))]
    return Configs(*(_within(config, block_size) for config in (chosen.forward, chosen.dq, chosen.dkv)))
