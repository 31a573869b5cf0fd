"""What ranks exchange to choose the blocks of an adaptive pattern, counted position by position."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dilated_attention_pytorch.distributed import Shards


@dataclass(frozen=True)
class ChoiceCase:
    """An adaptive pattern over the ranks of a sequence."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int
    block_size: int
    is_causal: bool
    lengths: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def received(self, shards: Shards, rank: int) -> dict[str, int]:
        """The bytes of rows, means and requests that a rank receives."""
        found = {"rows": 0, "means": 0, "requests": 0}
        holders = [-1] * shards.length
        for p, chunks in enumerate(shards.chunks):
            for chunk in chunks:
                holders[chunk.start : chunk.stop] = [p] * len(chunk)
        for sample in range(self.batch):
            length = shards.length if self.lengths is None else self.lengths[sample]
            for start, stop in pairwise((0, length) if self.cu_seqlens is None else self.cu_seqlens):
                cut = [[range(max(c.start, start), min(c.stop, stop)) for c in chunks] for chunks in shards.chunks]
                for name, count in self._of_sequence(holders[start:stop], start, cut, rank):
                    found[name] += count
        return found

    def _of_sequence(self, holders, start, chunks, rank):
        size, accumulated = self.block_size, max(4, self.itemsize)
        query, key = self.heads * self.head_dim, self.key_heads * self.head_dim
        for block in range(-(-len(holders) // size)):
            rows = range(block * size, min((block + 1) * size, len(holders)))
            owner = holders[rows.start]
            if owner == rank:
                yield "rows", sum(holders[a] != rank for a in rows) * (query + key) * self.itemsize
                continue
            # Each chunk has its own query means.
            continued = [c for c in chunks[rank] if any(a - start in rows for a in c)]
            yield "means", len(continued) * query * accumulated
            if any(p == rank for a, p in enumerate(holders) if not self.is_causal or a // size >= block):
                yield "means", key * accumulated
        for chunk in chunks[rank]:
            touched = {(a - start) // size for a in chunk}
            for p in set(holders) - {rank}:
                later = [a for a, holder in enumerate(holders) if holder == p and a + start > chunk.start]
                if touched and (later or not self.is_causal):
                    yield "requests", len(touched) * self.key_heads
