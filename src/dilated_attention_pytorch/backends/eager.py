"""Tiles by plain matrix products: any device, any floating-point type, any head size. Slower than a fused kernel.

A call computes its query rows in blocks, so that its scores stay below a fixed number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import StockBackend
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.execute.loop import TileKernel

_MAX_SCORES = 2**25
_MAX_FACTORS = 2**22  # the hash of dropout takes several 64-bit numbers per pair
# Function of a slice of query rows and a slice of key rows: what dropout multiplies their weights by.
Factors = Callable[[slice, slice], Tensor]


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 for -inf: a row that sees no key has only scores of -inf, whose weights are then 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _blocks(
    q: Tensor, k: Tensor, causal: bool, scale: float, masks: dict[str, Any]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of query rows with the keys they may see and their scores."""
    units, heads, rows, _ = q.shape
    dtype = accumulate_dtype(q.dtype)
    positions, most = masks.get("positions"), _MAX_FACTORS if "factors" in masks else _MAX_SCORES
    step = max(1, min(rows, most // max(1, units * heads * k.shape[2])))
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        seen = slice(0, block.stop if causal else k.shape[2])
        scores = torch.matmul(q[:, :, block].to(dtype), k[:, :, seen].to(dtype).transpose(-1, -2)).mul_(scale)
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(start + 1)
            scores.masked_fill_(hidden, -torch.inf)
        if positions is not None:
            scores.masked_fill_(positions[0][:, :, block, None] < positions[1][:, :, None, :], -torch.inf)
        yield block, seen, scores


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, **masks: Any) -> tuple[Tensor, Tensor]:
    factors: Factors | None = masks.get("factors")
    dtype = accumulate_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for block, seen, scores in _blocks(q, k, causal, scale, masks):
        block_lse = torch.logsumexp(scores, -1)
        lse[:, :, block] = block_lse
        weights = scores.sub_(_finite(block_lse).unsqueeze(-1)).exp_()
        if factors is not None:
            weights.mul_(factors(block, seen).to(dtype))
        out[:, :, block] = torch.matmul(weights, v[:, :, seen].to(dtype))
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, **masks: Any
) -> tuple[Tensor, Tensor, Tensor]:
    factors: Factors | None = masks.get("factors")
    dtype = accumulate_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for block, seen, scores in _blocks(q, k, causal, scale, masks):
        weights = scores.sub_(_finite(lse[:, :, block]).unsqueeze(-1)).exp_()
        dout_block = dout[:, :, block].to(dtype)
        delta = (dout_block * out[:, :, block].to(dtype)).sum(-1, keepdim=True)
        dweights = torch.matmul(dout_block, v[:, :, seen].to(dtype).transpose(-1, -2))
        kept = weights
        if factors is not None:
            factor = factors(block, seen).to(dtype)
            kept, dweights = weights * factor, dweights.mul_(factor)
        dv[:, :, seen] += torch.matmul(kept.transpose(-1, -2), dout_block)
        dscores = dweights.sub_(delta).mul_(weights)
        dq[:, :, block] = torch.matmul(dscores, k[:, :, seen].to(dtype)).mul_(scale)
        dk[:, :, seen] += torch.matmul(dscores.transpose(-1, -2), q[:, :, block].to(dtype)).mul_(scale)
    return dq, dk, dv


KERNEL = TileKernel("eager", _forward, _backward)
EAGER = StockBackend("eager", why_not=lambda request: [], kernel=lambda request: KERNEL)
