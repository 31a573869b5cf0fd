"""Whole sequences to shards and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.checks import check_is_order
from dilated_attention_pytorch.distributed.shards import Shards
from dilated_attention_pytorch.distributed.transport import resolve_group
from dilated_attention_pytorch.orders import Order, check_dim


def rows_of(shards: Shards, rank: int, device: torch.device) -> Tensor:
    """The positions of a rank's rows."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in shards.chunks[rank]])


def shard_sequence(
    x: Tensor,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    layout: str = "contiguous",
    dim: int = 1,
    order: Order | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank holds whole; lengths differ by at most one. Differentiable.

    Five rows on two ranks are rows 0, 1, 2 and rows 3, 4; in the zigzag layout rows 0, 1, 4 and rows 2, 3.

    With an ``order`` they are those rows of ``order.permute(x, dim)``: a model that orders its embeddings so, once, passes
    the same order to every ``attention(..., group=group, order=order)`` and to ``gather_sequence``.
    """
    check_dim(x, dim)
    group = resolve_group(group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    rows = rows_of(Shards.even(x.shape[dim], world, layout), rank, x.device)
    if order is None:
        return x.index_select(dim, rows)
    check_is_order(order)
    return order.take(x, rows, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, layout: str, dim: int) -> Tensor:
        lengths = [torch.zeros((), dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, torch.tensor(x.shape[dim], device=x.device), group=group)
        shards = Shards.of([int(n) for n in lengths], layout)
        rows = [rows_of(shards, rank, x.device) for rank in range(shards.world_size)]
        # Collectives want equal sizes: every rank sends as many rows as the longest has.
        longest = max(map(len, rows))
        padded = x.new_zeros((longest, *x.movedim(dim, 0).shape[1:]))
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=group)
        whole = x.new_empty((shards.length, *padded.shape[1:]))
        for part, some in zip(parts, rows, strict=True):
            whole[some] = part[: len(some)]
        ctx.rows, ctx.dim, ctx.group = rows[dist.get_rank(group)], dim, group
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable  # autograd does not see the sum over ranks
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # What every rank's loss says about this rank's rows.
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.index_select(ctx.dim, ctx.rows), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def gather_sequence(
    x: Tensor,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    layout: str = "contiguous",
    dim: int = 1,
    order: Order | None = None,
) -> Tensor:
    """The whole sequence from the shards of all ranks, in the order of positions, on every rank.

    With the ``order`` in which it was sharded, positions are the original ones.

    Differentiable: a shard's gradient is the sum over what all ranks do with it, so a loss that every rank computes from
    the whole sequence has to be divided by the number of ranks.
    """
    check_dim(x, dim)
    if order is not None:
        check_is_order(order)
    whole: Tensor = _Gather.apply(x, resolve_group(group), layout, dim % x.dim())  # type: ignore[no-untyped-call]
    return whole if order is None else order.unpermute(whole, dim)
