"""The first forward and backward of a process on one GPU: with an empty and a filled kernel cache, and after ``warm_up``.

    PYTHONPATH=src python3 benchmarks/first_call.py [--head-dim 64] [--tokens 65536] [--out FILE]

Every row is a process of its own. ``empty`` is a cache without kernels, ``filled`` the same one after a process. Times are
seconds of the host until the device is done. The import of PyTorch and of this library is not counted, and neither is
``torch_backward``: what PyTorch itself imports at the first backward of a process, of any operation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = (("empty", False), ("filled", False), ("empty", True), ("filled", True))  # the cache, whether warm_up is called


def child(tokens: int, head_dim: int, warm: bool) -> dict[str, float]:
    """One process: its seconds by step, and the error of the result."""
    import torch

    from dilated_attention_pytorch import Dilated, attention, attention_weights, warm_up

    pattern = Dilated([2048, 8192, 32768], [1, 4, 16])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    start = time.perf_counter()
    torch.autograd.grad(q * 2, q, dout)
    torch.cuda.synchronize()
    found = {"torch_backward": time.perf_counter() - start}
    found |= {"warm_up": warm_up(q, k, v, pattern, is_causal=True)} if warm else {}
    for name in ("first", "second"):
        start = time.perf_counter()
        # As projections would make them: leaves would not compile the backward beside the forward.
        out = attention(*(x.clone() for x in inputs), pattern, is_causal=True)
        torch.cuda.synchronize()
        between = time.perf_counter()
        torch.autograd.grad(out, inputs, dout)
        torch.cuda.synchronize()
        found |= {f"{name} forward": between - start, f"{name} backward": time.perf_counter() - between}
    rows = [0, tokens // 3, tokens - 1]
    weights = attention_weights(*(x.detach().double() for x in (q, k)), pattern, rows, is_causal=True)
    expected = torch.einsum("bhrm,bmhd->brhd", weights, v.detach().double())
    found["error"] = float((out.detach()[:, rows].double() - expected).norm() / expected.norm())
    return found | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=("plain", "warm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.tokens, options.head_dim, options.child == "warm")))
        return
    rows = []
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as warmed:
        for cache, warm in CASES:
            environment = {**os.environ, "TRITON_CACHE_DIR": warmed if warm else plain}
            command = [sys.executable, __file__, "--child", "warm" if warm else "plain"]
            command += ["--tokens", str(options.tokens), "--head-dim", str(options.head_dim)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"cache": cache, "warm_up called": warm, **json.loads(done.stdout.splitlines()[-1])})
            steps = {name: f"{x:.3f}" for name, x in rows[-1].items() if isinstance(x, float)}
            print(f"{cache:6s} cache, {'with' if warm else 'without'} warm_up: {steps}", flush=True)
    if options.out is not None:
        report = {"tokens": options.tokens, "head_dim": options.head_dim, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
