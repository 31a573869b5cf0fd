"""Block-sparse attention on sharded sequences over gloo: every rank's rows are those of one device, gradients included, and
what goes over the wire is what is read, counted position by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import block_oracle
from adaptive_cases import ChoiceCase
from block_cases import SIZE, config, table_of
from dilated_attention_pytorch import (
    Attention,
    BlockSparse,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    DistributedSparseConfig,
    MultiheadDilatedAttention,
    attention,
)
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.executor import RankCall
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.execute.loop import StockCalls
from ring_cases import Case, LargestTensor, by_world, check_case, check_staged, sharded

RATIO = 0.4


@dataclass
class BlockCase(Case):
    """``kind``: of a configuration, or "mask", one for all heads, "masks", one for each; or a configuration by rank."""

    pattern: Any = None
    kind: str | DistributedSparseConfig = "hierarchical"
    rows: tuple[int, ...] | int = ()
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shards = Shards.of(self.rows, self.layout)
        blocks = -(-shards.length // SIZE)
        generator = torch.Generator().manual_seed(blocks)
        if isinstance(self.kind, DistributedSparseConfig):
            self.pattern = self.kind.pattern(shards, token_bytes=2 * self.key_heads * 8 * self.dtype.itemsize)
        elif self.kind.startswith("mask"):
            shape = (self.heads, blocks, blocks) if self.kind == "masks" else (blocks, blocks)
            self.pattern = BlockSparse.custom(torch.rand(shape, generator=generator) < 0.3, block_size=SIZE)
        else:
            self.pattern = BlockSparse.from_config(config(self.kind, RATIO))

    def _table(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Boolean (B, H, query blocks, key blocks) of one sequence, by slow rules or from the mask itself."""
        batch, heads, blocks = q.shape[0], q.shape[2], -(-q.shape[1] // SIZE)
        if self.pattern.given is not None:
            given = self.pattern.given_causal if isinstance(self.kind, DistributedSparseConfig) and self.is_causal else None
            return (given or self.pattern.given).mask()[..., :blocks, :blocks].expand(batch, heads, blocks, blocks)
        if self.kind == "adaptive":
            scale = self.more.get("scale", 8**-0.5)
            return block_oracle.adaptive(q.detach(), k.detach(), str(RATIO), SIZE, scale, self.is_causal)
        return table_of(self.kind, str(RATIO), 0, blocks, self.is_causal).expand(batch, heads, blocks, blocks)

    def read(self, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Boolean (B, G, N, N): which query position reads which key position for a key head."""
        batch, n, heads, _ = q.shape
        met = torch.zeros(batch, heads, n, n, dtype=torch.bool)
        cuts = options["cu_seqlens"].tolist() if "cu_seqlens" in options else [0, n]
        for b in range(batch):
            for start, stop in pairwise(cuts):
                stop = min(stop, int(options["lengths"][b])) if "lengths" in options else stop
                if stop > start:
                    some = slice(start, stop)
                    blocks = torch.arange(stop - start) // SIZE
                    table = self._table(q[b : b + 1, some], k[b : b + 1, some])[0]
                    met[b, :, some, some] = table[:, blocks][:, :, blocks]
        if self.is_causal:
            met &= torch.ones(n, n, dtype=torch.bool).tril()
        return met.unflatten(1, (self.key_heads, -1)).any(2)

    def expected_bytes(self, shards, rank, options, sent, qk) -> int:
        read, rows = self.read(*qk, options), 0
        for target in range(shards.world_size):
            if target == rank or sent:
                wanted = read[:, :, rows_of(shards, target, torch.device("cpu"))].any(2)
                holders = [p for p in range(shards.world_size) if p != target and (p == rank or not sent)]
                rows += sum(int(wanted[:, :, rows_of(shards, p, torch.device("cpu"))].sum()) for p in holders)
        return rows * 2 * 8 * self.dtype.itemsize

    def choice_bytes(self, shards, rank, options) -> int:
        if self.kind != "adaptive":
            return 0
        sequences = {name: tuple(options[name].tolist()) for name in ("lengths", "cu_seqlens") if name in options}
        sizes = 2, self.heads, self.key_heads, 8, self.dtype.itemsize, SIZE, self.is_causal
        received = ChoiceCase(*sizes, **sequences).received(shards, rank)
        return received["rows"] + received["means"]


def case(kind, rows, layout="contiguous", is_causal=False, heads=2, key_heads=2, transport="ring", **more) -> BlockCase:
    dtype = more.pop("dtype", torch.float64)
    return BlockCase(
        kind=kind, rows=rows, layout=layout, is_causal=is_causal, heads=heads, key_heads=key_heads, transport=transport,
        dtype=dtype, more=more,
    )  # fmt: skip


def tiers(kind, **more) -> DistributedSparseConfig:
    return DistributedSparseConfig(0.5, kind, block_size=SIZE, node_size=2, **more)


UNEVEN = (30, 41, 29, 1, 17)  # edges inside of blocks, three ranks in one block
CASES: dict[int, list[BlockCase]] = {
    1: [case("hierarchical", (50,), is_causal=True, transport="auto"), case("adaptive", (50,))],
    2: [
        case("hierarchical", (30, 41), "zigzag", True, 4, 2),
        case("masks", (70, 57), heads=4, key_heads=2, transport="auto", scale=-0.4),
        case("adaptive", (30, 41), "contiguous", True, 4, 2),
        case("dilated_sparse", (64, 64), "zigzag", transport="allgather", dtype=torch.float32),
    ],
    3: [
        case("local_window", (0, 0, 0)),
        case("local_window", (30, 0, 57), "zigzag", lengths=[47, 14], transport="allgather"),
        case("mask", (40, 40, 47), "contiguous", True, lengths=[127, 100]),
        case("global_local", (50, 1, 33), "zigzag", True, 2, 1, cu_seqlens=[0, 33, 33, 84]),
        case("adaptive", (33, 20, 31), "zigzag", False, 4, 2, cu_seqlens=[0, 40, 84]),
        case("masks", (33, 20, 31), "zigzag", True, 4, 2, dropout_p=0.3, seed=2**40 + 7),
        case("adaptive", (33, 20, 31), "contiguous", False, 4, 2, dropout_p=0.2, seed=-3, cu_seqlens=[0, 40, 84]),
    ],
    5: [
        case("hierarchical", UNEVEN, "zigzag", True, 4, 2),
        case("masks", UNEVEN, "zigzag", True, 4, 4),
        case("adaptive", (30, 41, 0, 29, 17), "zigzag", True, 2, 1, "allgather", lengths=[117, 60]),
        case(tiers("hierarchical"), (32, 32, 32, 32, 32), is_causal=True),
        case(tiers("node_local"), UNEVEN, "zigzag"),
        case(tiers("bandwidth_aware", node_bytes=2 * 2 * 8 * 8 * 16, inter_node_bytes=2 * 2 * 8 * 8 * 32), (32,) * 5),
        case(tiers("adaptive_load_balanced"), UNEVEN, is_causal=True),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("world", "number", "case"), by_world(CASES))
def test_rows_are_those_of_one_device(on_ranks, world, number, case):
    """In the default group, and in a group whose ranks have other numbers there."""
    on_ranks(world, check_case, case, number, spare=number % 2)


@pytest.mark.parametrize(("world", "number", "case"), by_world({2: CASES[2][:3], 3: CASES[3][-1:]}))
def test_messages_through_host_memory(on_ranks, world, number, case):
    on_ranks(world, check_staged, case, number)


def check_memory(group) -> None:
    pattern = BlockSparse.from_config(config("local_window", 0.02))
    q = torch.randn(1, 2000, 2, 8, generator=torch.Generator().manual_seed(1))
    mine = shard_sequence(q, group).requires_grad_()
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(RankCall, "stock", lambda self, query: StockCalls(self.kernel, self.options.scale, 2**10))
        attention(mine, mine, mine, pattern, group=group, is_causal=True).sum().backward()
    assert largest.numel <= mine.numel()


def test_memory(on_ranks):
    """Nothing of the size of the sequence: with small kernel calls, the largest tensor is the rank's own."""
    on_ranks(5, check_memory)


def check_module(group, kind: str) -> None:
    torch.manual_seed(3)
    q = torch.randn(1, 101, 2, 8, dtype=torch.float64)
    one, many = (
        BlockSparseRingDilatedAttention(sparse_config=config(kind), **sharding)
        for sharding in ({}, {"group": group, "layout": "zigzag"})
    )
    whole = gather_sequence(many(shard_sequence(q, group, layout="zigzag"), is_causal=True), group, layout="zigzag")
    torch.testing.assert_close(whole, one(q, is_causal=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["dilated_sparse", "adaptive"])
def test_module(on_ranks, kind):
    on_ranks(3, check_module, kind)


def check_seed(group) -> None:
    torch.manual_seed(3)
    q = torch.randn(1, 101, 2, 8, dtype=torch.float64)
    dropping = BlockSparseRingDilatedAttention([40, 96], [1, 2], dropout_p=0.5, group=group)
    torch.manual_seed(dist.get_rank())
    dropped = gather_sequence(dropping(shard_sequence(q, group)), group)
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, attention(q, q, q, dropping.pattern, dropout_p=0.5), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        gather_sequence(dropping.eval()(shard_sequence(q, group)), group), attention(q, q, q, dropping.pattern)
    )


def test_a_seed_that_nobody_gave(on_ranks):
    """It is the first rank's."""
    on_ranks(3, check_seed)


def check_training(group) -> None:
    torch.manual_seed(3)
    n, world = 101, dist.get_world_size()
    settings = tiers("hierarchical")
    shards = Shards.even(n, world, "zigzag")
    one = MultiheadDilatedAttention(16, 2, [32], [1], num_kv_heads=1, dtype=torch.float64)
    one.attention = Attention(settings.pattern(shards))
    many = BlockSparseRingDistributedDilatedAttention(
        16, 2, None, None, settings, num_kv_heads=1, dtype=torch.float64, group=group, layout="zigzag"
    )
    many.load_state_dict(one.state_dict())
    many = DistributedDataParallel(many, process_group=group)
    x = torch.randn(2, n, 16, dtype=torch.float64)
    part = shard_sequence(x, group, layout="zigzag")
    for model, tokens, factor in ((one, x, 1 / n), (many, part, world / n)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            out, weights = model(tokens, tokens, tokens, is_causal=True)
            assert weights is None
            (out.square().sum() * factor).backward()
            optimiser.step()
    for (name, a), b in zip(many.module.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_steps_in_ddp_are_those_of_one_device(on_ranks):
    """DDP averages gradients over the ranks."""
    on_ranks(3, check_training)


def check_mistakes(group) -> None:
    rank = dist.get_rank()
    x = torch.randn(1, 20, 2, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    whole = BlockSparse.custom(mask, block_size=16)

    def refused(match, pattern, error=ValueError, **options):
        with pytest.raises(error, match=match):
            attention(x, x, x, pattern, **sharded(group, **options))

    other = mask.clone()
    other[2, 0] = rank != 1
    both = r"these differ:\n  pattern: 'mask 1x1x4x4 of blocks of 16, \w+' on ranks 0, 2, 'mask .*' on rank 1$"
    refused(both, BlockSparse.custom(other, block_size=16))
    refused("these differ:\n  pattern: 'local_window.* on ranks 0, 2, 'hier.* on rank 1", BlockSparse.from_config(
        config("hierarchical" if rank == 1 else "local_window")))  # fmt: skip
    built = BlockSparse.custom(mask[:3, :3], block_size=16)
    refused("the mask of this pattern has 3 x 3 blocks of 16: got 60 queries and 60 keys, which are 4 x 4 blocks", built)
    refused("are one message for a block-sparse pattern, so it has no bucket_size: got 7", whole, bucket_size=7)
    refused("exchanges heads for one dense segment only", whole, transport="ulysses")
    refused("block-sparse attention is one softmax", whole, mixing_gradient="detached")
    refused("backend 'hopper' cannot serve this call", whole, backend="hopper")
    refused("excludes cu_seqlens", whole, cu_seqlens=torch.tensor([0, 30, 60]))
    told = "^dropout_p must satisfy 0 <= dropout_p < 1" if rank == 2 else "rank 2 refused its arguments: dropout_p must"
    refused(told, whole, dropout_p=1.0 if rank == 2 else 0.0)
    assert attention(x, x, x, whole, group=group).shape == x.shape  # the group works on


def test_mistakes(on_ranks):
    """The same error on every rank, before anything is sent."""
    on_ranks(3, check_mistakes)
