"""Execution of block lists through a tile kernel: dense tiles of gathered key blocks, merged forward, summed backward.

A list is cut into chunks of powers of two of key blocks, so that chunks of one size are equal tiles and go in few calls.
Its last entry goes apart where it may be special: under ``is_causal`` the block on the diagonal, a causal square, otherwise
the short last block of the sequence. Everything that decides about shapes is known on the host; only numbers of blocks
are on the device. Rows that lie in another order are causal by their original positions: the lists and tiles are then those
of the call that is not causal, and the kernel masks by position.

Shape letters: B batch, N query rows, M key rows, H query heads, G key heads, D head size; U units: tiles of one sample, and
of one head if lists differ by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.execute import loop as tiles
from dilated_attention_pytorch.execute.loop import TileKernel
from dilated_attention_pytorch.execute.merge import accumulate_dtype, merge_
from dilated_attention_pytorch.execute.strided import Positions
from dilated_attention_pytorch.patterns.lists import BlockLists
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.sequences import Span


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Equal tiles: ``rows`` query rows of one query block over ``blocks`` key blocks, of each the rows ``keys``."""

    lists: Tensor  # (T,) number of the list (sample, head, query block), on the host
    entries: Tensor  # (T,) place of the first key block in the indices, on the host
    skipped: int  # positions of the query block before its first query
    rows: int
    blocks: int
    keys: range  # within each key block
    causal: bool = False
    # Of the numbers of key and query blocks: which tiles count. Where the host can read them, only those are made.
    gate: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PlacedDropout:
    """Dropout of some query and key rows; which pairs it keeps depends on their places in the row of tokens."""

    dropout: Dropout  # at the first sample and head
    queries: Tensor  # (N,) places
    keys: Tensor  # (M,)


@dataclass(frozen=True, slots=True)
class _Call:
    """Tiles of a kernel call as index tensors: samples (U,1,1), query and key rows (U,1,rows), heads (U or 1,heads,1)."""

    sample: Tensor
    row: Tensor
    head: Tensor
    key_row: Tensor
    key_head: Tensor
    causal: bool
    gate: Tensor | None  # (U,)

    def queries(self, x_bnh: Tensor) -> Tensor:
        """(U, heads, rows, ...) of a tensor (B, N, H, ...)."""
        return x_bnh[self.sample, self.row, self.head]

    def keys(self, x_bmg: Tensor) -> Tensor:
        """(U, heads, keys, D) of a tensor (B, M, G, D)."""
        return x_bmg[self.sample, self.key_row, self.key_head]

    def positions(self, positions: Positions | None) -> dict[str, Any]:
        """The further argument of a kernel, if rows are masked by position: (U, 1, rows) each, the same for all heads."""
        if positions is None:
            return {}
        return {"positions": (positions[0][self.sample, self.row], positions[1][self.sample, self.key_row])}

    def kept(self, placed: PlacedDropout | None) -> dict[str, Any]:
        """The further argument of a kernel, if weights are dropped."""
        if placed is None:
            return {}
        sample, head = self.sample.unsqueeze(-1), self.head.unsqueeze(-1)
        i, j = placed.queries[self.row].unsqueeze(-1), placed.keys[self.key_row].unsqueeze(-2)
        factors = placed.dropout.factors
        return {"factors": lambda rows, keys: factors(sample, head, 0, i[:, :, rows], j[..., keys])}

    def put_queries(self, x_bnh: Tensor, part: Tensor) -> None:
        """Write ``queries`` back: no row is in two units of a call."""
        x_bnh[self.sample, self.row, self.head] = part

    def add_queries(self, x_bnhd: Tensor, part: Tensor) -> None:
        """Add to the rows of ``queries``."""
        self.put_queries(x_bnhd, self.queries(x_bnhd) + part)

    def add_keys(self, x_bmgd: Tensor, part: Tensor) -> None:
        """Add to the rows of ``keys``: units share them."""
        _, m, heads, d = x_bmgd.shape
        place = (self.sample * m + self.key_row) * heads + self.key_head
        x_bmgd.view(-1, d).index_add_(0, place.flatten(), part.reshape(-1, d).to(x_bmgd.dtype))


def _host_reads(x: Tensor) -> bool:
    """Whether reading the values of a tensor waits for no device."""
    return x.device.type == "cpu"


