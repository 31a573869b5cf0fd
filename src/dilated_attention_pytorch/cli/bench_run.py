"""The command ``bench``: its progress, and what it prints and writes of the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.cli.bench_options import BenchOptions
from dilated_attention_pytorch.cli.demo import choose_device
from dilated_attention_pytorch.cli.outputs import Outputs, device_name, end, parse_count, versions
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.workbench.bench import BenchGroup
from dilated_attention_pytorch.workbench.bench_compare import Comparison, check_earlier, compare_rows, read_earlier
from dilated_attention_pytorch.workbench.bench_ring import RingGroup
from dilated_attention_pytorch.workbench.bench_suites import groups_of
from dilated_attention_pytorch.workbench.bench_values import BOTH, DTYPES, SUITES, BenchRow, BenchSettings

_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_TURNS = {"cpu": 3, "cuda": 5}
_SECONDS = {"cpu": 0.1, "cuda": 0.4}


def make_settings(options: BenchOptions) -> BenchSettings:
    """The settings that the options describe. Raise a ValueError if one of them is not valid."""
    device = choose_device(options.device)
    dtype = options.dtype or _DTYPE[device.type]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not options.tolerance >= 0:
        raise ValueError(f"--tolerance must be a number of percent from 0 on, got {options.tolerance}")
    return BenchSettings(
        device=device, dtype=getattr(torch, dtype), heads=options.heads, head_dim=options.head_dim,
        tokens=None if options.tokens is None else parse_count("--tokens", options.tokens), is_causal=options.causal,
        only=tuple(x.strip() for x in (options.only or "").split(",") if x.strip()),
        turns=_TURNS[device.type] if options.turns is None else options.turns,
        seconds=_SECONDS[device.type] if options.seconds is None else options.seconds,
    )  # fmt: skip


def _suites(options: BenchOptions) -> list[str]:
    chosen = list(dict.fromkeys(options.suites or ["single"]))
    for suite in chosen:
        if suite not in SUITES:
            raise ValueError(f"SUITE must be one of {', '.join(SUITES)}, got {suite!r}")
    return chosen


Group = BenchGroup | RingGroup


def _groups(suites: Sequence[str], settings: BenchSettings) -> list[Group]:
    found: list[Group] = []
    for suite in suites:
        found += RingGroup.all_of(settings) if suite == "ring" else groups_of(suite, settings)
    return found


def run_bench(options: BenchOptions) -> None:
    """Run the command."""
    outputs = Outputs(options.json, options.plot, options.quiet)
    try:
        settings = make_settings(options)
        suites = _suites(options)
        head = _head(suites, settings)
        earlier = None if options.compare is None else read_earlier(options.compare)
        if earlier is not None and options.compare is not None:
            check_earlier(earlier, options.compare, head)
        groups = _groups(suites, settings)
        outputs.check()
        console = outputs.console()
        interrupted = _measure(groups, console, quiet=options.quiet)
    except (TypeError, ValueError) as error:
        end(error, 2)
    rows = [row for group in groups for row in group.rows()]
    if rows:
        _print(rows, console, settings)
    compared = None
    if earlier is not None:
        compared = compare_rows(earlier, rows, options.tolerance / 100)
        _print_comparison(compared, console, options.tolerance)
    figures = head | {"finished": not interrupted, "rows": [row.figures() for row in rows]}
    outputs.write(figures | ({} if compared is None else {"comparison": compared.figures()}))
    if interrupted:
        end(f"Interrupted: {len(rows)} rows are finished.", 130)
    outputs.draw(lambda: _picture(rows, settings))
    bad = [row for row in rows if row.status in ("wrong", "failed")]
    for row in bad:
        typer.echo(f"{row.setting}, {row.method}, {row.direction}: {row.status}, {row.reason}", err=True)
    if bad or (compared is not None and compared.regressed):
        raise typer.Exit(1)


def _head(suites: Sequence[str], settings: BenchSettings) -> dict[str, Any]:
    return {
        "command": "bench",
        "versions": versions(),
        "device": device_name(settings.device),
        "suites": list(suites),
        "settings": settings.description(),
        "turns": settings.turns,
        "seconds_per_turn": settings.seconds,
    }


def _measure(groups: Sequence[Group], console: Console, *, quiet: bool) -> bool:
    """Run all groups; whether Ctrl-C ended them."""
    total, done = sum(group.steps for group in groups), 0
    try:
        with interruptible(), show_progress(console, total, "step {:,}", quiet=quiet) as report:
            for group in groups:
                before = done
                for step in group.run():
                    report(done, step.__str__)
                    done = min(done + 1, before + group.steps)
                done = before + group.steps
                group.release()
    except KeyboardInterrupt:
        return True
    return False


def _picture(rows: Sequence[BenchRow], settings: BenchSettings) -> Any:
    from dilated_attention_pytorch.cli.bench_picture import bench_picture  # imports matplotlib

    return bench_picture(rows, _title(settings))


def _title(settings: BenchSettings) -> str:
    dtype = str(settings.dtype).removeprefix("torch.")
    return f"{device_name(settings.device)}, {dtype}{', causal' if settings.is_causal else ''}"


def _print(rows: Sequence[BenchRow], console: Console, settings: BenchSettings) -> None:
    console.print(f"{_title(settings)}, torch {torch.__version__}; median of {settings.turns} turns (least - most)")
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        console.print()
        table = _table(own, suite)
        # A cell that is cut off would be a wrong number. A table that is too wide is left to the terminal to wrap.
        needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
        wide = Console(highlight=False, width=max(console.width, needed), stderr=console.stderr, quiet=console.quiet)
        wide.print(table)
        for line in _notes(own):
            console.print(line, soft_wrap=True)


def _table(rows: Sequence[BenchRow], suite: str) -> Table:
    """The rows of a suite for 80 columns. A method that could not run is a note below."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), title=suite)
    table.title_justify = "left"
    names = {"setting": len({row.setting for row in rows}) > 1, "method": True, "": True}
    numbers = dict.fromkeys(("ms", "range", "TFLOP/s", "tokens/s", "MiB", "error"), True)
    numbers["received"] = any(row.received_bytes is not None for row in rows)
    for name, shown in (names | numbers).items():
        if shown:
            table.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    for row in rows:
        if row.status not in ("not run", "failed"):
            shown_cells = zip(_cells(row), (names | numbers).values(), strict=True)
            table.add_row(*(cell for cell, shown in shown_cells if shown))
    return table


