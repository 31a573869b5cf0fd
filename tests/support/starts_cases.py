"""What the tests of samples with padding in front share: each sample by itself, from sliced rows."""

from __future__ import annotations

import torch

# Of 70 rows: whole, padding in front, on both sides, none at all, padding behind, few rows, and twice the same.
ROWS = 70
STARTS, LENGTHS = (0, 13, 50, 70, 0, 66, 20, 20), (70, 57, 5, 0, 41, 4, 33, 33)


def query_rows(start: int, length: int, n: int, m: int) -> slice:
    """The rows of the query tensor that belong to a sample: query row a is key row a + m - n."""
    rows = [a for a in range(n) if start <= a + m - n < start + length]
    return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)


def by_itself(attend, starts, lengths):
    """A call for the whole batch that computes ``attend(b, q, k, v)`` on the rows of each sample."""

    def call(q, k, v):
        (batch, n, heads, _), m = q.shape, k.shape[1]
        out = q * 0.0 + (k * 0.0).sum() + (v * 0.0).sum()  # it belongs to the graph, also without samples
        lse = torch.full((batch, heads, n), -torch.inf, dtype=q.dtype, device=q.device)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = query_rows(start, length, n, m)
            if own.stop > own.start:
                keys = slice(start, start + length)
                found = attend(b, q[b : b + 1, own], k[b : b + 1, keys], v[b : b + 1, keys])
                out[b, own], lse[b, :, own] = found[0][0].to(out), found[1][0].to(lse)
        return out, lse

    return call


def poisoned(tensors, starts, lengths):
    """Copies of query, key and value with NaN in all rows outside of the samples."""
    q, k, v = (x.detach().clone() for x in tensors)
    n, m = q.shape[1], k.shape[1]
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = query_rows(start, length, n, m)
        for x, rows in ((q, own), (k, slice(start, start + length)), (v, slice(start, start + length))):
            outside = torch.ones(x.shape[1], dtype=torch.bool)
            outside[rows] = False
            x[b, outside.to(x.device)] = torch.nan
    return [x.requires_grad_() for x in (q, k, v)]