def _tiles(lists: BlockLists, positions: range, length: int, is_causal: bool, most_blocks: int) -> Iterator[_Tiles]:
    """The tiles of lists. ``most_blocks``, a power of two, bounds the key blocks of one."""
    size, last, stop = lists.block_size, lists.key_blocks - 1, lists.first + lists.query_blocks
    tail = length - last * size
    counts, starts = lists.counts.flatten(), lists.starts.flatten()
    block = torch.arange(lists.first, stop).expand(lists.counts.shape).flatten()
    whole = range(size)
    for first_block, stop_block in _runs(lists.first, stop):
        # All query blocks of a run have the same rows: the first one may begin late, the last one may end early.
        skipped = max(0, positions.start - first_block * size)
        rows = min(size, positions.stop - first_block * size) - skipped
        some = ((block >= first_block) & (block < stop_block) & (counts > 0)).nonzero().squeeze(1)
        left, place = counts[some], starts[some]
        if is_causal or tail < size:
            left = left - 1
            entry = place + left
            if is_causal:
                if skipped:
                    yield _Tiles(some, entry, skipped, rows, 1, range(skipped), gate=_same)
                square = range(skipped, skipped + rows)
                yield _Tiles(some, entry, skipped, rows, 1, square, causal=True, gate=_same)
                yield _Tiles(some, entry, skipped, rows, 1, whole, gate=_different)
            else:
                yield _Tiles(some, entry, skipped, rows, 1, range(tail), gate=lambda key, _: key == last)
                yield _Tiles(some, entry, skipped, rows, 1, whole, gate=lambda key, _: key != last)
        blocks = most_blocks
        while blocks:
            chosen = (left >= blocks).nonzero().squeeze(1)
            if len(chosen):
                yield _Tiles(some[chosen], place[chosen], skipped, rows, blocks, whole)
                left, place = left.clone(), place.clone()
                left[chosen] -= blocks
                place[chosen] += blocks
            else:
                blocks //= 2


def _same(key: Tensor, query: Tensor) -> Tensor:
    return key == query


def _different(key: Tensor, query: Tensor) -> Tensor:
    return key != query


def _runs(first: int, stop: int) -> list[tuple[int, int]]:
    """The first and the last query block, which may have fewer rows, and those between."""
    cuts = sorted({first, min(first + 1, stop), max(first, stop - 1), stop})
    return list(pairwise(cuts))


