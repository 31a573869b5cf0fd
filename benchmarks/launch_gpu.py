"""What does it save to call compiled kernels directly, without Triton's dispatcher? Short sequences on one GPU.

    PYTHONPATH=src python3 benchmarks/launch_gpu.py [--out FILE]

``host`` is the time until the calls return, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from gpu import SETTINGS, graph_milliseconds, milliseconds, tensors, versions

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.backends.gpu import launch as launching
from dilated_attention_pytorch.backends.hopper import run as hopper
from dilated_attention_pytorch.backends.triton import run as portable


def dispatched(launches, tensors) -> None:
    for one in launches:
        one.kernel[(one.programs,)](*tensors, *one.tables, *one.numbers, **one.constants)


def host_milliseconds(call, repeats: int = 200) -> float:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    passed = time.perf_counter() - start
    torch.cuda.synchronize()
    return passed / repeats * 1e3


def measure(name: str, how: str) -> dict:
    s = SETTINGS[name]
    inputs = tensors(s)
    dout = torch.randn_like(inputs[0])

    def forward():
        return attention(*inputs, s.pattern)

    def both():
        return torch.autograd.grad(forward(), inputs, dout)

    with torch.no_grad():
        row = {"forward_ms": milliseconds(forward, 31), "forward_host_ms": host_milliseconds(forward)}
        row["forward_graph_ms"] = graph_milliseconds(lambda: forward)
    row |= {"both_ms": milliseconds(both, 31), "both_host_ms": host_milliseconds(both)}
    print(f"{name:14s} {how:11s} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return {"setting": name, "launches": how} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, direct = [], launching.launch
    for name in ("short", "gigapath 16k"):
        for how, function in (("dispatched", dispatched), ("direct", direct)):
            launching.launch = hopper.launch = portable.launch = function
            rows.append(measure(name, how))
    if options.out:
        report = {**versions(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
