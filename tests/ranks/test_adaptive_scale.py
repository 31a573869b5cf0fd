"""Adaptive block patterns on ranks: what a rank holds and receives to choose its blocks, and random cases next to one
device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaptive_cases import ChoiceCase
from block_cases import SIZE, config
from dilated_attention_pytorch import BlockSparse, Sharding, SparsePatternConfig, attention
from dilated_attention_pytorch.distributed import Shards, adaptive
from dilated_attention_pytorch.distributed.means import held_sequences, mean_bytes
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.distributed.wire import Wire
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.plan import adaptive as choice
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.values import Inputs
from ring_cases import on_first_rank

CASES_PER_WORLD = 4  # 16 random cases
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
class AdaptiveCase:
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
    def of(seed: int, world: int) -> AdaptiveCase:
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
        return AdaptiveCase(
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


def check_attention(group, case: AdaptiveCase, seed: int) -> None:
    """Output, lse and gradients are those of one device."""
    q, k, v, dout = case.tensors(seed, torch.float64)
    pattern = BlockSparse.from_config(case.rule)
    options = {"is_causal": case.is_causal, "return_lse": True}
    options |= {name: torch.tensor(values) for name, values in case.more.items()}
    mine = rows_of(case.shards, dist.get_rank(group), torch.device("cpu"))
    whole, local = [q, k, v], [x[:, mine].clone() for x in (q, k, v)]
    known = {"lengths", "cu_seqlens"} & case.more.keys()  # the lengths may be those of one shard
    sharding = Sharding(group, case.shards if known else case.layout)

    def results(inputs, upstream, **more):
        inputs = [x.requires_grad_() for x in inputs]
        out, lse = attention(*inputs, pattern, **options, **more)
        grads = torch.autograd.grad((out * upstream).sum() + lse.where(lse.isfinite(), 0.0).sum(), inputs)
        return [out.detach(), lse.detach().transpose(1, 2), *grads]

    wanted, found = on_first_rank(group, lambda: results(whole, dout)), results(local, dout[:, mine], group=sharding)
    for name, expected, actual in zip(("out", "lse", "dq", "dk", "dv"), wanted, found, strict=True):
        torch.testing.assert_close(
            actual, expected[:, mine], rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )  # fmt: skip


def check_means(group, case: AdaptiveCase, seed: int) -> None:
    """The means have the bits of one device. What is held and received is what the integers say."""
    rank, problem = dist.get_rank(group), case.problem()
    query, key, _, _ = case.tensors(seed, torch.float32)
    mine = rows_of(case.shards, rank, torch.device("cpu"))
    local = Inputs(query[:, mine], key[:, mine], key[:, mine])
    held = held_sequences(problem, case.shards, rank)
    wire = Wire(group, torch.device("cpu"))
    with wire.turn("means"):
        means = adaptive.exchange_means(held, case.shards, local, wire)
    for own in means:
        span = own.sequence.span
        q, k = (choice.block_means(x[span.key_rows], 0, SIZE, torch.float32) for x in (query, key))
        assert torch.equal(own.keys, k[:, :, : own.keys.shape[2]])
        for chunk in own.chunks:
            assert torch.equal(chunk.queries, q[:, :, chunk.blocks.start : chunk.blocks.stop])
    tables = [x for own in means for x in (own.keys, *(chunk.queries for chunk in own.chunks))]
    with pytest.MonkeyPatch.context() as patch, wire.turn("choice"):
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
        case = AdaptiveCase.of(seed, dist.get_world_size(group))
        try:
            with pytest.MonkeyPatch.context() as patch:
                if seed % 2:  # as with many blocks: scores of few pairs and rows at a time
                    patch.setattr(choice, "_MAX_SCORES", 100)
                check_attention(group, case, seed)
            check_means(group, case, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise


@pytest.mark.parametrize("world", [2, 3, 5, 7])
def test_random_cases_are_those_of_one_device(on_ranks, world):
    """Uneven and empty shards, both layouts, padded batches, packed documents, grouped heads, equal scores."""
    on_ranks(world, check_fuzz, list(range(1000 * world, 1000 * world + CASES_PER_WORLD)), spare=world % 2)


def test_equal_scores_take_the_earlier_block(on_ranks):
    """The means of blocks that several ranks hold have the bits of one device, also where their rows are added up."""
    shards = Shards.of((50, 67, 50), "zigzag")
    on_ranks(3, check_attention, AdaptiveCase(shards, "zigzag", True, 1, 1, 0.4, True, {}), 7002)


def check_peak(group, is_causal: bool) -> None:
    rank, world, cpu = dist.get_rank(group), dist.get_world_size(group), torch.device("cpu")
    blocks, heads, head_dim = 128, 8, 64
    rows = blocks * SIZE
    problem = Problem(BlockRule(SIZE, config("adaptive", 0.001)), is_causal, 1, world * rows, world * rows, heads, 1)
    shards, wire = Shards.of([rows] * world, "contiguous"), Wire(group, cpu)
    q = torch.randn(1, rows, heads, head_dim)
    inputs = Inputs(q, q[:, :, :1].contiguous(), q[:, :, :1].contiguous())
    with wire.turn("choice"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_MAX_SCORES", 2**13)
        peak = peak_extra_bytes(lambda: adaptive.adaptive_sequences(problem, shards, inputs, 0.3, wire), cpu)
    mean = head_dim * 4
    # Two temporaries are as large as the rank's own query means. The means of all query blocks would be 5 times these.
    assert peak <= blocks * (rank + 1 if is_causal else world) * mean + 3 * blocks * heads * mean + 2**16


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_is_as_large_as_the_query_means_of_the_sequence(on_ranks, is_causal):
    """Beside a rank's own query means, it has the mean keys that it can reach."""
    on_ranks(5, check_peak, is_causal)


