"""Tile sizes of the Hopper kernels: a frozen table by head size, measured by benchmarks/tune_hopper.py and joint_gpu.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from dilated_attention_pytorch.backends.gpu.running import RunningProblem
from dilated_attention_pytorch.plan.problem import Problem

ITEM_ROWS = 128  # that a program computes at once: 64 by each of its two groups of four warps
MOST_LINES = 2**30  # rows of all samples of a tensor that one descriptor serves: coordinates have 31 bits


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Rows of a streamed block, blocks in flight, where the left sides of score products are kept, and further warp groups."""

    block: int
    stages: int
    held: int  # of the operands that stay for a whole item, this many are in registers, the others in shared memory
    overlap: bool = False  # dk/dv: compute scores while the block before is still being added up
    # Forward: tiles of whole blocks are loaded through one descriptor of each tensor, if they have at most this many rows.
    whole_rows: int = 0
    helpers: int = 0  # groups of four warps beside the two that compute 64 rows each
    programs: int = 1  # on each multiprocessor: they share its registers and its shared memory


# The programs of the joint backward start one after the other, and dq is rounded in a separate step. This costs more than
# the two saved products on small problems. Milliseconds of the joint kernel / two kernels, one H200:
# Head size 64 (benchmarks/results/h200_joint_chunks.json): paper with 4k tokens (2**27.3 pairs) 0.38 / 0.35, 8k 0.68 / 0.68,
# 64k 4.8 / 5.6; short (2**28.4) 0.58 / 0.60 to 0.66, causal 0.37 / 0.45; gigapath with 8k tokens 0.65 / 0.72, 128k 18.5 /
# 21.4, causal 10.5 / 16.8; one branch with tiles of 128 rows 1.08 / 0.95, 256 1.19 / 1.19, 512 1.73 / 1.74, 1024 2.59 /
# 3.08; causal 1.10 / 0.99, 1.15 / 1.20, 1.35 / 1.40. Head size 128 (h200_joint_128.json): paper with 16k tokens (2**29)
# 1.68 / 1.54, 64k 6.05 / 6.34; tiles of 512 rows 2.07 / 1.90, 1024 3.23 / 3.22, 2048 5.59 / 5.82, 16,384
# 36.7 / 42.1; causal 1024 2.19 / 2.17, 2048 3.41 / 3.40. In whole calls it is faster from 1,024 rows on (h200_cliffs.json).
@dataclass(frozen=True, slots=True)
class JointUse:
    """For which problems the joint backward is used: it computes all gradients by one kernel."""

    pairs: int  # of a query and a key, at least; causal tiles count as full ones
    keys: int  # per query, at least, on average
    branches: int  # at most: the layout entries of many branches take the shared memory of its few stages


@dataclass(frozen=True, slots=True)
class ShortTiles:
    """The forward of patterns whose tiles have at most so many rows.

    The groups of a program have blocks of 64 keys, and skip those that they do not see. Of a causal tile of 256 rows, they
    compute 10 of the 16 squares of 64 by 64 pairs; with blocks of 128 keys they would compute 12. In an item of one or two
    blocks, a group mostly waits: for products, exponentials and stores. A second program on the multiprocessor runs
    meanwhile, if there are registers for it.
    """

    config: HopperConfig
    full: int
    causal: int
    branches: int = 128  # at most: the layout entries of many branches take the shared memory of its stages


@dataclass(frozen=True, slots=True)
class HopperConfigs:
    """One configuration per kernel."""

    forward: HopperConfig
    dq: HopperConfig
    dkv: HopperConfig
    joint: HopperConfig | None = None  # all gradients at once, see joint_config
    joint_use: JointUse | None = None
    short: ShortTiles | None = None


