"""Calls of a stock kernel over block lists: dense tiles of gathered key blocks.

A list is cut into chunks of powers of two of key blocks, so that chunks of one size are equal tiles and share few calls.
The last entry of a list is a tile of its own where it may be special. Under ``is_causal`` that is the block on the
diagonal, a causal square; otherwise it is the short last block of the sequence. Everything that decides about shapes is
known on the host, and only block numbers are on the device. If rows are in another order, the lists are those of the call
that is not causal, and the kernel masks by position.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size. U units: tiles of one sample, and
of one head if lists differ by head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.merge import merge_
from dilated_attention_pytorch.execute.strided import Positions
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.values import Inputs


@dataclass(frozen=True, slots=True)
class PlacedDropout:
    """Dropout of query and key rows; which pairs it keeps depends on their rows in the sequence of tokens."""

    dropout: Dropout  # placed at the first sample and head
    queries: Tensor  # (N,) rows
    keys: Tensor  # (M,)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Equal tiles: ``rows`` query rows of one query block over ``blocks`` key blocks, of each the rows ``keys``."""

    lists: Tensor  # (T,) number of the list (sample, head, query block), on the host
    entries: Tensor  # (T,) index of the first key block in the indices, on the host
    skipped: int  # positions of the query block before its first query
    rows: int
    blocks: int
    keys: range  # within each key block
    causal: bool = False
    # Function of the numbers of key and query blocks: which tiles count. Where the host can read them, only those are made.
    gate: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ListedTiles:
    """The tiles of block lists.

    The query rows are at ``positions``, by which they belong to query blocks. The key rows are key blocks one after the
    other, of which the last may be short. With ``originals``, a row sees only keys of no larger original position.
    """

    lists: BlockLists
    positions: range
    is_causal: bool
    dropout: PlacedDropout | None = None
    originals: Positions | None = None

    def calls(self, inputs: Inputs, others: tuple[Tensor, ...], limit: int) -> Iterator[ListedCall]:
        """Kernel calls of at most ``limit`` gathered elements of queries and of keys, where possible."""
        (batch, _, heads, head_dim), (_, length, key_heads, _) = inputs.query.shape, inputs.key.shape
        lists, size, device = self.lists, self.lists.block_size, self.lists.indices.device
        samples, list_heads, query_blocks = lists.counts.shape
        own_heads = 1 if list_heads > 1 else heads  # of one unit
        most_blocks = 2 ** max(0, (limit // (size * head_dim * own_heads)).bit_length() - 1)
        for made in _chunks(lists, self.positions, length, self.is_causal, most_blocks):
            if made.keys.stop > length:  # there is no such block
                continue
            copies = 1 if samples > 1 else batch  # of a tile: one for each sample
            step = max(1, limit // (copies * own_heads * head_dim * max(made.rows, made.blocks * len(made.keys))))
            gate = None
            if made.gate is not None:
                key = lists.indices[made.entries.to(device)].long()
                gate = made.gate(key, (lists.first + made.lists % query_blocks).to(device))
            numbers = torch.arange(len(made.lists), device="cpu")
            if gate is not None and _host_reads(gate):
                numbers, gate = gate.nonzero().squeeze(1), None
            for own in torch.split(numbers, step):
                if len(own) == 0:
                    continue
                number, entry = made.lists[own].repeat_interleave(copies), made.entries[own].repeat_interleave(copies)
                sample = number // (list_heads * query_blocks)
                if copies > 1:
                    sample = torch.arange(batch, device="cpu").repeat(len(own))
                head = torch.arange(heads, device="cpu").view(1, -1, 1)
                if list_heads > 1:
                    head = (number // query_blocks % list_heads).view(-1, 1, 1)
                block = lists.first + number % query_blocks
                row = block[:, None] * size + made.skipped - self.positions.start
                row = row + torch.arange(made.rows, device="cpu")
                within = torch.arange(made.keys.start, made.keys.stop, device=device)
                key_block = lists.indices[(entry[:, None] + torch.arange(made.blocks, device="cpu")).to(device)].long()
                counted = None if gate is None else gate[own.to(device)].repeat_interleave(copies)
                if counted is not None:  # tiles that do not count read rows that exist
                    key_block = torch.where(counted[:, None], key_block, 0)
                key_row = (key_block[:, :, None] * size + within).flatten(1)
                yield ListedCall(
                    tiles=self, sample=sample.view(-1, 1, 1).to(device), row=row[:, None].to(device), head=head.to(device),
                    key_row=key_row[:, None], key_head=(head // (heads // key_heads)).to(device),
                    causal=made.causal, gate=counted,
                )  # fmt: skip

    def key_sums(self, grads: Inputs) -> Inputs:
        """Where the gradients of calls are added: new tensors for keys and values, whose rows follow one another."""
        sums = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in grads[1:])
        return Inputs(grads.query, *sums)

    def add_key_sums_(self, grads: Inputs, sums: Inputs) -> None:
        """Add the sums of keys and values to their gradients."""
        grads.key.add_(sums.key)
        grads.value.add_(sums.value)


@dataclass(frozen=True, slots=True, eq=False)
class ListedCall:
    """Tiles of a kernel call as index tensors: samples (U,1,1), query and key rows (U,1,rows), heads (U or 1,heads,1)."""

    tiles: ListedTiles
    sample: Tensor
    row: Tensor
    head: Tensor
    key_row: Tensor
    key_head: Tensor
    causal: bool
    gate: Tensor | None  # (U,): units that count

    def queries(self, x_bnh: Tensor) -> Tensor:
        """(U, heads, rows, ...) of a tensor (B, N, H, ...)."""
        return x_bnh[self.sample, self.row, self.head]

    def keys(self, x_bmg: Tensor) -> Tensor:
        """(U, heads, keys, D) of a tensor (B, M, G, D)."""
        return x_bmg[self.sample, self.key_row, self.key_head]

    def lse(self, lse_bnh: Tensor) -> Tensor:
        """The lse of the query rows; infinity in units that do not count, whose weights are then 0."""
        lse = self.queries(lse_bnh)
        return lse if self.gate is None else lse.masked_fill(~self.gate[:, None, None], torch.inf)

    def mask(self) -> dict[str, Any]:
        """The further argument of a kernel that masks pairs by position: (U, 1, rows) each, the same for all heads."""
        if self.tiles.originals is None:
            return {}
        queries, keys = self.tiles.originals
        return {"positions": (queries[self.sample, self.row], keys[self.sample, self.key_row])}

    def factors(self, device: torch.device) -> dict[str, Any]:
        """The further argument of a kernel that drops weights."""
        placed = self.tiles.dropout
        if placed is None:
            return {}
        sample, head = self.sample.unsqueeze(-1), self.head.unsqueeze(-1)
        i, j = placed.queries[self.row].unsqueeze(-1), placed.keys[self.key_row].unsqueeze(-2)
        factors = placed.dropout.factors
        return {"factors": lambda rows, keys: factors(sample, head, 0, i[:, :, rows], j[..., keys])}

    def merge_(self, out: Tensor, lse_bnh: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
        """Merge the result of the call into ``out`` and ``lse``: no row is in two units of a call."""
        if self.gate is not None:
            partial_lse = partial_lse.masked_fill(~self.gate[:, None, None], -torch.inf)
        merged, merged_lse = self.queries(out), self.queries(lse_bnh)
        merge_(merged, merged_lse, partial, partial_lse)
        out[self.sample, self.row, self.head] = merged
        lse_bnh[self.sample, self.row, self.head] = merged_lse

    def add_queries_(self, x_bnhd: Tensor, partial: Tensor) -> None:
        """Add to the query rows."""
        x_bnhd[self.sample, self.row, self.head] = self.queries(x_bnhd) + partial

    def add_keys_(self, x_bmgd: Tensor, partial: Tensor) -> None:
        """Add to the key rows, which units share."""
        _, m, heads, d = x_bmgd.shape
        index = (self.sample * m + self.key_row) * heads + self.key_head
        x_bmgd.view(-1, d).index_add_(0, index.flatten(), partial.reshape(-1, d).to(x_bmgd.dtype))


def _host_reads(x: Tensor) -> bool:
    """Whether the host reads the values of a tensor without a device synchronisation."""
    return x.device.type == "cpu"


def _chunks(lists: BlockLists, positions: range, length: int, is_causal: bool, most_blocks: int) -> Iterator[_Chunks]:
    """The tiles of lists. ``most_blocks``, a power of two, bounds the key blocks of one."""
    size, last, stop = lists.block_size, lists.key_blocks - 1, lists.first + lists.query_blocks
    tail = length - last * size
    counts, starts = lists.counts.flatten(), lists.starts.flatten()
    block = torch.arange(lists.first, stop, device="cpu").expand(lists.counts.shape).flatten()
    whole = range(size)
    # The first and the last query block, which may have fewer rows, and those between.
    cuts = sorted({lists.first, min(lists.first + 1, stop), max(lists.first, stop - 1), stop})
    for first_block, stop_block in pairwise(cuts):
        # All query blocks of a run have the same rows: the first one may begin late, the last one may end early.
        skipped = max(0, positions.start - first_block * size)
        rows = min(size, positions.stop - first_block * size) - skipped
        own = ((block >= first_block) & (block < stop_block) & (counts > 0)).nonzero().squeeze(1)
        left, start = counts[own], starts[own]
        if is_causal or tail < size:
            left = left - 1
            entry = start + left
            if is_causal:
                if skipped:
                    yield _Chunks(own, entry, skipped, rows, 1, range(skipped), gate=operator.eq)
                square = range(skipped, skipped + rows)
                yield _Chunks(own, entry, skipped, rows, 1, square, causal=True, gate=operator.eq)
                yield _Chunks(own, entry, skipped, rows, 1, whole, gate=operator.ne)
            else:
                yield _Chunks(own, entry, skipped, rows, 1, range(tail), gate=lambda key, _: key == last)
                yield _Chunks(own, entry, skipped, rows, 1, whole, gate=lambda key, _: key != last)
        blocks = most_blocks
        while blocks:
            chosen = (left >= blocks).nonzero().squeeze(1)
            if len(chosen):
                yield _Chunks(own[chosen], start[chosen], skipped, rows, blocks, whole)
                left, start = left.clone(), start.clone()
                left[chosen] -= blocks
                start[chosen] += blocks
            else:
                blocks //= 2
