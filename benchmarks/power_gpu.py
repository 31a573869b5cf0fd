"""What limits attention on this GPU: rate, clock, power and energy of kernels that run for some seconds.

    PYTHONPATH=src python3 benchmarks/power_gpu.py [--out FILE]

Dense cuDNN attention and a matrix product beside ours. ``of peak`` is the rate over that of the tensor cores at the clock
that was measured (4096 FLOP a cycle and multiprocessor on Hopper); dq counts 3 products, dk and dv 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import torch
from gpu import GPU, PAPER, WIDE, versions

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.hopper import run
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import compile_plan

TOKENS = 2**17
QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "50"]


def busy(call, seconds: float) -> float:
    """Milliseconds of a call, on average over so many seconds of them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began, calls = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - began < seconds:
        for _ in range(8):
            call()
        calls += 8
        torch.cuda.synchronize()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def measure(name: str, call, flops: float) -> dict:
    busy(call, 1.0)
    which = ["-i", f"GPU-{torch.cuda.get_device_properties(GPU).uuid}"]
    with subprocess.Popen(QUERY + which, stdout=subprocess.PIPE, text=True) as watch:
        try:
            ms = busy(call, 1.2)
        finally:
            watch.kill()
        read = [tuple(map(float, line.split(","))) for line in watch.stdout if line.count(",") == 1]
    if not read:
        raise SystemExit("nvidia-smi has told neither clock nor power")
    clock, watts = (statistics.median(x[i] for x in read) for i in range(2))
    cores = torch.cuda.get_device_properties(GPU).multi_processor_count
    rate = flops / ms / 1e9
    row = {
        "name": name,
        "readings": len(read),
        "ms": ms,
        "tflops": rate,
        "mhz": clock,
        "watts": watts,
        "pj_per_flop": watts / rate,
    }
    row["of_peak"] = rate / (cores * 4096 * clock / 1e6)
    print(
        f"{name:32s} {ms:8.3f} ms {rate:5.0f} TFLOP/s {clock:6.0f} MHz {watts:4.0f} W {row['pj_per_flop']:6.3f} pJ/FLOP "
        f"{row['of_peak']:.2f} of peak",
        flush=True,
    )
    return row


def rows_of(heads: int, head_dim: int, pattern: Dilated) -> list[dict]:
    rows = []
    scale = head_dim**-0.5

    def problem(p: Dilated) -> Problem:
        return Problem(p, False, 1, TOKENS, TOKENS, heads, heads, None, None)

    q, k, v, dout = (torch.randn(1, TOKENS, heads, head_dim, device=GPU, dtype=torch.bfloat16) for _ in range(4))
    for length in (2**15, 2048):
        tiles = [x.view(-1, length, heads, head_dim).transpose(1, 2) for x in (q, k, v)]
        flops = 4 * TOKENS * length * heads * head_dim
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            call = partial(torch.nn.functional.scaled_dot_product_attention, *tiles)
            rows.append(measure(f"cuDNN, D = {head_dim}, tiles of {length}", call, flops))
        one = problem(Dilated([length], [1]))
        name = f"ours, D = {head_dim}, tiles of {length}"
        rows.append(measure(name, partial(run.forward, one, q, k, v, scale=scale), flops))
    out, lse = run.forward(one, q, k, v, scale=scale)
    lse, delta, shifts = run.row_statistics(dout, out, None, lse, scale=scale)
    read = one, dout, q, k, v
    rows.append(measure(f"dq, D = {head_dim}", lambda: run.dq(*read, lse, delta, scale=scale), 1.5 * flops))
    rows.append(measure(f"dk and dv, D = {head_dim}", lambda: run.dkv(*read, shifts, scale=scale), 2 * flops))
    many, flops = problem(pattern), compile_plan(pattern, TOKENS, heads, is_causal=False).flops(head_dim)
    rows.append(measure(f"ours, D = {head_dim}, five branches", lambda: run.forward(many, q, k, v, scale=scale), flops))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    rows = [measure("matrix product of 8192", lambda: a @ b, 2 * 8192**3)]
    rows += rows_of(12, 64, PAPER) + rows_of(16, 128, WIDE)
    if options.out:
        report = {"command": "PYTHONPATH=src python3 benchmarks/power_gpu.py", **versions(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
