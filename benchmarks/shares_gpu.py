"""Parts of long sequences in shares and all at once, in turns in one process on one GPU: milliseconds.

    PYTHONPATH=src python3 benchmarks/shares_gpu.py [--only 'paper,flat 8M'] [--log2 24,26,28,40] [--out FILE]

Settings are those of gpu.py; their memory is in its table. Forward alone, and forward and backward.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gpu
import torch

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.backends.gpu import tables

ROUNDS = 4


def measure(s: gpu.Setting, log2_numbers: list[int]) -> dict[str, list[float]]:
    """By the size of a buffer of parts, in float32 numbers: 28 is shipped, 40 is all at once."""
    x = gpu.tensors(s)
    dout = torch.randn_like(x[0])

    def both() -> None:
        torch.autograd.grad(attention(*x, s.pattern, is_causal=s.causal), x, dout)

    calls = {"forward": torch.no_grad()(lambda: attention(*x, s.pattern, is_causal=s.causal)), "both": both}
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for log2 in log2_numbers:
            tables.PART_NUMBERS = 2**log2
            for name, call in calls.items():
                times.setdefault(f"{name}, 2**{log2}", []).append(gpu.steady_milliseconds(call))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="paper,paper causal,flat 8M", help="settings, separated by commas")
    parser.add_argument("--log2", default="28,40", help="numbers of a buffer, as powers of 2, separated by commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = f"PYTHONPATH=src python3 benchmarks/shares_gpu.py --only '{options.only}' --log2 {options.log2}"
    report = {"command": command, **gpu.versions(), "rows": []}
    for setting in options.only.split(","):
        for way, times in measure(gpu.SETTINGS[setting], [int(x) for x in options.log2.split(",")]).items():
            report["rows"].append({"setting": setting, "way": way, "ms": times})
            print(f"{setting:14s} {way:18s} {'  '.join(f'{ms:.2f}' for ms in times)}", flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
