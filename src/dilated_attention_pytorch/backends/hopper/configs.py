"""How the Hopper kernels are cut: a frozen table by head size, measured by benchmarks/tune_hopper.py."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_ROWS = 128  # that a program computes at once, see pieces.ROWS


@dataclass(frozen=True, slots=True)
class Config:
    """Rows of a streamed block, blocks in flight, and where the left sides of the score products lie."""

    block: int
    stages: int
    held: int  # of the operands that stay for a whole item, this many are in registers, the others in shared memory
    overlap: bool = False  # dk/dv: compute scores while the block before is still being added up


@dataclass(frozen=True, slots=True)
class Configs:
    """One configuration per kernel."""

    forward: Config
    dq: Config
    dkv: Config


# By the head size, up to this one.
TABLE = {
    32: Configs(Config(128, 6, 1), Config(64, 8, 2), Config(64, 8, 2, overlap=True)),
    48: Configs(Config(128, 6, 1), Config(64, 8, 2), Config(64, 8, 2)),
    64: Configs(Config(128, 6, 1), Config(64, 8, 2), Config(64, 8, 2, overlap=True)),
    96: Configs(Config(128, 3, 0), Config(64, 5, 1), Config(64, 4, 1)),
    128: Configs(Config(128, 3, 0), Config(64, 5, 1), Config(64, 4, 0)),
}


def configs(head_dim: int) -> Configs:
    """The configurations for a head size."""
    return TABLE[min(size for size in TABLE if size >= head_dim)]
