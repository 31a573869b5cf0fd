"""What the demo prints on a terminal: the progress bar, the table and its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dilated_attention_pytorch.cli.demo import Row


def seconds_text(seconds: float) -> str:
    """Format a time with three digits: ``0.61 ms``, ``61.2 ms``, ``61.2 s``, ``1,230 s``."""
    value, unit = (seconds * 1e3, "ms") if seconds < 1.0 else (seconds, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def table(rows: Sequence[Row]) -> Table:
    """The table of results, one line per length. A time of dense attention that is predicted has a ``~``."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tokens", "time", "tokens/s", "extra memory", "error", "dense time"):
        result.add_column(name, justify="right", no_wrap=True, style="bold" if name in ("tokens", "time") else "")
    for row in rows:
        dense = ("" if row.dense_measured else "~") + seconds_text(row.dense_seconds)
        rate, memory = f"{row.tokens / row.seconds:,.0f}", f"{row.extra_bytes / 2**20:,.1f} MiB"
        result.add_row(f"{row.tokens:,}", seconds_text(row.seconds), rate, memory, f"{row.error:.1e}", dense)
    return result


@contextlib.contextmanager
def progress(console: Console, rows: Sequence[Row]) -> Iterator[Callable[[str, float], None]]:
    """Show the rows so far above a live bar. The yielded function takes the next step and the fraction done.

    If the output is not a terminal that can redraw lines, each step is a line on standard error instead.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        plain = Console(stderr=True, soft_wrap=True)
        yield lambda step, done: plain.print(f"{done:4.0%}  {step}", highlight=False)
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    task = bar.add_task("", total=1.0)
    with Live(get_renderable=lambda: Group(table(rows), bar), console=console, refresh_per_second=4, transient=True):
        yield lambda step, done: bar.update(task, description=step, completed=done)
