"""Versions of the Hopper kernels at the power limit of the GPU: source trees that take turns, a process for each.

    PYTHONPATH=src python3 benchmarks/variants_gpu.py 'forward|D=64,block dkv|random 0.1 D=64' src ../other/src [--out FILE]

Jobs are a kernel (forward, dq, dkv) and one of SETTINGS, or with ``block`` before it one of those of blocks_gpu.py; the
first tree is what the others are compared with. A turn is ``--seconds`` of calls that are not counted and as many that are:
in turns of a tenth of a second the clock is still falling, and differences of 10 % look like 2. ``differs`` compares the
sums of all results, to see that they agree. Where the tensors lie in memory makes up to 3 %, and that differs from process
to process: smaller gains need several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks_gpu
import torch
import tune_hopper
from gpu import GIGAPATH, WIDE, Setting, steady_milliseconds, versions

from dilated_attention_pytorch.backends.hopper import block_run, run

Calls = Callable[[str], Any]  # by the name of a kernel
SETTINGS = tune_hopper.SETTINGS | {
    "D=48": Setting(GIGAPATH, 2**17, 16, 48, 4096),
    "D=80": Setting(WIDE, 2**17, 16, 80, 2048),
    "D=96": Setting(WIDE, 2**17, 16, 96, 2048),
}


def dilated_calls(name: str) -> Calls:
    s = SETTINGS[name]
    problem, x = tune_hopper.problem(s, s.n), tune_hopper.inputs(s, s.n)
    out, lse = run.forward(problem, *x[:3], scale=s.head_dim**-0.5)
    statistics = run.row_statistics(x[3], out, None, lse, scale=s.head_dim**-0.5)
    return lambda kernel: tune_hopper.call(kernel, problem, x, statistics, None)


def block_calls(name: str) -> Calls:
    s = blocks_gpu.SETTINGS[name]
    *x, dout = (y.detach() for y in (*s.tensors(), s.tensors()[0]))
    by_query, by_key = blocks_gpu.tables_of(s.pattern(), x)
    options = {"block_size": blocks_gpu.BLOCK, "is_causal": False, "scale": s.head_dim**-0.5}
    out, lse = block_run.forward(by_query, *x, **options)
    read, statistics = (*x, dout), run.row_statistics(dout, out, None, lse, scale=s.head_dim**-0.5)
    ways = {
        "block forward": lambda: block_run.forward(by_query, *x, **options),
        "block dq": lambda: block_run.dq(by_query, read, statistics, **options),
        "block dkv": lambda: block_run.dkv(by_key, read, statistics, **options),
    }
    return lambda kernel: ways[kernel]()


def turn(kernel: str, name: str, seconds: float, cache: dict[str, Calls]) -> dict:
    """One measurement, in the process of a tree."""
    if name not in cache:
        cache.clear()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        cache[name] = block_calls(name) if name in blocks_gpu.SETTINGS else dilated_calls(name)
    call = lambda: cache[name](kernel)  # noqa: E731
    sums = [float(y.double().abs().sum()) for y in tune_hopper.outputs(call())]
    return {"ms": steady_milliseconds(call, seconds), "sums": sums}


def serve(seconds: float) -> None:
    """Answer jobs that come line by line."""
    cache: dict[str, Calls] = {}
    for line in sys.stdin:
        print("answer " + json.dumps(turn(*line.strip().split("|"), seconds, cache)), flush=True)


def ask(process: subprocess.Popen, job: str) -> None:
    process.stdin.write(job + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen) -> dict:
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise SystemExit("a tree's process has ended, see its messages above")


def compare(job: str, trees: list[str], processes: list[subprocess.Popen], rounds: int) -> list[dict]:
    times: list[list[float]] = [[] for _ in trees]
    sums: list[list[float]] = [[] for _ in trees]
    for _ in range(rounds):
        for i, process in enumerate(processes):
            ask(process, job)
            got = answer(process)
            times[i].append(got["ms"])
            sums[i] = got["sums"]
    rows = []
    for tree, own, own_sums in zip(trees, times, sums, strict=True):
        speed = statistics.median(a / b for a, b in zip(times[0], own, strict=True))
        differs = max(abs(a - b) / abs(a) for a, b in zip(sums[0], own_sums, strict=True))
        rows.append({"job": job, "tree": tree, "ms": own, "speedup": speed, "differs": differs})
        print(f"{job:24s} {tree:32s} {statistics.median(own):9.4f} ms  x {speed:.3f}  differs {differs:.0e}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", help="kernel|setting, separated by commas")
    parser.add_argument("trees", nargs="+", help="folders with the package in them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.jobs == "serve":
        serve(options.seconds)
        return
    command = [sys.executable, __file__, "serve", "-", "--seconds", str(options.seconds)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": tree}
        )
        for tree in options.trees
    ]
    rows = []
    for job in options.jobs.split(","):
        for process in processes:  # compile, all at once
            ask(process, job)
        for process in processes:
            answer(process)
        rows += compare(job, options.trees, processes, options.rounds)
    for process in processes:
        process.stdin.close()
    if options.out:
        options.out.write_text(json.dumps({**versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
