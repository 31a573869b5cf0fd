"""Our kernels beside PyTorch's own on strided views (``sdpa``), by type, head size and length: what ``auto`` chooses by.

    PYTHONPATH=src python3 benchmarks/choice_gpu.py [--only 'float32 128,bfloat16 256'] [--log2 12,13,15] [--out FILE]

The paper's pattern, 768 numbers a row. Pairs are query-key pairs of a piece (pieces.py), on average: what the table in
backends/__init__.py is about. Milliseconds of single calls; gpu.py has long sequences at the power limit. Kernels are
compiled before, each type, head size and causality in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from functools import partial
from pathlib import Path

import gpu
import torch

from dilated_attention_pytorch import attention, fused
from dilated_attention_pytorch.backends import choose
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.plan.problem import Problem

KINDS = ("float32 64", "float32 128", "float32 256", "bfloat16 192", "bfloat16 256")


def tensors(kind: str, n: int) -> list[torch.Tensor]:
    dtype, head_dim = kind.split()
    shape = (1, n, 768 // int(head_dim), int(head_dim))
    return [torch.randn(shape, device=gpu.GPU, dtype=getattr(torch, dtype)).requires_grad_() for _ in range(3)]


def ours(query: torch.Tensor) -> str:
    return choose("auto", Request.of(query, dropout_p=0.0))


def milliseconds(kind: str, n: int, backend: str, causal: bool, repeats: int = 5) -> tuple[float, float]:
    """Forward and backward."""
    x = tensors(kind, n)
    call = partial(attention, *x, gpu.PAPER, is_causal=causal, backend=backend)
    forward = gpu.milliseconds(torch.no_grad()(call), repeats)
    out = call()
    dout = torch.randn_like(out)
    return forward, gpu.milliseconds(lambda: torch.autograd.grad(out, x, dout, retain_graph=True), repeats)


def compiled(job: tuple[str, bool]) -> None:
    kind, causal = job
    milliseconds(kind, 2**12, ours(tensors(kind, 1)[0]), causal, repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS), help="types and head sizes, separated by commas")
    parser.add_argument("--log2", default="12,13,15", help="lengths, as powers of 2, separated by commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds = options.only.split(",")
    with multiprocessing.get_context("spawn").Pool(10, maxtasksperchild=1) as pool:
        pool.map(compiled, [(kind, causal) for kind in kinds for causal in (False, True)], chunksize=1)
    command = f"PYTHONPATH=src python3 benchmarks/choice_gpu.py --only '{options.only}' --log2 {options.log2}"
    report = {"command": command, **gpu.versions(), "rows": []}
    print("kind          tokens  causal  log2 pairs  forward ms, ours / sdpa   backward ms, ours / sdpa")
    for kind in kinds:
        for n in (2 ** int(x) for x in options.log2.split(",")):
            for causal in (False, True):
                query = tensors(kind, n)[0]
                problem = Problem.of(query, query, gpu.PAPER.spec, causal, None, None)
                row = {
                    "kind": kind, "tokens": n, "causal": causal, "backend": ours(query),
                    "log2_pairs": math.log2(fused.pairs_per_piece(problem, query.shape[-1])),
                    "ours_ms": milliseconds(kind, n, ours(query), causal), "sdpa_ms": milliseconds(kind, n, "sdpa", causal),
                }  # fmt: skip
                report["rows"].append(row)
                (f, b), (f_sdpa, b_sdpa) = row["ours_ms"], row["sdpa_ms"]
                print(
                    f"{kind:13s} {n:6d}  {causal!s:6s}  {row['log2_pairs']:10.1f}  "
                    f"{f:10.3f} / {f_sdpa:10.3f}   {b:11.3f} / {b_sdpa:10.3f}",
                    flush=True,
                )
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
