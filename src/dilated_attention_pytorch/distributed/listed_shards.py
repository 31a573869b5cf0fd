"""The sequences of block-sparse attention by samples and heads that share block lists, with the lists of one rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from dilated_attention_pytorch.distributed.messages import SequenceShards
from dilated_attention_pytorch.distributed.schedules import BlockSchedule, Ranges, blocks_of, joined, positions_read
from dilated_attention_pytorch.distributed.traffic import held_spans, is_one_sequence
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.shards import Shards

ChunkLists = tuple[BlockLists | None, ...]  # by chunk of a rank; None for an empty chunk
_ENTRIES = 2**20  # of block lists that are made together


@dataclass(frozen=True, slots=True, eq=False)
class ListedShards(SequenceShards[BlockSchedule]):
    """Samples and heads of a sequence that share block lists, with the lists of this rank."""

    query_heads: slice
    lists: ChunkLists


def named_blocks(lists: BlockLists | None) -> Ranges:
    """The key blocks that lists name, as runs.

    >>> named_blocks(BlockLists.from_mask(torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]).bool(), 64))
    (range(0, 2), range(3, 4))
    """
    blocks = None if lists is None else lists.entries()
    if blocks is None or not len(blocks):
        return ()
    first = int(blocks.min())
    named = torch.zeros(int(blocks.max()) - first + 3, dtype=torch.int8, device="cpu")  # with an unnamed one at each end
    named[blocks.long() - first + 1] = 1
    edges = (torch.diff(named).nonzero().squeeze(1) + first).tolist()
    return tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def read_by(problem: Problem, chunks: Sequence[range], lists: ChunkLists, length: int) -> Ranges:
    """The positions of a sequence that a rank with these chunks and lists reads."""
    named = [named_blocks(x) for x in lists]
    return positions_read(chunks, named, problem.blocks.block_size, length, is_causal=problem.is_causal)


def listed_sequences(problem: Problem, shards: Shards, rank: int) -> tuple[ListedShards, ...]:
    """The sequences of a pattern that does not depend on content, of which a rank holds rows.

    A batch of one sequence has it on every rank, because all ranks count what each of them reads of it.
    """
    own = problem.spans() if is_one_sequence(problem) else held_spans(problem, shards, rank)
    return tuple(sequence for span in own for sequence in listed_span(problem, shards, span, rank))


def listed_span(problem: Problem, shards: Shards, span: Span, rank: int) -> Iterator[ListedShards]:
    """A sequence by samples and heads that share lists, with the lists of a rank and what every rank reads."""
    rule, within = problem.blocks, shards.within(range(span.keys.start, span.keys.stop))
    blocks = -(-span.length // rule.block_size)
    given = None if rule.given is None else rule.given.cropped(0, blocks)
    for samples, heads, key_heads in sharing(problem, span, (1, 1) if given is None else given.counts.shape[:2]):
        source = None if given is None else given.of_samples(samples).of_heads(heads)
        lists = tuple(_lists(problem, source, chunk, blocks) if chunk else None for chunk in within.chunks[rank])
        schedule = BlockSchedule(within, _read_by_all(problem, source, within, blocks))
        at = samples, key_heads, span.keys.start
        yield ListedShards(*at, shards, schedule, heads, lists, padding=span.padding)


def _read_by_all(problem: Problem, given: BlockLists | None, shards: Shards, blocks: int) -> tuple[Ranges, ...]:
    """By rank: the positions of a sequence that it reads, if several ranks hold it. Many lists are made together."""
    if len(shards.holders(range(shards.length))) < 2:
        return ((),) * shards.world_size
    size, read = problem.blocks.block_size, [list[range]() for _ in shards.chunks]
    entries = max(1, -(-blocks * problem.blocks.config.ratio // 1)) if problem.blocks.config is not None else 1  # of a list
    together = max(1, _ENTRIES // entries) * size  # positions
    first = 0
    while first < len(shards.held):
        start = shards.held[first][0]
        last = bisect_left(shards.held, start + together, lo=first + 1, key=itemgetter(1))
        lists = _lists(problem, given, range(start, shards.held[last - 1][1]), blocks)
        for a, b, rank, _ in shards.held[first:last]:
            rows = blocks_of(range(a, b), size)
            named = named_blocks(lists.rows(rows.start, rows.stop))
            read[rank] += positions_read([range(a, b)], [named], size, shards.length, is_causal=problem.is_causal)
        first = last
    return tuple(map(joined, read))


def _lists(problem: Problem, given: BlockLists | None, chunk: range, blocks: int) -> BlockLists:
    """The lists of a chunk's query blocks, given or by the pattern's rule, in a sequence of so many blocks."""
    rows = blocks_of(chunk, problem.blocks.block_size)
    if given is not None:
        return given.rows(rows.start, rows.stop)
    assert problem.blocks.config is not None
    return problem.blocks.config.lists(rows.start, blocks, problem.is_causal, rows.stop)


def sharing(problem: Problem, span: Span, lists: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, query heads and key heads that share lists; ``lists`` counts lists by sample and by query head."""
    samples, per_key = [span.samples], problem.heads_per_key
    if lists[0] > 1:
        samples = [slice(b, b + 1) for b in range(span.samples.start, span.samples.stop)]
    for own in samples:
        if lists[1] == 1:
            yield own, slice(0, problem.heads), slice(0, problem.key_heads)
        else:
            for g in range(problem.key_heads):
                yield own, slice(g * per_key, (g + 1) * per_key), slice(g, g + 1)
