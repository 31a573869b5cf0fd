"""One causal attention layer over a stream of any length in bounded memory: the run, its checkpoints and its results.

Rows are made by a counter (``streaming_rows.py``), attended to by a ``DilatedKVCache`` chunk by chunk, and dropped. Chunks
begin at multiples of the chunk's length, so that a run that was stopped goes on with the same bits.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming_check import CheckedRow, check_row, checked_positions, tolerance
from dilated_attention_pytorch.streaming_rows import KEY, QUERY, VALUE, checksum, column_weights, fill_rows

DTYPES = ("bfloat16", "float16", "float32", "float64")
_LONGEST = 2**30  # a branch with segments of at least this length is the last one
_MOST_TOKENS = 2**40
_MARKS = 200  # points of a run that are recorded
_REPORT_S = 1.0  # the longest time between two reports, if chunks are shorter
_WARM_UP = 2  # chunks on a GPU before the time starts: they compile kernels
_FORMAT = 1  # of checkpoints


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read."""


def default_pattern(tokens: int) -> Dilated:
    """Segments of ``2048 * 4**i`` with rates ``4**i``, up to the first that is as long as the stream or 2**30.

    >>> default_pattern(100_000).segment_lengths
    (2048, 8192, 32768, 131072)
    """
    lengths = [2048]
    while lengths[-1] < min(tokens, _LONGEST):
        lengths.append(4 * lengths[-1])
    return Dilated(lengths, [w // 2048 for w in lengths])


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream computes. Two runs with equal settings on equal devices have the same results, bit for bit."""

    tokens: int
    pattern: Dilated
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    chunk: int  # tokens of a call
    seed: int = 0
    rows: int = 64  # that are checked

    def __post_init__(self) -> None:
        for name, most in (("tokens", _MOST_TOKENS), ("heads", 2**16), ("head_dim", 2**16), ("chunk", 2**31 - 1)):
            if as_integer(name, getattr(self, name), 1) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if not 0 <= as_integer("seed", self.seed) < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        as_integer("rows", self.rows, 0)
        if self.heads * self.head_dim % 4:
            raise ValueError(
                "heads * head_dim must be a multiple of 4, because four elements are made at a time: got "
                f"{self.heads} * {self.head_dim}; use a head size that is a multiple of 4"
            )
        if self.pattern.offsets != "interleaved" or self.pattern.torchscale_padding:
            raise ValueError(f"the pattern of a stream must have interleaved offsets and no padding, got {self.pattern}")

    def description(self) -> dict[str, Any]:
        """The settings as integers, lists and strings. Devices of one type are equal."""
        return {
            "tokens": self.tokens,
            "segment_lengths": list(self.pattern.segment_lengths),
            "dilation_rates": list(self.pattern.dilation_rates),
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "chunk": self.chunk,
            "seed": self.seed,
            "rows": self.rows,
        }


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """What is known at the end of a chunk, after a device synchronisation."""

    position: int  # tokens that are done
    seconds: float  # that they took, without checkpoints and warm-up
    memory_bytes: int  # the largest since the last point on a GPU; the resident memory on a CPU, 0 if not known


@dataclass(frozen=True, slots=True)
class StreamResult:
    """The results of a stream that is finished, or of its tokens so far."""

    point: StreamPoint
    warm_up_seconds: float
    check_seconds: float
    first_tenth: float | None  # tokens per second; None if the run has not come that far
    last_tenth: float | None
    peak_bytes: int
    cache_bytes: int
    checksum: str  # 16 hexadecimal digits
    checked: tuple[CheckedRow, ...]
    tolerance: float

    @property
    def tokens_per_second(self) -> float:
        """The mean rate."""
        return self.point.position / self.point.seconds if self.point.seconds else 0.0

    @property
    def failed(self) -> tuple[CheckedRow, ...]:
        """The checked rows outside of the tolerance."""
        return tuple(row for row in self.checked if not row.passed)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of now, and the peak: of the tensors since the last call on a GPU, of the resident process on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak, peak
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux
        return 0, 0
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
    now, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


class Stream:
    """A run: a cache, a position, the checksum of the results so far and the checked rows so far."""

    def __init__(self, settings: StreamSettings) -> None:
        self.settings = settings
        branches, shape = settings.pattern.branches, (settings.heads, settings.head_dim)
        self.positions = checked_positions(settings.tokens, settings.rows, branches, settings.heads, settings.seed)
        dtype, device = settings.dtype, settings.device
        self._cache = DilatedKVCache(settings.pattern, 1, *shape, dtype=dtype, device=device, max_rollback=0)
        self._inputs: tuple[Tensor, ...] = ()  # memory for query, key and value of a chunk
        self._columns = column_weights(settings.seed, shape[0] * shape[1], device)
        self._rows = torch.zeros((len(self.positions), *shape), dtype=dtype, device=device)
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._position = 0
        self._points = [StreamPoint(0, 0.0, _memory(device)[0])]
        self._last = self._points[0], 0  # and the checksum there
        self._peak = self._points[0].memory_bytes
        self._warm_up_s = 0.0

    @property
    def points(self) -> tuple[StreamPoint, ...]:
        """The recorded points of the run: its start, and at most 200 others."""
        return tuple(self._points)

    def run(self) -> Iterator[StreamPoint]:
        """Go on to the end, and yield a point about every second and at every recorded point.

        The device is synchronised at these points only. The time between a yield and the next step does not count.
        """
        tokens = self.settings.tokens
        if self.settings.device.type == "cuda" and self._position < tokens:
            self._warm_up()
        while self._position < tokens:
            start = time.perf_counter()
            mark = self._position * _MARKS // tokens
            while self._position < tokens:
                self._step()
                at_mark = self._position * _MARKS // tokens > mark
                if at_mark or time.perf_counter() - start >= _REPORT_S:
                    break
            total = int(self._sum)  # this synchronises the device
            seconds = self._last[0].seconds + time.perf_counter() - start
            now, peak = _memory(self.settings.device)
            self._peak = max(self._peak, peak)
            point = StreamPoint(self._position, seconds, now)
            self._last = point, total
            if at_mark:
                self._points.append(point)
            yield point

    def _step(self) -> None:
        """Make, attend to and add up one chunk, on the device of the settings."""
        device = self.settings.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._attend()

    def _attend(self) -> None:
        first, seed = self._position, self.settings.seed
        n = min(self.settings.chunk, self.settings.tokens - first)
        if not self._inputs:
            shape = 1, min(self.settings.chunk, self.settings.tokens), self.settings.heads, self.settings.head_dim
            how = self.settings.dtype, self.settings.device
            self._inputs = tuple(torch.empty(shape, dtype=how[0], device=how[1]) for _ in range(3))
        query, key, value = chunk = [x[:, :n] for x in self._inputs]
        for tensor, x in zip((QUERY, KEY, VALUE), chunk, strict=True):
            fill_rows(x[0], seed, tensor, first)
        out = self._cache.attend(query, key, value)
        self._sum += checksum(out[0], self._columns, seed, first)
        for i, position in enumerate(self.positions):
            if first <= position < first + n:
                self._rows[i] = out[0, position - first]
        self._position += n

    def _warm_up(self) -> None:
        """Run the first chunks of another stream, so that kernels are compiled before the time starts."""
        start = time.perf_counter()
        other = Stream(self.settings)
        for _ in range(_WARM_UP):
            if other._position < self.settings.tokens:
                other._step()
        self._inputs = other._inputs
        torch.cuda.synchronize(self.settings.device)
        self._warm_up_s += time.perf_counter() - start

    def result(self) -> StreamResult:
        """The results up to the last point, with the check of the rows before it."""
        settings, (point, total) = self.settings, self._last
        start, limit = time.perf_counter(), tolerance(settings.dtype)
        rows = self._rows.cpu()
        checked = [
            check_row(out, position, settings.pattern.branches, settings.seed, limit)
            for out, position in zip(rows, self.positions, strict=True)
            if position < point.position
        ]
        first, last = _tenths(settings.tokens, self._points)
        return StreamResult(
            point=point, warm_up_seconds=self._warm_up_s, check_seconds=time.perf_counter() - start, first_tenth=first,
            last_tenth=last, peak_bytes=self._peak, cache_bytes=self._cache.nbytes, checksum=f"{total % 2**64:016x}",
            checked=tuple(checked), tolerance=limit,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write a checkpoint between two steps of ``run``. The old file stays complete until the new one replaces it."""
        point, total = self._last
        assert point.position == self._position, "a checkpoint is written at a point"
        state = {
            "format": _FORMAT, "settings": self.settings.description(), "cache": self._cache.state_dict(),
            "rows": self._rows, "checksum": total, "points": [_numbers(x) for x in (*self._points, point)],
            "peak_bytes": self._peak, "warm_up_seconds": self._warm_up_s,
        }  # fmt: skip
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if os.name == "posix":  # the name is durable too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. One of other settings is refused; one that is damaged raises a ``CheckpointError``."""
        state = _read(path)
        theirs, own = state["settings"], self.settings.description()
        different = [
            f"{name} {theirs.get(name)!r} instead of {own.get(name)!r}"
            for name in {**own, **theirs}
            if theirs.get(name) != own.get(name)
        ]
        if different:
            raise ValueError(
                f"{path} is the checkpoint of a run with other settings: {', '.join(different)}; use the settings of that "
                "run, or another file"
            )
        self._cache.load_state_dict(state["cache"])
        self._rows.copy_(state["rows"])
        self._sum.fill_(state["checksum"])
        *points, last = (StreamPoint(*x) for x in state["points"])
        self._points, self._last, self._position = points, (last, state["checksum"]), last.position
        self._peak = max(self._peak, state["peak_bytes"])
        self._warm_up_s = state["warm_up_seconds"]


def _numbers(point: StreamPoint) -> tuple[int, float, int]:
    return point.position, point.seconds, point.memory_bytes


def _read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint. The checksums of the file's entries are compared first."""
    way_out = "delete it to start again, or name another file"
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"the entry {damaged} does not have its checksum")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {error}; {way_out}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of a stream in format {_FORMAT}; {way_out}")
    return state


def _tenths(tokens: int, points: list[StreamPoint]) -> tuple[float | None, float | None]:
    """The rates up to the first point behind a tenth, and from the last point before nine tenths to the end."""
    start, end = points[0], points[-1]
    first = next((x for x in points if 10 * x.position >= tokens), None)
    before = next(x for x in reversed(points) if 10 * x.position <= 9 * tokens)
    return _rate(start, first), _rate(before, end) if end.position == tokens else None


def _rate(start: StreamPoint, end: StreamPoint | None) -> float | None:
    if end is None or end.seconds <= start.seconds:
        return None
    return (end.position - start.position) / (end.seconds - start.seconds)