META = torch.device("meta")


@dataclass
class RecordingWire:
    """Takes the messages of one rank without sending them."""

    rank: int
    world: int
    device: torch.device = META
    bytes: int = 0
    batches: list[tuple[dict[int, int], dict[int, int]]] = field(default_factory=list)  # by peer: sent and received bytes

    @property
    def global_ranks(self) -> list[int]:
        return list(range(self.world))

    def now(self) -> None:
        pass

    def start(self, sends, receives, after):
        for parcel in sends:
            parcel.pack()
        sizes = [{x.peer: x.rows.numel() * x.rows.element_size() for x in side} for side in (sends, receives)]
        self.batches.append((sizes[0], sizes[1]))
        self.bytes += sum(sizes[1].values())
        return lambda: None


def meta_inputs(rows: int, problem: Problem, head_dim: int, dtype: torch.dtype) -> Inputs:
    q, k = (
        torch.empty(problem.batch, rows, x, head_dim, dtype=dtype, device=META) for x in (problem.heads, problem.key_heads)
    )
    return Inputs(q, k, k)


@pytest.mark.parametrize(
    ("layout", "is_causal", "rank", "limit"),
    [("contiguous", False, 0, 225e6), ("contiguous", True, 255, 127e6), ("zigzag", True, 511, 114e6)],
)
def test_4_million_tokens_on_512_ranks(layout, is_causal, rank, limit):
    """The sums of all blocks would be 671 MB, and their means and copies 2,188 MB. In the first case the choice
    has 87 MB beside the means that it holds, of which the key means of one head in float64 are 34 MB."""
    n, world = 2**22, 512
    problem = Problem(BlockRule(128, SparsePatternConfig("adaptive", 0.1)), is_causal, 1, n, n, 32, 8)
    shards, wire = Shards.even(n, world, layout), RecordingWire(rank, world)
    held, inputs = held_sequences(problem, shards, rank), meta_inputs(n // world, problem, 128, torch.bfloat16)
    counted = mean_bytes(problem, shards, rank, 128, 2)
    peak = peak_extra_bytes(lambda: adaptive.choose_blocks(problem, held, shards, inputs, 0.1, wire), META)
    assert counted.held < peak < limit
    assert counted.received == wire.bytes
    message = n // world // 128 * 8 * 128 * 4  # the key means of a shard
    means = peak_extra_bytes(lambda: adaptive.exchange_means(held, shards, inputs, RecordingWire(rank, world)), META)
    assert means <= counted.held + 5 * message + 32 * 64 * 128 * 4


def meet(batches: list[list[tuple[dict[int, int], dict[int, int]]]]) -> None:
    """Run the batches of all ranks by NCCL's rules: a rank begins a batch when its previous one has ended."""
    at = [0] * len(batches)
    open_ends = [[(dict(sent), dict(received)) for sent, received in own] for own in batches]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(open_ends):
            while at[rank] < len(own) and own[at[rank]] == ({}, {}):
                at[rank] += 1
                moved = True
            for peer, size in list(own[at[rank]][0].items()) if at[rank] < len(own) else ():
                ready = open_ends[peer][at[peer]][1] if at[peer] < len(open_ends[peer]) else {}
                if rank in ready:
                    assert ready.pop(rank) == size, (rank, peer)
                    del own[at[rank]][0][peer]
                    moved = True
    assert at == [len(own) for own in batches], "a deadlock"


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_messages_meet_under_strict_order(world):
    """Both ends of every message agree on its size, and no ranks wait for each other in a cycle."""
    for seed in range(8):
        case = AdaptiveCase.of(seed, world)
        problem, batches = case.problem(), []
        for rank in range(world):
            wire, held = RecordingWire(rank, world), held_sequences(problem, case.shards, rank)
            inputs = meta_inputs(case.shards.rows(rank), problem, HEAD_DIM, torch.float32)
            adaptive.choose_blocks(problem, held, case.shards, inputs, 0.3, wire)
            batches.append(wire.batches)
            assert wire.bytes == mean_bytes(problem, case.shards, rank, HEAD_DIM, 4).received
        meet(batches)


def test_the_rule_finds_deadlocks():
    with pytest.raises(AssertionError, match="a deadlock"):
        meet([[({1: 4}, {}), ({}, {1: 4})], [({0: 4}, {}), ({}, {0: 4})]])


class OnlyOn(TorchDispatchMode):
    """Every tensor of every operator is on one device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
        assert devices <= {self.device}, (func, devices)
        return result


@pytest.mark.parametrize("seed", range(6))
def test_the_host_waits_once(seed):
    """On the meta device, which has no values to wait for: nothing is read from it or copied to it but once."""
    world, waits = 3, []
    case = AdaptiveCase.of(seed, world)
    problem, mode = case.problem(), OnlyOn("meta")

    def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        waits.append(len(tensors))
        mode.device = "cpu"
        return [torch.zeros(x.shape, dtype=x.dtype, device="cpu") for x in tensors]

    rank = max(range(world), key=case.shards.rows)
    inputs, wire = meta_inputs(case.shards.rows(rank), problem, HEAD_DIM, torch.float32), RecordingWire(rank, world)
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(adaptive, "_on_host", on_host)
        adaptive.adaptive_sequences(problem, case.shards, inputs, 0.3, wire)
    assert len(waits) == 1


def test_one_copy_to_the_host(monkeypatch):
    copies, plain = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.shape) or plain(x))
    tensors = [
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.ones(5, dtype=torch.uint8),
        torch.ones(0, dtype=torch.uint8),
    ]
    for x, y in zip(adaptive._on_host(tensors), tensors, strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    assert len(copies) == 1
    assert adaptive._on_host([]) == []
