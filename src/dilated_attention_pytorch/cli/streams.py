"""Standard streams that end the command with one sentence if they cannot be written, and sections that Ctrl-C leaves."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

_CLOSED_PIPE = 141  # the code that a shell reports for a program that SIGPIPE ended


def say_error(sentence: str) -> None:
    """Write a sentence to standard error, if it can be written."""
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


class GuardedStream(io.TextIOWrapper):
    """A standard stream. A write that fails raises SystemExit, which neither typer nor rich handle."""

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return super().write(text)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            super().flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> NoReturn:
        number = self.fileno()
        if number != 2:
            closed = isinstance(error, BrokenPipeError)
            reason = "its reader has closed it" if closed else error.strerror or str(error)
            say_error(f"Stopped: standard output could not be written: {reason}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # what is still buffered is written at exit
        raise SystemExit(_CLOSED_PIPE if isinstance(error, BrokenPipeError) else 1)


def guard_streams() -> None:
    """Replace the standard streams by guarded ones. A stream that was closed at the start becomes the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            guarded = GuardedStream(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115
        else:
            guarded = GuardedStream(
                stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
            )
        setattr(sys, name, guarded)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this section, for one that has to clean up or to show results."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
