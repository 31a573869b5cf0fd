"""The log of a run: one JSON object per line. A run that goes on first cuts off what comes after its checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the name of the file that is written: on a full disk, the error of a write has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class TrainLog:
    """Lines of a file. Each has a step, and steps do not fall."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file and cut it off behind the last line of ``step``. A line that is not complete is cut off too."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n") or _step(line) > step:
                break
            kept += len(line)
        self._file = path.open("ab")
        self._file.truncate(kept)

    def append(self, record: dict[str, Any]) -> None:
        """Write a line at once."""
        with naming(self.path):
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Make the lines durable."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
