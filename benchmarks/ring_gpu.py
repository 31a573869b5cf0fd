"""Several ranks on one GPU, over gloo and pinned host memory: time, copies, and the difference from one rank.

    PYTHONPATH=src python3 benchmarks/ring_gpu.py [--tokens 262144 1048576] [--ranks 2 4] [--backend auto] [--mps]
        [--out FILE]

``single`` is the same problem on a group of one rank, which communicates nothing. ``alone`` is the same call without a
group. ``copies`` is the time of all messages of a forward and a backward without any computation. The ranks share the
time of one GPU, so ``seconds`` is at best ``alone``. The table has the ratio to each of both with the copies added.

With ``--mps`` the ranks share the GPU through CUDA's multi-process service, whose daemon is started for the run.
Without it, the driver gives each process the whole GPU in turns. ``difference`` is the largest relative difference of
out, dq, dk and dv from ``single``, over sampled rows.

Times are the median of three calls after one that is not counted. Calls that take about a second are timed once after
one that is not counted, and calls that take several seconds are timed once. Copies, and ``alone`` with one branch, are
timed once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, Sharding, attention
from dilated_attention_pytorch.backends import stock_kernel
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.executor import Exchange, RankCall
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.wire import Wire
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options

GPU = torch.device("cuda")
HEADS, HEAD_DIM, SAMPLES = 8, 64, 512
LONGNET = "w = 2048 * 4**i, r = 4**i"


def settings(n: int) -> dict[str, Dilated]:
    rates = [4**i for i in range(20) if 2048 * 4 ** (i - 1) < n]
    one = {f"w = N, r = {r}": Dilated([n], [r]) for r in (1, 2, 4)}
    return {**one, LONGNET: Dilated([2048 * r for r in rates], rates)}


def whole(n: int) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, the same on every rank."""
    generator = torch.Generator(GPU).manual_seed(0)
    shape = (1, n, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator, device=GPU, dtype=torch.bfloat16) for _ in range(4)]


def timed(call, world: int) -> tuple[float, list[torch.Tensor]]:
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
    return time.perf_counter() - start, result