def _calls(lists: BlockLists, positions: range, q: Tensor, k: Tensor, is_causal: bool, limit: int) -> Iterator[_Call]:
    """Kernel calls of at most ``limit`` gathered elements of queries and of keys, where possible."""
    (batch, _, heads, head_dim), length, key_heads = q.shape, k.shape[1], k.shape[2]
    size, device = lists.block_size, lists.indices.device
    samples, list_heads, query_blocks = lists.counts.shape
    own_heads = 1 if list_heads > 1 else heads  # of one unit
    most_blocks = 2 ** max(0, (limit // (size * head_dim * own_heads)).bit_length() - 1)
    for made in _tiles(lists, positions, length, is_causal, most_blocks):
        if made.keys.stop > length:  # there is no such block
            continue
        copies = 1 if samples > 1 else batch  # of a tile: one for each sample
        step = max(1, limit // (copies * own_heads * head_dim * max(made.rows, made.blocks * len(made.keys))))
        gate = None
        if made.gate is not None:
            key = lists.indices[made.entries.to(device)].long()
            gate = made.gate(key, (lists.first + made.lists % query_blocks).to(device))
        numbers = torch.arange(len(made.lists))
        if gate is not None and _host_reads(gate):
            numbers, gate = gate.nonzero().squeeze(1), None
        for some in torch.split(numbers, step):
            if len(some) == 0:
                continue
            number, entry = made.lists[some].repeat_interleave(copies), made.entries[some].repeat_interleave(copies)
            sample = number // (list_heads * query_blocks)
            if copies > 1:
                sample = torch.arange(batch).repeat(len(some))
            head = (
                (number // query_blocks % list_heads).view(-1, 1, 1)
                if list_heads > 1
                else torch.arange(heads).view(1, -1, 1)
            )
            block = lists.first + number % query_blocks
            row = block[:, None] * size + made.skipped - positions.start + torch.arange(made.rows)
            place = (entry[:, None] + torch.arange(made.blocks)).to(device)
            within = torch.arange(made.keys.start, made.keys.stop, device=device)
            key_block = lists.indices[place].long()
            counted = None if gate is None else gate[some.to(device)].repeat_interleave(copies)
            if counted is not None:  # tiles that do not count read rows that are there
                key_block = torch.where(counted[:, None], key_block, 0)
            key_row = (key_block[:, :, None] * size + within).flatten(1)
            yield _Call(
                sample.view(-1, 1, 1).to(device),
                row[:, None].to(device),
                head.to(device),
                key_row[:, None],
                (head // (heads // key_heads)).to(device),
                made.causal,
                counted,
            )


def forward(
    lists: list[tuple[Span, BlockLists]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: TileKernel,
    positions: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out (B, N, H, D), lse (B, H, N))``: the attention of all tiles, merged.

    With ``positions`` (B, N), of as many queries as keys, each row sees only rows whose positions are not larger.
    """
    query, scale, _ = tiles.positive_scale(query, scale)
    dtype = accumulate_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse_bnh = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
    limit = tiles.part_limit(query)
    for span, some in lists:
        rows, columns = (span.samples, span.queries), (span.samples, span.keys)
        attend_(
            some, span.positions, query[rows], key[columns], value[columns], out[rows], lse_bnh[rows],
            is_causal=is_causal, scale=scale, kernel=kernel, limit=limit, originals=_of_span(positions, span),
            dropout=_at_span(dropout, span, query.device),
        )  # fmt: skip
    return out.to(query.dtype), lse_bnh.transpose(1, 2).contiguous()


def _of_span(positions: Tensor | None, span: Span) -> Positions | None:
    return None if positions is None else (positions[span.samples, span.queries], positions[span.samples, span.keys])


def _at_span(dropout: Dropout | None, span: Span, device: torch.device) -> PlacedDropout | None:
    if dropout is None:
        return None
    keys = torch.arange(span.keys.start, span.keys.stop, device=device)
    return PlacedDropout(dropout.at(span.samples.start, 0), keys[span.positions.start : span.positions.stop], keys)


def attend_(
    lists: BlockLists,
    positions: range,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: TileKernel,
    limit: int,
    originals: Positions | None = None,
    dropout: PlacedDropout | None = None,
) -> None:
    """Merge the attention of lists into ``out`` and ``lse_bnh``, both in the accumulation type; the scale is positive.

    The query rows are at ``positions``, by which they belong to query blocks; the key rows are key blocks one after the
    other, of which the last may be short. With ``originals``, the positions of both before they were put in order, a row
    sees only keys whose original positions are not larger than its own.
    """
    for call in _calls(lists, positions, q, k, is_causal, limit):
        _forward_call_(call, q, k, v, out, lse_bnh, scale, kernel, originals, dropout)


def _forward_call_(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    scale: float,
    kernel: TileKernel,
    originals: Positions | None,
    dropout: PlacedDropout | None,
) -> None:
    more = call.positions(originals) | call.kept(dropout)
    part, part_lse = kernel.forward(call.queries(q), call.keys(k), call.keys(v), call.causal, scale, **more)
    if call.gate is not None:
        part_lse = part_lse.masked_fill(~call.gate[:, None, None], -torch.inf)
    merged, merged_lse = call.queries(out), call.queries(lse_bnh)
    merge_(merged, merged_lse, part, part_lse)
    call.put_queries(out, merged)
    call.put_queries(lse_bnh, merged_lse)


def backward(
    lists: list[tuple[Span, BlockLists]],
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    kernel: TileKernel,
    positions: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``: the gradients of all tiles, summed, given the merged ``out`` and ``lse``."""
    query, scale, sign = tiles.positive_scale(query, scale)
    dtype = accumulate_dtype(query.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value))
    lse_bnh = lse.transpose(1, 2)
    dlse_bnh = None if dlse is None else dlse.transpose(1, 2)
    limit = tiles.part_limit(query)
    for span, some in lists:
        rows, columns = (span.samples, span.queries), (span.samples, span.keys)
        by_row, qkv = (dout[rows], out[rows], lse_bnh[rows]), (query[rows], key[columns], value[columns])
        add_gradients_(
            some, span.positions, by_row, None if dlse_bnh is None else dlse_bnh[rows], qkv,
            (dq[rows], dk[columns], dv[columns]), is_causal=is_causal, scale=scale, kernel=kernel, limit=limit,
            originals=_of_span(positions, span), dropout=_at_span(dropout, span, query.device),
        )  # fmt: skip
    if sign != 1.0:
        dq *= sign
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def add_gradients_(
    lists: BlockLists,
    positions: range,
    by_row: tuple[Tensor, Tensor, Tensor],
    dlse_bnh: Tensor | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    is_causal: bool,
    scale: float,
    kernel: TileKernel,
    limit: int,
    originals: Positions | None = None,
    dropout: PlacedDropout | None = None,
) -> None:
    """Add the gradients of ``attend_`` to ``grads`` (dq, dk, dv); ``by_row`` is dout, out and lse (B, N, H)."""
    (q, k, v), (dq, dk, dv) = qkv, grads
    # Sums go to tensors of their own, whose rows follow one another.
    k_sums, v_sums = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (k, v))
    for call in _calls(lists, positions, q, k, is_causal, limit):
        _backward_call_(call, *by_row, dlse_bnh, q, k, v, (dq, k_sums, v_sums), scale, kernel, originals, dropout)
    dk += k_sums
    dv += v_sums


def _backward_call_(
    call: _Call,
    dout: Tensor,
    out: Tensor,
    lse_bnh: Tensor,
    dlse_bnh: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    kernel: TileKernel,
    originals: Positions | None,
    dropout: PlacedDropout | None,
) -> None:
    mask = call.positions(originals)
    q, k, v, lse = call.queries(query), call.keys(key), call.keys(value), call.queries(lse_bnh)
    if call.gate is not None:
        lse = lse.masked_fill(~call.gate[:, None, None], torch.inf)  # all weights 0
    more = mask | call.kept(dropout)
    part = kernel.backward(call.queries(dout), q, k, v, call.queries(out), lse, call.causal, scale, **more)
    call.add_queries(grads[0], part[0])
    call.add_keys(grads[1], part[1])
    call.add_keys(grads[2], part[2])
    if dlse_bnh is not None:
        dq, dk = tiles.lse_gradients(kernel, q, k, lse, call.queries(dlse_bnh), call.causal, scale, **mask)
        call.add_queries(grads[0], dq)
        call.add_keys(grads[1], dk)
