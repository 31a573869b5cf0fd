"""The choice of an adaptive block-sparse pattern: the highest products of mean queries and mean keys.

Shape letters: B batch, H query heads, G key heads, D head size, Q query blocks, n key blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.rules import Rows

# The most scores of pairs of blocks that exist at a time. They need about 28 bytes each, with the memory of the sort.
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

    The score of a pair has the same bits whatever else is computed with it, so ranks choose what one device chooses.
    """
    (batch, heads, count, d), n = q.shape, k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], 1) if batch * heads * n * d <= _MAX_SCORES else k
    key_heads = k.shape[1]
    pairs, per_key = batch * key_heads, heads // key_heads  # pairs of samples and key heads
    queries, keys = q.reshape(pairs, per_key, count, d), k.flatten(0, 1)
    chosen = torch.full((pairs, per_key, count, width), rows.blocks, dtype=torch.int32, device=q.device)
    # Pairs together have at most ``_MAX_SCORES`` scores and key elements, unless one pair or row has more.
    most_rows = max(1, min(count, _MAX_SCORES // max(1, n)))
    most_pairs = max(1, _MAX_SCORES // max(1, most_rows * n, n * d))
    for at in _slices(pairs, most_pairs):
        # A function of its own, so that its key means in float64 do not outlive it.
        _choose_(chosen[at], queries[at], keys[at], rows, scale, most_rows)
    return chosen.view(batch, heads, count, width)


def _choose_(chosen: Tensor, queries: Tensor, keys: Tensor, rows: Rows, scale: float, most_rows: int) -> None:
    """Write the blocks of all queries of some pairs of samples and key heads."""
    n, device = keys.shape[1], keys.device
    j, most = torch.arange(n, device=device), min(chosen.shape[-1], n)
    low, high = torch.finfo(torch.float64).min, torch.finfo(torch.float64).max
    key_integers, key_units = _fixed_point(keys)
    # The unit of a query and the size of the scale are factors of all scores of a row.
    factors = key_units.mT * math.copysign(float(scale != 0), scale)
    for h, own in product(range(queries.shape[1]), _slices(queries.shape[2], most_rows)):
        score = torch.bmm(_fixed_point(queries[:, h, own])[0], key_integers.mT).mul_(factors)
        score.nan_to_num_(nan=low, posinf=high, neginf=low)
        score.masked_fill_(j == rows.i[own, None], torch.inf).masked_fill_(j >= rows.visible[own, None], -torch.inf)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., :most]
        best = best.masked_fill(j[:most] >= rows.budget[own, None], rows.blocks)
        chosen[:, h, own, :most] = best.sort(-1).values.to(torch.int32)


def _slices(stop: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, stop, step))


def _fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (..., D) as integers of 23 bits (at D = 64 and 128), and the unit of each vector, a power of 2.

    The largest element of a vector has this many bits, the others fewer. Sums of products of two vectors are then exact in
    float64. So they do not depend on the order in which a matrix product adds, which differs between shapes and devices.
    """
    bits = (53 - math.ceil(math.log2(x.shape[-1]))) // 2
    largest = x.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(-1, keepdim=True).double().clamp_(min=1e-300)
    units = largest / torch.frexp(largest).mantissa * 2.0**-bits
    return x.to(torch.float64, copy=True).div_(units).round_(), units


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
