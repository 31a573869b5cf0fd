"""Sharded sequences over gloo on a CPU: every rank's rows are those of one device, gradients included."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import programs
from dilated_attention_pytorch import (
    Dilated,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    Sharding,
    attention,
    dilated_attention,
)
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.sequence import rows_of
from ring_cases import Case, Received, by_world, check_case, check_staged

LONG = Dilated([64, 512, 8192], [1, 4, 16])
MIXED = Dilated([16, 64, 400], [1, 2, 4])


UNEVEN = (30, 41, 29, 1, 17)
# By the number of ranks. Every transport, layout, bucket size and kind of batch is met; lengths are those that went wrong
# elsewhere: 1, primes, fewer rows than ranks, empty shards.
CASES: dict[int, list[Case]] = {
    1: [
        Case(MIXED, 17, is_causal=True, heads=4, transport="auto"),
        Case(Dilated([64], [1]), 17, transport="ulysses"),
        Case(Dilated([8], [1]), 1, transport="allgather"),
    ],
    2: [
        Case(LONG, 1023, "zigzag", True, 4, 2, more={"bucket_size": 7}),
        Case(MIXED, (30, 41), "zigzag", True, more={"mixing_gradient": "detached", "bucket_size": 5}),
        Case(MIXED, (30, 41), more={"mixing_gradient": "detached", "dropout_p": 0.3, "seed": 5}),
        Case(MIXED, (30, 41), "contiguous", True, more={"scale": -0.4}),
        Case(Dilated([1000], [1]), (30, 41), "zigzag", True, 6, 3, "ulysses"),
    ],
    3: [
        Case(MIXED, (0, 0, 0), transport="auto"),
        Case(MIXED, 17, "zigzag", True, 4, 2, "allgather", more={"bucket_size": 1}),
        Case(Dilated([16, 100], [1, 3]), (30, 0, 17), heads=4, more={"lengths": [47, 14], "bucket_size": 3}),
        Case(MIXED, (30, 41, 29), heads=4, more={"dropout_p": 0.4, "seed": 2**40 + 7, "bucket_size": 4}),
        Case(Dilated([16, 100], [1, 3]), (0, 40, 29), "zigzag", True, 2, 1,
             more={"dropout_p": 0.2, "seed": -3, "cu_seqlens": [0, 33, 69]}),
        Case(Dilated([200], [1]), 100, "contiguous", True, 8, 4, "ulysses", more={"lengths": [77, 100]}),
        Case(Dilated([200], [1]), (40, 0, 60), "zigzag", True, 3, 3, "ulysses", more={"cu_seqlens": [0, 50, 51, 100]}),
    ],
    4: [
        Case(LONG, 4099, "zigzag", True, 2, 1, "auto"),
        Case(LONG, 4099, "contiguous", False, 2, 2, "allgather", torch.float32),
        Case(Dilated([5000], [1]), 1023, "zigzag", True, more={"bucket_size": 100}),
        Case(Dilated([5000], [1]), 1023, "contiguous", True, 4, 4, "auto", torch.float32),
        Case(Dilated([16, 64], [1, 2], [1, 0]), (3, 0, 50, 12), transport="auto"),
    ],
    5: [
        Case(MIXED, UNEVEN, heads=4, more={"bucket_size": 7}),
        Case(MIXED, (30, 41, 0, 29, 17), is_causal=True, heads=4, key_heads=4, transport="auto"),
        Case(Dilated([16, 64, 400], [1, 3, 5], "blocked"), (20, 33, 7, 40, 12), "zigzag", True, 4, more={"bucket_size": 2}),
        Case(Dilated([7, 30], [2, 9]), (3, 0, 5, 2, 1), heads=3, key_heads=3),
        Case(Dilated([8], [1]), (0, 0, 0, 1, 0), is_causal=True, key_heads=1),
        Case(Dilated([16, 100], [1, 3]), (30, 41, 0, 9, 17), "zigzag", True, 4, 2, more={"cu_seqlens": [0, 5, 5, 48, 97]}),
        Case(MIXED, UNEVEN, "zigzag", True, more={"mixing_gradient": "detached"}),
    ],
    7: [
        Case(MIXED, 17, "zigzag", True, 4, 2, more={"bucket_size": 1}),
        Case(MIXED, 1, transport="auto"),
        Case(LONG, 1023, heads=4, transport="allgather", more={"bucket_size": 100000}),
        Case(Dilated([2000], [1]), 101, "zigzag", False, 8, 8, "ulysses"),
    ],
    8: [
        Case(LONG, 2053, "zigzag", True, 2, 2, "ring", torch.float32),
        Case(LONG, 1023, "contiguous", True, 4, 1, "auto"),
        Case(Dilated([2000], [1]), 1023, "contiguous", True, 8, 8, "auto"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("world", "number", "case"), by_world(CASES, quick=(2, 3)))
def test_rows_are_those_of_one_device(on_ranks, world, number, case):
    """In the default group, and in a group whose ranks have other numbers there."""
    on_ranks(world, check_case, case, number, spare=number % 2 if world < 8 else 0)


# All transports and layouts, small and empty messages, both dtypes, and sequences of their own.
STAGED = {2: [CASES[2][1], CASES[2][4]], 3: [CASES[3][i] for i in (0, 1, 2, 4, 6)], 4: CASES[4][3:]}


@pytest.mark.parametrize(("world", "number", "case"), by_world(STAGED))
def test_messages_through_host_memory(on_ranks, world, number, case):
    on_ranks(world, check_staged, case, number)


def check_comm_dtype(group) -> None:
    pattern, n = Dilated([8, 64], [1, 2]), 40
    whole = torch.randn(3, 1, n, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        received = Received(monkeypatch)
        for comm_dtype in (None, torch.float32, torch.bfloat16):
            local = [shard_sequence(x, group).requires_grad_() for x in whole]
            out = attention(*local, pattern, group=Sharding(group, transport="ring", comm_dtype=comm_dtype))
            forward_bytes = received.take()
            grads = torch.autograd.grad(out.square().sum(), local)
            results[comm_dtype] = grads, received.take() - forward_bytes
    exact, most_bytes = results.pop(None)
    for comm_dtype, (grads, some_bytes) in results.items():
        assert some_bytes * 8 == most_bytes * comm_dtype.itemsize
        errors = [float((a - e).norm() / e.norm()) for a, e in zip(grads, exact, strict=True)]
        assert errors[0] == 0.0
        assert all(0.0 < error < torch.finfo(comm_dtype).eps for error in errors[1:]), errors


def test_type_of_gradients_that_are_sent(on_ranks):
    """Gradients of keys and values that come from elsewhere have the precision and the size of the type they travel in."""
    on_ranks(8, check_comm_dtype)


def check_accuracy(group) -> None:
    pattern, n = Dilated([32, 128], [1, 2]), 128
    torch.manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, n, 2, 16).bfloat16().unbind(0)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = attention(*exact, pattern, is_causal=True)
    wanted = [out, *torch.autograd.grad(out, exact, dout.double())]
    errors = []
    rank, alone = dist.get_rank(), dist.new_group([0])
    for some in (alone, group):
        if some is alone and rank > 0:
            continue
        shards = Shards.even(n, dist.get_world_size(some), "zigzag")
        mine = rows_of(shards, rank, torch.device("cpu"))
        local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        part = attention(*local, pattern, is_causal=True, group=Sharding(some, "zigzag", transport="ring"))
        parts = [part, *torch.autograd.grad(part, local, dout[:, mine])]
        parts = [gather_sequence(x.detach(), some, layout="zigzag") for x in parts]
        errors.append([float((a - e).norm() / e.norm()) for a, e in zip(parts, wanted, strict=True)])
    if rank == 0:
        assert all(many <= 1.3 * one for one, many in zip(*errors, strict=True)), errors


def test_errors_do_not_grow_with_the_ranks(on_ranks):
    """In half precision, next to one rank."""
    on_ranks(8, check_accuracy)


def check_shards(group) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
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


def test_there_and_back(on_ranks):
    """The rows of a rank and the whole sequence from them, gradients included; over a mesh as over its group."""
    on_ranks(8, check_shards)


def check_module(group) -> None:
    module = RingDilatedAttention([16, 64], [1, 2], group=Sharding(None, "zigzag", bucket_size=3, transport="ring"))
    q = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [shard_sequence(x, group, layout="zigzag") for x in q]
    whole = gather_sequence(module(*parts, is_causal=True), group, layout="zigzag")
    torch.testing.assert_close(whole, attention(*q, module.pattern, is_causal=True), rtol=1e-10, atol=1e-10)
    part = dilated_attention(*parts, [16, 64], [1, 2], is_causal=True, group=group, layout="zigzag")
    torch.testing.assert_close(gather_sequence(part, group, layout="zigzag"), whole, rtol=1e-10, atol=1e-10)


def check_seed(group) -> None:
    q = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dropping = RingDilatedAttention([16, 64], [1, 2], dropout_p=0.5)
    parts = [shard_sequence(x, group) for x in q]
    torch.manual_seed(dist.get_rank())
    first, second = (gather_sequence(dropping(*parts), group) for _ in range(2))
    torch.manual_seed(0)
    torch.testing.assert_close(first, attention(*q, dropping.pattern, dropout_p=0.5))
    assert not torch.equal(first, second)
    torch.testing.assert_close(gather_sequence(dropping.eval()(*parts), group), attention(*q, dropping.pattern))


def check_seed_tensors(group) -> None:
    q = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pattern, parts, rank = Dilated([16, 64], [1, 2]), [shard_sequence(x, group) for x in q], dist.get_rank(group)
    for p in (0.0, 0.5):
        expected = shard_sequence(attention(*q, pattern, dropout_p=p, seed=3), group)
        for seed in (torch.tensor(3), torch.tensor([3]), torch.tensor(3) if rank else 3):
            out = attention(*parts, pattern, group=group, dropout_p=p, seed=seed)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"these differ:\n  seed: 0 on rank 0, 1 on rank 1, 2 on rank 2$"):
        attention(*parts, pattern, group=group, dropout_p=0.5, seed=torch.tensor(rank))
    with pytest.raises(ValueError, match=r"seed must be one integer, got a tensor of shape \(2,\)"):
        attention(*parts, pattern, group=group, dropout_p=0.5, seed=torch.tensor([3, 4]))


def check_multihead(group) -> None:
    arguments = (16, 2, [16, 64], [1, 2])
    torch.manual_seed(3)
    one = MultiheadDilatedAttention(*arguments, dtype=torch.float64)
    sharding = Sharding(group, "zigzag", bucket_size=5)
    many = MultiheadDilatedAttention(*arguments, dtype=torch.float64, group=sharding)
    many.load_state_dict(one.state_dict())
    x = torch.randn(2, 50, 16, dtype=torch.float64)
    lengths = torch.tensor([50, 31])
    expected, _ = one(x, x, x, is_causal=True, lengths=lengths)
    expected.square().sum().backward()
    part = shard_sequence(x, group, layout="zigzag")
    out, _ = many(part, part, part, is_causal=True, lengths=lengths)
    out.square().sum().backward()
    torch.testing.assert_close(gather_sequence(out, group, layout="zigzag"), expected, rtol=1e-10, atol=1e-10)
    for (label, a), b in zip(many.named_parameters(), one.parameters(), strict=True):
        dist.all_reduce(a.grad)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-8, msg=lambda m, label=label: f"{label}: {m}")
    for bad in ({"need_weights": True}, {"key_padding_mask": torch.zeros(2, 50, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="needs the whole sequence, of which a rank has a shard"):
            many(part, part, part, **bad)


def test_module(on_ranks):
    on_ranks(8, check_module)


def test_a_seed_that_nobody_gave(on_ranks):
    """It is the first rank's, and drawn again every time."""
    on_ranks(8, check_seed)


