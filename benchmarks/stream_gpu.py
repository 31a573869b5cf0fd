"""``dilated-attention stream`` on one GPU without the packages of the command: a billion tokens through one causal layer.

PYTHONPATH=src python3 benchmarks/stream_gpu.py [--tokens N] [--chunk N] [--out FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch.streaming import Stream, StreamSettings, default_pattern


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--chunk", type=int, default=2**18)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pattern = default_pattern(options.tokens)
    settings = StreamSettings(options.tokens, pattern, 8, 64, torch.bfloat16, torch.device("cuda"), options.chunk)
    stream = Stream(settings)
    points = list(stream.run())
    result = stream.result()
    figures = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "version": dilated_attention_pytorch.__version__,
        "settings": settings.description(), "seconds": result.point.seconds, "warm_up_seconds": result.warm_up_seconds,
        "tokens_per_second": result.tokens_per_second, "first_tenth": result.first_tenth, "last_tenth": result.last_tenth,
        "peak_bytes": result.peak_bytes, "cache_bytes": result.cache_bytes, "checksum": result.checksum,
        "rows": len(result.checked), "failed": len(result.failed), "tolerance": result.tolerance,
        "largest_error": max((row.error for row in result.checked), default=0.0),
    }  # fmt: skip
    print(json.dumps(figures))
    if options.out is not None:
        figures["checked"] = [dataclasses.asdict(row) for row in result.checked]
        figures["points"] = [dataclasses.astuple(point) for point in points]
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
