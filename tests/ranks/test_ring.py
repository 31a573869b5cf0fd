"""Sharded sequences over gloo on a CPU: every rank's rows are those of one device, gradients included."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
from dilated_attention_pytorch import (
    BlockSparse,
    Dilated,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    attention,
    dilated_attention,
)
from dilated_attention_pytorch.distributed import Shards, gather_sequence, neighbours, shard_sequence
from dilated_attention_pytorch.distributed.route import default_bucket_size, make_route
from dilated_attention_pytorch.distributed.sequence import rows_of
from staged import machines, staged

NAMES = ("out", "lse", "dq", "dk", "dv")
LONG = Dilated([64, 512, 8192], [1, 4, 16])
MIXED = Dilated([16, 64, 400], [1, 2, 4])


@dataclass
class Case:
    pattern: Dilated | BlockSparse
    rows: tuple[int, ...] | int  # of the shards, or of the sequence and evenly spread
    layout: str = "contiguous"
    is_causal: bool = False
    heads: int = 2
    key_heads: int = 2
    transport: str = "ring"
    dtype: torch.dtype = torch.float64
    more: dict[str, Any] = field(default_factory=dict)  # lists become tensors

    def shards(self, world: int) -> Shards:
        return (
            Shards.even(self.rows, world, self.layout) if isinstance(self.rows, int) else Shards.of(self.rows, self.layout)
        )

    def expected_bytes(
        self, shards: Shards, rank: int, options: dict[str, Any], sent: bool, qk: tuple[torch.Tensor, torch.Tensor]
    ) -> int:
        spans = {name: tuple(options[name].tolist()) for name in ("lengths", "cu_seqlens") if name in options}
        route = make_route(
            self.pattern, shards, rank, 2, self.key_heads, is_causal=self.is_causal, bucket_size=1000, **spans
        )
        if not sent:
            sizes = {"head_dim": 8, "element_size": self.dtype.itemsize}
            return sum(place.schedule.bytes(rank, batch=place.batch, **sizes) for place in route.places)
        rows = sum(place.batch * t.rows for place in route.places for t in place.schedule.sends(rank))
        return rows * 2 * self.key_heads * 8 * self.dtype.itemsize


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
        Case(Dilated([16, 64, 400], [1, 3, 5], "blocked"), (20, 33, 7, 40, 12), "zigzag", True, 4, more={"bucket_size": 1}),
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
        Case(LONG, 4099, "zigzag", True, 2, 2, "ring", torch.float32),
        Case(LONG, 1023, "contiguous", True, 4, 1, "auto"),
        Case(Dilated([2000], [1]), 1023, "contiguous", True, 8, 8, "auto"),
    ],
}  # fmt: skip


class Received:
    """Bytes of keys, values and gradients that come in over the wire, counted where PyTorch is called."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        plain = dist.batch_isend_irecv

        def counting(operations):
            tensors = [x.tensor for x in operations if x.op is dist.irecv and x.tensor.is_floating_point()]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            return plain(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", counting)

    def take(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def check_case(case: Case, number: int, group, rank: int, world: int, received: Received) -> list[torch.Tensor]:
    shards = case.shards(world)
    n, name = shards.length, f"world {world}, case {number}"
    options = {key: torch.tensor(x) if isinstance(x, list) else x for key, x in case.more.items()}
    sharding = {key: options.pop(key) for key in ("bucket_size",) if key in options}
    torch.manual_seed(number)
    q, dout = torch.randn(2, 2, n, case.heads, 8, dtype=torch.float64).to(case.dtype).unbind(0)
    k, v = torch.randn(2, 2, n, case.key_heads, 8, dtype=torch.float64).to(case.dtype).unbind(0)
    dlse = torch.randn(2, case.heads, n, dtype=case.dtype)
    # One device in float64 is the truth, and for float32 one device in float32 the measure.
    wanted, tolerances = [], [1e-10] * 5
    for dtype in (torch.float64, case.dtype):
        whole = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out, lse = attention(*whole, case.pattern, is_causal=case.is_causal, return_lse=True, **options)
        met = lse.isfinite()
        total = (out * dout).sum() + (lse.where(met, 0.0) * dlse).sum()
        wanted.append([out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(total, whole)])
        if case.dtype == torch.float64:
            break
    if case.dtype == torch.float32:
        errors = [float((a - e).nan_to_num().abs().max()) for a, e in zip(*wanted, strict=True)]
        tolerances = [3 * error + 1e-6 for error in errors]
    mine = rows_of(shards, rank, torch.device("cpu"))
    local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
    results = []
    largest = LargestTensor()
    for _ in range(2):
        received.take()
        with largest:
            part, part_lse = attention(
                *local, case.pattern, group=group, is_causal=case.is_causal, layout=case.layout, return_lse=True,
                transport=case.transport, **sharding, **options,
            )  # fmt: skip
        forward_bytes = received.take()
        total = (part * dout[:, mine]).sum() + (part_lse.where(met[:, :, mine], 0.0) * dlse[:, :, mine]).sum()
        with largest:
            grads = torch.autograd.grad(total, local)
        backward_bytes = received.take()
        results.append([part.detach(), part_lse.detach().transpose(1, 2), *grads])
    for label, a, again, e, tolerance in zip(NAMES, *results, wanted[0], tolerances, strict=True):
        assert torch.equal(a, again), f"{name} {label}: other bits"
        assert a.dtype == case.dtype
        torch.testing.assert_close(
            a.double(), e[:, mine], rtol=0, atol=tolerance, msg=lambda m, label=label: f"{name} {label}: {m}"
        )
    if world == 1:
        assert forward_bytes == backward_bytes == 0
    elif case.transport in ("ring", "allgather"):
        assert forward_bytes == case.expected_bytes(shards, rank, options, False, (q, k)), name
        if options.get("mixing_gradient") != "detached":  # which computes branches again
            home = case.expected_bytes(shards, rank, options, True, (q, k))
            assert backward_bytes == forward_bytes + home, name
    if case.transport == "ring" and n > 1000 and isinstance(case.pattern, Dilated) and "bucket_size" not in case.more:
        # Nothing of the size of the sequence: the tensors of the rank itself, and a message.
        bucket = default_bucket_size(shards) * 2 * 2 * case.key_heads * 8
        assert largest.numel <= max(len(mine) * 2 * case.heads * 8, bucket), name
    return results[0]


def check_comm_dtype(group, rank: int, received: Received) -> None:
    """Gradients of keys and values that come from elsewhere have the precision and the size of the type they travel in."""
    pattern, n = Dilated([8, 64], [1, 2]), 40
    whole = torch.randn(3, 1, n, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    results = {}
    for comm_dtype in (None, torch.float32, torch.bfloat16):
        local = [shard_sequence(x, group).requires_grad_() for x in whole]
        out = attention(*local, pattern, group=group, transport="ring", comm_dtype=comm_dtype)
        forward_bytes = received.take()
        grads = torch.autograd.grad(out.square().sum(), local)
        results[comm_dtype] = grads, received.take() - forward_bytes
    exact, most_bytes = results.pop(None)
    for comm_dtype, (grads, some_bytes) in results.items():
        assert some_bytes * 8 == most_bytes * comm_dtype.itemsize
        errors = [float((a - e).norm() / e.norm()) for a, e in zip(grads, exact, strict=True)]
        assert errors[0] == 0.0
        assert all(0.0 < error < torch.finfo(comm_dtype).eps for error in errors[1:]), errors


def check_accuracy(groups, rank: int) -> None:
    """The error of half-precision gradients does not grow with the ranks."""
    pattern, n = Dilated([32, 128], [1, 2]), 128
    torch.manual_seed(1)
    q, k, v, dout = torch.randn(4, 1, n, 2, 16).bfloat16().unbind(0)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = attention(*exact, pattern, is_causal=True)
    wanted = [out, *torch.autograd.grad(out, exact, dout.double())]
    errors = []
    for world in (1, 8):
        shards = Shards.even(n, world, "zigzag")
        if rank >= world:
            continue
        mine = rows_of(shards, rank, torch.device("cpu"))
        local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        part = attention(*local, pattern, is_causal=True, group=groups[world], layout="zigzag", transport="ring")
        parts = [part, *torch.autograd.grad(part, local, dout[:, mine])]
        parts = [gather_sequence(x.detach(), groups[world], layout="zigzag") for x in parts]
        errors.append([float((a - e).norm() / e.norm()) for a, e in zip(parts, wanted, strict=True)])
    if rank == 0:
        assert all(many <= 1.3 * one for one, many in zip(*errors, strict=True)), errors


def check_staged(cases: dict[int, list[Case]], rank: int, received: Received) -> None:
    """Through host memory, with the bytes in a socket and in memory that ranks share: the same bits."""
    with staged(received) as cudart:
        by_way = []
        for name in (None, neighbours.machine()):
            groups = {world: dist.new_group(list(range(world))) for world in cases}
            with machines(name):
                by_way.append([
                    check_case(case, number, groups[world], rank, world, received)
                    for world, some in cases.items()
                    for number, case in enumerate(some)
                    if rank < world
                ])  # fmt: skip
            assert bool(cudart.pinned) == (name is not None and rank < max(cases))
            for group in groups.values():
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
            del group, groups
            assert not cudart.pinned
        for through_socket, shared in zip(*by_way, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(through_socket, shared, strict=True))


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


def check_modules(group) -> None:
    module = RingDilatedAttention([16, 64], [1, 2], layout="zigzag", bucket_size=3, transport="ring")
    q = torch.randn(3, 1, 50, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [shard_sequence(x, group, layout="zigzag") for x in q]
    whole = gather_sequence(module(*parts, is_causal=True), group, layout="zigzag")
    torch.testing.assert_close(whole, attention(*q, module.pattern, is_causal=True), rtol=1e-10, atol=1e-10)
    part = dilated_attention(*parts, [16, 64], [1, 2], is_causal=True, group=group, layout="zigzag")
    torch.testing.assert_close(gather_sequence(part, group, layout="zigzag"), whole, rtol=1e-10, atol=1e-10)
    # A seed that nobody gave is the first rank's; it is drawn again every time.
    dropping = RingDilatedAttention([16, 64], [1, 2], attention_dropout=0.5)
    parts = [shard_sequence(x, group) for x in q]
    torch.manual_seed(dist.get_rank())
    first, second = (gather_sequence(dropping(*parts), group) for _ in range(2))
    torch.manual_seed(0)
    torch.testing.assert_close(first, attention(*q, module.pattern, dropout_p=0.5))
    assert not torch.equal(first, second)
    torch.testing.assert_close(gather_sequence(dropping.eval()(*parts), group), attention(*q, module.pattern))
    # Multi-head, with projections that every rank has: the sum of their gradients is that of one device.
    arguments = (16, 2, [16, 64], [1, 2])
    torch.manual_seed(3)
    one = MultiheadDilatedAttention(*arguments, dtype=torch.float64)
    many = MultiheadDilatedAttention(*arguments, dtype=torch.float64, group=group, layout="zigzag", bucket_size=5)
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


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    world = max(CASES)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size))) for size in CASES}
    with pytest.MonkeyPatch.context() as monkeypatch:
        received = Received(monkeypatch)
        for size, cases in CASES.items():
            for number, case in enumerate(cases):
                if rank < size:
                    check_case(case, number, groups[size], rank, size, received)
        check_staged({2: CASES[2], 3: CASES[3], 4: CASES[4][3:]}, rank, received)
        received.take()
        check_comm_dtype(dist.group.WORLD, rank, received)
    check_accuracy(groups, rank)
    check_modules(dist.group.WORLD)
    check_shards(dist.group.WORLD, rank, world)
    dist.destroy_process_group()


