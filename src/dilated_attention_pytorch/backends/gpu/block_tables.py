"""Block lists as kernels read them: the lists of all sequences of a batch in one set of tables, so one launch serves all.

A table of blocks has one row for each sample and each block of its sequence: query blocks, or key blocks for dk and dv. The
list of head ``h`` for a row is number ``first_list + h * list_step`` (a step of 0: all heads share it), and it is
``indices[starts[number] :][: counts[number]]``. Within a sample, rows of long lists come first, so that no launch ends with
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.lists import BlockLists, entries_of, transposed_entries
from dilated_attention_pytorch.plan.sequences import Span

# One row of a table of blocks; kernels read it by these numbers (block_forward.py).
COLUMNS = (
    "sample",
    "block",  # of its sequence
    "q_row",  # of the tensor at position 0, which queries need not reach: it may be negative
    "q_first",  # the first position that has a query
    "k_row",  # of the tensor at position 0
    "length",  # positions of the sequence
    "first_list",
    "list_step",
)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """What one kernel reads, by query block or by key block."""

    rows: Tensor  # (R, COLUMNS) int64
    counts: Tensor  # (lists,) int32
    starts: Tensor  # (lists,) int64
    indices: Tensor  # (entries,) int32
    covered: bool  # every row of the result belongs to a block

    def to(self, device: torch.device) -> BlockTable:
        """The same table on a device."""
        rows, counts, starts, indices = (_moved(x, device) for x in self.tensors)
        return BlockTable(rows, counts, starts, indices, self.covered)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which kernels take them."""
        return self.rows, self.counts, self.starts, self.indices


