"""Training at 1,048,576 tokens of context: tokens per second, MFU and memory, next to the same model with dense attention.

The model is the preset "small" of 38 M parameters, in bfloat16 autocast. Activations are computed again in the backward.
Each step is one window of the standard library's sources: forward, backward, clipping and AdamW. "dilated" is the library.
The dense cases replace only its call of attention by PyTorch's scaled_dot_product_attention, with the backend that they
name. The first dilated step compiles kernels and is not timed. Dense attention needs no compilation. MFU counts the pairs
that each case needs.

A dense step at a million tokens takes about two minutes on an H200. Results are written after each case.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dilated_attention_pytorch
from dilated_attention_pytorch.models import LongNetConfig, layers
from dilated_attention_pytorch.training import Trainer, TrainSettings

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


def dense(name: str):
    """A replacement of ``attention`` in the layers of the model."""

    def call(query: Tensor, key: Tensor, value: Tensor, pattern: object, **options: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True).transpose(1, 2)

    return call


def measure(case: str, options: argparse.Namespace, folder: Path) -> dict:
    changes = {"vocab_size": 256, "checkpoint_layers": True}
    if case != "dilated":
        changes |= {"segment_lengths": (options.context,), "dilation_rates": (1,)}
    timed, skipped = (options.steps, 1) if case == "dilated" else (options.dense_steps, 0)
    device = torch.device(options.device)
    settings = TrainSettings(
        model=LongNetConfig.preset(options.preset, **changes), context=options.context, steps=timed + skipped, held_out=0.0,
        every=10**9, dtype="bfloat16" if device.type == "cuda" else "float32", learning_rate=3e-4,
    )  # fmt: skip
    library = layers.attention
    try:
        if case != "dilated":
            layers.attention = dense(case)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(settings, folder / case, device)
        points = list(trainer.run())
    finally:
        layers.attention = library
    trainer.close()
    seconds = statistics.median(x.seconds for x in points[skipped:])
    return {
        "case": case,
        "step_seconds": [x.seconds for x in points[skipped:]],
        "tokens_per_second": options.context / seconds,
        "mfu": points[-1].mfu,
        "step_flops": trainer.flops,
        "peak": trainer.peak,
        "peak_memory_bytes": points[-1].memory_bytes,
        "losses": [x.loss for x in points],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "segment_lengths": settings.model.segment_lengths,
        "dilation_rates": settings.model.dilation_rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="dilated,cudnn,flash", help="dilated, and backends of dense attention")
    parser.add_argument("--context", type=int, default=2**20)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of the dilated case")
    parser.add_argument("--dense-steps", type=int, default=1, help="timed steps of a dense case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        for case in options.cases.split(","):
            results.append(measure(case, options, Path(name)))
            print(json.dumps(results[-1]), flush=True)
            rates = {x["case"]: x["tokens_per_second"] for x in results}
            report = {
                "command": "python benchmarks/million.py",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "library": dilated_attention_pytorch.__version__,
                "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
                "preset": options.preset,
                "context": options.context,
                "dilated_to_dense": {
                    x: rates["dilated"] / rates[x] for x in rates if x != "dilated" and "dilated" in rates
                },
                "cases": results,
            }
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["dilated_to_dense"]))


if __name__ == "__main__":
    main()