def _cells(row: BenchRow) -> list[str]:
    mark = "~" if row.status == "predicted" else ""
    error = (
        "-" if row.error is None and row.status != "wrong" else "not finite" if row.error is None else f"{row.error:.0e}"
    )
    cells = [row.setting, row.method, "both" if row.direction == BOTH else "forward"]
    if row.time is None:
        return [*cells, row.status, "", "", "", "", error, ""]
    ms, least, most = (_digits(1e3 * x) for x in (row.time.median, row.time.least, row.time.most))
    rate = "-" if row.tflops is None else f"{row.tflops:.3g}"
    memory = "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:,.1f}"
    received = "-" if row.received_bytes is None else f"{row.received_bytes / 2**20:,.1f}"
    return [*cells, mark + ms, f"{least}-{most}", rate, f"{row.tokens_per_second:,.0f}", memory, error, received]


def _digits(value: float) -> str:
    """Three digits: 0.612, 61.2, 6,120.

    >>> _digits(0.6123), _digits(61.23), _digits(6123.4)
    ('0.612', '61.2', '6,123')
    """
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _notes(rows: Sequence[BenchRow]) -> Iterator[str]:
    computes: dict[str, list[str]] = {}
    for row in rows:
        if row.time is not None and row.method not in computes.setdefault(row.computes, []):
            computes[row.computes].append(row.method)
    for what, methods in computes.items():
        yield f"{what}: {', '.join(methods)}"
    if any(row.status == "predicted" for row in rows):
        yield "~: predicted, " + "; ".join(dict.fromkeys(row.reason for row in rows if row.status == "predicted"))
    refused: dict[tuple[str, str, str], None] = {}
    for row in rows:
        if row.status in ("not run", "failed"):
            refused[row.method, row.status, row.reason] = None
    for method, status, reason in refused:
        yield f"{status}: {method}: {reason}"


def _print_comparison(compared: Comparison, console: Console, tolerance: float) -> None:
    console.print()
    for change in compared.changes:
        if change.regressed:
            name = ", ".join(change.key)
            what = "slower" if change.figure == "time" else "more memory"
            console.print(f"regression: {name}: {change.factor:.2f} times as before, {what}", soft_wrap=True)
    for word, keys in (("missing", compared.missing), ("new", compared.new)):
        for key in keys:
            console.print(f"{word}: {', '.join(key)}", soft_wrap=True)
    rows = len({x.key for x in compared.changes})
    console.print(f"{rows} rows compared, {len(compared.regressed)} figures grew by more than {tolerance:g} %.")
