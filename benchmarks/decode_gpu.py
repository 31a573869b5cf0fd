"""Decoding steps, prompts in chunks, and the last row of a sequence, on one GPU.

    PYTHONPATH=src python3 benchmarks/decode_gpu.py [--out FILE]

``step`` replays a CUDA graph of one ``DilatedKVCache.attend`` and divides by the time in which the rows that the steps read
come from memory at 4.3 TB/s. The rows are counted for the very positions of the steps, and also as if every key head read
all of its rows. ``eager`` is the same call without a graph. ``context`` compares steps at 65,536 and at 16,777,216 tokens.
``prompt`` is a prompt of 1,048,576 tokens in chunks of 65,536 over one causal call. ``last row`` is
``attention`` with one query. Errors are against the definition in float64. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, DilatedKVCache, attention
from dilated_attention_pytorch.plan.held import HeldRows

GPU = torch.device("cuda")
PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
BYTES_PER_US = 4.3e6


def median_us(call: Callable[[], object], calls: int, rounds: int = 15) -> float:
    """The median over rounds of the mean time of some calls, which are queued."""
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / calls * 1e3)
    return statistics.median(times)


def rows_read(held: HeldRows, position: int) -> int:
    """The rows that the token at a position reads, over all key heads, with its own."""
    return sum(
        branch.rows_after(g, position) + 1
        for branch in held.branches
        for g in range(held.key_heads)
        if position % branch.segment_length % branch.dilation_rate == branch.offsets[g]
    )


def filled(batch: int, heads: int, dim: int, position: int) -> DilatedKVCache:
    """A cache at a position, whose rows are random."""
    cache = DilatedKVCache(PAPER, batch, heads, dim, dtype=torch.bfloat16, device=GPU)
    state = cache.state_dict()
    for name in ("keys", "values"):
        state[name].normal_()
    state["tokens_seen"].fill_(position)
    cache.load_state_dict(state)
    return cache


def steps(batch: int, position: int, heads: int = 12, dim: int = 64, count: int = 120) -> dict:
    """The time of steps in a CUDA graph and without one."""
    cache = filled(batch, heads, dim, position)
    token = [torch.randn(batch, 1, heads, dim, device=GPU, dtype=torch.bfloat16) for _ in range(3)]
    state = cache.state_dict()
    for _ in range(3):
        cache.attend(*token)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.attend(*token)
    rounds = 15

    def timed(call: Callable[[], object]) -> float:
        cache.load_state_dict(state)
        return median_us(call, count, rounds)

    graph_us = timed(graph.replay)
    # The eager call waits for the host, so the clock of the host is read.
    cache.load_state_dict(state)
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            cache.attend(*token)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / count * 1e6)
    held = HeldRows.of(PAPER, heads)
    row_bytes = 2 * batch * dim * 2
    positions = range(position, position + count * rounds)
    read = statistics.mean(rows_read(held, p) for p in positions) * row_bytes
    every = statistics.mean(sum(held.rows_after(g, p) for g in range(heads)) for p in positions) * row_bytes
    return {
        "batch": batch, "position": position, "graph_us": graph_us, "eager_us": statistics.median(times),
        "read_us": read / BYTES_PER_US, "all_rows_us": every / BYTES_PER_US, "cache_bytes": cache.nbytes,
    }  # fmt: skip


def check() -> dict:
    """Random chunks and steps against one causal call in float64."""
    pattern, batch, heads, key_heads, dim = Dilated([256, 1000, 4096], [1, 3, 8]), 2, 8, 4, 64
    total = 3000
    generator = torch.Generator(GPU).manual_seed(0)

    def rows(h: int) -> torch.Tensor:
        return torch.randn(batch, total, h, dim, generator=generator, device=GPU, dtype=torch.bfloat16)

    q, k, v = rows(heads), rows(key_heads), rows(key_heads)
    exact = attention(q.double(), k.double(), v.double(), pattern, is_causal=True, backend="reference")
    one = attention(q, k, v, pattern, is_causal=True)
    cache = DilatedKVCache(pattern, batch, key_heads, dim, dtype=torch.bfloat16, device=GPU)
    found, at = [], 0
    for n in (700, 1, 1, 5, 300, *(1,) * 60, 900, 8, 500):
        found.append(cache.attend(*(x[:, at : at + n] for x in (q, k, v))))
        at += n
    found.append(cache.attend(*(x[:, at:] for x in (q, k, v))))
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (torch.cat(found, 1), one)]
    last, last_exact = attention(q[:, -1:], k, v, pattern, is_causal=True), exact[:, -1:]
    errors.append(float((last.double() - last_exact).norm() / last_exact.norm()))
    return dict(zip(("chunks", "one_call", "last_row"), errors, strict=True))


def prompt(heads: int = 12, dim: int = 64, total: int = 2**20, chunk: int = 2**16) -> dict:
    """A prompt in chunks over one causal call, in turns."""
    q, k, v = (torch.randn(1, total, heads, dim, device=GPU, dtype=torch.bfloat16) for _ in range(3))
    cache = DilatedKVCache(PAPER, 1, heads, dim, dtype=torch.bfloat16, device=GPU)

    def chunks(first: int = 0) -> None:
        cache.reset()
        if first:
            cache.attend(*(x[:, :first] for x in (q, k, v)))
        for at in range(first, total, chunk):
            cache.attend(*(x[:, at : at + chunk] for x in (q, k, v)))

    def one() -> None:
        attention(q, k, v, PAPER, is_causal=True)

    found: dict[str, list[float]] = {"chunks": [], "uneven chunks": [], "one call": []}
    for _ in range(6):
        for name, call in (("chunks", chunks), ("uneven chunks", lambda: chunks(1000)), ("one call", one)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3)
    return {f"{name} ms": statistics.median(times[1:]) for name, times in found.items()}


def last_rows() -> list[dict]:
    """One query row with a long sequence."""
    found = []
    for length in (2**16, 2**20):
        k, v = (torch.randn(1, length, 8, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(1, 1, 32, 128, device=GPU, dtype=torch.bfloat16)
        call = partial(attention, q, k, v, PAPER, is_causal=True)
        call()
        times = []
        for _ in range(15):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 50 * 1e6)
        found.append({"keys": length, "us": statistics.median(times)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    answer: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    answer["version"] = dilated_attention_pytorch.__version__
    answer["errors"] = check()
    print("errors", answer["errors"], flush=True)
    contexts = (1, 2**16 - 2048), (1, 2**24 - 2048), (16, 2**16 - 2048)
    answer["steps"] = [steps(batch, position) for batch, position in contexts]
    for row in answer["steps"]:
        print({name: round(x, 2) for name, x in row.items()}, flush=True)
    answer["prompt"], answer["last_rows"] = prompt(), last_rows()
    print(answer["prompt"], answer["last_rows"])
    if options.out is not None:
        options.out.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
