"""A text that every Python installation has: the sources of its standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Installed packages differ between machines.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


def _sources(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(directory, name) for name in sorted(files) if name.endswith(".py"))


def standard_library(count: int) -> bytes:
    """The first ``count`` bytes of the standard library's sources in a fixed order, repeated if they are too short."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        if len(text) >= count:
            break
        text += path.read_bytes()
    if not text:
        raise FileNotFoundError(f"no Python sources in {root}, which the demo reads as its text")
    return bytes(text * -(-count // len(text)))[:count]
