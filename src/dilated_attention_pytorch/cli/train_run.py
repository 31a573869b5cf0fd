"""The command ``train``: its progress, and what it prints and writes of the results."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import typer
from rich.table import Table

from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import (
    Outputs,
    check_file,
    device_name,
    end,
    parse_integers,
    save_picture,
    versions,
)
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.train_options import TrainOptions
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.streaming import CheckpointError
from dilated_attention_pytorch.training import (
    DataError,
    LossError,
    SaveError,
    Trainer,
    TrainPoint,
    TrainSettings,
    read_log,
)
from dilated_attention_pytorch.training.files import VOCABULARIES, kind_of, list_files
from dilated_attention_pytorch.training.log import naming

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# What a minute is enough for on two slow CPU cores, and a start for one GPU.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"preset": "tiny", "context": 1024, "batch": 2, "steps": 100, "dtype": "float32"},
    "cuda": {"preset": "small", "context": 65_536, "batch": 4, "steps": 1000, "dtype": "bfloat16"},
}


def run_training(options: TrainOptions) -> None:
    """Run the command."""
    if not options.no_plot:
        # A missing package is reported before the run.
        from dilated_attention_pytorch.cli.train_picture import loss_picture
    with reported():
        _check_targets(options)
    with reported(), process_group(options.device) as device:
        settings = make_settings(options, device)
        with warnings_as_sentences():
            trainer = Trainer(settings, options.out, device)
        first = trainer.ranks.rank == 0
        outputs = Outputs(options.json, quiet=options.quiet or not first)
        console = outputs.console()
        start = trainer.step
        progress = show_progress(console, settings.steps, "step {:,}", quiet=outputs.quiet)
        describe = _texts(settings.steps)
        with stopped_by_signals(trainer) as received, progress as report:
            for point in trainer.run():
                report(point.step, partial(describe, point))
        trainer.close()
        if not first:
            raise typer.Exit(_CODES[received[0]] if received else 0)
        lines = read_log(options.out / "log.jsonl")
        console.print(_table(trainer, lines))
        outputs.write(_figures(trainer, lines, start))
        if received:
            last = trainer.checkpoints.last()
            done = f"{trainer.step:,} of {settings.steps:,} steps are finished"
            end(f"Interrupted: {done}; the same command goes on from {last}.", _CODES[received[0]])
        if not options.no_plot and lines:
            path = options.out / "loss.png"
            with naming(path):
                save_picture(loss_picture(lines, _title(trainer)), path)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn what can go wrong with options, files and memory into one sentence and an exit code."""
    try:
        yield
    except (DataError, LossError, SaveError, CheckpointError) as error:
        end(error, 1)
    except (TypeError, ValueError) as error:
        end(error, 2)
    except torch.OutOfMemoryError as error:
        end(f"the GPU has too little memory; use --recompute, a larger --accumulate or a smaller --context: {error}", 1)
    except OSError as error:
        if error.filename is None and error.strerror is None:  # a sentence of this library
            end(error, 1)
        end(f"{error.filename or 'a file'} could not be read or written: {error.strerror or error}", 1)


