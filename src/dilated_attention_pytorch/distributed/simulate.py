"""A ring in one process: the ranks of a sharded call one after the other, and the memory that each would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.blocks.call import as_chosen, prepare_blocks
from dilated_attention_pytorch.checks import prepare
from dilated_attention_pytorch.distributed import local
from dilated_attention_pytorch.distributed.block_ring import check_block_sharding
from dilated_attention_pytorch.distributed.block_work import static_work
from dilated_attention_pytorch.distributed.dilated_work import DilatedWork
from dilated_attention_pytorch.distributed.executor import Job, Work, forward
from dilated_attention_pytorch.distributed.ring import check_sharding
from dilated_attention_pytorch.distributed.route import default_bucket_size, make_route
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.transport import Parcel
from dilated_attention_pytorch.execute.loop import positive_scale
from dilated_attention_pytorch.execute.merge import accumulate_dtype
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.ops import tile_kernel
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.shards import Shards


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most bytes that one rank had of each kind during a forward, counted by the allocator."""

    rank: int
    rows: int
    query: int
    key_value: int
    buffers: int  # for messages, both directions
    partials: int  # output and lse in the accumulation type, and what the tiles of one kernel call take
    received: int  # not held at once: what all messages together brought


@dataclass(slots=True)
class Shelf:
    """A transport within one process: what a rank receives is packed from the shards of the others."""

    works: list[Work]  # by rank
    keys: list[Tensor]
    values: list[Tensor]
    received: int = 0
    lag: int = 0

    def now(self) -> None:
        """Nothing runs beside the caller."""

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Pack as the rank that is to be received from would, into the buffers of this one."""
        for parcel in sends:
            assert parcel.pack is not None
            parcel.pack()  # for its memory: nobody reads it
        for parcel in receives:
            source = parcel.message.source
            self.works[source].pack_(parcel.message, parcel.rows, self.keys[source], self.values[source])
            self.received += parcel.rows.numel() * parcel.rows.element_size()
        return lambda: None


def simulate_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Dilated | BlockSparse,
    world_size: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str | Shards = "contiguous",
    bucket_size: int | None = None,
) -> tuple[Tensor, Tensor, tuple[RankMemory, ...]]:
    """``attention`` of whole tensors as ``world_size`` ranks would compute it: out, lse (B, H, N) and each rank's memory.

    Routes, buffers, tiles and the backend are those of ``attention(..., group=..., transport="ring")``; only the messages
    do not leave the process. There are no gradients. An adaptive pattern chooses its blocks from the whole tensors: what
    ranks tell one another to do so is not counted.

    >>> from dilated_attention_pytorch import attention
    >>> q, k, v = torch.randn(3, 1, 4096, 2, 16).unbind(0)
    >>> out, lse, memory = simulate_ring(q, k, v, Dilated([512, 4096], [1, 4]), 4, bucket_size=64)
    >>> torch.allclose(out, attention(q, k, v, Dilated([512, 4096], [1, 4])), atol=1e-5)
    True
    >>> memory[0].rows, memory[0].key_value, memory[0].buffers  # 4 buffers of 64 rows, 2 heads, 16 numbers, key and value
    (1024, 262144, 65536)
    >>> from dilated_attention_pytorch import BlockSparse, SparsePatternConfig
    >>> window = BlockSparse.from_config(SparsePatternConfig("local_window", 0.125, block_size=64))
    >>> out, lse, memory = simulate_ring(q, k, v, window, 4)
    >>> torch.allclose(out, attention(q, k, v, window), atol=1e-5)
    True
    >>> [told.received for told in memory]  # windows of 8 blocks: 4 before a block, 3 behind it; 64 rows of 256 bytes each
    [49152, 114688, 114688, 65536]
    """
    arguments: dict[str, Any] = {
        "is_causal": is_causal, "scale": scale, "dropout_p": 0.0, "seed": None, "lengths": None, "cu_seqlens": None,
        "mixing_gradient": "exact",
    }  # fmt: skip
    check_sharding(layout, bucket_size, "ring", None)
    if isinstance(pattern, BlockSparse):
        check_block_sharding(bucket_size, "ring")
        query, key, value, used_scale = prepare_blocks(query, key, value, **arguments)
        batch, n, heads, _ = query.shape
        pattern.check_call(batch, n, key.shape[1], heads, is_causal=is_causal, packed=False)
    else:
        query, key, value, used_scale = prepare(query, key, value, pattern, **arguments)
    n = query.shape[1]
    shards = layout if isinstance(layout, Shards) else Shards.even(n, world_size, layout)
    padded = isinstance(pattern, Dilated) and pattern.torchscale_padding
    if not n == key.shape[1] == shards.length or shards.world_size != world_size or padded:
        raise ValueError(
            f"a ring of {world_size} ranks has as many queries as keys as rows of shards, and no torchscale_padding: got "
            f"{n} queries, {key.shape[1]} keys, {shards.length} rows on {shards.world_size} ranks, {pattern}"
        )
    request = Request.of(query, dropout_p=0.0)
    kernel = tile_kernel(local.stock_backend("auto", request), query)
    fused = local.fused_backend("auto", request, pattern, shards, detached=False)
    every = [rows_of(shards, rank, query.device) for rank in range(world_size)]
    keys, values = ([x.index_select(1, rows) for rows in every] for x in (key, value))
    out, lse_bnh = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=accumulate_dtype(query.dtype))
    works, memory = _works(query, key, pattern, shards, bucket_size, is_causal, used_scale, fused), []
    for rank, rows in enumerate(every):
        shelf = Shelf(works, keys, values)
        own, positive, _ = positive_scale(query.index_select(1, rows), used_scale)
        job = Job(works[rank], (), shelf, 1, positive, kernel, accumulate_dtype(query.dtype))
        results: list[Any] = []

        def run(job: Job = job, own: Tensor = own, rank: int = rank, results: list[Any] = results) -> None:
            results.append(forward(job, job.work, own, keys[rank], values[rank]))

        with torch.no_grad():
            peak = peak_extra_bytes(run, query.device)
        part, part_lse, exchange = results.pop()
        out[:, rows], lse_bnh[:, rows] = part.to(out.dtype), part_lse
        own_bytes, key_bytes = (x.numel() * x.element_size() for x in (own, keys[rank]))
        memory.append(
            RankMemory(rank, len(rows), own_bytes, 2 * key_bytes, exchange.bytes, peak - exchange.bytes, shelf.received)
        )
    return out, lse_bnh.transpose(1, 2).contiguous(), tuple(memory)


def _works(
    query: Tensor,
    key: Tensor,
    pattern: Dilated | BlockSparse,
    shards: Shards,
    bucket_size: int | None,
    is_causal: bool,
    scale: float,
    fused: str | None,
) -> list[Work]:
    """What every rank has to do."""
    (batch, _, heads, _), key_heads, ranks = query.shape, key.shape[2], range(shards.world_size)
    if isinstance(pattern, BlockSparse):
        chosen = as_chosen(query, key, pattern, is_causal, scale)
        call: dict[str, Any] = {"is_causal": is_causal, "lengths": None, "cu_seqlens": None}
        return [static_work(chosen, shards, rank, (batch, heads, key_heads), query.device, **call) for rank in ranks]
    rows = default_bucket_size(shards, query.device.type) if bucket_size is None else bucket_size
    works: list[Work] = []
    for rank in ranks:
        route = make_route(pattern, shards, rank, batch, key_heads, is_causal=is_causal, bucket_size=rows)
        problem = local.LocalProblem(pattern, is_causal, shards, rank, batch, heads, key_heads, None, None)
        works.append(DilatedWork(route, None if fused is None else (problem, fused)))
    return works