def median(runs: list[tuple[float, list[torch.Tensor]]]) -> tuple[float, list[torch.Tensor]]:
    """The middle one by time, and its result."""
    return sorted(runs, key=lambda run: run[0])[len(runs) // 2]


def copies(pattern: Dilated, shards: Shards, rank: int, inputs: Inputs) -> None:
    """The messages of a forward and of a backward, and nothing else."""
    problem = Problem(pattern, False, 1, shards.length, shards.length, HEADS, HEADS)
    plan = dilated_plan(problem, shards, rank, default_bucket_size(shards, "cuda"))  # as attention makes it
    kernel = stock_kernel("sdpa", Request.like(inputs.query))
    call = RankCall(plan, (), Wire(dist.group.WORLD, GPU), 1, kernel, Options(1.0), torch.float32)
    for _ in Exchange(call, plan, inputs, gradients=False).received():
        pass
    grads = Inputs(*(torch.zeros(x.shape, device=GPU) for x in inputs))
    exchange = Exchange(call, plan, inputs, gradients=True)
    for tick, _ in exchange.received():
        exchange.send_home(tick, grads)
    exchange.finish(grads)


def measure(rank: int, world: int, folder: str, lengths: list[int], backend: str) -> None:
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world, timeout=timeout)
    found = []
    for n in sorted(lengths):
        shards = Shards.even(n, world, "contiguous")
        (mine,) = shards.chunks[rank]
        q, k, v, dout = (x[:, mine.start : mine.stop].clone() for x in whole(n))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        options = {"backend": backend, "group": Sharding(dist.group.WORLD, transport="ring")}
        # Sampled over the whole sequence; a rank keeps its own.
        sample = torch.linspace(0, n - 1, SAMPLES).long()
        rows = sample[(sample >= mine.start) & (sample < mine.stop)] - mine.start
        for number, (name, pattern) in enumerate(settings(n).items()):

            def call(pattern=pattern, inputs=inputs, dout=dout, options=options) -> list[torch.Tensor]:
                out = attention(*inputs, pattern, **options)
                return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

            # Dense rows of the longest segment, which say how long a call takes: above half a million it is seconds, and
            # the first call is as good as the second.
            dense_rows = 0 if name == LONGNET else n // pattern.dilation_rates[0]
            warm_up = dense_rows < 2**19
            if warm_up:
                call()
            repeats = 1 if n >= 2**20 and name != LONGNET else 3
            seconds, result = median([timed(call, world) for _ in range(repeats)])
            row = {"tokens": n, "ranks": world, "number": number, "setting": name, "seconds": seconds}
            if world == 1:
                one_device = partial(call, options={"backend": backend})
                if warm_up:
                    one_device()
                row["alone_seconds"], _ = median([timed(one_device, world) for _ in range(3 if name == LONGNET else 1)])
            if world > 1:
                arguments = (pattern, shards, rank, Inputs(*(x.detach() for x in inputs)))
                if warm_up:
                    copies(*arguments)
                row["copy_seconds"], _ = timed(lambda arguments=arguments: copies(*arguments), world)
            found.append(row)
            torch.save([x[0, rows.to(GPU)].float().cpu() for x in result], f"{folder}/{world}.{rank}.{n}.{number}.pt")
            if rank == 0:
                print(json.dumps(row), flush=True)
            del result
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def rows_of(folder: str, row: dict, world: int) -> list[torch.Tensor]:
    shards = [torch.load(f"{folder}/{world}.{rank}.{row['tokens']}.{row['number']}.pt") for rank in range(world)]
    return [torch.cat(rows) for rows in zip(*shards, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**18, 2**20])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", default="auto", help="of attention, with and without a group")
    parser.add_argument("--mps", action="store_true", help="share the GPU by CUDA's multi-process service")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = []
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo,lo,lo,lo")  # a thread for each
    if options.mps:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, *options.ranks):
            mp.spawn(measure, (world, folder, options.tokens, options.backend), nprocs=world)
            table += json.loads(Path(folder, f"{world}.json").read_text())
        by_name = {(row["tokens"], row["ranks"], row["setting"]): row for row in table}
        for row in table:
            single = by_name[row["tokens"], 1, row["setting"]]
            dense = by_name[row["tokens"], row["ranks"], "w = N, r = 1"]
            row["times_faster_than_dilation_1"] = dense["seconds"] / row["seconds"]
            if row["ranks"] > 1:
                row["single_seconds"] = single["seconds"]
                row["alone_seconds"] = single["alone_seconds"]
                row["over_single_and_copies"] = row["seconds"] / (single["seconds"] + row["copy_seconds"])
                row["over_alone_and_copies"] = row["seconds"] / (single["alone_seconds"] + row["copy_seconds"])
                pairs = zip(rows_of(folder, row, row["ranks"]), rows_of(folder, row, 1), strict=True)
                row["differences"] = [float((a - e).norm() / e.norm()) for a, e in pairs]
    if options.mps:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True)
    names = "tokens, ranks, setting, seconds, x dilation 1, single, alone, copies, over single, over alone, difference"
    print("| " + " | ".join(names.split(", ")) + " |\n|" + " --- |" * len(names.split(", ")))
    for row in table:
        shown = [f"{row['tokens']:,}", row["ranks"], row["setting"], f"{row['seconds']:.4f}"]
        shown += [f"{row['times_faster_than_dilation_1']:.1f}"]
        if row["ranks"] == 1:
            shown += [f"{row['seconds']:.4f}", f"{row['alone_seconds']:.4f}", *[""] * 4]
        else:
            shown += [f"{row[name]:.4f}" for name in ("single_seconds", "alone_seconds", "copy_seconds")]
            shown += [f"{row[name]:.2f}" for name in ("over_single_and_copies", "over_alone_and_copies")]
            shown += [f"{max(row['differences']):.1e}"]
            # Two roundings to bfloat16 of the same numbers.
            assert max(row["differences"]) < 2e-2, row
        print("| " + " | ".join(map(str, shown)) + " |")
    if options.out is not None:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "backend": options.backend,
            "mps": options.mps,
            "gloo": os.environ["GLOO_SOCKET_IFNAME"],
        }
        results = {"machine": machine, "version": dilated_attention_pytorch.__version__, "rows": table}
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
