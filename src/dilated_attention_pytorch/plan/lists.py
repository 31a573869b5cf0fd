"""The block lists of a problem: for every sequence, which key blocks its query blocks read."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.patterns.blocks import SparsePatternConfig
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.adaptive import adaptive
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.plan.sequences import Span


class _ByIdentity:
    """Tensors as a cache key. The cache holds them, so that no other tensor gets their identity."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.tensors)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))


@lru_cache(maxsize=32)
def _given_rule(tensors: _ByIdentity, block_size: int, key_blocks: int) -> BlockRule:
    indices, starts, counts = tensors.tensors
    lists = BlockLists(counts, starts, indices, block_size, key_blocks, key_blocks - counts.shape[2])
    return BlockRule(block_size, None, lists)


def find_rule(spec: str, lists: tuple[Tensor | None, ...], keys: int) -> BlockRule:
    """The rule that an operator gets: ``spec`` of a ``BlockSparse``, and the indices, starts and counts of given lists.

    The same tensors give the same object, so that caches find its tables again.
    """
    indices, starts, counts = lists
    if indices is None or starts is None or counts is None:
        config = SparsePatternConfig.from_spec(spec)
        return BlockRule(config.block_size, config)
    block_size = int(spec.partition("|")[2])
    return _given_rule(_ByIdentity(indices, starts, counts), block_size, -(-keys // block_size))


@lru_cache(maxsize=32)
def _static_lists(
    config: SparsePatternConfig, first: int, blocks: int, is_causal: bool, device: torch.device
) -> BlockLists:
    with _disable_current_modes():  # the cache must not keep fake tensors
        return config.lists(first, blocks, is_causal).to(device)


def _block_range(span: Span, block_size: int) -> tuple[int, int]:
    """The first query block of a sequence, and the number of its key blocks."""
    return span.positions.start // block_size, -(-span.length // block_size)


def lists_of(problem: Problem, chosen: Tensor | None, device: torch.device) -> list[tuple[Span, BlockLists]]:
    """The sequences of a block-sparse problem, each with its lists on a device.

    ``chosen`` is what ``choose`` returned for an adaptive pattern.
    """
    rule, found, row = problem.blocks, [], 0
    for span in problem.spans():
        first, blocks = _block_range(span, rule.block_size)
        if rule.given is not None:
            lists = rule.given.cropped(first, blocks).of_samples(span.samples).to(device)
        elif chosen is not None:
            lists = _chosen_lists(problem, chosen, span, row)
            row += blocks if problem.cu_seqlens is not None else 0
        else:
            assert rule.config is not None
            lists = _static_lists(rule.config, first, blocks, problem.is_causal, device)
        found.append((span, lists))
    return found


def _chosen_lists(problem: Problem, chosen: Tensor, span: Span, row: int) -> BlockLists:
    """The lists of a sequence, from row ``row`` on, in the table (B, H, rows, width) of an adaptive choice."""
    rule = problem.blocks
    assert rule.config is not None
    first, blocks = _block_range(span, rule.block_size)
    budget = rule.config.rows(first, blocks, problem.is_causal).budget.long()
    batch, heads, rows, width = chosen.shape
    starts = torch.arange(batch * heads * rows, device="cpu").view(batch, heads, rows) * width
    own = starts[span.samples, :, row : row + len(budget)]
    return BlockLists(budget.expand(own.shape), own, chosen.flatten(), rule.block_size, blocks, first)


def chosen_shape(
    config: SparsePatternConfig, query: Tensor, keys: int, documents: int | None, *, shifted: bool
) -> tuple[int, ...]:
    """(B, H, rows, width) of an adaptive choice; ``documents`` is the number of packed documents, if any.

    The samples are ``shifted`` if they have starts: queries then begin anywhere in a block.
    """
    (batch, n, heads, _), size, ratio = query.shape, config.block_size, config.ratio
    blocks = -(-keys // size)
    # Documents have their query blocks one after the other, and each may have a short one.
    rows = blocks - (keys - n) // size if documents is None else n // size + documents
    rows = (n - 2) // size + 2 if shifted else rows
    return batch, heads, rows, 1 + blocks * ratio.numerator // ratio.denominator


def choose(problem: Problem, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """The key blocks that an adaptive pattern chooses, (B, H, query blocks, width), see ``adaptive``."""
    config = problem.blocks.config
    assert config is not None
    documents = None if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1
    shape = chosen_shape(config, query, problem.keys, documents, shifted=problem.starts is not None)
    chosen = torch.zeros(shape, dtype=torch.int32, device=query.device)
    row = 0
    for span in problem.spans():
        first, blocks = _block_range(span, config.block_size)
        rows = config.rows(first, blocks, problem.is_causal, query.device)
        q, k = query[span.query_rows], key[span.key_rows]
        own = adaptive(q, k, rows, first, config.block_size, scale, shape[-1])
        chosen[span.samples, :, row : row + blocks - first] = own
        row += blocks if problem.cu_seqlens is not None else 0
    return chosen
