"""One backward kernel for dq, dk and dv (hopper/kernels/joint.py) against two kernels: bits, differences, times.

    PYTHONPATH=src python3 benchmarks/joint_gpu.py 'odd,D64,D48,gigapath,paper,paper causal' [--compile] [--out FILE]

The figures decide the thresholds of ``joint_config`` in backends/hopper/configs.py. Number of pairs: the settings 2k to
64k are the first tokens of gigapath, "paper 2k" to "paper 64k" those of paper. Length of tiles: D64/128 to D64/1024 and
D128/128 to D128/16384.
The settings gigapath/1 to gigapath/16 are its single branches, named by their rates. " causal" may follow any setting.
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
from dilated_attention_pytorch.backends.hopper.configs import configs
from dilated_attention_pytorch.backends.hopper.persistent import GradientInputs, row_statistics
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.values import Inputs, Options, Results, Saved

# Pattern, tokens, heads, key heads, head size.
SETTINGS = {
    "odd": (Dilated([1000, 3000], [1, 3]), 7001, 4, 2, 48),
    "short": (Dilated([2048, 4096, 8192], [1, 2, 4]), 2**13, 12, 12, 64),
    "D64": (Dilated([2048], [1]), 2**17, 12, 12, 64),
    "D48": (Dilated([8192], [1]), 2**17, 16, 16, 48),
    "gigapath": (gpu.GIGAPATH, 2**17, 16, 16, 48),
    "paper": (gpu.PAPER, 2**18, 12, 12, 64),
}
SETTINGS |= {f"{n}k": (gpu.GIGAPATH, n * 1024, 16, 16, 48) for n in (2, 4, 8, 16, 32, 64)}
SETTINGS |= {f"paper {n}k": (gpu.PAPER, n * 1024, 12, 12, 64) for n in (2, 4, 8, 16, 32, 64)}
SETTINGS |= {f"D64/{w}": (Dilated([w], [1]), 2**17, 12, 12, 64) for w in (128, 256, 512, 1024)}
SETTINGS |= {f"D128/{w}": (Dilated([w], [1]), 2**17, 8, 8, 128) for w in (128, 256, 512, 1024, 2048, 16384)}
SETTINGS |= {f"paper128 {n}k": (gpu.PAPER, n * 1024, 8, 8, 128) for n in (4, 8, 16, 64)}
SETTINGS |= {"odd128": (Dilated([1500, 6000, 24000], [1, 3, 9]), 200_000, 8, 8, 128)}
SETTINGS |= {f"gigapath/{r}": (Dilated([w], [r]), 2**17, 16, 16, 48) for w, r in gpu.GIGAPATH.branches}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def measure(name: str, only_compile: bool) -> dict:
    pattern, n, heads, key_heads, d = SETTINGS[name.removesuffix(" causal")]
    causal = name.endswith(" causal")
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, n, heads, d, device=gpu.GPU, dtype=torch.bfloat16).unbind(0)
    k, v = torch.randn(2, 1, n, key_heads, d, device=gpu.GPU, dtype=torch.bfloat16).unbind(0)
    problem, scale = Problem(pattern, causal, 1, n, n, heads, key_heads, None, None), d**-0.5
    results: Results = run.forward(problem, Inputs(q, k, v), Options(scale))
    found_statistics = row_statistics(Saved(*results, dout), scale)
    read = GradientInputs(q, k, v, dout)
    calls = {
        "statistics": lambda: row_statistics(Saved(*results, dout), scale),
        "dq": lambda: run.dq(problem, read, found_statistics, scale),
        "dk, dv": lambda: run.dkv(problem, read, found_statistics, scale),
        "at once": lambda: run.joint(problem, read, found_statistics, scale, configs(d).joint),
    }
    dq, (dk, dv), found = calls["dq"](), calls["dk, dv"](), calls["at once"]()
    row = {"setting": name, "dq_difference": error(found[0], dq)}
    row["same_dk_dv"] = torch.equal(dk, found[1]), torch.equal(dv, found[2])
    if not only_compile:
        row["same_bits_of_20"] = sum(all(map(torch.equal, calls["at once"](), found)) for _ in range(20))
        times: dict[str, list[float]] = {x: [] for x in calls}
        for _ in range(2):
            for x, call in calls.items():
                times[x].append(gpu.steady_milliseconds(call, 0.3))
        row["ms"] = {x: statistics.mean(y) for x, y in times.items()}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = gpu.versions() | {"rows": []}
    for name in options.settings.split(","):
        report["rows"].append(measure(name, options.compile))
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
