"""Sharded sequences over gloo on a CPU: every rank's rows are those of one device, gradients included."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import Dilated, RingDilatedAttention, attention
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence

CASES = [
    # pattern, lengths of the shards, layout, causal, query heads, key heads; further arguments by the total length
    (Dilated([16, 64, 400], [1, 2, 4]), (30, 41, 29, 1, 17), "contiguous", False, 4, 2, lambda n: {}),
    (Dilated([16, 64, 400], [1, 2, 4]), (30, 41, 0, 29, 17), "contiguous", True, 4, 4, lambda n: {}),
    (Dilated([16, 64, 400], [1, 3, 5], "blocked"), (20, 33, 7, 40, 12), "zigzag", True, 4, 2, lambda n: {}),
    (Dilated([1000], [1]), (25, 25, 25, 25, 25), "zigzag", True, 2, 2, lambda n: {}),
    (Dilated([7, 30], [2, 9]), (3, 0, 5, 2, 1), "contiguous", False, 3, 3, lambda n: {}),
    (Dilated([8], [1]), (0, 0, 0, 1, 0), "contiguous", True, 2, 1, lambda n: {}),
    (
        Dilated([16, 100], [1, 3]),
        (30, 41, 29, 1, 17),
        "contiguous",
        False,
        4,
        2,
        lambda n: {"lengths": [n, max(0, n - 33)]},
    ),
    (Dilated([16, 100], [1, 3]), (30, 41, 0, 9, 17), "zigzag", True, 4, 2, lambda n: {"cu_seqlens": [0, 5, 5, n // 2, n]}),
    (Dilated([16, 64], [1, 2]), (30, 41, 29, 1, 17), "zigzag", True, 2, 2, lambda n: {"mixing_gradient": "detached"}),
    (Dilated([16, 64], [1, 2]), (30, 41, 29, 1, 17), "contiguous", True, 2, 2, lambda n: {"scale": -0.4}),
]


def rows_of(shards: Shards, rank: int) -> torch.Tensor:
    return torch.tensor([i for chunk in shards.chunks[rank] for i in chunk], dtype=torch.int64)


def check_shards(group, rank: int, world: int) -> None:
    """There and back, gradients included; over a mesh as over its group."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("cp", "dp"))
    for layout in ("contiguous", "zigzag"):
        whole = torch.arange(2 * 11 * 3, dtype=torch.float64).view(2, 11, 3).requires_grad_()
        part = shard_sequence(whole, mesh, layout=layout)
        assert part.shape[1] == 11 // world + (rank < 11 % world)
        again = gather_sequence(part, group, layout=layout)
        assert torch.equal(again, whole)
        weights = torch.randn(2, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        (gradient,) = torch.autograd.grad((again * weights).sum() / world, part)
        assert torch.allclose(gradient, shard_sequence(weights, group, layout=layout))
    with pytest.raises(ValueError, match="one named 'cp'"):
        shard_sequence(whole, init_device_mesh("cpu", (world, 1), mesh_dim_names=("a", "b")))


def work(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.group.WORLD
    for number, (pattern, lengths, layout, causal, heads, key_heads, more) in enumerate(CASES):
        shards = Shards.of(lengths[:world], layout)
        n = shards.length
        options = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in more(n).items()}
        torch.manual_seed(number)
        q, dout = torch.randn(2, 2, n, heads, 8, dtype=torch.float64).unbind(0)
        k, v = torch.randn(2, 2, n, key_heads, 8, dtype=torch.float64).unbind(0)
        dlse = torch.randn(2, heads, n, dtype=torch.float64)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*whole, pattern, is_causal=causal, return_lse=True, **options)
        met = lse.isfinite()
        expected = torch.autograd.grad(((out * dout).sum() + (lse.where(met, 0.0) * dlse).sum()), whole)
        mine = rows_of(shards, rank)
        local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        results = []
        for _ in range(2):
            part, part_lse = attention(
                *local, pattern, group=group, is_causal=causal, layout=layout, return_lse=True, **options
            )
            total = (part * dout[:, mine]).sum() + (part_lse.where(met[:, :, mine], 0.0) * dlse[:, :, mine]).sum()
            results.append([part, part_lse, *torch.autograd.grad(total, local)])
        wanted = [out[:, mine], lse[:, :, mine], *(x[:, mine] for x in expected)]
        for name, a, again, e in zip(("out", "lse", "dq", "dk", "dv"), *results, wanted, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"case {number} {name}: {m}")  # noqa: B023
            assert torch.equal(a, again), f"case {number} {name}: other bits"
    # The same mistake is the same error on every rank, and the group works on.
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="all ranks must call") if world > 1 else contextlib.nullcontext():
        attention(x, x, x, Dilated([4 + rank], [1]), group=group)
    with pytest.raises(ValueError, match="has no torchscale_padding"):
        attention(x, x, x, Dilated([4], [1], torchscale_padding=True), group=group)
    for bad, match in (({"backend": "triton"}, "'sdpa' or 'eager'"),):
        with pytest.raises(ValueError, match=match):
            attention(x, x, x, Dilated([4], [1]), group=group, **bad)
    attention(x, x, x, Dilated([4], [1]), group=group)
    module = RingDilatedAttention([16, 64], [1, 2], layout="zigzag")
    q = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [shard_sequence(x, group, layout="zigzag") for x in q]
    whole = gather_sequence(module(*parts, is_causal=True), group, layout="zigzag")
    torch.testing.assert_close(whole, attention(*q, module.pattern, is_causal=True), rtol=1e-10, atol=1e-10)
    check_shards(group, rank, world)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_same_as_on_one_device(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (world, port), nprocs=world)


def test_without_a_group():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        RingDilatedAttention([4], [1])(x, x, x)
    with pytest.raises(ValueError, match="layout must be one of 'contiguous', 'zigzag', got 'spiral'"):
        RingDilatedAttention([4], [1], layout="spiral")
    with pytest.raises(ValueError, match="layout='zigzag' without group"):
        attention(x, x, x, Dilated([4], [1]), layout="zigzag")
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh, got 'all'"):
        attention(x, x, x, Dilated([4], [1]), group="all")


def test_example():
    pytest.importorskip("typer")  # the text comes from the command line's package
    script = Path(__file__).parents[1] / "examples" / "ring.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, "--tokens", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 1: 300 tokens, received" in done.stdout
    differences = re.findall(r"(?:out|dq|dk|dv) (\S+?)(?:,|$)", done.stdout.strip().splitlines()[-1])
    assert len(differences) == 4
    assert all(float(x) < 1e-5 for x in differences)
