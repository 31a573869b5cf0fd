"""All gradients by one kernel (hopper/joint.py) against dq and dk, dv apart: bits, errors, times. An experiment.

PYTHONPATH=src python3 benchmarks/joint_gpu.py odd,D64,D48,gigapath,paper [--compile] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import gpu
import torch

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.hopper import run
from dilated_attention_pytorch.backends.hopper.configs import Config
from dilated_attention_pytorch.backends.triton.run import row_delta
from dilated_attention_pytorch.problem import Problem

# Pattern, tokens, heads, key heads, head size.
SETTINGS = {
    "odd": (Dilated([1000, 3000], [1, 3]), 7001, 4, 2, 48),
    "D64": (Dilated([2048], [1]), 2**17, 12, 12, 64),
    "D48": (Dilated([8192], [1]), 2**17, 16, 16, 48),
    "gigapath": (gpu.GIGAPATH, 2**17, 16, 16, 48),
    "paper": (gpu.PAPER, 2**18, 12, 12, 64),
}
VARIANTS = {
    "ordered": (Config(64, 4, 0), True),
    "any order": (Config(64, 4, 0), False),
    "ordered, keys in registers": (Config(64, 4, 1), True),
    "ordered, overlap": (Config(64, 4, 0, overlap=True), True),
}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def measure(name: str, only_compile: bool) -> dict:
    pattern, n, heads, key_heads, d = SETTINGS[name]
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, n, heads, d, device=gpu.GPU, dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, 1, n, key_heads, d, device=gpu.GPU, dtype=torch.bfloat16).unbind(0)
    problem, scale = Problem(pattern, False, 1, n, n, heads, key_heads, None, None), d**-0.5
    out, lse = run.forward(problem, q, k, v, scale=scale)
    arguments = problem, dout, q, k, v, lse, row_delta(dout, out, None)
    calls = {"dq": lambda: run.dq(*arguments, scale=scale), "dkv": lambda: run.dkv(*arguments, scale=scale)}
    dq, (dk, dv) = calls["dq"](), calls["dkv"]()
    row: dict = {"setting": name}
    for variant, (config, ordered) in VARIANTS.items():
        call = lambda c=config, o=ordered: run.joint(*arguments, scale=scale, config=c, ordered=o)  # noqa: E731
        sums, *others = call()
        same = sum(all(map(torch.equal, call(), (sums, *others))) for _ in range(0 if only_compile else 20))
        bits = torch.equal(dk, others[0]), torch.equal(dv, others[1])
        row[variant] = {"dq_error": error(sums.transpose(1, 2) * scale, dq), "same_dk_dv": bits, "same_bits_of_20": same}
        calls[variant] = call
        print(name, variant, row[variant], flush=True)
    calls["to bfloat16"] = lambda: (sums.transpose(1, 2) * scale).to(q.dtype)
    if not only_compile:
        times: dict[str, list[float]] = {x: [] for x in calls}
        for _ in range(2):
            for x, call in calls.items():
                times[x].append(gpu.steady_milliseconds(call, 0.4))
        row["ms"] = {x: statistics.mean(y) for x, y in times.items()}
        print(name, " ".join(f"{x} {y:.3f}" for x, y in row["ms"].items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.settings.split(","):
        rows.append(measure(name, options.compile))
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
