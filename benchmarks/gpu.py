"""Dilated attention on one GPU against dense cuDNN attention: time, rate, memory, error.

    PYTHONPATH=src python3 benchmarks/gpu.py [--only paper,gigapath] [--backends auto,sdpa,triton,authors,flex] [--out FILE]

``x dense`` is the rate divided by the rate of dense cuDNN attention with the same head size, type and causality. The
dense tiles have the typical tile length L = w / r of the setting and are measured in the same run, before and after. A
forward has 4 D FLOPs per pair, a backward 2.5 times as many.

Calls are queued one after the other, as in training, so the GPU reaches its power limit (``steady_milliseconds``).
*Rested* is the median of five calls after one second without work. It is faster, because the clock has not fallen yet.

Sequences up to 16,384 tokens have three more figures: replays of a CUDA graph, single calls that include the time until
the host launches the first kernel, and calls with autograd in the calling thread (*one thread*). By default autograd
uses one thread per GPU. Waking that thread, and being woken by it, takes about as long as the kernels of such
sequences.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from baselines import METHODS

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, attention, attention_weights
from dilated_attention_pytorch.measure import peak_extra_bytes, turn_seconds
from dilated_attention_pytorch.plan.tiles import compile_plan

GPU = torch.device("cuda")


@dataclass(frozen=True)
class Setting:
    pattern: Dilated
    n: int
    heads: int
    head_dim: int
    dense_length: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def long(self) -> bool:
        return self.n > 2**14


PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
WIDE = Dilated([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])
GIGAPATH = Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
SHORT = Dilated([2048, 4096, 8192], [1, 2, 4])
FLAT = Dilated([2048, 4096, 8192, 16384], [1, 2, 4, 8])
SETTINGS = {
    "paper": Setting(PAPER, 2**20, 12, 64, 2048),
    "paper causal": Setting(PAPER, 2**20, 12, 64, 2048, causal=True),
    "wide": Setting(WIDE, 2**19, 16, 128, 2048),
    "wide causal": Setting(WIDE, 2**19, 16, 128, 2048, causal=True),
    "gigapath": Setting(GIGAPATH, 2**17, 16, 48, 4096),
    "gigapath 16k": Setting(GIGAPATH, 2**14, 16, 48, 2048),
    "short": Setting(SHORT, 8192, 12, 64, 2048),
    "paper fp16": Setting(PAPER, 2**18, 12, 64, 2048, dtype=torch.float16),
    "paper float32": Setting(PAPER, 2**16, 12, 64, 2048, dtype=torch.float32),
    "tiles of 1024": Setting(Dilated([1024, 4096], [1, 4]), 2**18, 16, 128, 1024),
    "tiles of 512": Setting(Dilated([512, 2048], [1, 4]), 2**18, 16, 128, 512),
    "flat 128k": Setting(FLAT, 2**17, 8, 64, 2048),
    "flat 1M": Setting(FLAT, 2**20, 8, 64, 2048),
    "flat 8M": Setting(FLAT, 2**23, 8, 64, 2048),
}


def versions() -> dict[str, object]:
    """The GPU and the versions that a report names."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "library": dilated_attention_pytorch.__version__,
    }


def tensors(s: Setting, batch: int = 1, n: int | None = None) -> list[torch.Tensor]:
    shape = (batch, s.n if n is None else n, s.heads, s.head_dim)
    return [torch.randn(shape, device=GPU, dtype=s.dtype).requires_grad_() for _ in range(3)]


def milliseconds(call, repeats: int = 7) -> float:
    """The median time of single calls by events, after two that are not counted. It includes the launch by the host."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeats // 2]


def steady_milliseconds(call, seconds: float = 0.5) -> float:
    """The mean time of queued calls, as in training, after as many that are not counted."""
    return 1e3 * turn_seconds(call, GPU, seconds)


def rested_milliseconds(call) -> float:
    torch.cuda.synchronize()
    time.sleep(1.0)
    return milliseconds(call, 5)


def graph_milliseconds(make_call: Callable[[], Callable[[], object]]) -> float:
    """The time of replays of a CUDA graph, without the cost of Python. The call is made on the stream of the capture."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call = make_call()
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()
    return milliseconds(graph.replay)


def gradients_of(function, inputs):
    """A call of forward and backward together."""
    dout = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(function(*inputs), inputs, dout)


def forward_and_backward(function, inputs) -> tuple[float, float]:
    with torch.no_grad():
        forward = steady_milliseconds(lambda: function(*inputs))
    out = function(*inputs)
    dout = torch.randn_like(out)
    return forward, steady_milliseconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))


def dense_rates(s: Setting) -> tuple[float, float, float]:
    """TFLOP/s of dense attention at the typical tile length that fills the GPU: forward, backward, forward rested."""
    batch = max(1, 2**17 // s.dense_length)

    def dense(q, k, v):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        kernel = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
        if s.dtype == torch.float32:
            kernel = torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION
        with torch.nn.attention.sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=s.causal).transpose(1, 2)

    flops = batch * s.heads * s.head_dim * 4 * s.dense_length**2 / (2 if s.causal else 1)
    inputs = tensors(s, batch, s.dense_length)
    forward, backward = forward_and_backward(dense, inputs)
    with torch.no_grad():
        rested = rested_milliseconds(lambda: dense(*inputs))
    return flops / forward / 1e9, 2.5 * flops / backward / 1e9, flops / rested / 1e9


