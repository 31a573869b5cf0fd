"""The progress of a run whose length is known."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_LINE_S = 2.0  # the shortest time between two lines


@contextlib.contextmanager
def show_progress(
    console: Console, total: int, counted: str, *, quiet: bool
) -> Iterator[Callable[[int, Callable[[], str]], None]]:
    """Show a bar on a terminal that can redraw lines, else lines on standard error. If ``quiet``, show nothing.

    The yielded function takes how many of ``total`` are done, and a function for the text. The text is made only if it is
    shown. ``counted`` is the format of the number in a line, for example ``"step {:,}"``.
    """
    if quiet:
        yield lambda done, text: None
        return
    if not console.is_terminal or console.is_dumb_terminal:
        plain, printed = Console(stderr=True, soft_wrap=True, highlight=False), 0.0

        def line(done: int, text: Callable[[], str]) -> None:
            nonlocal printed
            if time.monotonic() - printed >= _LINE_S or done == total:
                printed = time.monotonic()
                plain.print(f"{done / total:4.0%}  {counted.format(done)}, {text()}")

        yield line
        return
    columns = BarColumn(None), TaskProgressColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, expand=True, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text())
