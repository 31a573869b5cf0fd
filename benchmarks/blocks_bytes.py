"""Block-sparse attention on a sharded sequence: bytes that a rank receives, from the schedule, by density and ranks.

    python benchmarks/blocks_bytes.py [--out FILE]
    python benchmarks/blocks_bytes.py --docs [--picture FILE]

``--docs`` prints the tables of docs/block_sparse.md from the committed results/blocks_bytes.json, and draws its plot.
No data is sent and no attention is computed: tests/ranks/test_block_ring.py compares
the schedule with the bytes that are sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import dilated_attention_pytorch
from dilated_attention_pytorch import BlockSparse, DistributedSparseConfig, SparsePatternConfig
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.listed_shards import named_blocks
from dilated_attention_pytorch.distributed.schedules import BlockSchedule, blocks_of, positions_read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "blocks_bytes.json"
TOKENS_PER_RANK, BLOCK_SIZE = 8192, 128
KEY_HEADS, HEAD_DIM, ELEMENT_SIZE = 8, 64, 2
ROW_BYTES = KEY_HEADS * HEAD_DIM * 2 * ELEMENT_SIZE  # of keys and values
RANKS = (8, 64, 512)
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2)
SAMPLED = 16  # ranks; the same answer for all but those near the ends


def patterns(density: float, shards: Shards):
    """By name: the pattern, or its configuration. Tiers of 8 ranks per node, as dense as the ratio says everywhere."""
    yield "local_window", SparsePatternConfig("local_window", density, BLOCK_SIZE)
    yield "hierarchical", SparsePatternConfig("hierarchical", density, BLOCK_SIZE)
    # All lists of a pattern by ranks exist at once: 50 million entries at 512 ranks and 5 %.
    if shards.world_size < 512 or density <= 0.02:
        settings = DistributedSparseConfig(density, "hierarchical", block_size=BLOCK_SIZE, node_size=8)
        yield "tiers", settings.pattern(shards)


def read_by(rank: int, pattern: SparsePatternConfig | BlockSparse, shards: Shards):
    """The positions that a rank reads, and the blocks that it computes."""
    chunks, blocks = shards.chunks[rank], -(-shards.length // BLOCK_SIZE)
    lists = []
    for own in (blocks_of(chunk, BLOCK_SIZE) for chunk in chunks):
        if isinstance(pattern, BlockSparse):
            lists.append(pattern.given.rows(own.start, own.stop))
        else:
            lists.append(pattern.lists(own.start, blocks, False, own.stop))
    named = [named_blocks(x) for x in lists]
    computed = sum(int(x.counts.sum()) for x in lists)
    return positions_read(chunks, named, BLOCK_SIZE, shards.length, is_causal=False), computed


def measure() -> list[dict]:
    rows = []
    for world in RANKS:
        shards = Shards.even(TOKENS_PER_RANK * world, world, "contiguous")
        sampled = range(0, world, max(1, world // SAMPLED))
        dense = (world - 1) * TOKENS_PER_RANK * ROW_BYTES
        blocks = shards.length // BLOCK_SIZE
        for density in DENSITIES:
            for name, pattern in patterns(density, shards):
                start = time.perf_counter()
                read, computed = zip(*(read_by(rank, pattern, shards) for rank in sampled), strict=True)
                seconds = (time.perf_counter() - start) / len(sampled)
                by_rank = dict(zip(sampled, read, strict=True))
                schedule = BlockSchedule(shards, tuple(by_rank.get(rank, ()) for rank in range(world)))
                received = [ROW_BYTES * schedule.received_rows(rank) for rank in sampled]
                rows.append({
                    "ranks": world, "tokens": shards.length, "pattern": name, "ratio": density,
                    "density": statistics.mean(computed) / (TOKENS_PER_RANK // BLOCK_SIZE * blocks),
                    "bytes_mean": statistics.mean(received), "bytes_most": max(received), "dense_bytes": dense,
                    "of_dense": statistics.mean(received) / dense, "seconds_per_rank": seconds,
                })  # fmt: skip
                print({key: round(x, 5) if isinstance(x, float) else x for key, x in rows[-1].items()}, flush=True)
    return rows


def docs(rows: list[dict], picture: Path | None) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    colours = dict(zip(RANKS, ("#1f77b4", "#ff7f0e", "#2ca02c"), strict=True))
    for world, colour in colours.items():
        for name, style in (("local_window", "o-"), ("tiers", "s--")):
            shown = [row for row in rows if row["ranks"] == world and row["pattern"] == name and row["bytes_mean"]]
            label = f"{world} ranks" if name == "local_window" else None
            axes.loglog(
                [r["density"] for r in shown], [r["bytes_mean"] / 2**20 for r in shown], style, color=colour, label=label
            )
        dense = next(row["dense_bytes"] for row in rows if row["ranks"] == world)
        axes.axhline(dense / 2**20, color=colour, linewidth=0.6, linestyle=":")
    axes.set_xlabel("density: blocks computed (circles: local_window, squares: tiers)", fontsize=8)
    axes.set_ylabel("MiB received per rank (dotted: dense)", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if picture:
        figure.savefig(picture, dpi=100, metadata={"Software": None})
    for name in ("local_window", "tiers", "hierarchical"):
        print(f"\n{name}\n")
        for world in RANKS:
            shown = {row["ratio"]: row for row in rows if row["ranks"] == world and row["pattern"] == name}
            cells = [f"{shown[d]['bytes_mean'] / 2**20:,.1f}" if d in shown else "" for d in DENSITIES]
            one = next(iter(shown.values()))
            print(f"| {world} | {one['tokens']:,} | " + " | ".join(cells) + f" | {one['dense_bytes'] / 2**20:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="measure nothing, show the committed results")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw the committed results into this file")
    options = parser.parse_args()
    if options.docs:
        docs(json.loads(RESULTS.read_text())["rows"], options.picture)
        return
    setting = {
        "tokens_per_rank": TOKENS_PER_RANK, "block_size": BLOCK_SIZE, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM,
        "element_size": ELEMENT_SIZE, "is_causal": False, "node_size": 8, "version": dilated_attention_pytorch.__version__,
    }  # fmt: skip
    report = json.dumps({**setting, "rows": measure()}, indent=1)
    if options.out:
        options.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