def test_the_same_as_on_one_device(tmp_path):
    ranks.start(work, (str(tmp_path / "store"),), max(CASES))


def test_without_a_group():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        RingDilatedAttention([4], [1])(x, x, x)
    for name, bad in (("layout", "zigzag"), ("bucket_size", 5), ("transport", "ring"), ("comm_dtype", torch.float32)):
        with pytest.raises(ValueError, match=f"{name}=.*without group"):
            attention(x, x, x, Dilated([4], [1]), **{name: bad})
        with pytest.raises(ValueError, match=f"{name}=.*without group"):
            MultiheadDilatedAttention(16, 2, [4], [1], **{name: bad})
    for bad, error, match in (
        ({"layout": "spiral"}, ValueError, "layout must be one of 'contiguous', 'zigzag', got 'spiral'"),
        ({"transport": "pigeon"}, ValueError, "transport must be one of .*, got 'pigeon'"),
        ({"bucket_size": 0}, ValueError, "bucket_size is a number of rows, at least 1, or None, got 0"),
        ({"bucket_size": True}, ValueError, "bucket_size is a number of rows, at least 1, or None, got True"),
        ({"comm_dtype": "float32"}, TypeError, "comm_dtype must be one of torch.float64, .* or None, got 'float32'"),
        ({"comm_dtype": torch.float8_e4m3fn}, TypeError, "comm_dtype must be one of .* or None, got torch.float8_e4m3fn"),
    ):
        with pytest.raises(error, match=match):
            RingDilatedAttention([4], [1], **bad)
    with pytest.raises(TypeError, match="group must be a ProcessGroup or a DeviceMesh, got 'all'"):
        attention(x, x, x, Dilated([4], [1]), group="all")


def test_example():
    pytest.importorskip("typer")  # the text comes from the command line's package
    script = Path(__file__).parents[2] / "examples" / "ring.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, "--tokens", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 1: 300 tokens, received" in done.stdout
    differences = re.findall(r"(?:out|dq|dk|dv) (\S+?)(?:,|$)", done.stdout.strip().splitlines()[-1])
    assert len(differences) == 4
    assert all(float(x) < 1e-5 for x in differences)
