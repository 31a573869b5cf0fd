"""Launch tables: the families of a plan as rows of integers that a kernel reads.

A launch computes families whose query rows are disjoint, so that each row of the output has one writer. Families of the
same branch share query rows only where causality cut a tile into a rectangle and a triangle; so a launch is one branch's
rectangles or one branch's triangles.

Sequences of their own (``lengths``, ``cu_seqlens``) only add rows: a thousand documents are one launch per branch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch.plan import Plan, TileFamily
from dilated_attention_pytorch.spans import Span

# One row of a table; kernels read the columns in this order (primitives.load_family).
COLUMNS = (
    "first_program",
    "first_sample",
    "tiles",
    "tile_step",
    "heads",
    "first_head",
    "head_step",
    "head_row_step",
    "q_start",  # rows of the tensors, not positions
    "q_rows",
    "k_start",
    "k_rows",
    "row_stride",
    "causal",
    "zero_keys",
    "branch",
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A family and where its sequence lies in the batch: samples, first query row, first key row."""

    family: TileFamily
    samples: int
    first_sample: int
    q_start: int
    k_start: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Families that one kernel launch computes; ``dense`` if their query rows are all rows of their sequences."""

    families: tuple[Placed, ...]
    branch: int
    rate: int


def launches(plans: list[tuple[Span, Plan]]) -> list[Launch]:
    """The launches of a batch, sparse branches first: the last one then writes most rows, and writes them once."""
    grouped: dict[tuple[int, int, bool], list[Placed]] = defaultdict(list)
    for span, plan in plans:
        for f in plan.families:
            placed = Placed(
                f,
                samples=span.samples.stop - span.samples.start,
                first_sample=span.samples.start,
                q_start=f.q_start - plan.queries.start + span.queries.start,
                k_start=f.k_start - plan.keys.start + span.keys.start,
            )
            grouped[-f.row_stride, f.branch, f.causal].append(placed)
    return [
        Launch(tuple(families), branch=branch, rate=-minus_rate)
        for (minus_rate, branch, _), families in sorted(grouped.items(), key=lambda item: item[0])
    ]


@dataclass(frozen=True, slots=True)
class Table:
    """A launch on a device: one row per family, and the number of programs over all of them."""

    rows: Tensor  # (families, columns), int64
    families: int
    programs: int


@lru_cache(maxsize=512)
def table(launch: Launch, *, block: int, by_keys: bool, group: int, device: torch.device) -> Table:
    """The table of a launch for programs that take ``block`` query rows of a query head, or key rows of a key head."""
    rows, programs = [], 0
    for placed in launch.families:
        f = placed.family
        blocks = -(-(f.k_rows if by_keys else f.q_rows) // block)
        rows.append(
            (
                programs,
                placed.first_sample,
                f.tiles,
                f.tile_step,
                len(f.key_heads),
                f.key_heads.start,
                f.key_heads.step,
                f.head_row_step,
                placed.q_start,
                f.q_rows,
                placed.k_start,
                f.k_rows,
                f.row_stride,
                int(f.causal),
                f.zero_keys,
                f.branch,
            )
        )
        programs += blocks * (1 if by_keys else group) * len(f.key_heads) * f.tiles * placed.samples
    assert all(len(row) == len(COLUMNS) for row in rows)
    return Table(torch.tensor(rows, dtype=torch.int64).to(device), len(rows), programs)
