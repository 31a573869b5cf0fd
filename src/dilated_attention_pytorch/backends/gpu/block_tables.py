"""Block lists as kernels read them: the lists of all sequences of a batch in one set of tables, for one launch.

A table of blocks has one row for each sample and each block of its sequence: query blocks, or key blocks for dk and dv. The
list of head ``h`` for a row has the number ``first_list + h * list_step``. With a step of 0, all heads share one list. List
``i`` is ``indices[starts[i] :][: counts[i]]``. Within a sample, rows with long lists come first: no launch ends with one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.running import BlockSpan, RunningBlocks
from dilated_attention_pytorch.backends.gpu.tables import BLOCK_COLUMNS, keep_for_device
from dilated_attention_pytorch.patterns.lists import BlockLists, places_of, transposed_entries
from dilated_attention_pytorch.plan.lists import lists_of
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.sequences import Span

# Lists with more entries are transposed on the host, because the device needs about 50 bytes of memory for an entry.
_MOST_ON_DEVICE = 2**22
_FIRST_LIST, _LIST_STEP = BLOCK_COLUMNS.index("first_list"), BLOCK_COLUMNS.index("list_step")


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """What one kernel reads, by query block or by key block."""

    rows: Tensor  # (R, BLOCK_COLUMNS) int64
    counts: Tensor  # (lists,) int32
    starts: Tensor  # (lists,) int64
    indices: Tensor  # (entries,) int32
    covered: bool  # every row of the result belongs to a block

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which kernels take them."""
        return self.rows, self.counts, self.starts, self.indices

    def to(self, device: torch.device) -> BlockTable:
        """The same table on a device. Indices that are a meta tensor stay so, because each call has its own."""
        rows, counts, starts, indices = (x if x.is_meta else x.to(device, non_blocking=True) for x in self.tensors)
        return BlockTable(rows, counts, starts, indices, self.covered)


class _ListNumbers(NamedTuple):
    """The lists of a batch, numbered one after the other, and what their transposition needs."""

    entries: int  # of all lists
    transposed: int  # lists
    key_rows: Tensor  # (R, BLOCK_COLUMNS) int64, with the numbers of transposed lists
    counts: Tensor  # (lists,) int64
    starts: Tensor  # (lists,) int64
    readers: Tensor  # (lists,) int32: the query block of each list
    columns: Tensor  # (lists,) int64: the number of the transposed list of key block 0

    def to(self, device: torch.device) -> _ListNumbers:
        """The same numbers on a device."""
        tensors = (x.to(device) for x in (self.key_rows, self.counts, self.starts, self.readers, self.columns))
        return _ListNumbers(self.entries, self.transposed, *tensors)


class BlockTables:
    """The tables of a block-sparse problem on a device, each made when it is first asked for.

    >>> lists = BlockLists.from_mask(torch.tensor([[1, 0], [1, 1]]).bool(), 64)
    >>> problem = Problem(None, False, 1, 100, 100, 1, 1)
    >>> tables = BlockTables(problem, [(Span(slice(0, 1), slice(0, 100), slice(0, 100)), lists)], torch.device("cpu"))
    >>> tables.by_query.rows.tolist()  # the longer list first
    [[0, 1, 0, 0, 0, 100, 1, 0, 100, 0], [0, 0, 0, 0, 0, 100, 0, 0, 100, 0]]
    """

    def __init__(self, problem: Problem, sequences: list[tuple[Span, BlockLists]], device: torch.device) -> None:
        self.device = device
        self.heads = max((lists.counts.shape[1] for _, lists in sequences), default=1)  # lists of a row
        samples = [span.samples.stop - span.samples.start for span, _ in sequences]
        queries = sum(b * len(span.positions) for b, (span, _) in zip(samples, sequences, strict=True))
        keys = sum(b * span.length for b, (span, _) in zip(samples, sequences, strict=True))
        self.queries_covered = queries == problem.batch * problem.queries
        self.keys_covered = keys == problem.batch * problem.keys
        # The lists are kept without their indices, because ``indices`` may be a copy of them.
        self._sequences = [(span, replace(own, indices=_none(torch.int32))) for span, own in sequences]
        starts, self.indices = _joined([own for _, own in sequences])
        counts = torch.cat([_none(torch.int64), *(own.counts.flatten() for _, own in sequences)])
        self._lists = counts, starts

    @cached_property
    def _numbers(self) -> _ListNumbers:
        key_rows, readers, columns = [], [], []
        transposed = 0
        for span, own in self._sequences:
            sets, heads, rows = own.counts.shape
            key_rows.append(_rows(span, torch.arange(own.key_blocks, device="cpu"), transposed, sets, heads))
            readers.append(_query_blocks(own).repeat(sets * heads).to(torch.int32))
            firsts = transposed + torch.arange(sets * heads, device="cpu") * own.key_blocks
            columns.append(firsts.repeat_interleave(rows))
            transposed += sets * heads * own.key_blocks
        none, counts = _none(torch.int64), self._lists[0]
        return _ListNumbers(
            int(counts.sum()), transposed, torch.cat([none.view(0, len(BLOCK_COLUMNS)), *key_rows]), *self._lists,
            torch.cat([none.to(torch.int32), *readers]), torch.cat([none, *columns]),
        )  # fmt: skip

    @cached_property
    def by_query(self) -> BlockTable:
        """For each query block its key blocks."""
        rows, lists = [_none(torch.int64).view(0, len(BLOCK_COLUMNS))], 0
        for span, own in self._sequences:
            sets, heads, _ = own.counts.shape
            rows.append(_rows(span, _query_blocks(own), lists, sets, heads))
            lists += own.counts.numel()
        counts, starts = self._lists
        sorted_rows = _longest_first(torch.cat(rows), counts, self.heads)
        return BlockTable(sorted_rows, counts.to(torch.int32), starts, self.indices, self.queries_covered).to(self.device)

    @cached_property
    def by_key(self) -> BlockTable:
        """For each key block the query blocks that read it; not for adaptive patterns."""
        if self._numbers.entries > _MOST_ON_DEVICE:
            return self._transposed(self._numbers, self.indices.cpu()).to(self.device)
        table = self._transposed(self._numbers.to(self.device), self.indices.to(self.device))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # it is kept, so it must be complete for every stream
        return table

    @cached_property
    def _numbers_on_device(self) -> _ListNumbers:
        return self._numbers.to(self.device)

    def for_queries(self, chosen: Tensor | None) -> BlockTable:
        """``by_query`` for one call, which may have chosen the indices."""
        table = self.by_query
        keep_for_device(self, table.tensors)
        return table if chosen is None else replace(table, indices=chosen.flatten())

    def for_keys(self, chosen: Tensor | None) -> BlockTable:
        """``by_key`` for one call. A choice is transposed on the device, and nothing waits for that."""
        if chosen is None:
            keep_for_device(self, self.by_key.tensors)
            return self.by_key
        keep_for_device(self, self._numbers_on_device[2:])
        return self._transposed(self._numbers_on_device, chosen.flatten())

    def _transposed(self, numbers: _ListNumbers, indices: Tensor) -> BlockTable:
        places = places_of(numbers.counts, numbers.starts, numbers.entries)
        columns = numbers.columns.repeat_interleave(numbers.counts, output_size=numbers.entries)
        readers = numbers.readers.repeat_interleave(numbers.counts, output_size=numbers.entries)
        columns.add_(indices.index_select(0, places))
        counts, starts, indices = transposed_entries(columns, readers, numbers.transposed)
        rows = _longest_first(numbers.key_rows, counts, self.heads)
        return BlockTable(rows, counts.to(torch.int32), starts, indices, self.keys_covered)


