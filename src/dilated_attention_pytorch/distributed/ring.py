"""``attention`` over a sharded sequence: check, agree with the other ranks, choose a transport, execute."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dilated_attention_pytorch
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.blocks.call import causal_by_position, prepare_blocks
from dilated_attention_pytorch.checks import DTYPES, check_no_forward_derivative, check_order, prepare, rows_in_order
from dilated_attention_pytorch.distributed import heads as ulysses
from dilated_attention_pytorch.distributed import local
from dilated_attention_pytorch.distributed.agreement import Facts, agree, agree_once, refuse
from dilated_attention_pytorch.distributed.block_ring import block_work, check_block_sharding
from dilated_attention_pytorch.distributed.cost import TRANSPORTS, Costs, choose_transport
from dilated_attention_pytorch.distributed.dilated_work import DilatedWork
from dilated_attention_pytorch.distributed.executor import Job, RingAttention
from dilated_attention_pytorch.distributed.route import default_bucket_size, make_route
from dilated_attention_pytorch.distributed.transport import Wire, resolve_group
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.ops import rows_contiguous, tile_kernel
from dilated_attention_pytorch.orders.order import Identity, Order
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.dropout import Dropout
from dilated_attention_pytorch.plan.sequences import host_cu_seqlens, host_lengths
from dilated_attention_pytorch.shards import Shards, check_layout


def check_sharding(layout: str | Shards, bucket_size: int | None, transport: str, comm_dtype: torch.dtype | None) -> None:
    """Raise if an option that says how rows travel is not one ``attention`` takes."""
    if not isinstance(layout, Shards):
        check_layout(layout)
    if bucket_size is not None and (isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1):
        raise ValueError(f"bucket_size is a number of rows, at least 1, or None, got {bucket_size!r}")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    if comm_dtype is not None and comm_dtype not in DTYPES:
        raise TypeError(f"comm_dtype must be one of {', '.join(map(str, DTYPES))} or None, got {comm_dtype!r}")


def _check(
    query: Tensor, key: Tensor, value: Tensor, pattern: Dilated | BlockSparse, layout: str | Shards, rank: int, world: int
) -> None:
    """What a sharded call asks for beyond a call on one device."""
    check_no_forward_derivative(query, key, value)
    if isinstance(pattern, Dilated) and pattern.torchscale_padding:  # every tile of a row would count its zero keys
        raise ValueError("a sharded sequence has no torchscale_padding; use a pattern without it, or one device")
    n, m = query.shape[1], key.shape[1]
    if n != m:
        raise ValueError(f"a shard has as many queries as keys, got {n} and {m}; decoding is for one device")
    if isinstance(layout, Shards):
        if layout.world_size != world:
            raise ValueError(f"layout has shards for {layout.world_size} ranks, the group has {world}")
        own = layout.rows(rank)
        if n != own:
            whole = "; these look like whole sequences, not shards: use shard_sequence" if n == layout.length else ""
            raise ValueError(f"layout gives rank {rank} a shard of {own} rows, its tensors have {n}{whole}")


def _check_sharded(rows: list[int], lengths: tuple[int, ...] | None, cu_seqlens: tuple[int, ...] | None) -> None:
    """Raise if every rank seems to have passed the whole sequence."""
    n, world = rows[0], len(rows)
    ends = {"lengths": max(lengths or (0,)), "cu_seqlens": cu_seqlens[-1] if cu_seqlens else 0}
    for name, end in ends.items():
        if world > 1 and set(rows) == {n} and (0 < end <= n if name == "lengths" else 0 < end == n):
            raise ValueError(
                f"these look like whole sequences, not shards: each of {world} ranks has {n} rows, together {n * world}, "
                f"but {name} ends at {end}; use shard_sequence. If the rest is padding, say which rows ranks hold: "
                f"layout=Shards.of([{n}] * {world}, ...)"
            )


def _check_order_length(order: Order, shards: Shards) -> None:
    """Raise if the order is not over the rows of all ranks together."""
    if len(order) != shards.length:
        rows = [shards.rows(rank) for rank in range(shards.world_size)]
        whole = "; these look like whole sequences, not shards" if set(rows) == {len(order)} else ""
        raise ValueError(
            f"the order is over {len(order)} positions, the {len(rows)} rank(s) have {shards.length} rows together{whole}; "
            "use shard_sequence(x, group, order=order)"
        )


def _shards(group: dist.ProcessGroup, facts: Facts, rows: int, drawn: int | None) -> tuple[Shards, int | None]:
    """The shards of all ranks and their common seed, after they have compared everything else."""
    known = facts.layout if isinstance(facts.layout, Shards) else None
    seed = facts.seed if drawn is None else drawn
    if dist.get_world_size(group) == 1:
        return known or Shards.of([rows], facts.layout), seed
    if known is not None and drawn is None:
        agree_once(group, facts, rows)
        return known, seed
    every, first = agree(group, facts, rows, drawn or 0)
    if known is None:
        _check_sharded(every, facts.lengths, facts.cu_seqlens)
    return known or Shards.of(every, facts.layout), seed if drawn is None else first


@lru_cache(maxsize=64)
def traffic(
    pattern: Dilated, shards: Shards, batch: int, heads: int, head_dim: int, element_size: int,
    lengths: tuple[int, ...] | None, cu_seqlens: tuple[int, ...] | None, is_causal: bool, key_heads: int,
    bucket_size: int, exchange_heads: bool,
) -> Costs:  # fmt: skip
    """What a forward sends, on the rank that has most to do: the same answer on every rank."""
    route = make_route(
        pattern, shards, 0, batch, key_heads,
        is_causal=is_causal, lengths=lengths, cu_seqlens=cu_seqlens, bucket_size=bucket_size,
    )  # fmt: skip
    received = [
        sum(p.schedule.bytes(rank, head_dim=head_dim, element_size=element_size, batch=p.batch) for p in route.places)
        for rank in range(shards.world_size)
    ]
    longest = max(map(shards.rows, range(shards.world_size)))
    size = batch * head_dim * element_size
    return Costs(
        bytes=max(received),
        messages=len(route.ticks),
        shard_bytes=2 * longest * (heads + key_heads) * size,
        ulysses_bytes=ulysses.received_bytes(shards, batch, heads, key_heads, head_dim, element_size)
        if exchange_heads
        else None,
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the exchange is not traced
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str | Shards,
    bucket_size: int | None,
    transport: str,
    comm_dtype: torch.dtype | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    mixing_gradient: str,
    backend: str,
    return_lse: bool,
    order: Order | None,
    ordered: bool | None,
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)`` of this rank's rows, lse only if asked for: see ``attention``."""
    group = resolve_group(group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    try:
        arguments: dict[str, Any] = {
            "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "seed": seed, "lengths": lengths,
            "cu_seqlens": cu_seqlens, "mixing_gradient": mixing_gradient,
        }  # fmt: skip
        if isinstance(pattern, BlockSparse):
            check_block_sharding(bucket_size, transport)
            query, key, value, used_scale = prepare_blocks(query, key, value, **arguments)
        else:
            query, key, value, used_scale = prepare(query, key, value, pattern, **arguments)
        check_sharding(layout, bucket_size, transport, comm_dtype)
        _check(query, key, value, pattern, layout, rank, world)
        rows_in_order(order, ordered, sharded=True)
        if order is not None:
            check_order(order, query, key, lengths, cu_seqlens, sharded=True)
        by_position = causal_by_position(pattern, order, is_causal)
        request = Request.of(query, dropout_p, by_position)
        kernel = tile_kernel(local.stock_backend(backend, request), query)
        detached = mixing_gradient == "detached" and isinstance(pattern, Dilated) and len(pattern.branches) > 1
        fused = local.fused_backend(backend, request, pattern, layout, detached=detached)
        wire = Wire(group, query.device)
    except (ValueError, TypeError, NotImplementedError) as mistake:
        refuse(group, layout, mistake)
        raise
    query, key, value = map(rows_contiguous, (query, key, value))
    (batch, n, heads, head_dim), key_heads = query.shape, key.shape[2]
    given = None if seed is None or dropout_p == 0.0 else int(seed)
    drawn = None
    if dropout_p > 0.0 and given is None:
        drawn = int(torch.randint(0, 2**62, (), dtype=torch.int64, device=query.device))
    facts = Facts(
        version=dilated_attention_pytorch.__version__,
        device=query.device.type,
        dtype=str(query.dtype),
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)),
        pattern=pattern.digest if isinstance(pattern, BlockSparse) else pattern.spec,
        is_causal=is_causal,
        scale=used_scale,
        dropout_p=float(dropout_p),
        seed=given,
        lengths=None if lengths is None else tuple(lengths.tolist()),
        cu_seqlens=None if cu_seqlens is None else tuple(cu_seqlens.tolist()),
        # By its name, because the identity is computed without positions and an order that is equal to it is not.
        order=None if order is None else repr(order) if isinstance(order, Identity) else order.fingerprint,
        mixing_gradient=mixing_gradient,
        backend=backend,
        return_lse=return_lse,
        layout=layout,
        bucket_size=bucket_size,
        transport=transport,
        comm_dtype=str(comm_dtype),
    )
    shards, used_seed = _shards(group, facts, n, drawn)
    # From here on every rank decides the same.
    if order is not None:
        _check_order_length(order, shards)
    call: dict[str, Any] = {
        # Under an order, rows of any place may be seen: all travel, and tiles are masked by position.
        "is_causal": is_causal and not by_position,
        "lengths": host_lengths(lengths, shards.length),
        "cu_seqlens": host_cu_seqlens(cu_seqlens, shards.length),
    }
    positions = order.positions.expand(batch, -1) if by_position and order is not None else None
    job = partial(
        Job,
        transport=wire,
        scale=used_scale,
        kernel=kernel,
        comm_dtype=accumulate_dtype(query.dtype) if comm_dtype is None else comm_dtype,
    )
    dropout = Dropout(dropout_p, used_seed) if dropout_p > 0.0 else None
    if isinstance(pattern, BlockSparse):
        pattern.check_call(batch, shards.length, shards.length, heads, is_causal=is_causal, packed=cu_seqlens is not None)
        blocks, ahead = block_work(query, key, pattern, shards, wire, used_scale, transport, **call)
        blocks = replace(blocks, positions=positions, dropout=dropout)
        out, lse = RingAttention.apply(query, key, value, job(blocks, (), ahead=ahead))  # type: ignore[no-untyped-call]
        return out, lse
    reasons = ulysses.why_not(pattern, shards.length, key_heads, world, dropout_p, bucket_size, comm_dtype)
    rows_per_message = default_bucket_size(shards, query.device.type) if bucket_size is None else bucket_size
    if transport == "auto" and world > 1:
        costs = traffic(
            pattern, shards, batch, heads, head_dim, query.element_size(),
            key_heads=key_heads, bucket_size=rows_per_message, exchange_heads=not reasons, **call,
        )  # fmt: skip
        transport = choose_transport(costs)
    if transport == "ulysses":
        if reasons:
            raise ValueError("heads cannot be exchanged (transport='ulysses'):\n" + "\n".join(f"  {x}" for x in reasons))
        return ulysses.attend(
            query, key, value, wire, shards, return_lse=return_lse, is_causal=is_causal, scale=used_scale, lengths=lengths,
            cu_seqlens=cu_seqlens, backend=backend, order=order, ordered=order is not None,
        )  # fmt: skip
    route = partial(make_route, pattern, shards, rank, batch, key_heads, bucket_size=rows_per_message, **call)
    branches = range(len(pattern.branches)) if detached else ()
    own = None
    if fused is not None:
        problem = local.LocalProblem(
            pattern, shards=shards, rank=rank, batch=batch, heads=heads, key_heads=key_heads, **call
        )
        own = problem, fused
    work = DilatedWork(route(), own, dropout, positions)
    alone = tuple(DilatedWork(route(branch=branch), None, dropout, positions) for branch in branches)
    ahead = None if transport == "allgather" else 1
    out, lse = RingAttention.apply(query, key, value, job(work, alone, ahead=ahead))  # type: ignore[no-untyped-call]
    return out, lse
