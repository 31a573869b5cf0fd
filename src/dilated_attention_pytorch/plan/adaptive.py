"""The choice of an adaptive block-sparse pattern: the highest products of mean queries and mean keys.

Shape letters: B batch, H query heads, G key heads, D head size, Q query blocks, n key blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.rules import Rows

# The most scores of pairs of blocks that exist at a time. They need about 24 bytes each, with the memory of the sort.
_MAX_SCORES = 2**20


def adaptive(query: Tensor, key: Tensor, rows: Rows, first: int, block_size: int, scale: float, width: int) -> Tensor:
    """The chosen blocks of every sample and head, (B, H, Q, width), ascending, the first c of each list valid.

    ``rows`` are on the device of the query, from query block ``first`` on, so nothing synchronises with the device.

    The score of two blocks is ``scale`` times the product of the means of their queries and keys; the block itself comes
    first, then the highest scores, the earlier block of two with the same. Queries are the last positions.
    """
    with torch.no_grad():
        dtype = accumulate_dtype(query.dtype)
        n, length = query.shape[1], key.shape[1]
        q = block_means(query, length - n - first * block_size, block_size, dtype)
        return best_blocks(q, block_means(key, 0, block_size, dtype).contiguous(), rows, scale, width)


def best_blocks(q: Tensor, k: Tensor, rows: Rows, scale: float, width: int) -> Tensor:
    """The choice of ``adaptive`` from the means of queries (B, H, Q, D) and of the first n key blocks (B, G, n, D).

    The rows see no other blocks than these. A limited number of scores exists at a time. Only few key means are copied for
    each query head. If there are more, the query heads of a key head take turns.
    """
    (batch, heads, count, d), n, dtype, device = q.shape, k.shape[2], q.dtype, q.device
    k = k.repeat_interleave(heads // k.shape[1], 1) if batch * heads * n * d <= _MAX_SCORES else k
    key_heads = k.shape[1]
    pairs, per_key = batch * key_heads, heads // key_heads  # pairs of samples and key heads
    queries, keys = q.view(batch, key_heads, per_key, count, d), k.flatten(0, 1).transpose(1, 2)
    j, most = torch.arange(n, device=device), min(width, n)
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    chosen = torch.full((pairs, per_key, count, width), rows.blocks, dtype=torch.int32, device=device)
    for h in range(per_key):
        of_pairs = queries[:, :, h].flatten(0, 1)
        for at, own in _limited(pairs, count, n):
            score = torch.bmm(of_pairs[at, own], keys[at]).mul_(scale).nan_to_num_(nan=low, posinf=high, neginf=low)
            score.masked_fill_(j == rows.i[own, None], torch.inf).masked_fill_(j >= rows.visible[own, None], -torch.inf)
            best = score.sort(dim=-1, descending=True, stable=True).indices[..., :most]
            best = best.masked_fill(j[:most] >= rows.budget[own, None], rows.blocks)
            chosen[at, h, own, :most] = best.sort(-1).values.to(torch.int32)
    return chosen.view(batch, heads, count, width)


def _limited(pairs: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices of pairs and of rows. Each has at most ``_MAX_SCORES`` scores, unless a single row has more."""
    most_rows = max(1, min(rows, _MAX_SCORES // max(1, columns)))
    most_pairs = max(1, _MAX_SCORES // max(1, most_rows * columns))
    for pair in range(0, pairs, most_pairs):
        for row in range(0, rows, most_rows):
            yield slice(pair, pair + most_pairs), slice(row, row + most_rows)


def block_means(x: Tensor, skipped: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """(B, heads, blocks, D): the means of the rows of each block; the first block lacks its first ``skipped`` rows."""
    batch, rows, heads, d = x.shape
    blocks = math.ceil((skipped + rows) / block_size)
    sums = torch.zeros((batch, blocks, heads, d), dtype=dtype, device=x.device)
    _add_to_blocks_(sums, x, skipped, block_size)
    block = torch.arange(blocks, device=x.device)
    ends = ((block + 1) * block_size).clamp(max=skipped + rows)
    sizes = (ends - (block * block_size).clamp(min=skipped)).to(dtype)
    return sums.div_(sizes[:, None, None]).transpose(1, 2)


def _add_to_blocks_(sums: Tensor, x: Tensor, first: int, block_size: int) -> None:
    """Add rows, the first of which is position ``first``, to sums (B, blocks, heads, D) by block, in a fixed order.

    Whole blocks are added at once, and so are the rows before and after them: ``index_add_`` adds in any order on a GPU.
    """
    rows, block = x.shape[1], first // block_size
    head = min(rows, -first % block_size)
    whole = (rows - head) // block_size
    if head:
        sums[:, block] += x[:, :head].sum(1, dtype=sums.dtype)
        block += 1
    if whole:
        inside = x[:, head : head + whole * block_size].reshape(x.shape[0], whole, block_size, *x.shape[2:])
        sums[:, block : block + whole] += inside.sum(2, dtype=sums.dtype)
    if head + whole * block_size < rows:
        sums[:, block + whole] += x[:, head + whole * block_size :].sum(1, dtype=sums.dtype)
