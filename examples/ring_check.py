"""The self-test of ``ring.py --check``: what ranks compute, how fast they exchange, and what happens if one dies.

    torchrun --nproc-per-node 2 examples/ring.py --check [--backend nccl]

It takes about a minute. Rank 0 prints a report that can be pasted into an issue. The exit status is 1 if a check fails.

* *exact*: sharded calls next to one device in float64, for all transports, layouts and kinds of batches, forward and
  backward. On GPUs also in bfloat16, whose error must not exceed 1.5 x that of one device.
* *first call*: the first call of a new group, in which some ranks have nothing to send.
* *killed rank*: processes with a group of their own, of which the last ends. When do the others raise, and whom do they
  name? With NCCL, PyTorch's watchdog may end a process instead of raising. The report has both, without and with
  ``TORCH_NCCL_BLOCKING_WAIT=1``.
* *link* and *overlap*: bandwidth to the next rank; the time of a call, of its computation, and of its messages.

``--backend nccl`` makes the group ``"cpu:gloo,cuda:nccl"``. ``--backend cuda:nccl`` is a group without gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import dilated_attention_pytorch
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, SparsePatternConfig, attention
from dilated_attention_pytorch.distributed import Shards, local_device
from dilated_attention_pytorch.distributed import executor as ring_executor
from dilated_attention_pytorch.distributed.wire import Wire

NAMES = ("out", "lse", "dq", "dk", "dv")
TOKENS, BATCH, HEAD_DIM = 384, 2, 16
EXACT = 1e-10  # relative to the largest element, in float64
KILL_TIMEOUT_S = 15.0  # of the group in which a rank dies
RAISED_S = 5.0  # the others raise within this time, over gloo
WATCHDOG_S = 30.0  # more than the watchdog of NCCL takes after the timeout


@dataclass(frozen=True)
class Setting:
    """A call that is compared with one device."""

    name: str
    pattern: Dilated | BlockSparse
    transport: str = "ring"
    layout: str | Shards = "contiguous"
    bucket_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The lines of the report: what was checked, the result, and whether it is right. Notes are neither."""

    lines: list[tuple[str, str, bool | None]] = field(default_factory=list)

    def add(self, name: str, result: str, ok: bool | None = None) -> None:
        self.lines.append((name, result, ok))

    @property
    def failed(self) -> int:
        return sum(ok is False for _, _, ok in self.lines)

    def __str__(self) -> str:
        words = {True: "ok", False: "**WRONG**", None: ""}
        rows = [f"| {name} | {result} | {words[ok]} |" for name, result, ok in self.lines]
        return "\n".join(["| check | result | |", "| --- | --- | --- |", *rows])


