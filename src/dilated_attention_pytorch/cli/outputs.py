"""What all commands share: endings with a sentence, the files that they write, and how options are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import typer
from rich.console import Console

from dilated_attention_pytorch import __version__
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.workbench.machine import version_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def end(message: object, code: int) -> NoReturn:
    """End the command with a sentence on standard error."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn an error of the operating system about ``path`` into one sentence and exit code 1."""
    try:
        yield
    except OSError as error:
        end(f"{path} could not be written: {error.strerror or error}; choose another file.", 1)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a command writes its results: the options ``--json``, ``--plot`` and ``--quiet``."""

    json: str | None = None  # a file, or - for standard output
    plot: Path | None = None
    quiet: bool = False

    def check(self) -> None:
        """Find out before the work whether the files can be written, and whether matplotlib is there for a picture.

        Raise a ValueError for a name that is not that of a picture. End the command if a file cannot be written.
        """
        if self.plot is not None:
            check_picture("--plot", self.plot)
            import matplotlib  # noqa: F401  # a missing package is reported before the work
        if self.json == "":
            end("--json must be a file, or - for standard output, got an empty name", 2)
        for path in (self._json_file, self.plot):
            if path is not None:
                with reported(path):
                    check_file(path)

    def console(self) -> Console:
        """The console for tables. They go to standard error if standard output is for JSON."""
        return Console(highlight=False, stderr=self.json == "-", quiet=self.quiet)

    def write(self, figures: dict[str, Any]) -> None:
        """Write the figures as JSON, if they are wanted."""
        if self.json is None:
            return
        text = json.dumps(figures, indent=1, allow_nan=False)
        path = self._json_file
        if path is None:
            typer.echo(text)
        else:
            with reported(path):
                write_file(path, lambda unfinished: unfinished.write_text(text + "\n"))

    def draw(self, make: Callable[[], Figure]) -> None:
        """Make and write the picture, if it is wanted, and name it."""
        if self.plot is None:
            return
        try:
            with reported(self.plot), interruptible():
                save_picture(make(), self.plot)
        except KeyboardInterrupt:
            end(f"Interrupted: {self.plot} was not written.", 130)
        self.console().print(f"Picture: {self.plot}", soft_wrap=True)  # a line break would not belong to the name

    @property
    def _json_file(self) -> Path | None:
        return None if self.json in (None, "-") else Path(str(self.json))


def check_picture(option: str, path: Path) -> None:
    """Raise a ValueError if the name of a file does not end like that of a picture."""
    if path.suffix.lower() not in PICTURES and not path.is_dir():
        raise ValueError(f"{option} must be a picture, a name that ends in {', '.join(PICTURES)}, got {str(path)!r}")


def check_file(path: Path) -> None:
    """Raise an OSError with this name if a file could not be written. Its content does not change."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _is_special(path):
        path.open("ab").close()
        return
    unfinished = _unfinished(path)
    try:
        unfinished.write_bytes(b"x")
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write a file beside ``path``, and rename it. ``path`` never holds an incomplete file."""
    if _is_special(path):  # a device or a pipe keeps its kind
        write(path)
        return
    unfinished = _unfinished(path)
    try:
        write(unfinished)
        unfinished.replace(path.resolve())  # a link stays one
    finally:
        unfinished.unlink(missing_ok=True)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its name."""
    write_file(path, lambda unfinished: figure.savefig(unfinished, format=path.suffix[1:].lower(), dpi=150))


def make_folder(path: Path) -> None:
    """Make a folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # "File exists" would not explain the error.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _unfinished(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(f".{real.name}.{os.getpid()}")


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """The integers of an option, which are separated by commas."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, such as 2048,8192, got {text!r}") from None


def parse_count(option: str, text: str) -> int:
    """A number such as ``65536``, ``1_000_000``, ``64k``, ``1.5M`` or ``64Ki``.

    ``k``, ``M`` and ``B`` (or ``G``) are powers of 1,000, and ``Ki``, ``Mi`` and ``Gi`` are powers of 1,024.

    >>> parse_count("--tokens", "1.5M"), parse_count("--tokens", "64Ki"), parse_count("--tokens", "1_000")
    (1500000, 65536, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]{0,2})", text.strip().replace("_", "").lower())
    factor = _FACTORS.get(found[2]) if found else None
    number = round(float(found[1]) * factor) if found and factor is not None and "." in found[1] else None
    if found and factor is not None and number is None:
        number = int(found[1]) * factor
    if number is None:
        raise ValueError(f"{option} must be a number such as 65536, 64k, 10M, 1B or 64Ki, got {text!r}")
    return number


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU with {threads} thread{'s' * (threads != 1)}"


def versions() -> dict[str, str | None]:
    """The versions that a measurement depends on."""
    return {
        "dilated_attention": __version__,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
    }
