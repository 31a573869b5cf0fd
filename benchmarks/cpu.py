"""Dilated attention on the CPU against the rate of the dense kernel: time, memory, error.

    python benchmarks/cpu.py [--quick] [--causal] [--out FILE]

``ratio`` is the measured time over the time that the floating-point operations of the plan take at the rate of
PyTorch's dense CPU kernel at L = 2048. That rate is measured in the same run, before and after. A ratio of 1.0 means
that everything except the products costs nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, attention, attention_weights
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.plan.tiles import compile_plan

HEADS, HEAD_DIM, DENSE_LENGTH = 8, 64, 2048
PATTERN = Dilated([2048, 4096, 8192, 16384], [1, 2, 4, 8])
CPU = torch.device("cpu")


def tensors(batch: int, n: int) -> list[torch.Tensor]:
    return [torch.randn(batch, n, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]


def seconds(call, repeats: int) -> float:
    """The median over the repeats; ``call`` returns its own time."""
    return statistics.median(call() for _ in range(repeats))


def forward_and_backward(function, inputs, repeats: int) -> tuple[float, float]:
    out = function(*inputs)
    dout = torch.randn_like(out)

    def forward() -> float:
        with torch.no_grad():
            start = time.perf_counter()
            function(*inputs)
            return time.perf_counter() - start

    def backward() -> float:
        out = function(*inputs)
        start = time.perf_counter()
        torch.autograd.grad(out, inputs, dout)
        return time.perf_counter() - start

    return seconds(forward, repeats), seconds(backward, repeats)


def dense_rates(causal: bool, repeats: int) -> tuple[float, float]:
    """FLOP/s of PyTorch's dense attention at L = 2048, forward and backward."""

    def dense(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    flops = compile_plan(Dilated([DENSE_LENGTH], [1]), DENSE_LENGTH, HEADS, is_causal=causal).flops(HEAD_DIM)
    forward, backward = forward_and_backward(dense, tensors(1, DENSE_LENGTH), repeats)
    return flops / forward, 2.5 * flops / backward


def error_of_rows(q, k, v, out, causal: bool) -> float:
    """The largest relative error of 16 rows against float64."""
    rows = torch.linspace(0, q.shape[1] - 1, 16).long()
    weights = attention_weights(q.double(), k.double(), PATTERN, rows, is_causal=causal)
    expected = torch.einsum("bhrm,bmhd->brhd", weights, v.double())
    return float(((out[:, rows] - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def measure(n: int, causal: bool, repeats: int) -> dict:
    q, k, v = tensors(1, n)
    run = lambda *x: attention(*x, PATTERN, is_causal=causal)  # noqa: E731
    before = dense_rates(causal, 3)
    forward, backward = forward_and_backward(run, (q, k, v), repeats)
    after = dense_rates(causal, 3)
    rates = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
    plan = compile_plan(PATTERN, n, HEADS, is_causal=causal)
    with torch.no_grad():
        out = run(q, k, v)
        extra = peak_extra_bytes(lambda: run(q, k, v), CPU)
        error = error_of_rows(q, k, v, out, causal)
    return {
        "tokens": n,
        "causal": causal,
        "forward_s": forward,
        "backward_s": backward,
        "forward_ratio": forward * rates[0] / plan.flops(HEAD_DIM),
        "backward_ratio": backward * rates[1] / plan.flops(HEAD_DIM, backward=True),
        "dense_forward_gflops": rates[0] / 1e9,
        "dense_backward_gflops": rates[1] / 1e9,
        "forward_us_per_token": forward / n * 1e6,
        "backward_us_per_token": backward / n * 1e6,
        "extra_bytes": extra,
        "extra_over_output": extra / (out.numel() * 4),
        "relative_error": error,
    }


def plan_milliseconds() -> float:
    """Making the plan of the paper's setting for 2**30 tokens: the median of 20, none of them cached."""
    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])

    def once(n: int) -> float:
        start = time.perf_counter()
        compile_plan(pattern, n, 12, is_causal=True)
        return time.perf_counter() - start

    return statistics.median(once(2**30 - i) for i in range(20)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 16,384 tokens, one repeat")
    parser.add_argument("--causal", action="store_true", help="a token sees itself and earlier tokens only")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    lengths = [4096, 8192, 16384] if options.quick else [4096, 8192, 16384, 32768, 65536]
    torch.manual_seed(0)
    report = {
        "command": " ".join(["python", "benchmarks/cpu.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library": dilated_attention_pytorch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "setting": {"pattern": PATTERN.spec, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"},
        "plan_ms_for_2**30_tokens": plan_milliseconds(),
        "rows": [],
    }
    print(f"plan for 2**30 tokens: {report['plan_ms_for_2**30_tokens']:.2f} ms")
    print("tokens  forward s  ratio  backward s  ratio  us/token  extra/output  error")
    for n in lengths:
        row = measure(n, options.causal, 1 if options.quick else 3)
        report["rows"].append(row)
        print(
            f"{n:6d}  {row['forward_s']:9.3f}  {row['forward_ratio']:5.3f}  {row['backward_s']:10.3f}  "
            f"{row['backward_ratio']:5.3f}  {row['forward_us_per_token']:8.1f}  {row['extra_over_output']:12.2f}  "
            f"{row['relative_error']:.1e}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