def settings(world: int) -> Iterator[Setting]:
    """All transports; known shards; padded and packed batches; dropout; blocks."""
    n = TOKENS
    longnet, dense = Dilated([32, 128, n], [1, 4, 8]), Dilated([n], [1])
    rows = [n // (2 * world)] * world  # one rank has the rest, and one has nothing
    rows[-1] = 0 if world > 2 else rows[-1]
    rows[0] += n - sum(rows)
    known = Shards.of(rows, "contiguous")
    packed = {"cu_seqlens": torch.tensor([0, 7, n // 3, n // 3, n - 20, n]), "is_causal": True}
    local, adaptive = (
        BlockSparse.from_config(SparsePatternConfig(kind, 0.3, block_size=16)) for kind in ("local_window", "adaptive")
    )
    for transport in ("ring", "allgather"):
        yield Setting("dilated, causal, zigzag", longnet, transport, "zigzag", options={"is_causal": True})
    yield Setting("dilated, small messages", longnet, bucket_size=5)
    for transport in ("ring", "allgather", "ulysses"):
        yield Setting("dense", dense, transport, "zigzag", options={"is_causal": True})
    yield Setting("known shards, uneven", longnet, layout=known)
    yield Setting("known shards, second call", longnet, layout=known)
    yield Setting("padded", longnet, options={"lengths": torch.tensor([n, n // 3])})
    yield Setting("packed", longnet, options=packed)
    yield Setting("packed", dense, "ulysses", options=packed)
    yield Setting("dropout", longnet, options={"dropout_p": 0.3, "seed": 7})
    yield Setting("blocks", local, options={"is_causal": True})
    yield Setting("adaptive blocks", adaptive, layout="zigzag")


class Check:
    """The checks of one rank, which make the same calls in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, backend: str) -> None:
        self.group, self.device, self.backend = group, device, backend
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.heads = 8 * -(-self.world // 8)  # enough for every rank to have one
        self.report = Report()

    def everyone(self, own: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, own, group=self.group)
        return values

    def run(self) -> None:
        self.first_call()
        for setting in settings(self.world):
            self.exact(setting, torch.float64)
        if self.device.type == "cuda":
            for setting in settings(self.world):
                self.exact(setting, torch.bfloat16)
        self.killed({})
        if "nccl" in self.backend:
            self.killed({"TORCH_NCCL_BLOCKING_WAIT": "1"})
        self.link()
        self.overlap()

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Query, key, value and the gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        shape = (4, BATCH, TOKENS, self.heads, HEAD_DIM)
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, dtype).unbind(0))

    def first_call(self) -> None:
        """Only rank 0 has valid rows, so no rank has a message."""
        group = dist.new_group(list(range(self.world)))
        (x,) = (self.inputs(torch.float64)[0][:, : 8 * self.world],)
        own = x[:, 8 * self.rank : 8 * self.rank + 8].contiguous()
        options: dict[str, Any] = {"lengths": torch.tensor([5, 3]), "layout": Shards.of([8] * self.world, "contiguous")}
        out = attention(own, own, own, Dilated([64], [1]), group=group, **options)
        whole = attention(x, x, x, Dilated([64], [1]), lengths=options["lengths"])
        expected = whole[:, 8 * self.rank : 8 * self.rank + 8]
        error = max(self.everyone(float((out - expected).abs().max())))
        self.report.add("first call of a group, without messages", f"{error:.0e}", error < EXACT)

    def exact(self, setting: Setting, dtype: torch.dtype) -> None:
        """The rows of all ranks next to one device."""
        given, layout = self.inputs(dtype), setting.layout
        truth = self.results(setting, [x.double() for x in given])
        shards = layout if isinstance(layout, Shards) else Shards.even(TOKENS, self.world, layout)
        mine = torch.cat([torch.arange(c.start, c.stop) for c in shards.chunks[self.rank]]).to(self.device)
        sharding = Sharding(self.group, layout, setting.bucket_size, setting.transport)
        own = self.results(setting, [x[:, mine] for x in given], sharding)
        errors = self.relative(own, [x[:, mine] for x in truth], truth)
        allowed = [EXACT] * len(NAMES)
        if dtype != torch.float64:
            allowed = [1.5 * x + 1e-3 for x in self.relative(self.results(setting, given), truth, truth)]
        errors = [max(each) for each in zip(*self.everyone(errors), strict=True)]
        shown = ", ".join(f"{name} {error:.0e}" for name, error in zip(NAMES, errors, strict=True))
        ok = all(error <= most for error, most in zip(errors, allowed, strict=True))  # not if an error is NaN
        name = f"{setting.name}, {setting.transport}, {str(dtype).removeprefix('torch.')}"
        self.report.add(name, shown, all(self.everyone(ok)))

    def results(self, setting: Setting, tensors: list[Tensor], sharding: Sharding | None = None) -> list[Tensor]:
        """out, lse, dq, dk and dv, rows first, in float64."""
        *inputs, dout = tensors
        inputs = [x.detach().contiguous().requires_grad_() for x in inputs]
        out, lse = attention(*inputs, setting.pattern, group=sharding, return_lse=True, **setting.options)
        lse = lse.transpose(1, 2)
        total = (out * dout).sum() + lse.where(lse.isfinite(), 0.0).sum()
        grads = torch.autograd.grad(total, inputs)
        return [x.detach().double() for x in (out, lse.where(lse.isfinite(), 0.0), *grads)]

    def relative(self, actual: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> list[float]:
        """The largest differences, relative to the largest elements of the whole sequence."""
        differences = [float((a - e).abs().max()) if a.numel() else 0.0 for a, e in zip(actual, expected, strict=True)]
        return [x / float(w.abs().max()) for x, w in zip(differences, whole, strict=True)]

    def killed(self, environment: dict[str, str]) -> None:
        """The last of as many processes as ranks ends. What do the others do?"""
        address = [""]
        if self.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                address = [f"{os.environ['MASTER_ADDR']}:{free.getsockname()[1]}"]
        (address,) = {x for x in self.everyone(address[0]) if x}
        command = [sys.executable, __file__, address, str(self.rank), str(self.world), self.backend, str(self.device)]
        # The group of these processes has a store of its own, not that of torchrun.
        variables = os.environ | environment | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
        pipe, start = subprocess.PIPE, time.monotonic()
        child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables)
        try:
            output, errors = child.communicate(timeout=60.0 + KILL_TIMEOUT_S + WATCHDOG_S)
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = json.dumps({"hangs": time.monotonic() - start}), ""
        found = json.loads(output.splitlines()[-1]) if output.strip() else {}
        last = errors.strip().splitlines()[-1:]
        reports = self.everyone({"code": child.returncode, "last": last[0] if last else "", **found})
        where = "".join(f", {name}={value}" for name, value in environment.items())
        for rank, report in enumerate(reports[:-1]):
            self.report.add(f"rank {self.world - 1} is killed{where}: rank {rank}", *self.judged(report))

    def judged(self, report: dict[str, Any]) -> tuple[str, bool | None]:
        """What a rank did after another had died, and whether it is right."""
        if "hangs" in report:
            return f"hangs for {report['hangs']:.0f} s", False
        if "error" not in report:
            # The watchdog of NCCL ends a process by SIGABRT.
            by_watchdog = "nccl" in self.backend and report["code"] == -signal.SIGABRT
            return f"its process ended with code {report['code']}: {report['last']}", None if by_watchdog else False
        dead = self.world - 1
        named = re.search(rf"\brank {dead}\b", report["error"]) is not None
        shown = f"raised after {report['seconds']:.1f} s, {'and named' if named else 'without naming'} rank {dead}"
        right = named and report["seconds"] < RAISED_S
        return shown, right if "nccl" not in self.backend or right else None

    def timed(self, call: Callable[[], Any]) -> float:
        """The median of three, in seconds, on the slowest rank."""
        call()
        seconds = []
        for _ in range(3):
            self.everyone(None)  # all ranks begin together
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            seconds.append(max(self.everyone(time.perf_counter() - start)))
        return sorted(seconds)[1]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def link(self) -> None:
        """All ranks send to the next one at the same time."""
        count = (64 if self.device.type == "cuda" else 8) * 2**20
        sent, received = torch.zeros(2, count, dtype=torch.uint8, device=self.device).unbind(0)
        ranks = dist.get_process_group_ranks(self.group)
        after, before = ranks[(self.rank + 1) % self.world], ranks[(self.rank - 1) % self.world]

        def call() -> None:
            sending = dist.P2POp(dist.isend, sent, after, self.group)
            for handle in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, before, self.group)]):
                handle.wait()

        seconds = self.timed(call)
        self.report.add("link", f"{count / seconds / 1e9:.2f} GB/s to the next rank, {count // 2**20} MiB at a time")

    def overlap(self) -> None:
        """A call, the same without messages, and the same without computation."""
        tokens, dtype = (65536, torch.bfloat16) if self.device.type == "cuda" else (1024, torch.float32)
        shape = (3, 1, tokens // self.world, self.heads, 64 if self.device.type == "cuda" else HEAD_DIM)
        inputs = [x.requires_grad_() for x in torch.randn(shape, device=self.device).to(dtype).unbind(0)]
        options: dict[str, Any] = {"backend": "sdpa", "group": Sharding(self.group, transport="ring")}

        def call() -> None:
            out = attention(*inputs, Dilated([tokens], [2]), **options)
            torch.autograd.grad(out, inputs, out.detach())

        whole = self.timed(call)
        with mock.patch.object(Wire, "start", return_value=lambda: None):
            computation = self.timed(call)
        nothing = mock.patch.multiple(ring_executor.loop, attend_=mock.DEFAULT, add_gradients_=mock.DEFAULT)
        with nothing:
            messages = self.timed(call)
        hidden = (computation + messages - whole) / min(computation, messages)
        times = f"call {whole * 1e3:.1f} ms, computation {computation * 1e3:.1f} ms, messages {messages * 1e3:.1f} ms"
        shown = f"{times}: {max(0.0, min(1.0, hidden)):.0%} of the shorter one is hidden"
        self.report.add(f"overlap, {tokens:,} tokens, w = N, r = 2", shown)

    def describe(self) -> str:
        """Versions and devices."""
        cuda = self.device.type == "cuda"
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else ""  # type: ignore[no-untyped-call]
        versions = f"dilated_attention_pytorch {dilated_attention_pytorch.__version__}, torch {torch.__version__}{nccl}"
        devices = self.everyone(torch.cuda.get_device_name(self.device) if cuda else platform.machine())
        machines = len(set(self.everyone(socket.gethostname())))
        ranks = f"{self.world} ranks on {machines} machine(s): " + ", ".join(
            f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)
        )
        return f"{versions}, Python {platform.python_version()}\n{ranks}; backend {self.backend}"


def device_of(backend: str) -> torch.device:
    """The device of this rank; its GPU, if the backend has one."""
    if "nccl" not in backend:
        return torch.device("cpu")
    device = local_device()
    torch.cuda.set_device(device)
    return device


def check(backend: str) -> int:
    """Run all checks in the ranks that torchrun started; the exit status."""
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    device = device_of(backend)
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    start = time.monotonic()
    ranks = Check(dist.group.WORLD, device, backend)
    head = ranks.describe()
    end = "stopped by an error"
    try:
        ranks.run()
        end = f"{ranks.report.failed} check(s) failed" if ranks.report.failed else "nothing failed"
    finally:
        if ranks.rank == 0:
            print(f"{head}\n\n{ranks.report}\n\n{end}, {time.monotonic() - start:.0f} s", flush=True)
    dist.destroy_process_group()
    return 1 if ranks.report.failed else 0


def die_or_report(address: str, rank: int, world: int, backend: str, device: torch.device) -> None:
    """A rank of the group in which the last one dies: print when and how this one noticed it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=KILL_TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=timeout)
    # With known shards the second call compares nothing: the others notice by a message that does not come.
    x, shards = torch.randn(1, 64, 4, 16, device=device), Shards.of([64] * world, "contiguous")

    def call() -> None:
        attention(
            x, x, x, Dilated([64 * world], [1]), backend="sdpa", group=Sharding(dist.group.WORLD, shards, transport="ring")
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    call()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    text = ""
    try:
        call()
    except RuntimeError as error:
        text = str(error)
    print(json.dumps({"error": text, "seconds": time.monotonic() - start}), flush=True)
    if rank == 0:  # this process holds the store, in which the others look for the failure
        time.sleep(RAISED_S)
    os._exit(0)  # the group cannot be destroyed in order


def main() -> None:
    parser = argparse.ArgumentParser(description="a rank of a group in which the last one dies; ring.py --check starts it")
    parser.add_argument("address")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("backend")
    parser.add_argument("device", type=torch.device)
    die_or_report(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
