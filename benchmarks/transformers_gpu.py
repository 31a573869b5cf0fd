"""A Llama-shaped model of transformers with dense and with dilated attention: a long prompt, and tokens after it.

    PYTHONPATH=src python3 benchmarks/transformers_gpu.py [--tokens N] [--out FILE]

The model has 8 layers of Llama 3 8B (32 heads, 8 key heads, size 128) with random weights in bf16. ``prompt`` is one
forward with a cache, which computes the logits of the last token. ``chunks`` is the same prompt in chunks. ``token`` is a
forward with one token after the prompt. Dense attention is ``sdpa`` with a ``DynamicCache``. Dilated attention has the
paper's pattern and a ``DilatedCache``. Memory is the peak of a prompt beyond the weights.

The errors come first, in float32 with 2 layers. ``one segment`` compares one segment of rate 1 with sdpa. ``cache``
compares tokens after a prompt in a ``DilatedCache`` with one forward without a cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

import dilated_attention_pytorch
from dilated_attention_pytorch.integrations.transformers import DilatedCache, apply, remove

SEGMENTS, RATES = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(layers: int, options: argparse.Namespace, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = TINY if options.tiny else LLAMA
    config = LlamaConfig(
        vocab_size=32000, num_hidden_layers=layers, max_position_embeddings=2**20, attn_implementation="sdpa", **sizes
    )
    with torch.device(options.device):
        return LlamaForCausalLM(config).to(dtype).eval()


def errors(options: argparse.Namespace) -> dict[str, float]:
    """The largest difference of logits over the largest logit."""
    model = llama(2, options, torch.float32)
    tokens = torch.randint(0, 32000, (1, 3000), device=options.device)

    def relative(x: Tensor, y: Tensor) -> float:
        return ((x - y).abs().max() / y.abs().max()).item()

    dense = model(tokens, use_cache=False).logits
    one = apply(model, [4096], [1])(tokens, use_cache=False).logits
    dilated = apply(model, [256, 1024], [1, 4])(tokens, use_cache=False).logits
    cache = DilatedCache(model.config)
    found = [model(tokens[:, :2990], past_key_values=cache).logits]
    found += [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(2990, 3000)]
    return {
        "one segment": relative(one, dense), "cache": relative(torch.cat(found, 1), dilated),
        "dilated against dense (no error)": relative(dilated, dense),
    }  # fmt: skip


class Clock:
    """Wall time with device synchronisations."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"

    def now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0


def cache_bytes(cache: Cache) -> int:
    if isinstance(cache, DilatedCache):
        return sum(layer.nbytes for layer in cache.layers)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def measure(model: LlamaForCausalLM, tokens: Tensor, options: argparse.Namespace, chunk: int) -> dict[str, float]:
    """One prompt that is not counted, then the median of ``rounds`` prompts, and tokens after the last one."""
    clock = Clock(options.device)
    is_dilated = model.config._attn_implementation == "dilated"
    prompts: list[float] = []
    for number in range(1 + options.rounds):
        cache = DilatedCache(model.config) if is_dilated else DynamicCache(config=model.config)
        gc.collect()
        if clock.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        weights, start = (torch.cuda.memory_allocated() if clock.is_cuda else 0), clock.now()
        for rows in tokens.split(chunk, dim=1):
            model(rows, past_key_values=cache, logits_to_keep=1)
        seconds = clock.now() - start
        if number:
            prompts.append(seconds)
    peak = clock.peak() - weights
    steps = []
    for number in range(4 + options.steps):
        start = clock.now()
        model(tokens[:, number : number + 1], past_key_values=cache, logits_to_keep=1)
        seconds = clock.now() - start
        if number >= 4:
            steps.append(seconds)
    return {
        "prompt_s": statistics.median(prompts), "peak_bytes": peak, "token_ms": 1e3 * statistics.median(steps),
        "cache_bytes": cache_bytes(cache),
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--chunk", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    report = {
        "command": "python benchmarks/transformers_gpu.py", "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "library": dilated_attention_pytorch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "tokens": options.tokens, "chunk": options.chunk, "layers": options.layers, "segment_lengths": SEGMENTS,
        "dilation_rates": RATES, "errors": errors(options),
    }  # fmt: skip
    print(json.dumps(report["errors"]), flush=True)
    model = llama(options.layers, options, torch.float32 if options.device == "cpu" else torch.bfloat16)
    tokens = torch.randint(0, 32000, (1, options.tokens), device=options.device)
    for name, chunk in (("dense", options.tokens), ("dilated", options.tokens), ("dilated in chunks", options.chunk)):
        if name == "dilated":
            apply(model, SEGMENTS, RATES)
        report[name] = measure(model, tokens, options, chunk)
        print(name, json.dumps(report[name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    remove(model)


if __name__ == "__main__":
    main()
