"""How the portable kernels are cut. This module does not import triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Rows of queries and keys per block, warps per program, depth of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    # How float32 is multiplied if PyTorch's precision is "highest". "tf32x3" computes a product as three TF32 products on
    # tensor cores, with errors like those of float32. "ieee" uses no tensor cores.
    float32: str = "tf32x3"


@dataclass(frozen=True, slots=True)
class TritonConfigs:
    """One configuration per kernel."""

    forward: TritonConfig
    dq: TritonConfig
    dkv: TritonConfig


def padded(head_dim: int) -> int:
    """The head size of a block: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
