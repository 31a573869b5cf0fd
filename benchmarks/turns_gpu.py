"""Is one source tree as fast as another? Trees take turns on one GPU, a process for each, through the public API alone.

    PYTHONPATH=src python3 benchmarks/turns_gpu.py src ../before/src [--only 'paper,short'] [--rounds 5] [--out FILE]

A turn is ``--seconds`` of calls that are not counted and as many that are, at the power limit of the GPU. ``x`` is the time
of the last tree over that of the first, the median over rounds. ``same`` says whether all results agree in every bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

PAPER = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
WIDE = ([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])
GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
SHORT = ([2048, 4096, 8192], [1, 2, 4])
# Branches, or the density of random blocks of 128; tokens, heads, head size, options of attention.
SETTINGS = {
    "paper": (PAPER, 2**20, 12, 64, {}),
    "paper causal": (PAPER, 2**20, 12, 64, {"is_causal": True}),
    "wide": (WIDE, 2**19, 16, 128, {}),
    "gigapath": (GIGAPATH, 2**17, 16, 48, {}),
    "gigapath 16k": (GIGAPATH, 2**14, 16, 48, {}),
    "short": (SHORT, 2**13, 12, 64, {}),
    "short triton": (SHORT, 2**13, 12, 64, {"backend": "triton"}),
    "short sdpa": (SHORT, 2**13, 12, 64, {"backend": "sdpa"}),
    "tiles 128 D=64": (([128], [1]), 2**18, 16, 64, {}),
    "tiles 16384 D=64": (([16384], [1]), 2**18, 16, 64, {}),
    "tiles 2048 D=128": (([2048], [1]), 2**18, 8, 128, {}),
    "blocks 0.1 D=64": (0.1, 2**16, 16, 64, {}),
    "blocks 0.1 D=128": (0.1, 2**16, 16, 128, {}),
}


def calls(name: str) -> dict:
    """Functions of a setting by direction, in the process of a tree."""
    from dilated_attention_pytorch import BlockSparse, Dilated, attention

    pattern, n, heads, head_dim, options = SETTINGS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, n, heads, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4))
    if isinstance(pattern, float):
        mask = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(0)) < pattern
        made = BlockSparse.custom(mask.cuda(), block_size=128)
    else:
        made = Dilated(*pattern)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [attention(*inputs, made, **options)]

    def both() -> list[torch.Tensor]:
        out = attention(*inputs, made, **options)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    return {"forward": forward, "both": both}


def steady_milliseconds(call, seconds: float) -> float:
    """The time of a call among calls that follow one another."""
    for counted in (False, True):
        torch.cuda.synchronize()
        start, count = time.perf_counter(), 0
        while count < 5 or time.perf_counter() - start < seconds:
            call()
            count += 1
            if count % 20 == 0:  # keeps the queue of launches short
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        if counted:
            return (time.perf_counter() - start) / count * 1e3
    raise AssertionError


def serve(seconds: float) -> None:
    """Answer jobs that come line by line."""
    name, made = "", {}
    for line in sys.stdin:
        wanted, direction = line.strip().split("|")
        if wanted != name:
            made = {}
            torch.cuda.empty_cache()
            name, made = wanted, calls(wanted)
        digest = hashlib.sha256()
        for x in made[direction]():
            digest.update(x.detach().contiguous().view(torch.int16).sum(dtype=torch.int64).cpu().numpy().tobytes())
            digest.update(x.detach().flatten()[:: max(1, x.numel() // 2**16)].float().cpu().numpy().tobytes())
        ms = steady_milliseconds(made[direction], seconds)
        print("answer " + json.dumps({"ms": ms, "digest": digest.hexdigest()[:16]}), flush=True)


def ask(process: subprocess.Popen, job: str) -> dict:
    process.stdin.write(job + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise SystemExit("the process of a tree has ended, see its messages above")


def compare(job: str, trees: list[str], processes: list[subprocess.Popen], rounds: int) -> dict:
    answers: list[list[dict]] = [[] for _ in trees]
    for number in range(rounds + 1):  # the first round compiles
        for i, process in enumerate(processes):
            answer = ask(process, job)
            if number:
                answers[i].append(answer)
    times = [[x["ms"] for x in own] for own in answers]
    ratio = statistics.median(b / a for a, b in zip(times[0], times[-1], strict=True))
    same = len({x["digest"] for own in answers for x in own}) == 1
    medians = [statistics.median(own) for own in times]
    print(f"{job:26s} {'  '.join(f'{m:9.4f} ms' for m in medians)}  x {ratio:.4f}  same {same}", flush=True)
    return {"job": job, "ms": dict(zip(trees, times, strict=True)), "x": ratio, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", help="folders with the package in them")
    parser.add_argument("--only", default=",".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trees == ["serve"]:
        serve(options.seconds)
        return
    command = [sys.executable, __file__, "serve", "--seconds", str(options.seconds)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": tree}
        )
        for tree in options.trees
    ]
    rows = []
    for name in options.only.split(","):
        for direction in ("forward", "both"):
            rows.append(compare(f"{name}|{direction}", options.trees, processes, options.rounds))
    for process in processes:
        process.stdin.close()
    if options.out:
        versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
        options.out.write_text(json.dumps({**versions, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
