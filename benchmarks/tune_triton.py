"""Tile sizes of the portable kernels, dilated (also with dropout) and over block lists, on one GPU: time and error of each.

    PYTHONPATH=src python3 benchmarks/tune_triton.py [--only 'float32 blocks dq 64,bfloat16 dilated dq 256'] [--out FILE]

The problems have 32,768 tokens, rows of 768 numbers, and the paper's pattern or random blocks of 128 with density 0.1.
Edit CANDIDATES, run, and put the best sizes into backends/triton/configs.py. A time of dq or dkv is that of the whole
backward, in which the other kernel has its shipped sizes. `sdpa` is PyTorch's own attention on strided views. Errors
are relative, by norms, against products in float64 (2,048 tokens): of out, or the largest of dq, dk and dv. Each
candidate is compiled in its own process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import gpu
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, attention
from dilated_attention_pytorch.backends.gpu.portable import TritonConfig as Config
from dilated_attention_pytorch.backends.triton import block_run, run

MODULES = {"dilated": run, "dropout": run, "blocks": block_run}
SHIPPED = {name: module._configs for name, module in MODULES.items()}
# No 64 rows with 8 warps and blocks of 16: see configs.py.
WITHOUT = {64: Config(64, 32, 4, 2, "ieee"), 128: Config(32, 32, 4, 1, "ieee")}
FORWARD = {64: [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2)], 128: [(128, 32, 8, 2), (64, 32, 4, 2)]}
DQ = {64: [(128, 32, 8, 1), (64, 32, 4, 2)], 128: [(32, 32, 4, 1), (32, 32, 8, 1)]}
DKV = {64: [(32, 128, 8, 1), (32, 64, 4, 2)], 128: [(32, 32, 4, 1), (32, 32, 8, 1)]}
CANDIDATES = {
    f"float32 {module} {kernel} {d}": [WITHOUT[d], *(Config(*sizes) for sizes in table[d])]
    for module in ("dilated", "blocks")
    for kernel, table in (("forward", FORWARD), ("dq", DQ), ("dkv", DKV))
    for d in (64, 128)
}
CANDIDATES["float32 dilated dq 256"] = [Config(32, 16, 8, 1, "ieee"), Config(32, 16, 4, 1), Config(16, 16, 4, 1)]
CANDIDATES["float32 dilated dkv 256"] = [Config(16, 32, 8, 1, "ieee"), Config(16, 16, 8, 1), Config(16, 16, 4, 1)]
# The first of each is shipped.
HALF_BLOCKS = {
    "forward 64": [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)],
    "forward 128": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    "dq 64": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)],
    "dq 128": [(64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3)],
    "dkv 64": [(64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3)],
    "dkv 128": [(32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 2)],
}
HALF_256 = {
    "forward 256": [(128, 64, 8, 2), (64, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 2)],
    "dq 256": [(128, 32, 8, 1), (64, 32, 8, 1), (128, 16, 8, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2)],
    "dkv 256": [(32, 32, 4, 2), (32, 32, 4, 1), (32, 64, 8, 1), (64, 32, 4, 1), (64, 32, 8, 1), (128, 32, 8, 1)],
}
HALF_DROPOUT = {
    "forward 64": [(128, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3)],
    "dq 64": [(64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3)],
    "dkv 64": [(32, 64, 4, 3), (64, 64, 4, 3), (32, 32, 4, 3), (32, 128, 8, 3)],
}
for module, tables in (("dilated", HALF_256), ("dropout", HALF_DROPOUT), ("blocks", HALF_BLOCKS | HALF_256)):
    for kernel, several in tables.items():
        CANDIDATES[f"bfloat16 {module} {kernel}"] = [Config(*sizes) for sizes in several]


def pattern_of(module: str, n: int) -> Dilated | BlockSparse:
    if module != "blocks":
        return gpu.PAPER
    mask = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(0)) < 0.1
    return BlockSparse.custom((mask | torch.eye(n // 128, dtype=torch.bool)).to(gpu.GPU), block_size=128)


def options_of(module: str) -> dict[str, float]:
    return {"dropout_p": 0.1, "seed": 1} if module == "dropout" else {}


def tensors(n: int, dtype: str, head_dim: str) -> list[torch.Tensor]:
    shape = (1, n, 768 // int(head_dim), int(head_dim))
    return [torch.randn(shape, device=gpu.GPU, dtype=getattr(torch, dtype)).requires_grad_() for _ in range(3)]


def choose(name: str, config: Config) -> None:
    """Let the kernel of this name run like this, in this process."""
    _, module, kernel, _ = name.split()
    MODULES[module]._configs = lambda *x: replace(SHIPPED[module](*x), **{kernel: config})


def grads(call, x: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    out = call(*x)
    return [out.detach(), *torch.autograd.grad(out, x, dout)]


def error(name: str) -> float:
    """Of a few rows' worth of tokens: this also compiles what is timed afterwards."""
    dtype, module, kernel, head_dim = name.split()
    torch.manual_seed(0)
    x, pattern = tensors(2048, dtype, head_dim), pattern_of(module, 2048)
    dout = torch.randn_like(x[0])
    call = partial(attention, pattern=pattern, **options_of(module))
    exact = grads(partial(call, backend="eager"), [y.double() for y in x], dout.double())
    ours = grads(partial(call, backend="triton"), x, dout)
    errors = [float((a - e).norm() / e.norm()) for a, e in zip(ours, exact, strict=True)]
    return errors[0] if kernel == "forward" else max(errors[1:])


def compiled(job: tuple[str, Config]) -> float:
    choose(*job)
    return error(job[0])


def milliseconds(name: str, backend: str) -> float:
    dtype, module, kernel, head_dim = name.split()
    x, pattern = tensors(2**15, dtype, head_dim), pattern_of(module, 2**15)
    call = partial(attention, *x, pattern, backend=backend, **options_of(module))
    if kernel == "forward":
        return gpu.milliseconds(torch.no_grad()(call), 3)
    out = call()
    dout = torch.randn_like(out)
    return gpu.milliseconds(lambda: torch.autograd.grad(out, x, dout, retain_graph=True), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="kernels, separated by commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CANDIDATES)
    jobs = [(name, config) for name in names for config in CANDIDATES[name]]
    with multiprocessing.get_context("spawn").Pool(14, maxtasksperchild=1) as pool:
        errors = pool.map(compiled, jobs, chunksize=1)
    report = {
        "command": f"PYTHONPATH=src python3 benchmarks/tune_triton.py --only '{','.join(names)}'",
        **gpu.versions(),
        "rows": [],
    }
    print("kernel                        rows, keys, warps, stages, products        ms   error")
    for name in names:
        for backend, config, found in (
            *((("sdpa", None, None),) if "dropout" not in name else ()),
            *(("triton", c, e) for (n, c), e in zip(jobs, errors, strict=True) if n == name),
        ):
            if config is not None:
                choose(name, config)
            ms = milliseconds(name, backend)
            sizes = "sdpa" if config is None else str(astuple(config))
            report["rows"].append({"kernel": name, "config": sizes, "ms": ms, "error": found})
            print(f"{name:29s} {sizes:36s} {ms:8.2f}  {'' if found is None else f'{found:.1e}'}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
