"""Adaptive block patterns on ranks: what a rank holds and receives to choose its blocks, and random cases next to one
device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptive_cases import ChoiceCase
from block_cases import SIZE, config
from dilated_attention_pytorch import BlockSparse, Sharding, SparsePatternConfig, attention
from dilated_attention_pytorch.distributed import Shards, adaptive, shard_sequence
from dilated_attention_pytorch.distributed.means import held_sequences, mean_bytes
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.wire import Wire
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.plan import adaptive as choice
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.values import Inputs
from ring_cases import LargestTensor

CASES_PER_WORLD = 13  # 65 random cases
HEAD_DIM = 8


class Traffic:
    """Bytes and messages that a rank receives, by whatever function of PyTorch."""

    def __init__(self, monkeypatch):
        self.bytes = self.messages = 0
        plain = dist.batch_isend_irecv

        def counting(operations):
            for x in operations:
                if x.op is dist.irecv:
                    self.bytes += x.tensor.numel() * x.tensor.element_size()
                    self.messages += 1
            return plain(operations)

        def collective(tensor, *_, **__):
            raise AssertionError(f"a collective over {tuple(tensor.shape)}")

        monkeypatch.setattr(dist, "batch_isend_irecv", counting)
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
            monkeypatch.setattr(dist, name, collective)


@dataclass(frozen=True)
class FuzzCase:
    """A random adaptive call."""

    shards: Shards
    layout: str
    is_causal: bool
    heads: int
    key_heads: int
    ratio: float
    equal_keys: bool  # all keys are the same, so all scores of a query block are equal
    more: dict[str, list[int]]

    @staticmethod
    def of(seed: int, world: int) -> FuzzCase:
        r = random.Random(seed)
        longest = r.choice([3, 20, 50])
        lengths = [r.choice([0, 1, longest, r.randrange(longest + 1)]) for _ in range(world)]
        if r.random() < 0.25:
            lengths = [2 * SIZE] * world
        lengths[r.randrange(world)] += 17
        layout, n = r.choice(["contiguous", "zigzag"]), sum(lengths)
        more = {}
        kind = r.randrange(3)
        if kind == 1:
            more["lengths"] = [r.choice([0, n, r.randrange(n + 1)]) for _ in range(2)]
        elif kind == 2:
            more["cu_seqlens"] = [0, *sorted(r.randrange(n + 1) for _ in range(r.randrange(4))), n]
        heads, key_heads = r.choice([(1, 1), (2, 2), (4, 2), (4, 1), (3, 3), (6, 2)])
        ratio = r.choice([0.01, 0.3, 0.4, 0.75, 1.0])
        return FuzzCase(
            Shards.of(lengths, layout), layout, r.random() < 0.5, heads, key_heads, ratio, r.random() < 0.2, more
        )  # fmt: skip

    @property
    def rule(self) -> SparsePatternConfig:
        return config("adaptive", self.ratio)

    def problem(self) -> Problem:
        more = {name: tuple(values) for name, values in self.more.items()}
        n = self.shards.length
        return Problem(BlockRule(SIZE, self.rule), self.is_causal, 2, n, n, self.heads, self.key_heads, **more)

    def tensors(self, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Query, key, value and the gradient of the output."""
        g, n = torch.Generator().manual_seed(seed), self.shards.length
        shapes = [(2, n, heads, HEAD_DIM) for heads in (self.heads, self.key_heads, self.key_heads, self.heads)]
        q, k, v, dout = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
        return [q, k[:, :1].expand_as(k).contiguous() if self.equal_keys else k, v, dout]


def check_attention(group, case: FuzzCase, seed: int) -> None:
    """Output, lse and gradients are those of one device."""
    q, k, v, dout = case.tensors(seed, torch.float64)
    pattern = BlockSparse.from_config(case.rule)
    options = {"is_causal": case.is_causal, "return_lse": True}
    options |= {name: torch.tensor(values) for name, values in case.more.items()}
    mine = rows_of(case.shards, dist.get_rank(group), torch.device("cpu"))
    whole, local = [q, k, v], [x[:, mine].clone() for x in (q, k, v)]
    results = []
    for inputs, upstream, more in ((whole, dout, {}), (local, dout[:, mine], {"group": Sharding(group, case.layout)})):
        inputs = [x.requires_grad_() for x in inputs]
        if "group" in more and {"lengths", "cu_seqlens"} & case.more.keys():
            more["group"] = Sharding(group, case.shards)  # the lengths may be those of one shard
        out, lse = attention(*inputs, pattern, **options, **more)
        grads = torch.autograd.grad((out * upstream).sum() + lse.where(lse.isfinite(), 0.0).sum(), inputs)
        results.append([out.detach(), lse.detach().transpose(1, 2), *grads])
    for name, expected, actual in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(
            actual, expected[:, mine], rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )  # fmt: skip


def check_means(group, case: FuzzCase, seed: int) -> None:
    """The means have the bits of one device. What is held and received is what the integers say."""
    rank, problem = dist.get_rank(group), case.problem()
    query, key, _, _ = case.tensors(seed, torch.float32)
    mine = rows_of(case.shards, rank, torch.device("cpu"))
    local = Inputs(query[:, mine], key[:, mine], key[:, mine])
    held = held_sequences(problem, case.shards, rank)
    wire = Wire(group, torch.device("cpu"))
    means = adaptive.exchange_means(held, case.shards, local, wire)
    for own in means:
        span = own.sequence.span
        q, k = (choice.block_means(x[span.key_rows], 0, SIZE, torch.float32) for x in (query, key))
        assert torch.equal(own.keys, k[:, :, : own.keys.shape[2]])
        for chunk in own.chunks:
            assert torch.equal(chunk.queries, q[:, :, chunk.blocks.start : chunk.blocks.stop])
    tables = [x for own in means for x in (own.keys, *(chunk.queries for chunk in own.chunks))]
    with pytest.MonkeyPatch.context() as patch:
        traffic = Traffic(patch)
        adaptive.adaptive_sequences(problem, case.shards, local, 0.3, wire)
    counted = mean_bytes(problem, case.shards, rank, HEAD_DIM, 4)
    assert counted.held == sum(x.numel() * 4 for x in tables)
    assert (counted.received, counted.messages) == (traffic.bytes, traffic.messages)
    more = {name: tuple(values) for name, values in case.more.items()}
    by_position = ChoiceCase(2, case.heads, case.key_heads, HEAD_DIM, 4, SIZE, case.is_causal, **more)
    assert sum(by_position.received(case.shards, rank).values()) == traffic.bytes


def check_fuzz(group, seeds: list[int]) -> None:
    for seed in seeds:
        case = FuzzCase.of(seed, dist.get_world_size(group))
        try:
            check_attention(group, case, seed)
            check_means(group, case, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7])
def test_random_cases_are_those_of_one_device(on_ranks, world):
    """Uneven and empty shards, both layouts, padded batches, packed documents, grouped heads, equal scores."""
    on_ranks(world, check_fuzz, list(range(1000 * world, 1000 * world + CASES_PER_WORLD)), spare=world % 2)
