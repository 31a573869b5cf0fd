"""Random sharded calls: patterns, shards, batches and options that ``attention`` takes together, drawn from a seed.

    case = draw(seed=17, world=3)           the same on every rank and in every process
    results = one_device(case)              out, lse, dq, dk and dv of the whole sequence, from the definition

Sequences are short, so that shards end inside of segments, blocks, documents and messages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from block_cases import KINDS, SIZE, config
from dilated_attention_pytorch import BlockSparse, Dilated, DistributedSparseConfig, Order, Sharding, attention
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.sequence import rows_of

TIERS = ("hierarchical", "node_local", "adaptive_load_balanced")
CPU = torch.device("cpu")


@dataclass
class FuzzCase:
    """One call of ``attention`` on ``shards.world_size`` ranks."""

    seed: int
    pattern: Dilated | BlockSparse
    shards: Shards
    layout: str | Shards
    batch: int
    heads: int
    key_heads: int
    head_dim: int
    transport: str
    bucket_size: int | None
    options: dict[str, Any] = field(default_factory=dict)  # of attention, on one device too
    only_out: bool = False  # without lse and its gradient

    def whole(self) -> list[Tensor]:
        """Query, key, value, the gradient of the output, and that of lse, of the whole sequence."""
        torch.manual_seed(self.seed)
        shape, dtype = (self.batch, self.shards.length, self.heads, self.head_dim), torch.float64
        q, dout = torch.randn(2, *shape, dtype=dtype).unbind(0)
        k, v = torch.randn(2, *shape[:2], self.key_heads, self.head_dim, dtype=dtype).unbind(0)
        return [q, k, v, dout, torch.randn(shape[:3], dtype=dtype)]

    def rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """The index of a rank's rows in a tensor (B, N, ...)."""
        mine = rows_of(self.shards, rank, CPU)
        order = self.options.get("order")
        index = mine if order is None else order.positions[..., mine]
        return torch.arange(self.batch)[:, None], index.expand(self.batch, -1)


def draw(seed: int, world: int) -> FuzzCase:
    """The case of a seed on so many ranks."""
    chance = random.Random(f"{seed} {world}")
    shards, layout = _shards(chance, world)
    n = shards.length
    kind = chance.choice(["dilated"] * 5 + ["dense"] * 2 + [*KINDS, "adaptive", "adaptive", "mask", "masks", "tiers"])
    ulysses = kind == "dense" and chance.random() < 0.6
    key_heads = chance.randint(world, world + 2) if ulysses else chance.choice([1, 2, 2, 3, 4])
    case = FuzzCase(
        seed=seed,
        pattern=_pattern(chance, kind, shards, key_heads),
        shards=shards,
        layout=chance.choice([layout, layout, shards]),
        batch=chance.choice([1, 2, 2, 3]),
        heads=key_heads * chance.choice([1, 1, 2, 3]),
        key_heads=key_heads,
        head_dim=chance.choice([1, 4, 8]),
        transport="ulysses" if ulysses else chance.choice(["ring", "ring", "allgather", "auto"]),
        bucket_size=None,
        only_out=chance.random() < 0.2,
    )
    if kind == "masks":  # one for each head
        case.pattern = _mask(chance, n, (case.heads,))
    _add_options(chance, case, kind)
    if isinstance(case.pattern, Dilated) and not ulysses and chance.random() < 0.6:
        case.bucket_size = chance.choice([1, 2, 3, 7, 16, 1000] if n <= 60 else [7, 16, 1000])
    return case


