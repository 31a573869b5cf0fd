"""Two runs of a benchmark: which rows became slower, or need more memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.workbench.bench_values import BenchRow

Key = tuple[str, str, str, str]


class CompareError(ValueError):
    """An earlier file that cannot be compared with."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """A figure of a row in both runs."""

    key: Key
    figure: str  # "time" or "memory"
    before: float
    after: float
    regressed: bool

    @property
    def factor(self) -> float:
        """How many times as large the figure is as before."""
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed between an earlier run and this one."""

    changes: tuple[RowChange, ...]
    missing: tuple[Key, ...]  # measured before and not now
    new: tuple[Key, ...]

    @property
    def regressed(self) -> tuple[RowChange, ...]:
        """The changes beyond the tolerance."""
        return tuple(x for x in self.changes if x.regressed)

    def figures(self) -> dict[str, Any]:
        """All of it for JSON."""
        changes = [
            {"row": list(x.key), "figure": x.figure, "before": x.before, "after": x.after, "regressed": x.regressed}
            for x in self.changes
        ]
        return {"changes": changes, "missing": [list(x) for x in self.missing], "new": [list(x) for x in self.new]}


def read_earlier(path: Path) -> dict[str, Any]:
    """The document of an earlier run. Raise a CompareError if the file is not one."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise CompareError(f"--compare could not read {path}: {error.strerror or error}; choose another file") from None
    except ValueError:
        raise CompareError(f"--compare needs a file that bench has written with --json, and {path} is not JSON") from None
    document: dict[str, Any] = found if isinstance(found, dict) else {}
    rows = document.get("rows") if document.get("command") == "bench" else None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise CompareError(f"--compare needs a file that bench has written with --json, and {path} is another document")
    return document


def _is_row(row: Any) -> bool:
    names = ("suite", "setting", "method", "direction", "status")
    if not isinstance(row, dict) or not all(isinstance(row.get(x), str) for x in names):
        return False
    numbers = (row.get("median_seconds"), row.get("extra_bytes"))
    return all(x is None or (isinstance(x, int | float) and not isinstance(x, bool) and x >= 0) for x in numbers)


def check_earlier(earlier: Mapping[str, Any], path: Path, now: Mapping[str, Any]) -> None:
    """Raise a CompareError unless two runs have the same suites, device and settings."""
    for name in ("suites", "device", "settings"):
        if earlier.get(name) != now[name]:
            raise CompareError(
                f"--compare needs a run with the same {name}: {path} has {_text(earlier.get(name))}, and this run has "
                f"{_text(now[name])}; repeat the command of that file"
            )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(x)}" for key, x in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def compare_rows(earlier: Mapping[str, Any], rows: Sequence[BenchRow], tolerance: float) -> Comparison:
    """Compare the measured rows. A figure that grew by more than ``tolerance``, a share, is a regression.

    Times are medians.
    """
    before = {(x["suite"], x["setting"], x["method"], x["direction"]): x for x in earlier["rows"]}
    before = {key: x for key, x in before.items() if x["status"] == "measured"}
    now = {row.key: row for row in rows if row.status == "measured"}
    changes = []
    for key in now:
        if key not in before:
            continue
        time = now[key].time
        pairs = (
            ("time", before[key].get("median_seconds"), None if time is None else time.median),
            ("memory", before[key].get("extra_bytes"), now[key].extra_bytes),
        )
        for figure, old, new in pairs:
            if old and new is not None:
                changes.append(RowChange(key, figure, old, new, new > old * (1 + tolerance)))
    missing, added = (tuple(x for x in a if x not in b) for a, b in ((before, now), (now, before)))
    return Comparison(tuple(changes), missing, added)
