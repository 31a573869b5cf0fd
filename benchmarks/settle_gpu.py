"""How a GPU settles at its power limit: milliseconds of a call in buckets of 0.1 s, after an idle time and without.

    PYTHONPATH=src python3 benchmarks/settle_gpu.py [--setting 'random 0.1 D=64'] [--out FILE]

Block-sparse attention (ours), FlexAttention over the same blocks, and dense cuDNN attention of tiles of 2048. Beside those
after an idle time, the clock in MHz and the power in W that nvidia-smi reads meanwhile, each 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import blocks_gpu
import gpu
import torch
from power_gpu import QUERY

from dilated_attention_pytorch import attention

BUCKET_MS = 100


def buckets(call: Callable, calls: int, number: int) -> list[float]:
    """Milliseconds of a call, on average over so many calls, again and again."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / calls for a, b in pairwise(events)]


def measure(name: str, call: Callable, idle: float, seconds: float) -> dict:
    calls = max(1, round(BUCKET_MS / gpu.milliseconds(call, 3)))
    watch = None
    if idle:
        time.sleep(idle)
        watch = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
    row = {"method": name, "idle_s": idle, "ms": buckets(call, calls, round(seconds * 1e3 / BUCKET_MS))}
    if watch:
        watch.kill()
        read = [line.split(",") for line in watch.stdout or () if line.count(",") == 1]
        row["mhz_and_watts"] = [(int(mhz), float(watts)) for mhz, watts in read[::4]]
    times = " ".join(f"{x:.3f}" for x in row["ms"])
    print(f"{name:6s} after {idle:g} s: {times}", row.get("mhz_and_watts", ""), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="random 0.1 D=64", choices=[x for x in blocks_gpu.SETTINGS if "random 0" in x])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    s = blocks_gpu.SETTINGS[options.setting]
    inputs = [x.detach() for x in s.tensors()]
    tiles = [x.reshape(-1, blocks_gpu.TILE, s.heads, s.head_dim) for x in inputs]
    methods = {
        "ours": partial(attention, *inputs, s.pattern()),
        "flex": partial(blocks_gpu.flex_call(s, "full"), *inputs),
        "dense": partial(blocks_gpu.dense_call, *tiles),
    }
    with torch.no_grad():
        for call in methods.values():  # compile
            call()
        rows = [measure(name, call, 4, 3) for name, call in methods.items()]
        for _ in range(2):
            rows += [measure(name, call, 0, 1.2) for name, call in methods.items()]
    if options.out:
        command = f"PYTHONPATH=src python3 benchmarks/settle_gpu.py --setting '{options.setting}'"
        report = {"command": command, **gpu.versions(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
