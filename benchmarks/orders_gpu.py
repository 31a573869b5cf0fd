"""Orders on one GPU: the cost of making them, and what they add to dilated attention over a million tokens.

    PYTHONPATH=src python3 benchmarks/orders_gpu.py [--out FILE]

"the order and back" is one permutation of the input of a layer and one of its output, forward and backward. That is the
most that an order can add to a model that applies it once; it does not grow with the number of layers.
"attention(order=)" permutes q, k, v and out in the call.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
from gpu import GPU, PAPER, milliseconds

import dilated_attention_pytorch
from dilated_attention_pytorch import Hilbert, attention

SIDE, HEADS, HEAD_DIM = 1024, 12, 64


def making() -> list[dict]:
    rows = []
    coordinates = torch.rand((1, 2**24, 2), device=GPU)
    cases = {
        "Hilbert.grid(4096, 4096)": lambda: Hilbert.grid(4096, 4096, device=GPU),
        "Hilbert.grid(256, 256, 256)": lambda: Hilbert.grid(256, 256, 256, device=GPU),
        "Hilbert.coordinates of 2**24 points": lambda: Hilbert.coordinates(coordinates),
    }
    for name, make in cases.items():
        rows.append({"order": name, "points": 2**24, "ms": milliseconds(make)})
        print(f"{name:40s} {rows[-1]['ms']:8.2f} ms", flush=True)
    return rows


def both(function, inputs) -> float:
    dout = torch.randn_like(inputs[0])
    return milliseconds(lambda: torch.autograd.grad(function(*inputs), inputs, dout))


def using(causal: bool) -> list[dict]:
    n, order = SIDE**2, Hilbert.grid(SIDE, SIDE, device=GPU)
    shape = (1, n, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=GPU, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    x = torch.randn((1, n, HEADS * HEAD_DIM), device=GPU, dtype=torch.bfloat16).requires_grad_()
    times = {"attention": both(lambda *qkv: attention(*qkv, PAPER, is_causal=causal), (q, k, v))}
    if not causal:
        times["the order and back, on (1, N, H * D)"] = both(lambda x: order.unpermute(order.permute(x)), (x,))
    times["attention(order=)"] = both(lambda *qkv: attention(*qkv, PAPER, is_causal=causal, order=order), (q, k, v))
    rows = []
    for name, ms in times.items():
        share = ms / times["attention"] if "and back" in name else ms / times["attention"] - 1
        rows.append({"tokens": n, "causal": causal, "what": name, "ms": ms, "added": share})
        print(f"{'causal' if causal else 'full':6s} {name:40s} {ms:9.2f} ms  {100 * share:+6.1f} %", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = {
        "command": "PYTHONPATH=src python3 benchmarks/orders_gpu.py",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "library": dilated_attention_pytorch.__version__,
        "making": making(),
        "using": using(causal=False) + using(causal=True),
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