# By the head size, up to this one. benchmarks/results/h200_tune_hopper.json has candidates at 64 and 128, measured with
# early kernels. At the power limit the choice of operands in registers was measured again, also at 96
# (docs/kernels_history.md, "Hopper forward" and "Hopper backward", version 9). Full tiles of 2,048 rows and more are slower
# with one descriptor of each tensor at 64 (the same page, "Hopper forward", ``whole_descriptor``).
TABLE = {
    32: HopperConfigs(HopperConfig(128, 6, 1), HopperConfig(64, 8, 2), HopperConfig(64, 8, 2, overlap=True)),
    64: HopperConfigs(
        HopperConfig(128, 6, 1, whole_rows=1024),
        HopperConfig(64, 8, 2),
        HopperConfig(64, 8, 2, overlap=True),
        HopperConfig(64, 4, 2, helpers=1),
        JointUse(pairs=2**28, keys=256, branches=32),
        ShortTiles(HopperConfig(64, 4, 0, whole_rows=1024, programs=2), full=256, causal=512),
    ),
    96: HopperConfigs(HopperConfig(128, 3, 0), HopperConfig(64, 5, 1), HopperConfig(64, 4, 1)),
    128: HopperConfigs(
        HopperConfig(128, 3, 0, whole_rows=2**40),
        HopperConfig(64, 5, 1),
        HopperConfig(64, 4, 0),
        HopperConfig(64, 2, 0),
        JointUse(pairs=2**30, keys=1024, branches=8),
        ShortTiles(HopperConfig(64, 6, 0, whole_rows=2**40), full=0, causal=512),
    ),
}
_BY_HEAD_DIM = {d: next(TABLE[size] for size in TABLE if size >= d) for d in range(1, max(TABLE) + 1)}


def configs(head_dim: int) -> HopperConfigs:
    """The configurations for a head size."""
    return _BY_HEAD_DIM[head_dim]


def forward_config(problem: Problem, head_dim: int) -> HopperConfig:
    """The configuration of the forward.

    Lengths do not matter to the choice. So the bits of a sequence do not depend on what else the batch holds.
    """
    known = configs(head_dim)
    branches = problem.dilated.branches
    if known.short is None or isinstance(problem, RunningProblem) or len(branches) > known.short.branches:
        return known.forward
    longest = max(-(-w // r) for w, r in branches)
    most = known.short.causal if problem.is_causal else known.short.full
    return known.short.config if longest <= most else known.forward


_MULTIPROCESSORS = 132  # of an H100 or H200


def joint_config(problem: Problem, head_dim: int) -> HopperConfig | None:
    """The configuration of the joint backward; None if it is not used."""
    known = configs(head_dim)
    # Items add to the same query rows one after the other: few queries of many keys, or few tiles, would leave most programs
    # waiting.
    unequal = problem.queries != problem.keys and not isinstance(problem, RunningProblem)
    use = known.joint_use
    if use is None or len(problem.dilated.branches) > use.branches or unequal:
        return None
    pairs, rows, busy_pairs = _extent(problem)
    pays = pairs >= max(use.pairs, use.keys * rows) and 2 * busy_pairs >= pairs
    return known.joint if pays else None


@lru_cache(maxsize=256)
def _extent(problem: Problem) -> tuple[int, int, int]:
    """Query-key pairs and query rows of all tiles of all heads, and the pairs in families that keep all programs busy."""
    pairs = rows = busy_pairs = 0
    running = isinstance(problem, RunningProblem)
    for span, plan in problem.plans():
        for f in plan.families:
            tiles = (span.samples.stop - span.samples.start) * f.tiles * len(f.key_heads)
            own_rows = tiles * problem.heads_per_key * f.q_rows
            rows += own_rows
            pairs += own_rows * f.k_rows
            long = not running or 2 * f.q_rows >= f.k_rows
            if long and tiles * math.ceil(f.k_rows / ITEM_ROWS) >= _MULTIPROCESSORS:
                busy_pairs += own_rows * f.k_rows
    return pairs, rows, busy_pairs
