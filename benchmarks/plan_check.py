"""Predictions of ``dilated-attention plan`` against committed measurements: time and memory, with the error of each row.

    PYTHONPATH=src python benchmarks/plan_check.py [--docs] [--out FILE]

Nothing is measured here. All rows of the files are shown. ``--docs`` prints the tables of docs/planning.md. Rows named in
``FITTED`` are those on which the constants of workbench/plan_time.py were fitted, by hand; the others only check them. The
formulas of memory have no fitted constants.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig
from dilated_attention_pytorch.hardware import find_gpu
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.workbench.plan_memory import attention_memory, model_memory
from dilated_attention_pytorch.workbench.plan_ranks import RankWork, Tiles, rank_work
from dilated_attention_pytorch.workbench.plan_settings import Machine, PlanSettings
from dilated_attention_pytorch.workbench.plan_time import attention_seconds, is_joint, model_seconds

RESULTS = Path(__file__).parent / "results"
H200 = Machine(find_gpu("h200"))
PAPER = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
WIDE = Dilated([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])
GIGAPATH = Dilated([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
FLAT = Dilated([2048, 4096, 8192, 16384], [1, 2, 4, 8])
# The settings of gpu.py, which imports triton: pattern, tokens, heads, head size.
SETTINGS = {
    "paper": (PAPER, 2**20, 12, 64), "wide": (WIDE, 2**19, 16, 128), "gigapath": (GIGAPATH, 2**17, 16, 48),
    "gigapath 16k": (GIGAPATH, 2**14, 16, 48), "short": (Dilated([2048, 4096, 8192], [1, 2, 4]), 8192, 12, 64),
    "paper fp16": (PAPER, 2**18, 12, 64), "paper float32": (PAPER, 2**16, 12, 64),
    "tiles of 1024": (Dilated([1024, 4096], [1, 4]), 2**18, 16, 128),
    "tiles of 512": (Dilated([512, 2048], [1, 4]), 2**18, 16, 128),
    "flat 128k": (FLAT, 2**17, 8, 64), "flat 1M": (FLAT, 2**20, 8, 64), "flat 8M": (FLAT, 2**23, 8, 64),
}  # fmt: skip
FITTED = (
    "h200_version16: paper", "h200_version16: wide", "h200_version16: tiles of 512", "h200_version16: paper float32",
    "h200_blocks_made: random 0.25 D=64", "h200_blocks_all: random 0.25 D=128",
)  # fmt: skip
TIME_BAR, MEMORY_BAR = 0.20, 0.10


@dataclass(frozen=True)
class CheckedRow:
    """One measurement and its prediction."""

    name: str  # file and setting
    what: str
    unit: str  # ms, or MiB
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def fitted(self) -> bool:
        return self.unit == "ms" and self.name in FITTED


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def superseded(settings: PlanSettings) -> bool:
    """Whether a backward was measured by two kernels, where one computes all gradients since revision 17206dd."""
    return settings.head_dim > 64 and is_joint(settings, "hopper")


def tile_rows() -> Iterator[CheckedRow]:
    """One branch of rate 1. For shorter tiles the model predicts up to 54 % too much."""
    for row in load("h200_cliffs")["runs"][0]["rows"]:
        found = re.fullmatch(r"tiles (\d+) D=(\d+) (causal|full)", row["call"])
        if found is None or int(found[1]) < 1024:
            continue
        tile, head_dim = int(found[1]), int(found[2])
        settings = PlanSettings(
            tokens=2**18, pattern=Dilated([tile], [1]), heads=1024 // head_dim, head_dim=head_dim,
            is_causal=found[3] == "causal", machine=H200,
        )  # fmt: skip
        for backward in (False, True):
            what = "backward" if backward else "forward"
            seconds = attention_seconds(settings, rank_work(settings), "hopper", backward=backward).total
            yield CheckedRow(f"h200_cliffs: {row['call']}", what, "ms", row[f"ours_{what}_ms"], 1e3 * seconds)


def attention_rows() -> Iterator[CheckedRow]:
    """The rows of gpu.py. Memory is compared for the newest version: version 13 had larger partial results."""
    for file in ("h200_version16", "h200_rested"):
        for row in load(file)["rows"]:
            pattern, n, heads, head_dim = SETTINGS[row["setting"].removesuffix(" causal")]
            settings = PlanSettings(
                tokens=n, pattern=pattern, heads=heads, head_dim=head_dim, dtype=row["dtype"].removeprefix("torch."),
                is_causal="causal" in row["setting"], machine=H200,
            )  # fmt: skip
            backend = "triton" if settings.dtype == "float32" else "hopper"
            work, name = rank_work(settings), f"{file}: {row['setting']}"
            measured = (False,) if superseded(settings) else (False, True)
            for backward in measured:
                what = "backward" if backward else "forward"
                seconds = attention_seconds(settings, work, backend, backward=backward).total
                yield CheckedRow(name, what, "ms", row[f"{what}_ms"], 1e3 * seconds)
            if file == "h200_rested":
                continue
            for backward in measured:
                memory = attention_memory(settings, work, backend, backward=backward)
                extra = memory.extra - (memory.query if backward else 0)  # the gradient of the output is given
                gib = row["both_extra_gib" if backward else "forward_extra_gib"]
                what = "forward and backward, extra" if backward else "forward, extra"
                yield CheckedRow(name, what, "MiB", 1024 * gib, extra / 2**20)


def block_rows() -> Iterator[CheckedRow]:
    """Random masks and windows of blocks of 128, whose number each row has."""
    for file in ("h200_blocks_made", "h200_blocks_all"):
        for row in load(file)["rows"]:
            head_dim = int(row["setting"].partition("D=")[2])
            sizes = {"random 128k": 2**17, "window": 2**20}
            n = next((x for key, x in sizes.items() if row["setting"].startswith(key)), 2**16)
            heads = 8 if n == 2**20 and head_dim == 128 else 16
            lists = n // 128
            ratio = max(1e-6, row["blocks"] / lists**2)
            pattern = BlockSparse.from_config(SparsePatternConfig("local_window", ratio))
            settings = PlanSettings(tokens=n, pattern=pattern, heads=heads, head_dim=head_dim, machine=H200)
            tiles = Tiles(128, 128 * row["blocks"] / lists, False, lists * heads, listed=True)
            work = RankWork(0, n, None, (tiles,), (), 0, 0, 0, 0, 0, 0, ())
            name = f"{file}: {row['setting']}"
            for backward in (False, True):
                what = "backward" if backward else "forward"
                seconds = attention_seconds(settings, work, "hopper", backward=backward).total
                yield CheckedRow(name, what, "ms", row[f"{what}_ms"], 1e3 * seconds)
            memory = attention_memory(settings, work, "hopper", backward=False)
            yield CheckedRow(name, "forward, extra", "MiB", 1024 * row["forward_extra_gib"], memory.extra / 2**20)


def message_rows() -> Iterator[CheckedRow]:
    """One branch of long tiles on one device, by single launches on a GPU that is not at its power limit."""
    for row in load("h200_messages")["rows"]:
        if "rows" not in row:
            continue
        w, r, heads, d = row["rows"] * row["rate"], row["rate"], 8, row["head_dim"]
        settings = PlanSettings(tokens=max(2**16, w), pattern=Dilated([w], [r]), heads=heads, head_dim=d, machine=H200)
        work = rank_work(settings)
        pairs = sum(x.pairs for x in work.own)
        for backward, rate in zip((False, True), row["one_device"], strict=True):
            if backward and superseded(settings):
                continue
            products, what = (10, "backward") if backward else (4, "forward")
            seconds = attention_seconds(settings, work, "hopper", backward=backward).total
            measured = products * d * pairs / rate / 1e9
            yield CheckedRow(f"h200_messages: {row['rows']}/{r}, D={d}", what, "ms", measured, 1e3 * seconds)


def ring_rows() -> Iterator[CheckedRow]:
    """Forward and backward of 262,144 tokens on one rank, without other ranks on the GPU."""
    patterns = {
        "w = N, r = 1": ([2**18], [1]), "w = N, r = 2": ([2**18], [2]), "w = N, r = 4": ([2**18], [4]),
        "w = 2048 * 4**i, r = 4**i": ([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256]),
    }  # fmt: skip
    for name, report in load("h200_ring_fused").items():
        for row in report["rows"] if name.startswith("fused") else ():
            if row["ranks"] == 1:
                pattern = Dilated(*patterns[row["setting"]])
                settings = PlanSettings(tokens=row["tokens"], pattern=pattern, heads=8, head_dim=64, machine=H200)
                both = (attention_seconds(settings, rank_work(settings), "hopper", backward=x).total for x in (False, True))
                label = f"h200_ring_fused: {row['setting']}"
                yield CheckedRow(label, "forward and backward", "ms", 1e3 * row["alone_seconds"], 1e3 * sum(both))


def model_rows() -> Iterator[CheckedRow]:
    """A training step with a context of a million tokens, and GigaPath's encoder."""
    case = load("h200_million")["cases"][0]
    config = LongNetConfig.preset("small", vocab_size=256, checkpoint_layers=True)
    settings = PlanSettings(
        tokens=2**20, pattern=config.pattern, heads=config.num_heads, head_dim=config.head_dim, is_causal=True, train=True,
        model=config, machine=H200,
    )  # fmt: skip
    work, steps = rank_work(settings), sorted(case["step_seconds"])
    name = "h200_million: 38 M parameters, 1,048,576 tokens"
    median = (steps[len(steps) // 2] + steps[(len(steps) - 1) // 2]) / 2
    yield CheckedRow(name, "training step", "ms", 1e3 * median, 1e3 * model_seconds(settings, work, "hopper").total)
    memory = model_memory(settings, work, "hopper").total
    yield CheckedRow(name, "training step, peak", "MiB", case["peak_memory_bytes"] / 2**20, memory / 2**20)
    found = load("h200_gigapath")
    config = LongNetConfig.preset("gigapath-12x768")
    settings = PlanSettings(
        tokens=found["tiles"] + 1, pattern=config.pattern, heads=16, head_dim=48, model=config, machine=H200
    )
    work, name = rank_work(settings), f"h200_gigapath: 12 layers, {found['tiles']:,} tiles"
    seconds = model_seconds(settings, work, "hopper").total
    yield CheckedRow(name, "all layers", "ms", found["milliseconds"]["ours"], 1e3 * seconds)
    parts = model_memory(settings, work, "hopper")
    extra = parts.total - parts.weights
    yield CheckedRow(name, "all layers, beyond weights", "MiB", found["peak_bytes"]["ours"] / 2**20, extra / 2**20)


def cpu_rows() -> Iterator[CheckedRow]:
    """Ranks of gloo on a CPU: the largest memory of a rank, its inputs included."""
    pattern = Dilated([2048, 8192, 32768, 131072], [1, 4, 16, 64])
    cpu = Machine(find_gpu("gtx1080"))  # its backend is that of stock kernels, as on a CPU
    for row in load("ring_cpu")["memory"]:
        settings = PlanSettings(
            tokens=65536, pattern=pattern, heads=8, head_dim=64, dtype="float32", gpus=row["ranks"], transport="ring",
            machine=cpu,
        )  # fmt: skip
        memory = attention_memory(settings, rank_work(settings), "sdpa", backward=False)
        name = f"ring_cpu: {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        yield CheckedRow(name, "forward, all", "MiB", row["real_bytes"] / 2**20, memory.total / 2**20)


def checked() -> list[CheckedRow]:
    parts = attention_rows, tile_rows, block_rows, message_rows, ring_rows, model_rows, cpu_rows
    return [row for part in parts for row in part()]


def shown(row: CheckedRow) -> str:
    digits = 2 if row.measured < 100 else 0
    numbers = f"{row.measured:,.{digits}f} {row.unit} | {row.predicted:,.{digits}f} {row.unit} | {100 * row.error:+.1f} %"
    return f"{row.name.replace('|', '/')} | {row.what} | {numbers}"


def docs(rows: list[CheckedRow]) -> None:
    for title, bar, unit in (("Time", TIME_BAR, "ms"), ("Memory", MEMORY_BAR, "MiB")):
        own = [row for row in rows if row.unit == unit]
        inside = sum(abs(row.error) <= bar for row in own)
        mean = sum(abs(row.error) for row in own) / len(own)
        print(f"{title}: {inside} of {len(own)} rows are within {bar:.0%}, and the mean of the errors is {mean:.1%}.\n")
        fitted = " fitted |" if unit == "ms" else ""
        print(f"| file and setting | what | measured | predicted | error |{fitted}")
        print("| --- | --- | ---: | ---: | ---: |" + " --- |" * bool(fitted))
        for row in own:
            mark = f" {'yes' if row.fitted else ''} |" if fitted else ""
            print(f"| {re.sub('^h200_', '', shown(row))} |{mark}".replace("|  |", "| |"))
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="print the tables of docs/planning.md")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    rows = checked()
    if options.docs:
        docs(rows)
    else:
        for row in rows:
            print(shown(row), "fitted" if row.fitted else "")
    if options.out:
        fields = [vars(row) | {"error": row.error, "fitted": row.fitted} for row in rows]
        options.out.write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    main()