@lru_cache(maxsize=32)
def _tables(problem: Problem, device: torch.device, shape: torch.Size | None) -> BlockTables:
    chosen = None if shape is None else torch.empty(shape, dtype=torch.int32, device="meta")
    return BlockTables(problem, lists_of(problem, chosen, device), device)


@lru_cache(maxsize=256)
def _running_tables(problem: RunningBlocks, device: torch.device) -> BlockTables:
    return BlockTables(problem, [(problem.span, problem.lists)], device)


def find_block_tables(problem: Problem, device: torch.device, chosen: Tensor | None) -> BlockTables:
    """The tables of a block-sparse problem. For an adaptive pattern they depend on the shape of the choice only."""
    if isinstance(problem, RunningBlocks):
        return _running_tables(problem, device)
    return _tables(problem, device, None if chosen is None else chosen.shape)


def _none(dtype: torch.dtype) -> Tensor:
    return torch.zeros(0, dtype=dtype, device="cpu")


def _query_blocks(lists: BlockLists) -> Tensor:
    return torch.arange(lists.first, lists.first + lists.query_blocks, device="cpu")


def _rows(span: Span, blocks: Tensor, first_list: int, sets: int, heads: int) -> Tensor:
    """The table rows of a sequence, whose lists are numbered from ``first_list`` on: by sample, head and block."""
    samples, step = torch.arange(span.samples.start, span.samples.stop, device="cpu"), len(blocks)
    own_set = torch.arange(len(samples), device="cpu") if sets > 1 else torch.zeros_like(samples)
    lists = first_list + own_set[:, None] * heads * step + torch.arange(step, device="cpu")
    same = torch.ones_like(lists)
    queries = same * (span.queries.start - span.positions.start), same * span.positions.start
    keys = same * span.keys.start
    if isinstance(span, BlockSpan):
        keys += torch.arange(len(samples), device="cpu")[:, None] * span.sample_rows
    own_lists = lists, same * (step if heads > 1 else 0)
    columns = (samples[:, None] * same, blocks * same, *queries, keys, same * span.positions.stop, *own_lists)
    return torch.stack((*columns, same * span.length, same * span.dropout_row), -1).flatten(0, 1)


def _joined(lists: list[BlockLists]) -> tuple[Tensor, Tensor]:
    """The starts of lists and the indices they point into, which are not copied if all lists share them."""
    none = _none(torch.int64)
    if len({own.indices.data_ptr() for own in lists}) <= 1:
        indices = lists[0].indices if lists else none.to(torch.int32)
        return torch.cat([none, *(own.starts.flatten() for own in lists)]), indices
    starts, first = [], 0
    for own in lists:
        starts.append(own.starts.flatten() + first)
        first += len(own.indices)
    return torch.cat(starts), torch.cat([own.indices.cpu() for own in lists])


def _longest_first(rows: Tensor, counts: Tensor, heads: int) -> Tensor:
    if not len(rows):
        return rows
    lists = rows[:, _FIRST_LIST, None] + torch.arange(heads, device=rows.device) * rows[:, _LIST_STEP, None]
    rows = rows[counts[lists].amax(1).argsort(descending=True, stable=True)]
    return rows[rows[:, 0].argsort(stable=True)]
