"""The command ``stream``: its options, its progress and what it prints and writes of the results."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import Outputs, check_file, device_name, end, parse_integers, reported, versions
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming import (
    DTYPES,
    CheckpointError,
    Stream,
    StreamPoint,
    StreamResult,
    StreamSettings,
    default_pattern,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOKENS = {"cpu": 131_072, "cuda": 1_000_000_000}
_CHUNK = {"cpu": 8192, "cuda": 2**18}
_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options as they are given. Typer reads the fields."""

    tokens: Annotated[int | None, typer.Option(help="By default 1_000_000_000 on a GPU, 131_072 on a CPU.")] = None
    heads: Annotated[int, typer.Option(help="The number of heads.")] = 8
    head_dim: Annotated[int, typer.Option(help="The size of a head.")] = 64
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}. By default bfloat16, float32 on a CPU.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER. By default the GPU, if any.")] = None
    chunk: Annotated[int | None, typer.Option(help="Tokens per call. By default 262_144 on a GPU, 8_192 on a CPU.")] = None
    seed: Annotated[int, typer.Option(help="Of the rows, and of the choice of rows to check.")] = 0
    rows: Annotated[int, typer.Option(help="How many rows are checked against the definition in float64.")] = 64
    segment_lengths: Annotated[
        str | None, typer.Option(help="The pattern: integers separated by commas. By default 2048 * 4**i.")
    ] = None
    dilation_rates: Annotated[str | None, typer.Option(help="As many integers as segment lengths.")] = None
    checkpoint: Annotated[Path | None, typer.Option(help="A file to go on from, and to write the state to.")] = None
    every: Annotated[float, typer.Option(help="Seconds between two checkpoints.")] = 10.0
    json: Annotated[str | None, typer.Option(help="A file for all figures, or - for standard output.")] = None
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file: tokens/s and memory over the position.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print neither progress nor the table.")] = False


def stream(**options: Any) -> None:
    """Run one causal attention layer over a stream of random tokens in bounded memory, and check rows of the result.

    \b
    Examples:
      dilated-attention stream --tokens 20_000 --heads 2 --head-dim 16 --plot stream.png
      dilated-attention stream --tokens 1_000_000_000 --checkpoint stream.pt --json figures.json
      dilated-attention stream --tokens 100_000 --segment-lengths 2048,65536 --dilation-rates 1,32
    """
    _run(StreamOptions(**options))


stream.__signature__ = inspect.signature(StreamOptions, eval_str=True)  # type: ignore[attr-defined]


def _run(options: StreamOptions) -> None:
    outputs = Outputs(options.json, options.plot, options.quiet)
    try:
        settings = make_settings(options)
        outputs.check()
    except (TypeError, ValueError) as error:
        end(error, 2)
    if options.checkpoint is not None:
        with reported(options.checkpoint):
            check_file(options.checkpoint)
    run = _make(settings, options.checkpoint)
    console = outputs.console()
    saving_s, interrupted = 0.0, False
    progress = show_progress(console, settings.tokens, "{:,} tokens", quiet=options.quiet)
    describe = _texts(settings.tokens)
    try:
        with interruptible(), progress as report:
            saved = time.monotonic()
            for point in run.run():
                report(point.position, partial(describe, point))
                if options.checkpoint is not None and time.monotonic() - saved >= options.every:
                    saving_s += _save(run, options.checkpoint)
                    saved = time.monotonic()
            if options.checkpoint is not None:
                saving_s += _save(run, options.checkpoint)
    except KeyboardInterrupt:
        interrupted = True
    except torch.OutOfMemoryError as error:
        end(f"{settings.device} has too little memory; use a smaller --chunk than {settings.chunk}: {error}", 1)
    result = run.result()
    console.print(_table(settings, result))
    outputs.write(_figures(run, result, saving_s))
    if interrupted:
        written = options.checkpoint is not None and options.checkpoint.exists()
        again = f"; the same command goes on from {options.checkpoint}" if written else ""
        end(f"Interrupted: {result.point.position:,} of {settings.tokens:,} tokens are finished{again}.", 130)
    outputs.draw(lambda: _picture(run))
    for row in result.failed:
        typer.echo(
            f"Row {row.position} is wrong: its error is {row.error:.1e}, and the tolerance is {result.tolerance:.1e}.",
            err=True,
        )
    if result.failed:
        raise typer.Exit(1)


def _picture(run: Stream) -> Figure:
    from dilated_attention_pytorch.cli.stream_picture import stream_picture  # imports matplotlib

    return stream_picture(run.points, _title(run.settings))