def error(s: Setting, inputs, out) -> float:
    """The largest relative error of a few rows and heads against float64."""
    rows = [0, 1, s.n // 3, s.n // 2 + 5, s.n - 1]
    widest = max(s.pattern.segment_lengths)
    # Whole segments are sequences of their own, if the shorter ones divide the longest.
    independent = widest < s.n and all(widest % w == 0 for w in s.pattern.segment_lengths)
    errors = []
    with torch.no_grad():
        for row in rows:
            start = row // widest * widest if independent else 0
            part = slice(start, start + widest if independent else s.n)
            q, k, v = (x[:, part].double() for x in inputs)
            weights = attention_weights(q, k, s.pattern, [row - start], is_causal=s.causal)
            expected = torch.einsum("bhrm,bmhd->brhd", weights, v)
            errors.append(float((out[:, [row]] - expected).norm() / expected.norm()))
    return max(errors)


def measure(name: str, s: Setting, backend: str) -> dict:
    if backend in METHODS:
        run = lambda *x: METHODS[backend](*x, s.pattern, s.causal)  # noqa: E731
    else:
        run = lambda *x: attention(*x, s.pattern, is_causal=s.causal, backend=backend)  # noqa: E731
    inputs = tensors(s)
    plan = compile_plan(s.pattern, s.n, s.heads, is_causal=s.causal)
    forward, backward = forward_and_backward(run, inputs)
    both = gradients_of(run, inputs)
    with torch.no_grad():
        out = run(*inputs)
        extra = peak_extra_bytes(lambda: run(*inputs), GPU)
    both_extra = peak_extra_bytes(both, GPU)
    row = {
        "setting": name,
        "backend": backend,
        "dtype": str(s.dtype),
        "forward_ms": forward,
        "backward_ms": backward,
        "both_ms": steady_milliseconds(both),
        "forward_ns_per_token": forward * 1e6 / s.n,
        "backward_ns_per_token": backward * 1e6 / s.n,
        "forward_tflops": plan.flops(s.head_dim) / forward / 1e9,
        "backward_tflops": plan.flops(s.head_dim, backward=True) / backward / 1e9,
        "forward_extra_gib": extra / 2**30,
        "forward_extra_over_output": extra / (out.numel() * out.element_size()),
        "both_extra_gib": both_extra / 2**30,
    }
    with torch.no_grad():
        row["forward_rested_ms"] = rested_milliseconds(lambda: run(*inputs))
    row["both_rested_ms"] = rested_milliseconds(both)
    if not s.long:
        with torch.no_grad():
            row["forward_single_ms"] = milliseconds(lambda: run(*inputs), 31)
        row["both_single_ms"] = milliseconds(both, 31)
        with torch.autograd.set_multithreading_enabled(False):
            row["both_one_thread_ms"] = steady_milliseconds(both)
    if not s.long and backend not in METHODS:  # those make tensors on the host
        with torch.no_grad():
            row["forward_graph_ms"] = graph_milliseconds(lambda: lambda: run(*inputs))
        row["both_graph_ms"] = graph_milliseconds(lambda: gradients_of(run, tensors(s)))
    row["relative_error"] = error(s, inputs, out)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings, separated by commas")
    parser.add_argument("--backends", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SETTINGS)
    torch.manual_seed(0)
    report = {
        "command": f"PYTHONPATH=src python3 benchmarks/gpu.py --only '{','.join(names)}' --backends {options.backends}",
        **versions(),
        "rows": [],
    }
    print(
        "setting          backend   forward ms  TFLOP/s  x dense  backward ms  TFLOP/s  x dense  both ms"
        "  extra GiB  both GiB  error"
    )
    for name in names:
        s = SETTINGS[name]
        before = dense_rates(s)
        for backend in options.backends.split(","):
            torch.cuda.empty_cache()
            row = measure(name, s, backend)
            after = dense_rates(s)
            dense_forward, dense_backward, dense_rested = ((x + y) / 2 for x, y in zip(before, after, strict=True))
            before = after
            row |= {"dense_forward_tflops": dense_forward, "dense_backward_tflops": dense_backward}
            row["dense_forward_rested_tflops"] = dense_rested
            row["forward_x_dense"] = row["forward_tflops"] / dense_forward
            row["backward_x_dense"] = row["backward_tflops"] / dense_backward
            report["rows"].append(row)
            more = "".join(
                f", {kind} {row[f'forward_{kind}_ms']:.3f} {row[f'both_{kind}_ms']:.3f}"
                for kind in ("rested", "graph", "single")
                if f"both_{kind}_ms" in row
            )
            if not s.long:
                more += f", one thread {row['both_one_thread_ms']:.3f}"
            print(
                f"{name:16s} {backend:9s} {row['forward_ms']:10.3f}  {row['forward_tflops']:7.0f}  "
                f"{row['forward_x_dense']:7.3f}  {row['backward_ms']:11.3f}  {row['backward_tflops']:7.0f}  "
                f"{row['backward_x_dense']:7.3f}  {row['both_ms']:7.3f}  {row['forward_extra_gib']:9.2f}  "
                f"{row['both_extra_gib']:8.2f}  "
                f"{row['relative_error']:.1e}{more}",
                flush=True,
            )
            if options.out:  # after each row: a later one may not fit the GPU
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