def test_seeds_that_are_tensors(on_ranks):
    """Ranks accept a tensor of one integer, as a call on one device does, and compare its value."""
    on_ranks(3, check_seed_tensors)


def test_multihead_module(on_ranks):
    """With projections that every rank has: the sum of their gradients is that of one device."""
    on_ranks(8, check_multihead)


def test_without_a_group():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        RingDilatedAttention([4], [1])(x, x, x)
    with pytest.raises(ValueError, match="layout='zigzag' without group"):
        attention(x, x, x, Dilated([4], [1]), layout="zigzag")
    with pytest.raises(ValueError, match="layout='zigzag' without group"):
        MultiheadDilatedAttention(16, 2, [4], [1], layout="zigzag")
    for bad, error, match in (
        ({"layout": "spiral"}, ValueError, "layout must be one of 'contiguous', 'zigzag', got 'spiral'"),
        ({"transport": "pigeon"}, ValueError, "transport must be one of .*, got 'pigeon'"),
        ({"bucket_size": 0}, ValueError, "bucket_size is a number of rows, at least 1, or None, got 0"),
        ({"bucket_size": True}, ValueError, "bucket_size is a number of rows, at least 1, or None, got True"),
        ({"comm_dtype": "float32"}, TypeError, "comm_dtype must be one of torch.float64, .* or None, got 'float32'"),
        ({"comm_dtype": torch.float8_e4m3fn}, TypeError, "comm_dtype must be one of .* or None, got torch.float8_e4m3fn"),
    ):
        with pytest.raises(error, match=match):
            RingDilatedAttention([4], [1], group=Sharding(None, **bad))
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh or a Sharding, got 'all'"):
        attention(x, x, x, Dilated([4], [1]), group="all")


def test_example(tmp_path):
    pytest.importorskip("typer")  # the text comes from the command line's package
    script = Path(__file__).parents[2] / "examples" / "ring.py"
    environments = [os.environ | rank for rank in programs.of_ranks(2)]
    arguments = (programs.FILE, script, "--tokens", 600)
    done, other = programs.run_together(
        *arguments, folder=tmp_path, environments=environments, modules=programs.WITH_DYNAMO
    )
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + other.stderr
    assert "rank 1: 300 tokens, received" in done.stdout
    differences = re.findall(r"(?:out|dq|dk|dv) (\S+?)(?:,|$)", done.stdout.strip().splitlines()[-1])
    assert len(differences) == 4
    assert all(float(x) < 1e-5 for x in differences)
