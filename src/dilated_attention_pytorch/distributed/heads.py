"""Heads exchanged instead of rows ("Ulysses"): every rank attends over the whole sequence, for its share of the heads.

For one dense segment only, where every row is read: a rank receives its heads of all rows once, instead of all heads of all
other rows, and gives the rows of its result back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.distributed.route import Message
from dilated_attention_pytorch.distributed.transport import Parcel, Wire
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards


def why_not(
    pattern: Dilated, length: int, key_heads: int, world: int, dropout_p: float, bucket_size: int | None, comm_dtype: Any
) -> list[str]:
    """The reasons why heads cannot be exchanged."""
    reasons = []
    if len(pattern.branches) > 1 or pattern.segment_lengths[0] < length or pattern.dilation_rates[0] > 1:
        reasons.append(f"the pattern must be one dense segment, Dilated([{length}], [1]) or longer, got {pattern}")
    if key_heads < world:
        reasons.append(f"every rank needs a key head, got {key_heads} key heads for {world} ranks")
    if dropout_p > 0.0:
        reasons.append(f"dropout counts heads of the whole call (dropout_p = {dropout_p})")
    if bucket_size is not None or comm_dtype is not None:
        reasons.append("bucket_size and comm_dtype are for transports that send rows")
    return reasons


def heads_of(rank: int, key_heads: int, world: int) -> range:
    """The key heads of a rank; numbers differ by at most one.

    >>> [heads_of(rank, 5, 3) for rank in range(3)]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each, more = divmod(key_heads, world)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def received_bytes(shards: Shards, batch: int, heads: int, key_heads: int, head_dim: int, element_size: int) -> int:
    """What a rank with the longest shard and the most heads receives in a forward: q, k and v, later rows of the output."""
    rows, mine = max(map(shards.rows, range(shards.world_size))), -(-key_heads // shards.world_size)
    there = (shards.length - rows) * mine * (heads // key_heads + 2)
    back = rows * (key_heads - mine) * (heads // key_heads)
    return batch * (there + back) * head_dim * element_size


class _Swap(torch.autograd.Function):
    """Tensors (B, n, all heads, ...) -> (B, N, own heads, ...), or back; the gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, wire: Wire, shards: Shards, key_heads: int, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.constants = wire, shards, key_heads, to_heads
        return _swap(wire, shards, key_heads, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wire, shards, key_heads, to_heads = ctx.constants
        swapped = _Swap.apply(wire, shards, key_heads, not to_heads, *grads)  # type: ignore[no-untyped-call]
        return None, None, None, None, *swapped


def _swap(wire: Wire, shards: Shards, key_heads: int, to_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    world, rank = shards.world_size, wire.rank
    # Query heads go with their key head; a tensor of own heads has as many of them as this rank has.
    own = len(heads_of(rank, key_heads, world)) if not to_heads else key_heads
    groups = [x.shape[2] // own for x in tensors]
    heads = [
        [slice(h.start * g, h.stop * g) for h in (heads_of(p, key_heads, world) for p in range(world))] for g in groups
    ]
    results = tuple(
        x.new_empty((x.shape[0], shards.length, heads[a][rank].stop - heads[a][rank].start, *x.shape[3:]))
        if to_heads
        else x.new_empty((x.shape[0], shards.rows(rank), key_heads * groups[a], *x.shape[3:]))
        for a, x in enumerate(tensors)
    )  # fmt: skip

    def rows(x: Tensor, p: int) -> Tensor:
        """Rank p's rows of a whole sequence, in its order."""
        return torch.cat([x[:, chunk.start : chunk.stop] for chunk in shards.chunks[p]], 1)

    def put_rows(x: Tensor, p: int, some: Tensor) -> None:
        start = 0
        for chunk in shards.chunks[p]:
            x[:, chunk.start : chunk.stop] = some[:, start : start + len(chunk)]
            start += len(chunk)

    sends, receives, arrivals = [], [], []
    for p in range(world):
        for a, x in enumerate(tensors):
            part = x[:, :, heads[a][p]] if to_heads else rows(x, p)
            if p == rank:
                arrivals.append((a, p, part))
                continue
            length = shards.rows(p if to_heads else rank)
            count = heads[a][rank if to_heads else p]
            arrival = x.new_empty((x.shape[0], length, count.stop - count.start, *x.shape[3:]))
            arrivals.append((a, p, arrival))
            sends.append(Parcel(Message(rank, p, 0, "exchange of heads", ()), "heads", p, part.contiguous()))
            receives.append(Parcel(Message(p, rank, 0, "exchange of heads", ()), "heads", p, arrival))
    wire.start(sends, receives, wire.now())()
    for a, p, part in arrivals:
        if to_heads:
            put_rows(results[a], p, part)
        else:
            results[a][:, :, heads[a][p]] = part
    return results


def attend(
    query: Tensor, key: Tensor, value: Tensor, wire: Wire, shards: Shards, *, return_lse: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse (B, H, n))`` of this rank's rows; ``options`` are those of ``attention`` on one device."""
    from dilated_attention_pytorch.api import attention  # which imports this package when it is given a group

    def swap(to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        swapped: tuple[Tensor, ...] = _Swap.apply(wire, shards, key.shape[2], to_heads, *tensors)  # type: ignore[no-untyped-call]
        return swapped

    dense = Dilated([max(1, shards.length)], [1])
    q, k, v = swap(True, query, key, value)
    if not return_lse:
        return swap(False, attention(q, k, v, dense, **options))[0], None
    out, lse = attention(q, k, v, dense, return_lse=True, **options)
    out, lse_bnh1 = swap(False, out, lse.transpose(1, 2).unsqueeze(-1))
    return out, lse_bnh1.squeeze(-1).transpose(1, 2).contiguous()
