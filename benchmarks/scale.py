"""Groups of up to 4,096 ranks in one process: planning time, messages and bytes of a rank, from the plans of real calls.

    python benchmarks/scale.py [--out FILE] [--ranks 8 64 512 4096]
    python benchmarks/scale.py --docs

Every rank has 8,192 tokens and 8 heads of size 64 in 16 bits. The time is what a rank needs on the host for a call with new
``cu_seqlens`` or a new length: the plan of the rank with its own documents, the plans of its own rows for fused kernels,
and the costs by which the transport is chosen. It is the best of several runs in processor time of one thread. Bytes and
messages are exact, and are those of the rank with most of them. The plan is that of the rank with most documents. Nothing
is computed and nothing is sent: tests/ranks/test_traffic.py compares the same numbers with those of ranks.

``--docs`` prints the table of docs/distributed.md from the committed results/scale.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig
from dilated_attention_pytorch.call import Call, Sharding, make_call
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.cost import choose_transport, costs_of, received_by_rank
from dilated_attention_pytorch.distributed.messages import RankPlan
from dilated_attention_pytorch.distributed.own_rows import OwnRows, whole_problem
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan, static_block_plan
from dilated_attention_pytorch.distributed.ring import make_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.traffic import held_spans
from dilated_attention_pytorch.plan.tiles import compile_plan

RESULTS = Path(__file__).parent / "results" / "scale.json"
TOKENS_PER_RANK, HEADS, HEAD_DIM = 8192, 8, 64
DOCUMENTS = 2000
WINDOW = 32  # blocks of 128 that a query block reads
CPU = torch.device("cpu")


def settings(world: int):
    """By name: the pattern, and the boundaries of documents."""
    n = TOKENS_PER_RANK * world
    rates = [4**i for i in range(next(i for i in range(99) if 2048 * 4**i >= n) + 1)]
    longnet = Dilated([2048 * r for r in rates], rates)
    documents = (0, *sorted(random.Random(0).sample(range(1, n), DOCUMENTS - 1)), n)
    yield "LongNet", longnet, None
    yield "LongNet, 2,000 documents", longnet, documents
    yield f"window of {WINDOW} blocks", BlockSparse.from_config(SparsePatternConfig("local_window", WINDOW * 128 / n)), None
    # An eighth of the blocks of each document.
    yield "window, 2,000 documents", BlockSparse.from_config(SparsePatternConfig("local_window", 0.125)), documents


def call_of(pattern: Dilated | BlockSparse, shards: Shards, documents: tuple[int, ...] | None) -> Call:
    """A causal call of one rank."""
    x = torch.empty(1, shards.length, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    call, _ = make_call(x, x, x, pattern, is_causal=True, cu_seqlens=documents)
    return replace(call, sharding=Sharding(None, shards), device=CPU)


def plan_once(call: Call, shards: Shards, rank: int) -> tuple[float, RankPlan, str]:
    """The processor time that a rank needs on the host for a call that it has not seen, its plan and the transport."""
    for cache in (dilated_plan, static_block_plan, compile_plan):
        cache.cache_clear()
    gc.collect()
    gc.disable()
    start = time.process_time()
    problem = whole_problem(call, shards.length)
    plan = make_plan(call, problem, shards, rank, CPU)
    transport = choose_transport(costs_of(call, plan, shards))
    if isinstance(call.pattern, Dilated):
        OwnRows.of(problem, shards, rank).plans()
    seconds = time.process_time() - start
    gc.enable()
    return seconds, plan, transport


def measure(world: int, repeats: int) -> list[dict]:
    rows, shards = [], Shards.even(TOKENS_PER_RANK * world, world, "contiguous")
    for name, pattern, documents in settings(world):
        call = call_of(pattern, shards, documents)
        problem, bucket = whole_problem(call, shards.length), default_bucket_size(shards)
        # The rank with most documents; without documents all ranks are much alike.
        rank = max(range(world), key=lambda p: len(held_spans(problem, shards, p))) if documents else world // 2
        count = repeats if documents or isinstance(pattern, Dilated) or world <= 64 else 1
        seconds, plans, transports = zip(*(plan_once(call, shards, rank) for _ in range(count)), strict=True)
        plan = plans[0]
        start = time.process_time()
        received = received_by_rank(call, problem, shards, plan, transports[0], bucket)
        rows.append({
            "ranks": world, "tokens": shards.length, "setting": name, "transport": transports[0],
            "plan_seconds": min(seconds), "plan_seconds_median": statistics.median(seconds), "runs": count,
            "sequences_of_rank": len(plan.sequences), "ticks": len(plan.ticks), "plan_bytes": plan.bytes,
            "messages_most": max(x.waits for x in received) if transports[0] == "ring" else None,
            "messages_of_rank": sum(message is not None for _, message in plan.ticks),
            "bytes_most": max(x.forward for x in received), "bytes_mean": statistics.mean(x.forward for x in received),
            "backward_bytes_most": max(x.backward for x in received), "all_ranks_seconds": time.process_time() - start,
        })  # fmt: skip
        print({key: round(x, 5) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    return rows


def docs(rows: list[dict]) -> None:
    for row in rows:
        mib = [f"{row[name] / 2**20:,.2f}" for name in ("bytes_most", "backward_bytes_most")]
        print(
            f"| {row['setting']} | {row['ranks']:,} | {1000 * row['plan_seconds']:,.1f} | {row['ticks']:,} | "
            f"{row['messages_of_rank']:,} | {row['transport']} | {mib[0]} | {mib[1]} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="measure nothing, show the committed results")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096], help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each plan")
    options = parser.parse_args()
    if options.docs:
        docs(json.loads(RESULTS.read_text())["rows"])
        return
    torch.set_num_threads(1)
    rows = [row for world in options.ranks for row in measure(world, options.repeats)]
    rows.sort(key=lambda row: [name for name, _, _ in settings(8)].index(row["setting"]))
    report = {
        "tokens_per_rank": TOKENS_PER_RANK, "heads": HEADS, "head_dim": HEAD_DIM, "element_size": 2, "is_causal": True,
        "documents": DOCUMENTS, "machine": {"cpu": platform.machine(), "torch": torch.__version__},
        "version": dilated_attention_pytorch.__version__, "rows": rows,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
