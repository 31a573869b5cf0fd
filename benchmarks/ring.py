"""Sharded sequences on a CPU: memory and traffic per rank, the speed of two ranks against one, the time of small calls.

    python benchmarks/ring.py [memory] [traffic] [speed] [latency] [--out FILE]
    python benchmarks/ring.py --docs [--picture FILE]

Each named measurement (all by default) replaces its section of FILE, if there is one. ``--docs`` prints the tables of
docs/distributed.md from the committed results/ring_cpu.json, and draws its plot. ``speed`` and ``latency`` need two
idle cores and some minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dilated_attention_pytorch
from dilated_attention_pytorch import Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import Shards, shard_sequence, simulate_ring
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.traffic import Holdings
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.plan.problem import Problem

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ring_cpu.json"
HEADS, HEAD_DIM = 8, 64
CPU = torch.device("cpu")


def inputs(n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]


def spawn(function, world: int, *arguments) -> list:
    """What ``function(rank, ...)`` returns on every rank, each with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (function, world, folder, arguments), nprocs=world)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _run(rank: int, function, world: int, folder: str, arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    Path(folder, f"{rank}.json").write_text(json.dumps(function(rank, *arguments)))
    dist.destroy_process_group()


# Memory: the same sequence on ever more ranks.
MEMORY_TOKENS = 65536
MEMORY_PATTERN = Dilated([2048, 8192, 32768, 131072], [1, 4, 16, 64])


def real_memory(rank: int) -> int:
    mine = [shard_sequence(x, dist.group.WORLD) for x in inputs(MEMORY_TOKENS)]
    return peak_extra_bytes(
        lambda: attention(*mine, MEMORY_PATTERN, group=Sharding(dist.group.WORLD, transport="ring")), CPU
    )


def memory() -> list[dict]:
    rows = []
    for world in (1, 2, 4, 8):
        shards = Shards.even(MEMORY_TOKENS, world, "contiguous")
        unit = shards.rows(0) * HEADS * HEAD_DIM * 4  # one shard of q; in float32 the partial result is the output
        bucket = 2 * default_bucket_size(shards) * HEADS * HEAD_DIM * 4 if world > 1 else 0
        _, _, used = simulate_ring(*inputs(MEMORY_TOKENS), MEMORY_PATTERN, world)
        simulated = max(m.query + m.key_value + m.buffers + m.partials for m in used)
        real = 3 * unit + max(spawn(real_memory, world))
        target = 4 * unit + 2 * bucket
        rows.append({"ranks": world, "target_bytes": target, "simulated_bytes": simulated, "real_bytes": real})
        rows[-1] |= {"simulated_ratio": simulated / target, "real_ratio": real / target}
        print(rows[-1])
    return rows


# Traffic: the paper's setting, 8,192 tokens per rank, segments up to the whole sequence.
TOKENS_PER_RANK = 8192
ROW_BYTES = HEADS * HEAD_DIM * 2 * 2  # of keys and values in 16 bits


def traffic() -> dict:
    rows = []
    for world in (8, 64, 512, 4096):
        n = TOKENS_PER_RANK * world
        count = next(i for i in range(99) if 2048 * 4**i >= n) + 1
        pattern = Dilated([2048 * 4**i for i in range(count)], [4**i for i in range(count)])
        for layout in ("contiguous", "zigzag"):
            shards = Shards.even(n, world, layout)
            problem = Problem(pattern, False, 1, n, n, HEADS, HEADS)

            def received_bytes(problem: Problem, shards: Shards = shards) -> list[int]:
                holdings = Holdings.of(problem, shards)
                return (holdings.received(shards.world_size, is_causal=False) * ROW_BYTES).tolist()

            start = time.perf_counter()
            received = received_bytes(problem)
            seconds = time.perf_counter() - start
            branches = {}
            for branch, (w, r) in enumerate(pattern.branches):
                branch_bytes = received_bytes(problem.of_branch(branch))
                if any(branch_bytes):
                    branches[f"{w}/{r}"] = {"most": max(branch_bytes), "mean": statistics.mean(branch_bytes)}
            dense = (n - TOKENS_PER_RANK) * ROW_BYTES
            rows.append({
                "ranks": world, "layout": layout, "tokens": n, "bytes_most": max(received),
                "bytes_mean": statistics.mean(received), "dense_ring_bytes": dense, "ratio": dense / max(received),
                "schedule_seconds": seconds, "branches": branches,
            })  # fmt: skip
            print({key: x for key, x in rows[-1].items() if key != "branches"})
    return {"tokens_per_rank": TOKENS_PER_RANK, "heads": HEADS, "head_dim": HEAD_DIM, "element_size": 2, "rows": rows}


# Speed: two ranks with one thread each against one.
SPEED_TOKENS = 65536
SPEED_PATTERN = Dilated([2048, 8192, 32768, 65536], [1, 2, 4, 8])


def seconds(rank: int, world: int) -> float:
    mine = [shard_sequence(x, dist.group.WORLD).requires_grad_() for x in inputs(SPEED_TOKENS)]
    dout = shard_sequence(inputs(SPEED_TOKENS)[0], dist.group.WORLD)

    def call(pattern: Dilated) -> None:
        torch.autograd.grad(attention(*mine, pattern, group=dist.group.WORLD), mine, dout)

    call(Dilated([256, SPEED_TOKENS], [1, 64]))  # threads, connections and caches
    dist.barrier()
    start = time.perf_counter()
    call(SPEED_PATTERN)
    return time.perf_counter() - start


def speed() -> dict:
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(2):  # in turn, so that other load on the machine meets both
        for world, seconds_of in times.items():
            seconds_of.append(max(spawn(seconds, world, world)))
            print(f"{world} rank(s): {seconds_of[-1]:.2f} s")
    one, two = min(times[1]), min(times[2])
    return {"tokens": SPEED_TOKENS, "pattern": SPEED_PATTERN.spec, "seconds": times, "speedup": one / two}


# Latency: small calls of two ranks. "plain" compares the rows of the ranks in every call, "known" has Shards.
LATENCY_ROUNDS, LATENCY_CALLS = 7, 40


def small_calls(group: dist.ProcessGroup) -> dict:
    calls = {}
    for n in (64, 256):
        mine = [torch.randn(1, n, 2, 8).requires_grad_() for _ in range(3)]
        dout = torch.randn(1, n, 2, 8)
        for pattern in (Dilated([2 * n], [1]), Dilated([n // 2, n, 2 * n], [1, 2, 4])):
            for layout in ("contiguous", Shards.of([n, n], "contiguous")):

                def forward(mine=mine, pattern=pattern, layout=layout) -> torch.Tensor:
                    return attention(*mine, pattern, is_causal=True, group=group, layout=layout)

                def both(mine=mine, forward=forward, dout=dout) -> None:
                    torch.autograd.grad(forward(), mine, dout)

                name = f"{'plain' if layout == 'contiguous' else 'known'}, {n} rows, {len(pattern.branches)} branches"
                calls |= {f"{name}, forward": torch.no_grad()(forward), f"{name}, forward and backward": both}
    return calls


def small_call_seconds(rank: int) -> dict[str, list[float]]:
    """By call: the medians of its time, and of the processor time of the thread that makes it."""
    calls = small_calls(dist.group.WORLD)
    medians: dict[str, list[list[float]]] = {name: [] for name in calls}
    for turn in range(LATENCY_ROUNDS + 1):  # the first one fills caches
        for name, call in calls.items():
            dist.barrier()
            times = []
            for _ in range(LATENCY_CALLS):
                start, cpu_start = time.perf_counter(), time.thread_time()
                call()
                times.append((time.perf_counter() - start, time.thread_time() - cpu_start))
            if turn:
                medians[name].append([statistics.median(x) for x in zip(*times, strict=True)])
    return {name: [statistics.median(x) for x in zip(*rounds, strict=True)] for name, rounds in medians.items()}


def latency() -> dict:
    ranks = spawn(small_call_seconds, 2)
    worst = {name: [max(rank[name][i] for rank in ranks) for i in (0, 1)] for name in ranks[0]}
    return {name: {"seconds": wall, "processor_seconds": cpu} for name, (wall, cpu) in worst.items()}


def docs(results: dict, picture: Path | None) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ring"}
    rows = [row for row in results["traffic"]["rows"] if row["layout"] == "contiguous"]
    ranks = [row["ranks"] for row in rows]
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.loglog(ranks, [row["dense_ring_bytes"] / 2**20 for row in rows], "o-", color="#999999", label="dense ring")
    axes.loglog(ranks, [row["bytes_most"] / 2**20 for row in rows], "o-", color="#1f77b4", label="dilated, all branches")
    axes.set_xticks(ranks, [f"{p:,}" for p in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks, 8,192 tokens each")
    axes.set_ylabel("MiB received per rank")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    if picture:
        figure.savefig(picture, format="svg", metadata={"Date": None})
    for row in rows:
        spanning = ", ".join(f"{x['most'] / 2**20:.2f}" for x in row["branches"].values())
        print(
            f"| {row['ranks']:,} | {row['tokens']:,} | {spanning} | {row['bytes_most'] / 2**20:.1f} | "
            f"{row['dense_ring_bytes'] / 2**20:,.0f} | {row['ratio']:,.0f} |"
        )
    for row in results["memory"]:
        numbers = [row["target_bytes"], row["simulated_bytes"], row["real_bytes"]]
        print(f"| {row['ranks']} | " + " | ".join(f"{x / 2**20:.1f}" for x in numbers) + f" | {row['real_ratio']:.2f} |")


def main() -> None:
    sections = {"memory": memory, "traffic": traffic, "speed": speed, "latency": latency}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*sections, []], default=[])
    parser.add_argument("--docs", action="store_true", help="measure nothing, show the committed results")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw the committed results into this file")
    options = parser.parse_args()
    if options.docs:
        docs(json.loads(RESULTS.read_text()), options.picture)
        return
    results = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name in options.sections or sections:
        results[name] = sections[name]()
        results["machine"] = {"cpu": platform.machine(), "cores": torch.get_num_threads(), "torch": torch.__version__}
        results["version"] = dilated_attention_pytorch.__version__
        print(json.dumps({name: results[name]}))
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
