"""How much a problem computes: tiles, pairs and rows without keys, counted on the host without computing anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.gaps import empty_rows
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.plan.sequences import Span

# Counting works on values: tensors must not become fake ones, also inside a FakeTensorMode.
real_tensors = _disable_current_modes
_HOST = torch.device("cpu")


@dataclass(slots=True)
class Counts:
    """Numbers of all samples and query heads together."""

    sequences: int = 0
    families: int = 0  # of dilated patterns
    tiles: int = 0
    pairs: int = 0  # that are computed
    visible_blocks: int = 0  # of block-sparse patterns: what dense attention would compute
    rows: int = 0  # pairs of a row and a query head, without those of padding
    empty_rows: int | None = 0  # those of them that meet no key; None if unknown


def has_values(x: Tensor) -> bool:
    """Whether the elements of a tensor can be read: not those of meta tensors and fake tensors."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def nearest_blocks(problem: Problem) -> Problem:
    """The same problem, where an adaptive pattern takes the nearest blocks: as many, and its own block as well."""
    config = problem.blocks.config
    assert config is not None
    nearest = SparsePatternConfig("local_window", config.sparsity_ratio, config.block_size)
    return replace(problem, pattern=BlockRule(config.block_size, nearest))


def count_pairs(problem: Problem, chosen: Tensor | None) -> int:
    """The query-key pairs that are computed; ``chosen`` is the choice of an adaptive pattern.

    A choice without values is counted as the nearest blocks.
    """
    with real_tensors():
        if isinstance(problem.pattern, Dilated):
            plans = problem.plans()
            return problem.heads_per_key * sum(_samples(span) * plan.pairs for span, plan in plans)
        if chosen is not None and not has_values(chosen):
            problem, chosen = nearest_blocks(problem), None
        return sum(
            _copies(problem, span, lists) * lists.pairs(span.positions, span.length, problem.is_causal)
            for span, lists in lists_of(problem, chosen, _HOST)
        )


def count(problem: Problem, chosen: Tensor | None, positions: Tensor | None) -> Counts:
    """All numbers of a problem. ``positions`` (B, N) are those that causality under an order compares."""
    with real_tensors():
        if isinstance(problem.pattern, Dilated):
            return _count_tiles(problem)
        return _count_blocks(problem, chosen, positions)


def _count_tiles(problem: Problem) -> Counts:
    counts, per_key = Counts(pairs=count_pairs(problem, None)), problem.heads_per_key
    for span, plan in problem.plans():
        samples = _samples(span)
        counts.sequences += samples
        counts.families += len(plan.families)
        counts.tiles += samples * sum(f.tiles * len(f.key_heads) for f in plan.families)
        counts.rows += samples * problem.heads * len(plan.queries)
        # A row sees itself, also under an order. So only rows that no branch has are empty.
        empty = empty_rows(problem.dilated, plan.queries, problem.key_heads)
        known = empty is not None and counts.empty_rows is not None
        counts.empty_rows = (counts.empty_rows or 0) + samples * per_key * (empty or 0) if known else None
    return counts


def _count_blocks(problem: Problem, chosen: Tensor | None, positions: Tensor | None) -> Counts:
    counts, heads = Counts(pairs=count_pairs(problem, chosen)), problem.heads
    if chosen is not None and not has_values(chosen):
        problem, chosen = nearest_blocks(problem), None
    # Other lists always have the query block itself, so their rows see themselves.
    positions = positions if problem.blocks.given is not None else None
    if positions is not None and not has_values(positions):
        counts.empty_rows = None
    for span, lists in lists_of(problem, chosen, _HOST):
        copies, samples = _copies(problem, span, lists), _samples(span)
        counts.sequences += samples
        counts.tiles += copies * int(lists.counts.sum())
        counts.rows += samples * heads * len(span.positions)
        first, blocks = lists.first, lists.query_blocks
        visible = blocks * lists.key_blocks
        if problem.is_causal:
            visible = blocks * (first + 1) + blocks * (blocks - 1) // 2
        counts.visible_blocks += samples * heads * visible
        if counts.empty_rows is not None and positions is None:
            counts.empty_rows += copies * _unlisted(lists, span)
        elif counts.empty_rows is not None and positions is not None:
            counts.empty_rows += _empty_in_lists(lists, span, positions[span.query_rows].cpu(), heads)
    return counts


def _copies(problem: Problem, span: Span, lists: BlockLists) -> int:
    """How many samples and heads each list serves."""
    list_samples, list_heads, _ = lists.counts.shape
    return _samples(span) // list_samples * (problem.heads // list_heads)


def _samples(span: Span) -> int:
    return int(span.samples.stop - span.samples.start)


def _unlisted(lists: BlockLists, span: Span) -> int:
    """The rows of all query blocks with empty lists."""
    start = torch.arange(lists.first, lists.first + lists.query_blocks, device="cpu") * lists.block_size
    end = (start + lists.block_size).clamp(max=span.positions.stop)
    rows = end - start.clamp(min=span.positions.start)
    return int((rows * (lists.counts == 0)).sum())


def _empty_in_lists(lists: BlockLists, span: Span, positions: Tensor, heads: int) -> int:
    """The rows whose listed blocks have no key of a position as small as theirs; positions are (B, N)."""
    size, none = lists.block_size, 2**62  # pad takes a double, which holds this exactly
    padding = lists.key_blocks * size - span.length
    padded = torch.nn.functional.pad(positions.long(), (0, padding), value=none)
    smallest = padded.view(len(positions), lists.key_blocks, size).amin(-1)
    table, total = lists.mask(), 0
    for sample, (own, least) in enumerate(zip(positions, smallest, strict=True)):
        for mask in table[sample if len(table) > 1 else 0]:
            seen = torch.where(mask, least, none).amin(-1).repeat_interleave(size)[: span.length]
            total += int((own < seen).sum()) * (heads // table.shape[1])
    return total
