"""Exchange of heads instead of rows ("Ulysses"): every rank attends over the whole sequence, for its share of the heads.

This serves one dense segment, where every row is read. A rank receives its heads of all rows once, instead of all heads of
all other rows, and returns the rows of its result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import backends, operators
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import Call
from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.own_rows import sharding_of
from dilated_attention_pytorch.distributed.wire import Parcel, Wire
from dilated_attention_pytorch.dtypes import accumulate_dtype
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards
from dilated_attention_pytorch.values import Inputs


def why_not_heads(call: Call, shards: Shards) -> list[str]:
    """The reasons why heads cannot be exchanged."""
    reasons, pattern, sharding = [], call.pattern, sharding_of(call)
    length, world = shards.length, shards.world_size
    branches = pattern.branches if isinstance(pattern, Dilated) else ()
    if len(branches) != 1 or branches[0][0] < length or branches[0][1] > 1:
        reasons.append(f"the pattern must be one dense segment, Dilated([{length}], [1]) or longer, got {pattern}")
    if call.key_heads < world:
        reasons.append(f"every rank needs a key head, got {call.key_heads} key heads for {world} ranks")
    if call.dropout_p > 0.0:
        reasons.append(f"dropout counts heads of the whole call (dropout_p = {call.dropout_p})")
    if sharding.bucket_size is not None or sharding.comm_dtype is not None:
        reasons.append("bucket_size and comm_dtype are for transports that send rows")
    return reasons


def heads_of(rank: int, key_heads: int, world: int) -> range:
    """The key heads of a rank; their numbers differ by at most one.

    >>> [heads_of(rank, 5, 3) for rank in range(3)]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    each, more = divmod(key_heads, world)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def received_bytes(call: Call, shards: Shards, *, backward: bool = False) -> list[int]:
    """By rank: the bytes that it receives. A forward exchanges inputs, then the output; a backward their gradients."""
    per_key, world, found = call.heads // call.key_heads, shards.world_size, []
    for rank in range(world):
        rows, own = shards.rows(rank), len(heads_of(rank, call.key_heads, world))
        of_others, of_heads = (shards.length - rows) * own, rows * (call.key_heads - own)
        inputs, output = (of_heads, of_others) if backward else (of_others, of_heads)
        elements = call.head_dim * (inputs * (per_key + 2) + output * per_key)
        lse = output * per_key * accumulate_dtype(call.dtype).itemsize if call.return_lse else 0
        found.append(call.batch * (elements * call.dtype.itemsize + lse))
    return found


class _Swap(torch.autograd.Function):
    """Tensors (B, n, all heads, ...) -> (B, N, own heads, ...), or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, to_heads: bool, wire: Wire, shards: Shards, key_heads: int, *tensors: Tensor) -> Any:
        ctx.to_heads, ctx.constants = to_heads, (wire, shards, key_heads)
        with wire.turn("exchange of rows for heads" if to_heads else "exchange of heads for rows"):
            return _swap(to_heads, wire, shards, key_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_Swap.apply(not ctx.to_heads, *ctx.constants, *grads)  # type: ignore[no-untyped-call]


def _swap(to_heads: bool, wire: Wire, shards: Shards, key_heads: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    world, rank = shards.world_size, wire.rank
    shares = [heads_of(p, key_heads, world) for p in range(world)]
    results, arrivals, sends, receives = [], [], [], []
    for x in tensors:
        per_key = x.shape[2] // (key_heads if to_heads else len(shares[rank]))
        # The heads of each rank in a tensor of all heads: query heads go with their key head.
        heads = [slice(share.start * per_key, share.stop * per_key) for share in shares]
        shape = (shards.length, len(shares[rank])) if to_heads else (shards.rows(rank), key_heads)
        result = x.new_empty((x.shape[0], shape[0], shape[1] * per_key, *x.shape[3:]))
        results.append(result)
        for p in range(world):
            chunks = shards.chunks[p]
            sent = x[:, :, heads[p]] if to_heads else torch.cat([x[:, c.start : c.stop] for c in chunks], 1)
            if p == rank:
                arrivals.append((result, p, heads, sent))
                continue
            rows, share = (shards.rows(p), shares[rank]) if to_heads else (shards.rows(rank), shares[p])
            arrival = x.new_empty((x.shape[0], rows, len(share) * per_key, *x.shape[3:]))
            arrivals.append((result, p, heads, arrival))
            sends.append(Parcel(Message(rank, p, 0, "exchange of heads"), "heads", p, sent.contiguous()))
            receives.append(Parcel(Message(p, rank, 0, "exchange of heads"), "heads", p, arrival))
    wire.start(sends, receives, wire.now())()
    for result, p, heads, arrival in arrivals:
        if not to_heads:
            result[:, :, heads[p]] = arrival
            continue
        chunks = shards.chunks[p]
        for chunk, own in zip(chunks, torch.split(arrival, [len(x) for x in chunks], 1), strict=True):
            result[:, chunk.start : chunk.stop] = own
    return tuple(results)


def exchange_heads(call: Call, inputs: Inputs, shards: Shards, wire: Wire) -> tuple[Tensor, Tensor | None]:
    """``(out, lse (B, H, n))`` of this rank's rows; lse only if the call returns it."""

    def swap(to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        swapped: tuple[Tensor, ...] = _Swap.apply(to_heads, wire, shards, call.key_heads, *tensors)  # type: ignore[no-untyped-call]
        return swapped

    own = Inputs(*swap(True, *inputs))
    rows, heads, key_heads = shards.length, own.query.shape[2], own.key.shape[2]
    one_device = replace(call, queries=rows, keys=rows, heads=heads, key_heads=key_heads, sharding=None)
    one_device = replace(one_device, pattern=Dilated([max(1, rows)], [1]))
    out, lse = operators.run(one_device, own, backends.choose(call.backend, Request.of(one_device)))
    if not call.return_lse:
        return swap(False, out)[0], None
    out, lse_bnh1 = swap(False, out, lse.transpose(1, 2).unsqueeze(-1))
    return out, lse_bnh1.squeeze(-1).transpose(1, 2).contiguous()
