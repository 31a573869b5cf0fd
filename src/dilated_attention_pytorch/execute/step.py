"""Decoding steps by stock operators: static shapes, and positions that only the device knows.

Shape letters: B batch, n rows of a chunk, H query heads, G key heads, D head size, S rows of the storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.plan.held import HeldRows


class CacheTensors(NamedTuple):
    """The tensors of a cache. A step changes all but the two tables, in place."""

    keys: Tensor  # (B, G, S, D)
    values: Tensor  # (B, G, S, D)
    tokens_seen: Tensor  # (B,) int64, the position of the next token
    rolled_back: Tensor  # (B,) int64, by how many tokens this position is before the furthest one that was reached
    table: Tensor  # (5 + G, branches) int64, see ``held_tables``
    branch: Tensor  # (S,) int32, the branch of each row
    arrived: Tensor  # (B * G + B,) int32, zeros between steps: counters of the decoding kernel


def held_tables(held: HeldRows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two constants of ``CacheTensors``.

    The table has the segment length, rate, rows of a segment, slots, first row and offsets of each branch.
    """
    columns = [(x.segment_length, x.dilation_rate, x.segment_rows, x.slots, x.first_row, *x.offsets) for x in held.branches]
    table = torch.tensor(columns, dtype=torch.int64, device="cpu").t().contiguous()
    numbers = torch.arange(len(columns), dtype=torch.int32, device="cpu")
    return table.to(device), numbers.repeat_interleave(table[3], output_size=held.rows).to(device)


def counters(keys: Tensor) -> Tensor:
    """``CacheTensors.arrived`` for these keys."""
    return torch.zeros(keys.shape[0] * (keys.shape[1] + 1), dtype=torch.int32, device=keys.device)


class _Columns(NamedTuple):
    """The columns of the table, for all branches or for all rows of the storage."""

    w: Tensor  # (columns,)
    r: Tensor
    segment_rows: Tensor
    slots: Tensor
    first: Tensor
    offsets: Tensor  # (G, columns)

    @staticmethod
    def of(table: Tensor) -> _Columns:
        w, r, segment_rows, slots, first = table[:5].unbind(0)
        return _Columns(w, r, segment_rows, slots, first, table[5:])

    def number(self, position: Tensor) -> Tensor:
        """(B,) positions to the numbers of their rows (B, columns)."""
        position = position.unsqueeze(-1)
        return position // self.w * self.segment_rows + position % self.w // self.r

    def behind(self, number: Tensor) -> Tensor:
        """How many numbers the newest row that a slot can hold is behind the last ``number``; both are (B, S)."""
        slot = torch.arange(len(self.first), device=self.first.device) - self.first
        return (number - slot) % self.slots


def step(
    held: HeldRows, storage: CacheTensors, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Append one token of every valid sample, and return its attention ``out (B, 1, H, D)`` and ``lse (B, H, 1)``.

    ``query`` is (B, 1, H, D), ``key`` and ``value`` are (B, 1, G, D), ``valid`` is (B,) bool. Other samples keep their
    state and get 0 and -inf. A token beyond ``max_tokens`` is not appended and gets NaN, because only the device knows its
    position.
    """
    keys, values, tokens_seen, rolled_back, *_ = storage
    valid = torch.ones_like(tokens_seen, dtype=torch.bool) if valid is None else valid
    beyond = None
    if held.max_tokens is not None:
        beyond = valid & (tokens_seen >= held.max_tokens)
        valid = valid & ~beyond
    branches, rows_of = _Columns.of(storage.table), storage.branch
    inside, number = tokens_seen.unsqueeze(-1) % branches.w, branches.number(tokens_seen)
    # Key heads and branches of which the token is a row, (B, G, branches).
    own = ((inside % branches.r).unsqueeze(1) == branches.offsets) & valid[:, None, None]
    index = (branches.first + number % branches.slots)[:, None, :, None].expand(*own.shape, keys.shape[3])
    for rows, row in ((keys, key), (values, value)):
        rows.scatter_(2, index, torch.where(own.unsqueeze(-1), row.transpose(1, 2), rows.gather(2, index)))
    # The rows of the token's segment, where it is a row itself, (B, G, S).
    columns = _Columns.of(storage.table.index_select(1, rows_of))
    near = columns.behind(number.index_select(1, rows_of)) <= (inside // branches.r).index_select(1, rows_of)
    seen = own.index_select(2, rows_of) & near.unsqueeze(1)
    out, lse = _attend(query, keys, values, seen, scale)
    taken = valid.long()
    tokens_seen.add_(taken)
    rolled_back.sub_(taken).clamp_(min=0)
    if beyond is not None:
        out = out.masked_fill(beyond[:, None, None, None], torch.nan)
        lse = lse.masked_fill(beyond[:, None, None], torch.nan)
    return out, lse


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over the rows that are seen (B, G, S). Other rows may hold anything, also NaN."""
    (batch, _, heads, head_dim), key_heads, dtype = query.shape, keys.shape[1], accumulate_dtype(query.dtype)
    q = query.to(dtype).reshape(batch, key_heads, heads // key_heads, head_dim)
    scores = torch.matmul(q, keys.to(dtype).transpose(-1, -2)).mul(scale)
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
    out = torch.matmul(weights, values.to(dtype).masked_fill(~seen.unsqueeze(-1), 0.0))
    return out.view(query.shape).to(query.dtype), lse.view(batch, heads, 1)


def append_(held: HeldRows, storage: CacheTensors, key: Tensor, value: Tensor, lengths: Tensor | None) -> None:
    """Append a chunk ``key, value (B, n, G, D)`` of any length, of which sample ``b`` has ``lengths[b]`` rows.

    For every slot, the position of the newest row that belongs there is computed. The row is copied if it is in the chunk.
    Rows beyond ``max_tokens`` are left out.
    """
    keys, values, tokens_seen, rolled_back, *_ = storage
    n = key.shape[1]
    if n == 0:
        return
    count = torch.full_like(tokens_seen, n) if lengths is None else lengths.to(tokens_seen).clamp(0, n)
    if held.max_tokens is not None:
        count = torch.minimum(count, held.max_tokens - tokens_seen)
    columns = _Columns.of(storage.table.index_select(1, storage.branch))
    last = columns.number(tokens_seen + count - 1)
    number = last - columns.behind(last)
    segment, row = number // columns.segment_rows, number % columns.segment_rows
    inside = (row * columns.r).unsqueeze(1) + columns.offsets  # (B, G, S)
    at = (segment * columns.w - tokens_seen.unsqueeze(-1)).unsqueeze(1) + inside  # row of the chunk
    new = (at >= 0) & (at < count[:, None, None]) & (inside < columns.w)
    index = at.clamp_(0, n - 1).unsqueeze(-1).expand(*at.shape, keys.shape[3])
    new = new.unsqueeze(-1)
    for rows, given in ((keys, key), (values, value)):
        torch.where(new, given.transpose(1, 2).gather(2, index), rows, out=rows)
    tokens_seen.add_(count)
    rolled_back.sub_(count).clamp_(min=0)
