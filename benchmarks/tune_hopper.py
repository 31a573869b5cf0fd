"""Configurations of the Hopper kernels: time, comparison with the portable kernels, and the same bits in 20 runs.

    PYTHONPATH=src python3 benchmarks/tune_hopper.py [--shipped] [--out FILE]

Edit CANDIDATES, run, and put the best configurations into backends/hopper/configs.py. ``x dense`` of a forward is its
rate over that of dense cuDNN attention with tiles of 2048. For dq and dkv compare the sum of their milliseconds with
the milliseconds that dense cuDNN attention would take for the FLOPs of the backward. ``--shipped`` measures only the
configurations of the table, which takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
from gpu import GPU, PAPER, WIDE, Setting, dense_rates, milliseconds

from dilated_attention_pytorch.backends.gpu.portable import RowStatistics
from dilated_attention_pytorch.backends.hopper import run
from dilated_attention_pytorch.backends.hopper.configs import HopperConfig as Config
from dilated_attention_pytorch.backends.hopper.configs import configs
from dilated_attention_pytorch.backends.hopper.persistent import GradientInputs, row_statistics
from dilated_attention_pytorch.backends.triton import run as portable
from dilated_attention_pytorch.plan.problem import Problem
from dilated_attention_pytorch.plan.tiles import compile_plan
from dilated_attention_pytorch.values import Inputs, Options, Saved

SETTINGS = {
    "D=64": Setting(PAPER, 2**18, 12, 64, 2048),
    "D=64 causal": Setting(PAPER, 2**18, 12, 64, 2048, causal=True),
    "D=128": Setting(WIDE, 2**17, 16, 128, 2048),
    "D=128 causal": Setting(WIDE, 2**17, 16, 128, 2048, causal=True),
}
CANDIDATES = {
    ("forward", 64): [Config(128, 6, 1), Config(128, 6, 0), Config(128, 3, 1)],
    ("forward", 128): [Config(128, 3, 0), Config(128, 3, 1), Config(64, 6, 1)],
    ("dq", 64): [Config(64, 8, 2), Config(64, 8, 0)],
    ("dq", 128): [Config(64, 5, 1), Config(64, 5, 0)],
    ("dkv", 64): [Config(64, 8, 2, overlap=True), Config(64, 8, 2), Config(64, 8, 0, overlap=True)],
    ("dkv", 128): [Config(64, 4, 0), Config(32, 8, 0, overlap=True)],
}

SHIPPED = {(kernel, d): [getattr(configs(d), kernel)] for kernel in ("forward", "dq", "dkv") for d in (64, 128)}


def problem(s: Setting, n: int) -> Problem:
    return Problem(s.pattern, s.causal, 1, n, n, s.heads, s.heads, None, None)


def inputs(s: Setting, n: int) -> list[torch.Tensor]:
    return [torch.randn((1, n, s.heads, s.head_dim), device=GPU, dtype=s.dtype) for _ in range(4)]


def call(kernel: str, p: Problem, x: list[torch.Tensor], statistics: RowStatistics, config: Config | None):
    read = GradientInputs(*x)
    scale = read.query.shape[-1] ** -0.5
    if kernel == "forward":
        return run.forward(p, Inputs(*read[:3]), Options(scale), config=config)
    if kernel == "dq":
        return run.dq(p, read, statistics, scale, config=config)
    return run.dkv(p, read, statistics, scale, config=config)


def outputs(x) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def compile_one(job) -> None:
    """In a process of its own: the compiled kernels stay on disk."""
    kernel, head_dim, config = job
    s = SETTINGS[f"D={head_dim}"]
    n = 4096
    *x, dout = every = inputs(s, n)
    saved = Saved(x[0], torch.zeros(1, s.heads, n, device=GPU), dout)
    if kernel == "portable":
        portable.forward(problem(s, n), Inputs(*x), Options(1.0))
        statistics = portable.row_statistics(saved, Options(1.0))
        portable.gradients(problem(s, n), Inputs(*x), dout, statistics, Options(1.0), None)
        return
    call(kernel, problem(s, n), every, row_statistics(saved, 1.0), config)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shipped", action="store_true")
    options = parser.parse_args()
    candidates = SHIPPED if options.shipped else CANDIDATES
    jobs = [(kernel, d, config) for (kernel, d), some in candidates.items() for config in some]
    jobs += [("portable", 64, None), ("portable", 128, None)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    rows = []
    for name, s in SETTINGS.items():
        p, x = problem(s, s.n), inputs(s, s.n)
        qkv, options_of_call = Inputs(*x[:3]), Options(s.head_dim**-0.5)
        flops = compile_plan(s.pattern, s.n, s.heads, is_causal=s.causal).flops(s.head_dim)
        rates = dense_rates(s)
        results = portable.forward(p, qkv, options_of_call)
        saved = Saved(*results, x[3])
        statistics = row_statistics(saved, options_of_call.scale)
        grads = portable.backward(p, qkv, saved, options_of_call)
        expected = {"forward": results, "dq": grads[:1], "dkv": grads[1:]}
        print(f"{name}: dense forward {flops / rates[0] / 1e9:.2f} ms ({rates[0]:.0f} TFLOP/s), "
              f"backward {2.5 * flops / rates[1] / 1e9:.2f} ms ({rates[1]:.0f} TFLOP/s)")  # fmt: skip
        for (kernel, d), some in candidates.items():
            for config in some if d == s.head_dim else ():
                got = outputs(call(kernel, p, x, statistics, config))
                pairs = zip(got, expected[kernel], strict=True)
                error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
                again = [outputs(call(kernel, p, x, statistics, config)) for _ in range(20)]
                same = all(torch.equal(a, b) for other in again for a, b in zip(got, other, strict=True))
                del again
                ms = milliseconds(lambda: call(kernel, p, x, statistics, config), 9)  # noqa: B023
                raw = {"forward": 1.0, "dq": 1.5, "dkv": 2.0}[kernel] * flops / ms / 1e9
                row = {"setting": name, "kernel": kernel, "config": str(config), "ms": ms, "tflops": raw, "error": error}
                rows.append(row | {"same_bits": same, "dense_tflops": rates})
                share = f"x dense {raw / rates[0]:.3f}" if kernel == "forward" else ""
                bits = "" if same else "NOT THE SAME BITS"
                print(
                    f"   {kernel:8s} {config!s:50s} {ms:8.3f} ms  {raw:5.0f} TFLOP/s  error {error:.1e}  {share} {bits}",
                    flush=True,
                )
    if options.out:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
