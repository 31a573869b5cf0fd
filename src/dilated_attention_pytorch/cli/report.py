"""What the demo shows on a terminal: the progress bar, the table and the numbers in it."""

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
    """A time with three digits: ``0.61 ms``, ``61.2 ms``, ``61.2 s``, ``1,230 s``."""
    value, unit = (seconds * 1e3, "ms") if seconds < 1.0 else (seconds, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def dense_text(row: Row) -> str:
    """The time of dense attention, with ``~`` if it is predicted."""
    return ("" if row.dense_measured else "~") + seconds_text(row.dense_seconds)


def table(rows: Sequence[Row]) -> Table:
    """One line per length."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tokens", "time", "tokens/s", "extra memory", "error", "dense time"):
        result.add_column(name, justify="right", no_wrap=True, style="bold" if name in ("tokens", "time") else "")
    for row in rows:
        result.add_row(
            f"{row.tokens:,}",
            seconds_text(row.seconds),
            f"{row.tokens_per_second:,.0f}",
            f"{row.extra_bytes / 2**20:,.1f} MiB",
            f"{row.error:.1e}",
            dense_text(row),
        )
    return result


@contextlib.contextmanager
def progress(console: Console, rows: Sequence[Row]) -> Iterator[Callable[[str, float], None]]:
    """Show the rows so far above a live bar; the function given takes the next step and the part done.

    Where lines cannot be drawn again (a file, a pipe, a dumb terminal), each step is a line on standard error instead.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        plain = Console(stderr=True, soft_wrap=True)
        yield lambda step, part: plain.print(f"{part:4.0%}  {step}", highlight=False)
        return
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    task = bar.add_task("", total=1.0)
    with Live(get_renderable=lambda: Group(table(rows), bar), console=console, refresh_per_second=4, transient=True):
        yield lambda step, part: bar.update(task, description=step, completed=part)
