"""Whole sequences to shards and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.checks import check_is_order
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, comparable, reporting
from dilated_attention_pytorch.distributed.groups import Group, resolve_group
from dilated_attention_pytorch.distributed.rank_plans import positions_of
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.orders.order import Order, check_dim
from dilated_attention_pytorch.shards import Shards, check_layout


def rows_of(shards: Shards, rank: int, device: torch.device) -> Tensor:
    """The positions of a rank's rows."""
    return positions_of(shards.chunks[rank], device)


def shard_sequence(
    x: Tensor, group: Group, *, layout: str = "contiguous", dim: int = 1, order: Order | None = None
) -> Tensor:
    """This rank's rows of a tensor that every rank holds whole; lengths differ by at most one. Differentiable.

    Five rows on two ranks are rows 0, 1, 2 and rows 3, 4; in the zigzag layout they are rows 0, 1, 4 and rows 2, 3.

    With an ``order``, they are those rows of ``order.permute(x, dim)``. A model that orders its embeddings so once passes
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
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, shards: Shards, dim: int) -> Tensor:
        rows = [rows_of(shards, rank, x.device) for rank in range(shards.world_size)]
        # Collectives need equal sizes: every rank sends as many rows as the longest shard has.
        padded = x.new_zeros((shards.longest, *x.movedim(dim, 0).shape[1:]))
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        gathered = [torch.empty_like(padded) for _ in rows]
        watch = watch_of(group)
        with watch.turn("gather_sequence"), watch.waiting("gather the rows of the others"):
            dist.all_gather(gathered, padded, group=group)
        whole = x.new_empty((shards.length, *padded.shape[1:]))
        for shard, own in zip(gathered, rows, strict=True):
            whole[own] = shard[: len(own)]
        ctx.rows, ctx.dim, ctx.group = rows[dist.get_rank(group)], dim, group
        watch.calls += 1
        ctx.number = watch.calls
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable  # autograd does not see the sum over ranks
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The losses of all ranks depend on this rank's rows.
        total, watch = gradient.contiguous().clone(), watch_of(ctx.group)
        if watch.world > 1:  # sums have no identity: ranks that run backwards in another order would add up other gradients
            agree(ctx.group, Arguments("the backward of gather_sequence", (("call", ctx.number),)), 0)
        with watch.turn("the backward of gather_sequence"), watch.waiting("add up the gradients of all"):
            dist.all_reduce(total, group=ctx.group)
        return total.index_select(ctx.dim, ctx.rows), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def gather_sequence(
    x: Tensor, group: Group, *, layout: str = "contiguous", dim: int = 1, order: Order | None = None
) -> Tensor:
    """The whole sequence from the shards of all ranks, in the order of positions, on every rank.

    With the ``order`` in which it was sharded, positions are the original ones.

    Differentiable: the gradient of a shard is the sum over what all ranks do with it. A loss that every rank computes from
    the whole sequence therefore has to be divided by the number of ranks.
    """
    with reporting(Sharding(group, layout)):
        check_dim(x, dim)
        check_layout(layout)
        if order is not None:
            check_is_order(order)
    group, dim = resolve_group(group), dim % x.dim()
    every = [x.shape[dim]]
    if dist.get_world_size(group) > 1:
        other_dims = tuple(x.shape[:dim] + x.shape[dim + 1 :])
        values: dict[str, Any] = {"device": x.device, "dtype": x.dtype, "other_dims": other_dims, "dim": dim}
        values |= {"requires_grad": torch.is_grad_enabled() and x.requires_grad, "layout": layout}
        values |= {"order": None if order is None else order.fingerprint}
        arguments = Arguments("gather_sequence", tuple((name, comparable(value)) for name, value in values.items()))
        # Collectives end a process whose tensor is not as large as those of the others.
        every, _ = agree(group, arguments, x.shape[dim])
    whole: Tensor = _Gather.apply(x, group, Shards.of(every, layout), dim)  # type: ignore[no-untyped-call]
    return whole if order is None else order.unpermute(whole, dim)
