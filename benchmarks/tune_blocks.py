"""Tile sizes of the kernels over block lists, on one GPU: time of each, and the difference from what is shipped.

    PYTHONPATH=src python3 benchmarks/tune_blocks.py [--out FILE]

A random mask of density 0.1 over 65,536 tokens, 16 heads, blocks of 128, bf16. A time of dq or dk and dv is that of the
whole backward with the other kernel as shipped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import blocks_gpu
import gpu
import torch
import triton

from dilated_attention_pytorch import attention
from dilated_attention_pytorch.backends.triton import block_run
from dilated_attention_pytorch.backends.triton.configs import Config

# Rows, keys, warps, stages; all fit into shared memory, few spill (tests/compile_kernels.py).
CANDIDATES = {
    ("forward", 64): [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)],
    ("forward", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    ("dq", 64): [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)],
    ("dq", 128): [(64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3)],
    ("dkv", 64): [(64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3)],
    ("dkv", 128): [(32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "rows": []}
    shipped = block_run._configs
    for (kernel, head_dim), candidates in CANDIDATES.items():
        s = blocks_gpu.SETTINGS[f"random 0.1 D={head_dim}"]
        inputs, pattern = s.tensors(), s.pattern()
        dout = torch.randn_like(inputs[0])
        run = lambda *x, p=pattern: attention(*x, p, backend="triton")  # noqa: E731
        block_run._configs = shipped
        expected = blocks_gpu.with_grads(run, inputs, dout)
        for candidate in candidates:
            block_run._configs = lambda *x, k=kernel, c=candidate: replace(shipped(*x), **{k: Config(*c)})
            row = {"kernel": kernel, "head_dim": head_dim, "config": candidate}
            try:
                actual = blocks_gpu.with_grads(run, inputs, dout)
                forward, backward = gpu.forward_and_backward(run, inputs)
            except triton.runtime.errors.OutOfResources as error:
                row["refused"] = str(error)
            else:
                row["ms"] = forward if kernel == "forward" else backward
                pairs = zip(actual, expected, strict=True)
                row["difference"] = max(float((a - e).float().norm() / e.float().norm()) for a, e in pairs)
            report["rows"].append(row)
            print(row, flush=True)
    block_run._configs = shipped
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