def make_settings(options: StreamOptions) -> StreamSettings:
    """The settings that the options describe. Raise a ValueError if one of them is not valid."""
    device = choose_device(options.device)
    tokens = _TOKENS[device.type] if options.tokens is None else options.tokens
    dtype = options.dtype or _DTYPE[device.type]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if (options.segment_lengths is None) != (options.dilation_rates is None):
        raise ValueError("--segment-lengths and --dilation-rates describe branches pairwise: give both or neither")
    if options.segment_lengths is None or options.dilation_rates is None:
        pattern = default_pattern(tokens)
    else:
        lengths, rates = options.segment_lengths, options.dilation_rates
        pattern = Dilated(parse_integers("--segment-lengths", lengths), parse_integers("--dilation-rates", rates))
    if not options.every >= 0:
        raise ValueError(f"--every must be a number of seconds from 0 on, got {options.every}")
    return StreamSettings(
        tokens, pattern, heads=options.heads, head_dim=options.head_dim, dtype=getattr(torch, dtype), device=device,
        chunk=_CHUNK[device.type] if options.chunk is None else options.chunk, seed=options.seed, rows=options.rows,
    )  # fmt: skip


def _make(settings: StreamSettings, checkpoint: Path | None) -> Stream:
    """The run, from its checkpoint if there is one."""
    try:
        run = Stream(settings)
    except RuntimeError as error:
        end("\n".join((str(error), *getattr(error, "__notes__", ()))), 1)
    if checkpoint is not None and checkpoint.exists():
        try:
            run.load(checkpoint)
        except ValueError as error:
            end(error, 2)
        except CheckpointError as error:
            end(error, 1)
    return run


def _save(run: Stream, path: Path) -> float:
    start = time.perf_counter()
    with reported(path):
        run.save(path)
    return time.perf_counter() - start


def _texts(tokens: int) -> Callable[[StreamPoint], str]:
    """A function that describes a point: the rate since the last one that it described, the time left, and the memory."""
    before = StreamPoint(0, 0.0, 0)

    def text(point: StreamPoint) -> str:
        nonlocal before
        done, seconds = point.position - before.position, point.seconds - before.seconds
        left = (tokens - point.position) * point.seconds / point.position
        before = point
        rate = done / seconds if seconds > 0 else 0
        return f"{rate:,.0f} tokens/s, {left:,.0f} s left, {_mib(point.memory_bytes)}"

    return text


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _title(settings: StreamSettings) -> str:
    dtype = str(settings.dtype).removeprefix("torch.")
    heads = f"{settings.heads} head{'s' * (settings.heads != 1)} of size {settings.head_dim}"
    return f"{settings.tokens:,} tokens, {heads}, {dtype}, {device_name(settings.device)}"


def _ratio(result: StreamResult) -> float | None:
    return result.last_tenth / result.first_tenth if result.first_tenth and result.last_tenth else None


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def _table(settings: StreamSettings, result: StreamResult) -> Table:
    """The figures, one per line. A figure that the run has not reached is a dash."""
    ratio = _ratio(result)
    compiling = f", and {result.warm_up_seconds:,.2f} s before to compile kernels" if result.warm_up_seconds else ""
    worst = max(result.checked, key=lambda row: (not row.passed, row.error), default=None)
    error = "" if worst is None else f", largest error {worst.error:.1e} at position {worst.position:,}"
    lengths, rates = (", ".join(map(str, x)) for x in (settings.pattern.segment_lengths, settings.pattern.dilation_rates))
    table = Table(box=None, show_header=False, pad_edge=False, title=_title(settings), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("segment lengths", lengths),
        ("dilation rates", rates),
        ("tokens", f"{result.point.position:,}"),
        ("time", f"{result.point.seconds:,.2f} s{compiling}"),
        ("rate", _rate(result.tokens_per_second)),
        ("first tenth", _rate(result.first_tenth)),
        ("last tenth", _rate(result.last_tenth) + ("" if ratio is None else f", {ratio:.3f} of the first")),
        ("peak memory", f"{_mib(result.peak_bytes)} {'on the GPU' if settings.device.type == 'cuda' else 'resident'}"),
        ("cache", f"{_mib(result.cache_bytes)}, whatever the number of tokens"),
        ("checksum", result.checksum),
        ("checked rows", f"{len(result.checked)}, {len(result.failed)} wrong{error}"),
        ("tolerance", f"{result.tolerance:.1e}"),
    ):
        table.add_row(name, value)
    return table


def _figures(run: Stream, result: StreamResult, saving_s: float) -> dict[str, Any]:
    """Everything that is known of a run, for JSON."""
    rows = [asdict(row) | {"error": row.error if math.isfinite(row.error) else None} for row in result.checked]
    errors = [row["error"] for row in rows]
    return {
        "versions": versions(),
        "device": device_name(run.settings.device),
        "settings": run.settings.description(),
        "finished": result.point.position == run.settings.tokens,
        "tokens": result.point.position,
        "seconds": result.point.seconds,
        "tokens_per_second": result.tokens_per_second,
        "first_tenth_tokens_per_second": result.first_tenth,
        "last_tenth_tokens_per_second": result.last_tenth,
        "last_tenth_to_first": _ratio(result),
        "warm_up_seconds": result.warm_up_seconds,
        "checkpoint_seconds": saving_s,
        "check_seconds": result.check_seconds,
        "peak_memory_bytes": result.peak_bytes,
        "cache_bytes": result.cache_bytes,
        "checksum": result.checksum,
        "tolerance": result.tolerance,
        "largest_error": None if None in errors else max(errors, default=0.0),
        "passed": not result.failed,
        "rows": rows,
        "points": [asdict(point) for point in run.points],
    }
