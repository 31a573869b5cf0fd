"""What does the shortcut around PyTorch's dispatcher save? Host time of one eager call, with and without it.

    python benchmarks/dispatch.py [--device cuda] [--out FILE]

Calls are so short that the host decides. ``operator`` forces every call through the registered operator.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from dilated_attention_pytorch import Dilated, attention, dispatch


def microseconds(call, device: str, repeats: int = 300) -> float:
    """The median over five rounds of the host time per call."""
    rounds = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    n = 2048 if options.device == "cuda" else 16
    q, k, v = (torch.randn(1, n, 1, 64, device=options.device, dtype=dtype, requires_grad=True) for _ in range(3))
    pattern = Dilated([n], [1])
    dout = torch.randn_like(q)

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v, pattern)

    def both() -> None:
        torch.autograd.grad(attention(q, k, v, pattern), (q, k, v), dout)

    resolved, rows = dispatch._queries, []
    for name, queries in (("shortcut", resolved), ("operator", None), ("shortcut again", resolved)):
        dispatch._queries = queries
        rows.append(
            {
                "calls": name,
                "forward_us": microseconds(forward, options.device),
                "both_us": microseconds(both, options.device),
            }
        )
        print({key: round(x, 1) if isinstance(x, float) else x for key, x in rows[-1].items()})
    versions = {"python": platform.python_version(), "torch": torch.__version__, "device": options.device}
    if options.out:
        command = f"python benchmarks/dispatch.py --device {options.device}"
        options.out.write_text(json.dumps({"command": command, **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
