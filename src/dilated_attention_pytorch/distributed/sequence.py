"""Whole sequences to shards and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.checks import check_is_order
from dilated_attention_pytorch.distributed.agreement import Arguments, agree, refuse
from dilated_attention_pytorch.distributed.transport import failure, resolve_group
from dilated_attention_pytorch.orders.order import Order, check_dim
from dilated_attention_pytorch.shards import Shards, check_layout


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


@dataclass(frozen=True, slots=True)
class Gathering(Arguments):
    """Those of ``gather_sequence``: collectives end a process whose tensor is not as large as the others'."""

    call = "gather_sequence"
    device: str
    dtype: str
    other_dims: tuple[int, ...]
    dim: int
    requires_grad: bool
    layout: str
    order: str | None  # its fingerprint


@contextlib.contextmanager
def _naming(task: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say what failed."""
    try:
        yield
    except RuntimeError as error:
        raise failure(f"rank {dist.get_rank(group)} could not {task}", error) from error


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, shards: Shards, dim: int) -> Tensor:
        rows = [rows_of(shards, rank, x.device) for rank in range(shards.world_size)]
        # Collectives want equal sizes: every rank sends as many rows as the longest has.
        longest = max(map(len, rows))
        padded = x.new_zeros((longest, *x.movedim(dim, 0).shape[1:]))
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        parts = [torch.empty_like(padded) for _ in rows]
        with _naming("gather the rows of the others", group):
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
        with _naming("add up the gradients of all", ctx.group):
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
    try:
        check_dim(x, dim)
        check_layout(layout)
        if order is not None:
            check_is_order(order)
    except (ValueError, TypeError) as mistake:
        if group is not None:
            refuse(group, layout, mistake)
        raise
    group = resolve_group(group)
    dim %= x.dim()
    every = [x.shape[dim]]
    if dist.get_world_size(group) > 1:
        facts = Gathering(
            device=x.device.type,
            dtype=str(x.dtype),
            other_dims=tuple(x.shape[:dim] + x.shape[dim + 1 :]),
            dim=dim,
            requires_grad=torch.is_grad_enabled() and x.requires_grad,
            layout=layout,
            order=None if order is None else order.fingerprint,
        )
        every, _ = agree(group, facts, x.shape[dim], 0)
    whole: Tensor = _Gather.apply(x, group, Shards.of(every, layout), dim)  # type: ignore[no-untyped-call]
    return whole if order is None else order.unpermute(whole, dim)