def _shards(chance: random.Random, world: int) -> tuple[Shards, str]:
    layout = chance.choice(["contiguous", "zigzag"])
    how, most = chance.choice(["even", "even", "uneven", "uneven", "empty", "one", "short"]), chance.choice([40, 80, 160])
    if how == "even":
        return Shards.even(chance.randint(world, most), world, layout), layout
    if how == "short":  # fewer rows than ranks
        return Shards.even(chance.randint(1, world), world, layout), layout
    rows = [chance.randint(0 if how == "empty" else 1, 2 * most // world) for _ in range(world)]
    if how == "empty":
        rows = [x if chance.random() < 0.6 else 0 for x in rows]
        rows[chance.randrange(world)] += 1
    if how == "one":  # has them all
        rows = [0] * world
        rows[chance.randrange(world)] = chance.randint(1, 60)
    return Shards.of(rows, layout), layout


def _pattern(chance: random.Random, kind: str, shards: Shards, key_heads: int) -> Dilated | BlockSparse:
    n = shards.length
    if kind == "dense":
        return Dilated([n + chance.choice([0, 0, 5])], [1])
    if kind == "dilated":
        rates = [chance.choice([1, 1, 2, 3, 4, 5, 8]) for _ in range(chance.choice([1, 2, 2, 3, 3, 4]))]
        lengths = [max(1, chance.choice([n, 2 * n, n // 2, n // 3 + 1, chance.randint(1, n), 16])) for _ in rates]
        offsets: Any = chance.choice(["interleaved", "interleaved", "blocked", "own"])
        own = [chance.randrange(max(rates)) for _ in range(key_heads)]
        return Dilated(lengths, rates, own if offsets == "own" else offsets)
    if kind in ("mask", "masks"):
        return _mask(chance, n, ())
    if kind == "tiers":
        settings = DistributedSparseConfig(
            chance.choice([0.3, 0.6]), chance.choice(TIERS), block_size=SIZE, node_size=chance.choice([1, 2, 3])
        )
        return settings.pattern(shards)
    return BlockSparse.from_config(config(kind, chance.choice([0.1, 0.4, 0.8])))


def _mask(chance: random.Random, n: int, heads: tuple[int, ...]) -> BlockSparse:
    blocks, generator = -(-n // SIZE), torch.Generator().manual_seed(chance.randrange(2**31))
    table = torch.rand((*heads, blocks, blocks), generator=generator) < chance.choice([0.2, 0.5])
    return BlockSparse.custom(table, block_size=SIZE)


def _add_options(chance: random.Random, case: FuzzCase, kind: str) -> None:
    options, n, batch = case.options, case.shards.length, case.batch
    options["is_causal"] = chance.random() < 0.5
    if chance.random() < 0.2:
        options["scale"] = chance.choice([0.3, -0.4, 1.5])
    if case.transport != "ulysses" and chance.random() < 0.3:
        options |= {"dropout_p": chance.choice([0.1, 0.5]), "seed": chance.choice([0, 5, -3, 2**40 + 7])}
    if kind == "dilated" and chance.random() < 0.25:
        options["mixing_gradient"] = "detached"
    batched = chance.choice(["plain", "plain", "lengths", "cu_seqlens"])
    if batched == "lengths":
        lengths = [chance.choice([n, chance.randint(0, n)]) for _ in range(batch)]
        lengths[chance.randrange(batch)] = n  # or equal shards look like whole sequences
        options["lengths"] = torch.tensor(lengths)
    elif batched == "cu_seqlens" and kind not in ("mask", "masks", "tiers"):
        inside = sorted(chance.randint(0, n) for _ in range(chance.randint(0, 4)))
        options["cu_seqlens"] = torch.tensor([0, *inside, n])
    if chance.random() < 0.3:
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        one_each = chance.random() < 0.4 and "cu_seqlens" not in options
        permutations = [torch.randperm(n, generator=generator) for _ in range(batch if one_each else 1)]
        order = Order.from_permutation(torch.stack(permutations) if one_each else permutations[0])
        kept = {name: options[name] for name in ("lengths", "cu_seqlens") if name in options}
        options["order"] = order.within(**kept) if kept else order


def one_device(case: FuzzCase) -> list[Tensor]:
    """The results of the whole sequence by dense attention from the definition, (B, N, ...) each."""
    q, k, v, dout, dlse = case.whole()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, case.pattern, return_lse=True, backend="reference", **case.options)
    lse = lse.transpose(1, 2)
    total = (out * dout).sum()
    if not case.only_out:
        total = total + (lse.where(lse.isfinite(), 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, inputs)]


class RankRun:
    """A case on one rank: the forward at construction, the gradients later."""

    def __init__(self, case: FuzzCase, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        self.rows = case.rows(rank)
        q, k, v, dout, dlse = (x[self.rows] for x in case.whole())
        self.inputs = [x.requires_grad_() for x in (q, k, v)]
        sharding = Sharding(group, case.layout, case.bucket_size, case.transport)
        if case.only_out:
            self.out, self.lse = attention(*self.inputs, case.pattern, group=sharding, **case.options), None
        else:
            self.out, lse = attention(*self.inputs, case.pattern, group=sharding, return_lse=True, **case.options)
            self.lse = lse.transpose(1, 2)
        self.total = (self.out * dout).sum()
        if self.lse is not None:
            self.total = self.total + (self.lse.where(self.lse.isfinite(), 0.0) * dlse).sum()

    def results(self, grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        """out, lse, dq, dk and dv of this rank's rows."""
        return [self.out.detach(), None if self.lse is None else self.lse.detach(), *grads]


def run_together(cases: list[FuzzCase], group: dist.ProcessGroup) -> list[list[Tensor | None]]:
    """All forwards, then all backwards in one call of autograd, as in a model of several layers."""
    runs = [RankRun(case, group) for case in cases]
    grads = torch.autograd.grad(sum(run.total for run in runs), [x for run in runs for x in run.inputs])
    return [run.results(grads[3 * i : 3 * i + 3]) for i, run in enumerate(runs)]
