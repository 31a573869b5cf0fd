"""Does a longer context help? Bits per base of a held-out region of human chromosome X, by the context of training.

Decoders that differ only in context and pattern are trained on the first 15/16 of the chromosome. The rest is held out.
Every run reads the same number of tokens in the same number of steps. A step has 1,048,576 tokens, which are 512 windows of
2,048 or one window of a million. The dilated patterns have segments of 2048 * 4**i with rates 4**i, and a last segment of
the whole context with 2,048 keys. Dense attention is one segment with rate 1, at 16,384 tokens. At 2,048 tokens both are
the same. All runs evaluate the last 4,194,304 bases, in windows of their context. `make data` fetches the chromosome.

With --minutes, a few steps of every case are timed, and all runs together get the number of steps that fits into that time.
Results are written after each run. Runs that the file of --out already has are not repeated, with its number of steps.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

import dilated_attention_pytorch
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import Trainer, TrainSettings, read_log
from dilated_attention_pytorch.training.data import IGNORED, batch_of

FIRST = 2048  # tokens of the shortest segment, and keys of a row in every branch
HELD_OUT = 1 / 16  # the share of the tokens, at the end, that is not trained on
TIMED, RESERVE = 3, 0.88  # steps that are timed; the share of the remaining time that is planned


def pattern(context: int, first: int, dense: bool) -> dict[str, tuple[int, ...]]:
    """The branches of a case."""
    if dense or context <= first:
        return {"segment_lengths": (context,), "dilation_rates": (1,)}
    lengths = [first]
    while 4 * lengths[-1] < context:
        lengths.append(4 * lengths[-1])
    lengths.append(context)
    return {"segment_lengths": tuple(lengths), "dilation_rates": tuple(w // first for w in lengths)}


def settings(case: dict, options: argparse.Namespace, steps: int, seed: int) -> TrainSettings:
    context = case["context"]
    branches = pattern(context, options.first, case["dense"])
    model = LongNetConfig(
        embed_dim=options.width, num_layers=options.layers, num_heads=max(1, options.width // 64),
        ffn_dim=4 * options.width, vocab_size=5, checkpoint_layers=options.recompute, **branches,
    )  # fmt: skip
    return TrainSettings(
        model=model, context=context, steps=steps, data=(str(options.data),), batch=options.step_tokens // context,
        learning_rate=options.lr, warm_up=steps // 20 + 1, weight_decay=0.1, seed=seed, held_out=HELD_OUT,
        evaluate_every=10**9, every=10**9, keep=1,
        dtype="bfloat16" if options.device == "cuda" else "float32",
    )  # fmt: skip


@torch.no_grad()
def evaluate(trainer: Trainer, bases: int) -> dict:
    """Bits per base of windows of the context over the last bases, and of the last halves of the windows."""
    corpus, context = trainer.corpus, trainer.settings.context
    windows, first = bases // context, len(corpus) - 1 - bases
    if first < len(corpus) - round(HELD_OUT * len(corpus)):
        raise SystemExit(f"{bases} bases are more than the held-out share {HELD_OUT} of {len(corpus)}")
    at_once = max(1, trainer.settings.batch // 2)
    sums = torch.zeros(4, dtype=torch.float64, device=trainer.device)
    trainer.model.eval()
    for i in range(0, windows, at_once):
        starts = [first + j * context for j in range(i, min(windows, i + at_once))]
        tokens, targets = (x.to(trainer.device) for x in batch_of(corpus, starts, context))
        with torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.settings.dtype == "bfloat16"):
            losses = trainer.model.loss(tokens, targets, reduction="none").double()
        counted = (targets != IGNORED).double()
        half = context // 2
        sums += torch.stack((losses.sum(), counted.sum(), losses[:, half:].sum(), counted[:, half:].sum()))
    nats, count, late, late_count = sums.tolist()
    bits = {"bits_per_base": nats / count / math.log(2), "bits_per_base_last_half": late / late_count / math.log(2)}
    return bits | {"bases": int(count), "windows": windows}


def train(case: dict, options: argparse.Namespace, steps: int, seed: int, folder: Path) -> dict:
    """One run, or the time of a few steps if ``steps`` is 0. A folder in --keep goes on where it has stopped."""
    device = torch.device(options.device)
    timed = steps == 0
    name = f"{'dense' if case['dense'] else 'dilated'}-{case['context']}-{seed}-{steps}"
    place = (options.keep if options.keep and not timed else folder) / name
    trainer = Trainer(settings(case, options, steps or TIMED + 1, seed), place, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for point in trainer.run():
        if timed and point.step == TIMED:
            break
    trainer.close()
    lines = read_log(place / "log.jsonl")
    seconds = statistics.median(x["seconds"] for x in lines[1:] or lines)
    if timed:
        begin = time.monotonic()
        evaluate(trainer, options.test_bases)
        return case | {"step_s": seconds, "evaluate_s": time.monotonic() - begin}
    return case | evaluate(trainer, options.test_bases) | {
        "seed": seed,
        "steps": steps,
        "tokens": steps * options.step_tokens,
        "training_bits_last_tenth": statistics.mean(x["loss"] for x in lines[-max(1, steps // 10) :]) / math.log(2),
        "tokens_per_second": options.step_tokens / seconds,
        "mfu": lines[-1]["mfu"],
        "peak_memory_bytes": lines[-1]["memory_bytes"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        **pattern(case["context"], options.first, case["dense"]),
        "curve": [x["loss"] / math.log(2) for x in lines],
    }  # fmt: skip


def summary(runs: list[dict]) -> list[dict]:
    """Mean and spread over the seeds of each case."""
    found = []
    for dense, context in sorted({(r["dense"], r["context"]) for r in runs}):
        own = [r for r in runs if (r["dense"], r["context"]) == (dense, context)]
        bits = [r["bits_per_base"] for r in own]
        late = [r["bits_per_base_last_half"] for r in own]
        found.append(
            {
                "attention": "dense" if dense else "dilated", "context": context, "seeds": len(own),
                "bits_per_base": statistics.mean(bits), "largest_minus_smallest": max(bits) - min(bits),
                "bits_per_base_last_half": statistics.mean(late),
                "tokens_per_second": statistics.mean(r["tokens_per_second"] for r in own),
                "peak_memory_bytes": max(r["peak_memory_bytes"] for r in own),
            }
        )  # fmt: skip
    return found


def plot(picture: Path, rows: list[dict], runs: list[dict]) -> None:
    """Bits per base over the context: the mean of the seeds as a line, and each run as a point."""
    from matplotlib.figure import Figure  # only the picture needs it

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for dense, color, name in ((False, "#1f5fa8", "dilated"), (True, "#c8551b", "dense")):
        means = [row for row in rows if (row["attention"] == "dense") == dense]
        points = [run for run in runs if run["dense"] == dense]
        x = [row["context"] for row in means]
        axes.plot(x, [row["bits_per_base"] for row in means], "-o", color=color, label=f"{name} attention, mean")
        axes.plot([r["context"] for r in points], [r["bits_per_base"] for r in points], "x", color=color, label="one seed")
    contexts = sorted({row["context"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, labels=[f"{x:,}" for x in contexts])
    axes.minorticks_off()
    axes.set(xlabel="context of training and evaluation, bases", ylabel="bits per held-out base")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/hs37chrXtrunc.fa.gz"))
    parser.add_argument("--minutes", type=float, help="the time for all runs together")
    parser.add_argument("--steps", type=int, help="steps of a run, instead of --minutes")
    parser.add_argument("--contexts", default="2048,16384,131072,1048576")
    parser.add_argument("--dense-contexts", default="16384")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=2**20)
    parser.add_argument("--first", type=int, default=FIRST, help="the shortest segment")
    parser.add_argument("--test-bases", type=int, default=4 * 2**20, help="a multiple of every context")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--recompute", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the last checkpoint of every run")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file, after each run")
    parser.add_argument("--picture", type=Path, help="draw the results of --out into this file, if all its runs are there")
    options = parser.parse_args()
    if (options.minutes is None) == (options.steps is None):
        parser.error("give either --minutes or --steps")
    options.data = options.data.absolute()
    return options


def main() -> None:
    options = parse()
    end = time.monotonic() + 60 * (options.minutes or 0)
    cases = [{"context": int(x), "dense": False} for x in options.contexts.split(",")]
    cases += [{"context": int(x), "dense": True} for x in options.dense_contexts.split(",") if x]
    earlier = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    runs, timings, steps = earlier.get("runs", []), earlier.get("timings", []), options.steps or earlier.get("steps")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if steps is None:
            timings = []
            for case in cases:
                timings.append(train(case, options, 0, 0, folder))
                print(json.dumps(timings[-1]), flush=True)
            left = RESERVE * (end - time.monotonic()) - options.seeds * sum(x["evaluate_s"] for x in timings)
            steps = int(left / options.seeds / sum(x["step_s"] for x in timings))
            if steps < 1:
                raise SystemExit(f"{options.minutes} minutes are too few for one step of every run")
        finished = {(r["dense"], r["context"], r["seed"]) for r in runs}
        for seed in range(options.seeds):
            for case in cases:
                if (case["dense"], case["context"], seed) in finished:
                    continue
                step_s = next(
                    (x["step_s"] for x in timings if x["context"] == case["context"] and x["dense"] == case["dense"]), 0
                )
                if options.minutes and time.monotonic() + steps * step_s > end:
                    print(f"left out for now: {case}, seed {seed}; the same command goes on", flush=True)
                    continue
                runs.append(train(case, options, steps, seed, folder))
                print(json.dumps({key: value for key, value in runs[-1].items() if key != "curve"}), flush=True)
                report = {
                    "command": "python benchmarks/context_helps.py",
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "library": dilated_attention_pytorch.__version__,
                    "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
                    "data": options.data.name, "steps": steps, "timings": timings,
                    "step_tokens": options.step_tokens, "width": options.width, "layers": options.layers,
                    "learning_rate": options.lr, "summary": summary(runs), "runs": runs,
                }  # fmt: skip
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary(runs), indent=1))
    if options.picture:
        plot(options.picture, summary(runs), runs)


if __name__ == "__main__":
    main()
