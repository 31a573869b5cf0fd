"""Means of blocks across ranks: which rank computes the mean of a block, and which ranks need it. Plain integers, no torch.

The rank that holds the first position of a block is the owner of the block. Three exchanges follow one another:

1. A rank whose chunk starts inside of a block sends its rows of this block to the owner, which computes the means.
2. Owners send means. A rank needs the mean query of every block of which it holds rows, and the mean keys of the blocks
   that its queries may read: all blocks of the sequence, or those up to its own last block if causal.
3. A rank asks those that hold these blocks for the blocks that it chose, by one byte per block, sample and key head.

Ranks that hold no rows of a sequence take no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dilated_attention_pytorch.distributed.schedules import blocks_of
from dilated_attention_pytorch.distributed.traffic import held_spans
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence, and the chunks that ranks hold of it.

    12 positions in blocks of 4. Rank 1 holds the last two rows of block 1, which rank 0 owns:

    >>> span = Span(slice(0, 1), slice(0, 12), slice(0, 12))
    >>> sequence = HeldSequence(span, 4, True, ((0, range(0, 6)), (1, range(6, 12))))
    >>> list(sequence.shared_rows())
    [(1, 0, range(6, 8))]
    >>> sequence.owned(range(0, 6)), sequence.owned(range(6, 12)), sequence.reach()
    (range(0, 2), range(2, 3), {0: 2, 1: 3})
    """

    span: Span
    block_size: int
    is_causal: bool
    chunks: tuple[tuple[int, range], ...]  # ranks and positions of the sequence, ascending; none is empty

    @property
    def samples(self) -> int:
        """The number of samples that have this sequence."""
        return int(self.span.samples.stop - self.span.samples.start)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.span.length // self.block_size)

    def chunks_of(self, rank: int) -> tuple[range, ...]:
        """The chunks of a rank, ascending."""
        return tuple(chunk for holder, chunk in self.chunks if holder == rank)

    def owned(self, chunk: range) -> range:
        """The blocks that start in a chunk."""
        return range(-(-chunk.start // self.block_size), -(-chunk.stop // self.block_size))

    def reach(self) -> dict[int, int]:
        """By rank: the number of key blocks, from the first one on, that its queries may read."""
        stops = {rank: -(-chunk.stop // self.block_size) for rank, chunk in self.chunks}  # of the last chunk of a rank
        return stops if self.is_causal else dict.fromkeys(stops, self.blocks)

    def shared_rows(self) -> Iterator[tuple[int, int, range]]:
        """The rows of blocks that start in an earlier chunk: their rank, the owner of the block, and their positions."""
        owner, size = -1, self.block_size
        for rank, chunk in self.chunks:
            if chunk.start % size:
                yield rank, owner, range(chunk.start, min(chunk.stop, -(-chunk.start // size) * size))
            owner = rank if self.owned(chunk) else owner

    def may_read(self, queries: range, keys: range) -> bool:
        """Whether the queries of one chunk may read the keys of another."""
        return not self.is_causal or keys.start <= queries.start

    def last_chunks(self) -> dict[int, range]:
        """By rank: its last chunk, which may read all that its other chunks may read."""
        return dict(self.chunks)


def held_sequences(problem: Problem, shards: Shards, rank: int) -> tuple[HeldSequence, ...]:
    """The sequences of which a rank holds rows."""
    found = []
    for span in held_spans(problem, shards, rank):
        within = shards.within(range(span.keys.start, span.keys.stop))
        chunks = tuple((p, range(start, stop)) for start, stop, p, _ in within.held)
        found.append(HeldSequence(span, problem.blocks.block_size, problem.is_causal, chunks))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MeanBytes:
    """What the choice of an adaptive pattern costs one rank."""

    held: int  # bytes of its query means and of the key means that its queries may read
    received: int  # bytes of rows, means and requests
    messages: int  # that it receives


def mean_bytes(problem: Problem, shards: Shards, rank: int, head_dim: int, itemsize: int) -> MeanBytes:
    """The means that a rank holds and receives for an adaptive pattern; ``itemsize`` is that of the queries.

    4 million tokens in bfloat16 on 512 ranks, 32 query heads and 8 key heads of size 128. The sums of all blocks would be
    671 MB:

    >>> from dilated_attention_pytorch import SparsePatternConfig
    >>> from dilated_attention_pytorch.plan.problem import BlockRule
    >>> rule = BlockRule(128, SparsePatternConfig("adaptive", 0.1))
    >>> problem = Problem(rule, False, 1, 2**22, 2**22, 32, 8)
    >>> mean_bytes(problem, Shards.even(2**22, 512, "contiguous"), 0, 128, 2)
    MeanBytes(held=135266304, received=134217216, messages=1022)
    """
    accumulated, size = (8 if itemsize == 8 else 4), problem.blocks.block_size
    query_row, key_row = problem.heads * head_dim, problem.key_heads * head_dim
    held = received = 0
    sources: set[tuple[str, int]] = set()  # exchanges and ranks
    for sequence in held_sequences(problem, shards, rank):
        samples, own, reach = sequence.samples, sequence.chunks_of(rank), sequence.reach()[rank]
        query_blocks, owned = sum(len(blocks_of(x, size)) for x in own), sum(len(sequence.owned(x)) for x in own)
        held += samples * (reach * key_row + query_blocks * query_row) * accumulated
        received += samples * (reach - owned) * key_row * accumulated
        sources |= {("means", p) for p, x in sequence.chunks if (blocks := sequence.owned(x)) and blocks.start < reach}
        for p, owner, positions in sequence.shared_rows():
            if p == rank != owner:
                received += samples * query_row * accumulated
            elif owner == rank != p:
                received += samples * len(positions) * (query_row + key_row) * itemsize
                sources.add(("rows", p))
        for p, last in sequence.last_chunks().items():
            asked = [len(blocks_of(x, size)) for x in own if p != rank and sequence.may_read(last, x)]
            received += samples * problem.key_heads * sum(asked)
            sources |= {("requests", p) for _ in asked}
    return MeanBytes(held, received, len(sources - {("means", rank)}))