@dataclass(frozen=True, slots=True, eq=False)
class PackedLists:
    """The lists of all sequences of a batch, numbered one after the other, and what their transposition needs."""

    block_size: int
    query_rows: Tensor  # (R, COLUMNS)
    key_rows: Tensor  # (R', COLUMNS), with the numbers of transposed lists
    counts: Tensor  # (lists,) int64
    starts: Tensor  # (lists,) int64
    indices: Tensor  # (entries,) int32
    blocks: Tensor  # (lists,) int32: the query block of each list
    columns: Tensor  # (lists,) int64: the number of the transposed list of key block 0
    entries: int
    transposed_lists: int
    heads: int  # lists of a row
    queries_covered: bool
    keys_covered: bool

    @staticmethod
    def of(sequences: list[tuple[Span, BlockLists]], batch: int, n: int, m: int, block_size: int) -> PackedLists:
        """The lists of the sequences of a batch of ``n`` query rows and ``m`` key rows.

        >>> lists = BlockLists.from_mask(torch.tensor([[1, 0], [1, 1]]).bool(), 64)
        >>> packed = PackedLists.of([(Span(slice(0, 1), slice(0, 100), slice(0, 100)), lists)], 1, 100, 100, 64)
        >>> packed.by_query().rows.tolist()  # the longer list first
        [[0, 1, 0, 0, 0, 100, 1, 0], [0, 0, 0, 0, 0, 100, 0, 0]]
        """
        query_rows: list[Tensor] = []
        key_rows: list[Tensor] = []
        blocks, columns = [], []
        lists = transposed = queries = keys = 0
        for span, some in sequences:
            samples = torch.arange(span.samples.start, span.samples.stop)
            sets, heads, rows = some.counts.shape
            own = torch.arange(len(samples)) if sets > 1 else torch.zeros(len(samples), dtype=torch.int64)
            query_blocks, key_blocks = torch.arange(some.first, some.first + rows), torch.arange(some.key_blocks)
            for table, first_list, which in ((query_rows, lists, query_blocks), (key_rows, transposed, key_blocks)):
                step, tensor_row = len(which), span.queries.start - span.positions.start
                numbers = first_list + own[:, None] * heads * step + torch.arange(step)
                place = torch.tensor([tensor_row, span.positions.start, span.keys.start, span.length])
                same = torch.ones_like(numbers)
                tail = (*(same * x for x in place), numbers, same * (step if heads > 1 else 0))
                table.append(torch.stack((samples[:, None] * same, which * same, *tail), -1).flatten(0, 1))
            blocks.append(query_blocks.repeat(sets * heads).to(torch.int32))
            firsts = transposed + torch.arange(sets * heads) * some.key_blocks
            columns.append(firsts.repeat_interleave(rows))
            lists, transposed = lists + sets * heads * rows, transposed + sets * heads * some.key_blocks
            queries += len(samples) * len(span.positions)
            keys += len(samples) * span.length
        none = torch.zeros(0, dtype=torch.int64)
        starts, indices = _joined([some for _, some in sequences])
        counts = torch.cat([none, *(some.counts.flatten() for _, some in sequences)])
        return PackedLists(
            block_size=block_size,
            query_rows=torch.cat([none.view(0, len(COLUMNS)), *query_rows]),
            key_rows=torch.cat([none.view(0, len(COLUMNS)), *key_rows]),
            counts=counts,
            starts=starts,
            indices=indices,
            blocks=torch.cat([none.to(torch.int32), *blocks]),
            columns=torch.cat([none, *columns]),
            entries=int(counts.sum()),
            transposed_lists=transposed,
            heads=max((some.counts.shape[1] for _, some in sequences), default=1),
            queries_covered=queries == batch * n,
            keys_covered=keys == batch * m,
        )

    def to(self, device: torch.device) -> PackedLists:
        """The same lists on a device."""
        return replace(
            self,
            query_rows=self.query_rows.to(device),
            key_rows=self.key_rows.to(device),
            counts=self.counts.to(device),
            starts=self.starts.to(device),
            indices=_moved(self.indices, device),
            blocks=self.blocks.to(device),
            columns=self.columns.to(device),
        )

    def by_query(self) -> BlockTable:
        """For each query block its key blocks."""
        rows = _longest_first(self.query_rows, self.counts, self.heads)
        return BlockTable(rows, self.counts.to(torch.int32), self.starts, self.indices, self.queries_covered)

    def by_key(self) -> BlockTable:
        """For each key block the query blocks that read it. Made on the device of the lists, which nothing waits for."""
        _, places = entries_of(self.counts, self.starts, self.entries)
        columns, readers = (x.repeat_interleave(self.counts, output_size=self.entries) for x in (self.columns, self.blocks))
        columns = columns.add_(self.indices.index_select(0, places))
        counts, starts, indices = transposed_entries(columns, readers, self.transposed_lists)
        rows = _longest_first(self.key_rows, counts, self.heads)
        return BlockTable(rows, counts.to(torch.int32), starts, indices, self.keys_covered)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """On a device; indices that are only a shape, because each call has its own, stay it."""
    return x if x.is_meta else x.to(device)


def _joined(lists: list[BlockLists]) -> tuple[Tensor, Tensor]:
    """The starts of lists and the indices they point into, once for lists that share theirs."""
    none = torch.zeros(0, dtype=torch.int64)
    if len({some.indices.data_ptr() for some in lists}) <= 1:
        indices = lists[0].indices if lists else none.to(torch.int32)
        return torch.cat([none, *(some.starts.flatten() for some in lists)]), indices
    starts, first = [], 0
    for some in lists:
        starts.append(some.starts.flatten() + first)
        first += len(some.indices)
    return torch.cat(starts), torch.cat([some.indices.cpu() for some in lists])


def _longest_first(rows: Tensor, counts: Tensor, heads: int) -> Tensor:
    if not len(rows):
        return rows
    lists = rows[:, 6, None] + torch.arange(heads, device=rows.device) * rows[:, 7, None]
    rows = rows[counts[lists].amax(1).argsort(descending=True, stable=True)]
    return rows[rows[:, 0].argsort(stable=True)]