@contextlib.contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Print the text of each warning on standard error, without the file and the line that Python adds."""
    with warnings.catch_warnings(record=True) as found:
        try:
            yield
        finally:
            for one in found:
                typer.echo(f"Warning: {one.message}", err=True)


def _check_targets(options: TrainOptions) -> None:
    """Raise an OSError before the run if a result could not be written. Only the first rank writes results."""
    if os.environ.get("RANK", "0") != "0":
        return
    targets = [] if options.no_plot else [options.out / "loss.png"]
    if options.json is not None and options.json != "-":
        targets.append(Path(options.json))
    for path in targets:
        if options.out.exists() or path.parent.absolute() != options.out.absolute():  # the run makes its folder
            check_file(path)


@contextlib.contextmanager
def process_group(name: str | None) -> Iterator[torch.device]:
    """The device of this process, within the process group that torchrun describes, if it started this process."""
    if "LOCAL_RANK" not in os.environ:
        yield choose_device(name)
        return
    import torch.distributed as dist

    device = choose_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def stopped_by_signals(trainer: Trainer) -> Iterator[list[signal.Signals]]:
    """Let Ctrl-C and SIGTERM end the run after its step, with a checkpoint. The list gets the signal."""
    received: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        trainer.stop = True

    before = {number: signal.getsignal(number) for number in _CODES}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_settings(options: TrainOptions, device: torch.device) -> TrainSettings:
    """The settings that the options describe. Raise a ValueError if one of them is not valid."""
    given = {name: getattr(options, name) for name in _DEFAULTS[device.type]}
    chosen = _DEFAULTS[device.type] | {name: value for name, value in given.items() if value is not None}
    data = tuple(str(path.absolute()) for path in options.data or ())
    kind = kind_of(list_files(data, options.out)) if options.tokens == "auto" else options.tokens
    if kind not in VOCABULARIES:
        raise ValueError(f"--tokens must be one of auto, {', '.join(VOCABULARIES)}, got {kind!r}")
    if (options.segment_lengths is None) != (options.dilation_rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    changes: dict[str, Any] = {"vocab_size": VOCABULARIES[kind], "checkpoint_layers": options.recompute}
    if options.segment_lengths is not None and options.dilation_rates is not None:
        changes["segment_lengths"] = parse_integers("--segment-lengths", options.segment_lengths)
        changes["dilation_rates"] = parse_integers("--dilation-rates", options.dilation_rates)
    if options.dropout is not None:
        changes["dropout"] = options.dropout
    return TrainSettings(
        model=LongNetConfig.preset(chosen["preset"], **changes), context=chosen["context"], steps=chosen["steps"],
        data=data, kind=kind, batch=chosen["batch"], accumulate=options.accumulate, learning_rate=options.lr,
        warm_up=options.warm_up, clip=options.clip, seed=options.seed, held_out=options.held_out,
        evaluate_every=options.evaluate_every, dtype=chosen["dtype"], sequence_ranks=options.sequence_ranks,
        every=options.every, keep=options.keep,
    )  # fmt: skip


def _texts(steps: int) -> Callable[[TrainPoint], str]:
    """A function that describes a point of a run that begins now, with the time that the steps after it take."""
    begin = time.monotonic()
    first: int | None = None

    def text(point: TrainPoint) -> str:
        nonlocal first
        first = point.step - 1 if first is None else first
        left = (steps - point.step) * (time.monotonic() - begin) / (point.step - first)
        share = "" if point.mfu is None else f", MFU {point.mfu:.1%}"
        memory = f"{point.memory_bytes / 2**20:,.0f} MiB"
        return f"loss {point.loss:.4f}, {point.tokens_per_second:,.0f} tokens/s{share}, {memory}, {left:,.0f} s left"

    return text


def _title(trainer: Trainer) -> str:
    settings, model = trainer.settings, trainer.settings.model
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return (
        f"{model.num_layers} layers of width {model.embed_dim}, {parameters:,} parameters, context {settings.context:,}, "
        f"{settings.dtype} on {_device(trainer)}"
    )


def _device(trainer: Trainer) -> str:
    many = f"{trainer.ranks.world} x " if trainer.ranks.world > 1 else ""
    return many + device_name(trainer.device)


def _figures(trainer: Trainer, lines: list[dict[str, Any]], start: int) -> dict[str, Any]:
    """Everything that is known of a run, for JSON. Rates leave out the first step of this process, which warms up."""
    last = lines[-1] if lines else {}
    evaluated = [line["held_out_loss"] for line in lines if line["held_out_loss"] is not None]
    rates = sorted(line["tokens_per_second"] for line in lines[start + 1 :])
    shares = sorted(line["mfu"] for line in lines[start + 1 :] if line["mfu"] is not None)
    return {
        "versions": versions(),
        "device": _device(trainer),
        "settings": trainer.settings.description(),
        "data_files": len(trainer.corpus.files),
        "data_tokens": len(trainer.corpus),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "finished": trainer.step == trainer.settings.steps,
        "resumed_from": start,
        "step": trainer.step,
        "loss": last.get("loss"),
        "held_out_loss": evaluated[-1] if evaluated else None,
        "held_out_bits_per_token": evaluated[-1] / math.log(2) if evaluated else None,
        "tokens": last.get("tokens", 0),
        "median_tokens_per_second": rates[len(rates) // 2] if rates else None,
        "median_mfu": shares[len(shares) // 2] if shares else None,
        "peak_flops": None if trainer.peak is None else {"gpu": trainer.peak[0], "flops_per_second": trainer.peak[1]},
        "step_flops": trainer.flops,
        "peak_memory_bytes": last.get("memory_bytes"),
    }


def _table(trainer: Trainer, lines: list[dict[str, Any]]) -> Table:
    """The figures, one per line. A figure that is not known is a dash."""
    figures = _figures(trainer, lines, 0)
    bits, held_out = figures["held_out_bits_per_token"], figures["held_out_loss"]
    rate, share = figures["median_tokens_per_second"], "-"
    if trainer.peak is not None and figures["median_mfu"] is not None:
        share = f"{figures['median_mfu']:.1%} of {trainer.peak[1] / 1e12:,.0f} TFLOP/s ({trainer.peak[0]}, bfloat16)"
    table = Table(box=None, show_header=False, pad_edge=False, title=_title(trainer), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("data", f"{figures['data_tokens']:,} {trainer.corpus.kind} in {figures['data_files']:,} files"),
        ("steps", f"{trainer.step:,} of {trainer.settings.steps:,}, {figures['tokens']:,} tokens"),
        ("loss", "-" if figures["loss"] is None else f"{figures['loss']:.4f} nats in the last step"),
        ("held out", "-" if held_out is None else f"{held_out:.4f} nats, {bits:.4f} bits per token"),
        ("rate", "-" if rate is None else f"{rate:,.0f} tokens/s"),
        ("MFU", share),
        ("peak memory", f"{(figures['peak_memory_bytes'] or 0) / 2**20:,.0f} MiB"),
        ("checkpoint", str(trainer.checkpoints.last() or "-")),
        ("log", str(trainer.out / "log.jsonl")),
    ):
        table.add_row(name, value)
    return table
