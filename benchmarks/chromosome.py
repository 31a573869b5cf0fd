"""Score human chromosome X, 70.0 M bases, in one pass with a small decoder that is trained on it first.

The decoder is trained for some minutes on windows of the first 95 % of the bases. Then all bases are scored in order
through the caches of the decoder, whose size does not grow. The report has the bits per base of all bases, of those that
are not N, of those that training may have read, and of those that it has not read. It also has the bases per second, the
memory, and the means of 2,000 ranges along the chromosome. `make data` fetches the chromosome.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from context_helps import FIRST, pattern

import dilated_attention_pytorch
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import ScoreBins, Trainer, TrainSettings, load_decoder, log_probabilities
from dilated_attention_pytorch.training.files import BASES

TIMED = 4


def settings(options: argparse.Namespace, steps: int) -> TrainSettings:
    branches = pattern(options.context, options.first, False)
    model = LongNetConfig(
        embed_dim=options.width, num_layers=options.layers, num_heads=max(1, options.width // 64),
        ffn_dim=4 * options.width, vocab_size=5, **branches,
    )  # fmt: skip
    return TrainSettings(
        model=model, context=options.context, steps=steps, data=(str(options.data.absolute()),), batch=options.batch,
        learning_rate=1e-3, warm_up=steps // 20 + 1, evaluate_every=10**9, every=10**9, keep=1,
        dtype="bfloat16" if options.device == "cuda" else "float32",
    )  # fmt: skip


def train(options: argparse.Namespace, folder: Path) -> tuple[Trainer, float]:
    """Time a few steps, then train for the minutes that are given."""
    device = torch.device(options.device)
    seconds = [x.seconds for x in Trainer(settings(options, TIMED), folder / "timed", device).run()]
    steps = max(2, int(60 * options.minutes / min(seconds[1:])))
    begin = time.monotonic()
    trainer = Trainer(settings(options, steps), folder / "run", device)
    for point in trainer.run():
        if point.step % max(1, steps // 10) == 0:
            print(
                f"step {point.step} of {steps}: loss {point.loss:.4f}, {point.tokens_per_second:,.0f} tokens/s", flush=True
            )
    trainer.close()
    return trainer, time.monotonic() - begin


def plot(picture: Path, report: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    found = [(x / 1e6, y) for x, y in zip(report["positions"], report["bits"], strict=True) if y is not None]
    axes.plot(*zip(*found, strict=True), color="#1f5fa8", linewidth=0.7)
    axes.axvline(report["trained_bases"] / 1e6, color="#c8551b", linewidth=1)
    axes.set(xlabel="position, million bases (training read up to the line)", ylabel="bits per base")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/hs37chrXtrunc.fa.gz"))
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--first", type=int, default=FIRST, help="the shortest segment")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--chunk", type=int, default=262_144, help="bases of a call of the decoder")
    parser.add_argument("--bases", type=int, help="score only this many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw bits per base along the chromosome into this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as name:
        trainer, trained_s = train(options, Path(name))
        corpus, border, tokens = trainer.corpus, trainer.training.last, trainer.step * options.batch * options.context
        held_out_loss = trainer.evaluate()
        del trainer
        model = load_decoder(Path(name) / "run", device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        bins = ScoreBins(len(corpus), 2000)
        early, late, known = (ScoreBins(len(corpus), 1) for _ in range(3))
        marks = []
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        for first, values in log_probabilities(model, corpus, options.chunk):
            bins.add(first, values)
            letters = corpus.read(first, first + len(values))
            known.add(first, values.masked_fill(letters == BASES.index("N"), float("nan")))
            cut = min(max(border - first, 0), len(values))
            for half, start, own in ((early, first, values[:cut]), (late, first + cut, values[cut:])):
                half.add(start, own)
            memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            marks.append({"bases": first + len(values), "seconds": time.monotonic() - begin, "peak_memory_bytes": memory})
            if options.bases and first + len(values) >= options.bases:
                break
        seconds = time.monotonic() - begin
        report = {
            "command": "python benchmarks/chromosome.py",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "library": dilated_attention_pytorch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
            "data": options.data.name, "model": model.config.to_dict(), "training_seconds": trained_s,
            "training_tokens": tokens, "trained_bases": border, "held_out_loss_of_windows": held_out_loss,
            "chunk": options.chunk, "scored_bases": bins.tokens, "seconds": seconds,
            "bases_per_second": bins.tokens / seconds, "bits_per_base": bins.bits, "bases_without_n": known.tokens,
            "bits_per_base_without_n": known.bits if known.tokens else None,
            "bits_per_base_trained": early.bits, "bits_per_base_held_out": late.bits if late.tokens else None,
            "marks": marks[:: max(1, len(marks) // 50)], "peak_memory_bytes": marks[-1]["peak_memory_bytes"],
            "positions": bins.positions, "bits": bins.means,
        }  # fmt: skip
    print(json.dumps({key: value for key, value in report.items() if key not in ("positions", "bits", "marks", "model")}))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture:
        plot(options.picture, report)


if __name__ == "__main__":
    main()
