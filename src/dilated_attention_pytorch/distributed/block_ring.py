"""Block-sparse attention over a sharded sequence: what ``ring`` asks for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from dilated_attention_pytorch.distributed.block_choice import adaptive_places
from dilated_attention_pytorch.distributed.block_work import BlockWork, make_work, static_work
from dilated_attention_pytorch.distributed.cost import Costs, choose_transport
from dilated_attention_pytorch.distributed.transport import Wire
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.shards import Shards


def check_block_sharding(bucket_size: int | None, transport: str) -> None:
    """Raise for what a sharded call with a block-sparse pattern does not have."""
    if bucket_size is not None:
        raise ValueError(
            f"the blocks that a rank reads of another come in one message, so there is no bucket_size: got {bucket_size}; "
            "leave it out"
        )
    if transport == "ulysses":
        raise ValueError(
            "heads are exchanged (transport='ulysses') for one dense segment only, got a block-sparse pattern; use 'auto', "
            "'ring' or 'allgather'"
        )


def block_work(
    query: Tensor,
    key: Tensor,
    pattern: BlockSparse,
    shards: Shards,
    wire: Wire,
    scale: float,
    transport: str,
    *,
    is_causal: bool,
    lengths: tuple[int, ...] | None,
    cu_seqlens: tuple[int, ...] | None,
) -> tuple[BlockWork, int | None]:
    """The work of this rank, and how many messages are under way at a time: see ``Job``."""
    (batch, _, heads, _), key_heads = query.shape, key.shape[2]
    call: dict[str, Any] = {"is_causal": is_causal, "lengths": lengths, "cu_seqlens": cu_seqlens}
    if pattern.is_adaptive:  # nobody knows how much the others receive
        places = adaptive_places(query, key, pattern, shards, wire, scale, **call)
        work = make_work(places, wire.rank, shards.world_size, is_causal=is_causal, device=query.device)
        return work, None if transport == "allgather" else 1
    work = static_work(pattern, shards, wire.rank, (batch, heads, key_heads), query.device, **call)
    if transport == "auto":
        transport = choose_transport(costs_of(work, shards, query, key_heads))
    return work, None if transport == "allgather" else 1


def costs_of(work: BlockWork, shards: Shards, query: Tensor, key_heads: int) -> Costs:
    """What a forward with such queries sends."""
    (batch, _, heads, head_dim), size = query.shape, query.element_size()
    return _traffic(work, shards, head_dim, size, 2 * (heads + key_heads) * batch * head_dim * size)


@lru_cache(maxsize=16)
def _traffic(work: BlockWork, shards: Shards, head_dim: int, element_size: int, row_bytes: int) -> Costs:
    """What a forward sends, on the rank that has most to do: the same answer on every rank.

    ``row_bytes`` are those of a row of queries, keys, values and output.
    """
    ranks = range(shards.world_size)
    received = [sum(place.bytes(rank, head_dim, element_size) for place in work.places) for rank in ranks]
    return Costs(max(received), len(ranks) - 1, max(map(shards.rows, ranks)) * row_bytes, None)
