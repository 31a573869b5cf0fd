"""Prov-GigaPath's slide encoder on a CPU: the time to make, load and run it, and the memory of the process.

    python benchmarks/gigapath_cpu.py [--tiles 2000] [--out FILE]

Each step runs in a process of its own, in float32 with random weights. Memory is the peak of the process, with Python and
PyTorch, whose share is printed as ``import``. Files that are mapped into memory count as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import SlideConfig, SlideEncoder

STEPS = ("import", "make", "load", "run")


def step(name: str, path: str, width: int, tiles: int) -> dict:
    """Seconds and bytes of one step in this process."""
    start, config = time.perf_counter(), SlideConfig.gigapath(width)
    times: list[float] = []
    if name == "make":
        model = SlideEncoder(config)
        times.append(time.perf_counter() - start)
        torch.save({"model": model.state_dict()}, path)
    elif name == "load":
        SlideEncoder.from_gigapath(path)
        times.append(time.perf_counter() - start)
    elif name == "run":
        model = SlideEncoder.from_gigapath(path).eval()
        x, coordinates = torch.randn(1, tiles, 1536), 256 * torch.randint(0, 300, (1, tiles, 2))
        for _ in range(2):
            start = time.perf_counter()
            with torch.inference_mode():
                model(x, coordinates)
            times.append(time.perf_counter() - start)
    scale = 1 if sys.platform == "darwin" else 1024
    return {"seconds": times, "peak_bytes": scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=2000)
    parser.add_argument("--width", type=int, default=768, choices=(768, 1024, 1536))
    parser.add_argument("--step", choices=STEPS, help="one step in this process, with --file; used by the script itself")
    parser.add_argument("--file", default="slide_encoder.pth")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step is not None:
        print(json.dumps(step(options.step, options.file, options.width, options.tiles)))
        return
    found = {
        "torch": torch.__version__,
        "version": dilated_attention_pytorch.__version__,
        "threads": torch.get_num_threads(),
    }
    found |= {"load_average": os.getloadavg()[0], "width": options.width, "tiles": options.tiles}
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--width", str(options.width), "--tiles", str(options.tiles)]
        for name in STEPS:
            command = [sys.executable, __file__, "--step", name, "--file", f"{folder}/slide_encoder.pth", *sizes]
            found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds = ", ".join(f"{x:.2f} s" for x in found[name]["seconds"])
            print(f"{name:6} {found[name]['peak_bytes'] / 2**30:.2f} GiB  {seconds}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
