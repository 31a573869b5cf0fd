"""How the Hopper kernels are cut: a frozen table by head size, measured by benchmarks/tune_hopper.py and variants_gpu.py."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from dilated_attention_pytorch.problem import Problem


@dataclass(frozen=True, slots=True)
class Config:
    """Rows of a streamed block, blocks in flight, where the left sides of the score products lie, and who computes."""

    block: int
    stages: int
    held: int  # of the operands that stay for a whole item, this many are in registers, the others in shared memory
    overlap: bool = False  # dk/dv: compute scores while the block before is still being added up
    groups: int = 2  # of four warps, which compute 64 rows each
    helpers: int = 0  # more groups, which do something else

    @property
    def item_rows(self) -> int:
        """Rows that a program computes at once, 64 for each group."""
        return 64 * self.groups


@dataclass(frozen=True, slots=True)
class Configs:
    """One configuration per kernel."""

    forward: Config
    dq: Config
    dkv: Config
    # Three groups, where tiles are long enough, see backward_config.
    long_dq: Config | None = None
    long_dkv: Config | None = None
    joint: Config | None = None  # all gradients at once, see joint_config


# By the head size, up to this one.
TABLE = {
    32: Configs(Config(128, 6, 1), Config(64, 8, 2), Config(64, 8, 2, overlap=True)),
    64: Configs(
        Config(128, 6, 1),
        Config(64, 8, 2),
        Config(64, 8, 2, overlap=True),
        Config(64, 8, 1, groups=3),
        Config(64, 6, 0, groups=3),
        Config(64, 4, 2, helpers=1),
    ),
    96: Configs(Config(128, 3, 0), Config(64, 5, 1), Config(64, 4, 1)),
    128: Configs(Config(128, 3, 0), Config(64, 5, 1), Config(64, 4, 0)),
}


def configs(head_dim: int) -> Configs:
    """The configurations for a head size."""
    return TABLE[min(size for size in TABLE if size >= head_dim)]


# Three groups are faster by more than this: by 7 and 8 % (dq, dk/dv, head size 48) and 5 % (dq, 64) with 3 % more rows.
_MOST_WASTE = 1.05
_MULTIPROCESSORS = 132  # of an H100 or H200


def backward_config(problem: Problem, head_dim: int, *, by_keys: bool) -> Config:
    """How dk and dv (``by_keys``) or dq are cut for a problem."""
    known = configs(head_dim)
    short, long = (known.dkv, known.long_dkv) if by_keys else (known.dq, known.long_dq)
    return long if long and _is_long(problem, by_keys) else short


# From how many pairs of a query and a key on, causal ones counted whole, all gradients are computed at once: programs begin
# one after the other then, and dq is rounded apart, which takes time that five products instead of seven save.
# Milliseconds at once / apart, one H200 (docs/kernels.md, version 13): short (2**28.4) 0.58 / 0.60, causal 0.37 / 0.45;
# paper of 8k tokens 0.68 / 0.68, of 64k 4.8 / 5.6; gigapath of 8k 0.65 / 0.72, of 128k 18.5 / 21.4, causal 10.5 / 16.8.
_JOINT_FROM_PAIRS = 2**28


def joint_config(problem: Problem, head_dim: int) -> Config | None:
    """How all gradients are computed at once; None if they are not."""
    # What is known of the parts of many branches takes the room of its few stages.
    if len(problem.pattern.branches) > 32 or _pairs(problem) < _JOINT_FROM_PAIRS:
        return None
    return configs(head_dim).joint


@lru_cache(maxsize=256)
def _pairs(problem: Problem) -> int:
    """Query-key pairs of all tiles of all heads."""
    group = problem.heads // problem.key_heads
    return sum(
        (span.samples.stop - span.samples.start) * f.tiles * len(f.key_heads) * group * f.q_rows * f.k_rows
        for span, plan in problem.plans()
        for f in plan.families
    )


@lru_cache(maxsize=256)
def _is_long(problem: Problem, by_keys: bool) -> bool:
    """Whether items of 192 rows compute hardly more than items of 128. Where tiles are short or causal they compute more.

    >>> from dilated_attention_pytorch.patterns import Dilated
    >>> def of_tiles(w): return Problem(Dilated([w], [1]), False, 1, 2**20, 2**20, 1, 1, None, None)
    >>> _is_long(of_tiles(2048), False), _is_long(of_tiles(256), False)  # 11 * 192 and 16 * 128 rows; 2 * 192 and 2 * 128
    (True, False)
    """
    heads = 1 if by_keys else problem.heads // problem.key_heads

    def time(item_rows: int) -> float:
        """Rounds of all multiprocessors, branch by branch, times the mean of an item's pairs."""
        items: Counter[int] = Counter()
        pairs: Counter[int] = Counter()
        for span, plan in problem.plans():
            for f in plan.families:
                rows, others = (f.k_rows, f.q_rows) if by_keys else (f.q_rows, f.k_rows)
                tiles = (span.samples.stop - span.samples.start) * f.tiles * len(f.key_heads) * heads
                items[f.branch] += tiles * math.ceil(rows / item_rows)
                pairs[f.branch] += tiles * math.ceil(rows / item_rows) * item_rows * others
        return sum(math.ceil(items[b] / _MULTIPROCESSORS) * pairs[b] / items[b] for b in items)

    return not problem.is_causal and time(192) <= _MOST_WASTE * time(128)
