"""What ``explain`` and ``simulate_ring`` say, next to ranks over gloo: bytes, waits and memory of both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from block_cases import config
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, attention, explain
from dilated_attention_pytorch.distributed import Shards, simulate_ring
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.measure import peak_extra_bytes


class Traffic:
    """Bytes that come in over the wire, and batches that bring any, counted where PyTorch is called."""

    def __init__(self, monkeypatch) -> None:
        self.bytes = self.batches = 0
        plain = dist.batch_isend_irecv

        def counting(operations):
            received = [x.tensor for x in operations if x.op is dist.irecv]
            self.bytes += sum(x.numel() * x.element_size() for x in received)
            self.batches += bool(received)
            return plain(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", counting)

    def take(self) -> tuple[int, int]:
        taken, self.bytes, self.batches = (self.bytes, self.batches), 0, 0
        return taken


@dataclass
class Setting:
    pattern: Dilated | BlockSparse
    world: int
    transport: str  # that "auto" takes
    n: int = 203
    heads: int = 4
    key_heads: int = 2
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.transport}-{self.world}-{self.layout}-{self.pattern.spec.partition('|')[0]}"


def blocks(kind: str, ratio: float = 0.4) -> BlockSparse:
    return BlockSparse.from_config(config(kind, ratio))


SETTINGS = [
    Setting(Dilated([16, 64, 256], [1, 2, 4]), 3, "ring", layout="zigzag", more={"is_causal": True}),
    Setting(Dilated([16, 1603], [1, 128]), 4, "allgather", n=1603),
    Setting(Dilated([64, 203], [1, 2]), 4, "ring", more={"cu_seqlens": [0, 9, 9, 60, 70, 71, 140, 203]}),
    Setting(Dilated([64], [1]), 5, "ring", n=3, more={"scale": -0.3}),  # two ranks have no rows
    Setting(Dilated([64, 256], [2, 1]), 3, "ring", dtype=torch.bfloat16, n=77),
    Setting(Dilated([256], [1]), 4, "ulysses", heads=8, key_heads=4),
    Setting(Dilated([256], [1]), 4, "ulysses", heads=14, key_heads=7, layout="zigzag"),
    Setting(blocks("local_window", 0.1), 5, "ring"),
    Setting(blocks("hierarchical"), 4, "ring", layout="zigzag", more={"is_causal": True}),
    Setting(blocks("global_local", 0.2), 4, "ring", more={"cu_seqlens": [0, 100, 103, 203]}),
    Setting(blocks("local_window", 0.1), 3, "ring", more={"lengths": [203, 40]}),
    Setting(blocks("adaptive", 0.2), 3, "ring", n=107),
    Setting(blocks("adaptive", 0.2), 4, "ring", n=107, layout="zigzag", more={"is_causal": True}),
]


def tensors(setting: Setting) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, setting.n, heads, 8) for heads in (setting.heads, setting.key_heads, setting.key_heads)]
    return [torch.randn(shape, dtype=torch.float64).to(setting.dtype) for shape in shapes]


def check_traffic(group, setting: Setting) -> None:
    whole, rank = tensors(setting), dist.get_rank(group)
    rows = rows_of(Shards.even(setting.n, setting.world, setting.layout), rank, torch.device("cpu"))
    own = [x[:, rows].clone().requires_grad_() for x in whole]
    with pytest.MonkeyPatch.context() as monkeypatch:
        traffic = Traffic(monkeypatch)
        out = attention(*own, setting.pattern, group=group, layout=setting.layout, **setting.more)
        forward, waits = traffic.take()
        torch.autograd.grad(out, own, torch.randn_like(out))
        backward, _ = traffic.take()
    every: list[Any] = [None] * setting.world
    dist.all_gather_object(every, (forward, backward, waits), group=group)
    if rank > 0:
        return  # what follows is the same for all ranks
    options = {name: x for name, x in setting.more.items() if name != "scale"}
    found = explain(*whole, setting.pattern, world_size=setting.world, layout=setting.layout, **options).sharding
    assert found.transport == setting.transport
    most = tuple(map(max, zip(*every, strict=True)))
    one = min(1, most[2]) if setting.transport == "allgather" else most[2]
    assert (found.bytes, found.backward_bytes, found.waits) == (*most[:2], one)
    if setting.transport != "ulysses" and not {"cu_seqlens", "lengths"} & {*setting.more}:
        options = {"layout": setting.layout, "backward": True, **setting.more}
        *_, memory = simulate_ring(*whole, setting.pattern, setting.world, **options)
        assert [(x.received, x.grad_received) for x in memory] == [x[:2] for x in every]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bytes_and_waits_are_those_of_ranks(on_ranks, setting):
    on_ranks(setting.world, check_traffic, setting)


MEMORY = [
    Setting(Dilated([512, 4096], [1, 4]), 3, "ring", n=4096, heads=4, key_heads=4),
    Setting(Dilated([512, 4096], [1, 4]), 3, "ring", n=4096, layout="zigzag", more={"scale": -0.3, "is_causal": True}),
    Setting(Dilated([128, 512], [1, 2]), 2, "ring", n=512, dtype=torch.bfloat16, more={"scale": -0.3}),
    Setting(blocks("local_window", 0.05), 3, "ring", n=4096, more={"scale": -0.3}),
]


def check_memory(group, setting: Setting) -> None:
    whole, rank, cpu = tensors(setting), dist.get_rank(group), torch.device("cpu")
    rows = rows_of(Shards.even(setting.n, setting.world, setting.layout), rank, cpu)
    own = [x[:, rows].clone().requires_grad_() for x in whole]
    sharding, results = Sharding(group, setting.layout, transport="ring"), []

    def attend() -> None:
        results.append(attention(*own, setting.pattern, group=sharding, **setting.more))

    attend()  # plans are made once
    out = results.pop()
    torch.autograd.grad(out, own, torch.zeros_like(out))
    forward = peak_extra_bytes(attend, cpu)
    dout = torch.zeros_like(out)
    backward = peak_extra_bytes(lambda: torch.autograd.grad(results[0], own, dout), cpu)
    every: list[Any] = [None] * setting.world
    dist.all_gather_object(every, (forward, backward), group=group)
    if rank > 0:
        return  # what follows is the same for all ranks
    *_, memory = simulate_ring(*whole, setting.pattern, setting.world, layout=setting.layout, backward=True, **setting.more)
    # Acknowledgements and small tensors of plans are not simulated.
    for simulated, (forward, backward) in zip(memory, every, strict=True):
        assert simulated.buffers + simulated.partials == pytest.approx(forward, rel=0.01, abs=4096)
        assert simulated.grad_buffers + simulated.grad_partials == pytest.approx(backward, rel=0.01, abs=4096)


@pytest.mark.parametrize("setting", MEMORY, ids=str)
def test_memory_is_that_of_ranks(on_ranks, setting):
    """Both directions, with a negative scale and in half precision."""
    on_ranks(setting.world, check_memory, setting)
