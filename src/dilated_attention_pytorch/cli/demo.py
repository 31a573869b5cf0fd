"""The measurements of the demo: dilated and dense attention over growing lengths of a text.

Every Python installation has the text: the sources of its standard library.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.api import attention, attention_weights
from dilated_attention_pytorch.measure import median_seconds, peak_extra_bytes
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.plan.tiles import compile_plan

HEADS = 8
HEAD_DIM = 64
_CHECKED_ROWS = 16
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}  # installed packages differ between machines
_MOST_TOKENS = {"cpu": 65536, "cuda": 262144}
_SHORT_CALL_S = 0.25  # shorter calls are timed three times
_MARGIN = 1.25  # factor of a predicted time: the FLOPs do not include embedding and checking


@dataclass(frozen=True, slots=True)
class Settings:
    """The lengths that a run measures, and how long it may take."""

    pattern: Dilated
    lengths: tuple[int, ...]
    is_causal: bool
    device: torch.device
    dtype: torch.dtype
    budget_s: float  # limit for all measurements together
    dense_s: float  # limit for dense attention at one length

    def flops(self, tokens: int, *, dense: bool = False) -> int:
        """Floating-point operations of dilated attention, or of dense attention: one segment with all tokens."""
        pattern = Dilated([tokens], [1]) if dense else self.pattern
        return compile_plan(pattern, tokens, HEADS, is_causal=self.is_causal).flops(HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one length."""

    tokens: int
    seconds: float
    extra_bytes: int
    output_bytes: int
    error: float
    dense_seconds: float
    dense_measured: bool  # otherwise predicted


def choose_device(name: str | None) -> torch.device:
    """The device of this name; for None, the GPU if there is one, else the CPU. A missing device is a ValueError."""
    gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"--device must be cpu, cuda or cuda:NUMBER, got {name!r}; without it the GPU is taken, if any")
    if kind == "cpu":
        return torch.device("cpu")
    if not gpus:
        raise ValueError(f"--device {name} needs a GPU that PyTorch can use, got none; use --device cpu")
    if int(index or 0) >= gpus:
        raise ValueError(f"--device cuda:NUMBER must be below the number of GPUs, {gpus}, got {name!r}; use --device cuda")
    return torch.device(name)


def make_settings(*, quick: bool, is_causal: bool, device: torch.device, max_tokens: int | None) -> Settings:
    """The lengths and limits of a run. They suit two slow CPU cores; a GPU gets more tokens."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {max_tokens}; without it the demo chooses the lengths")
    first, segment = (2048, 512) if quick else (4096, 2048)
    most = max_tokens or _MOST_TOKENS[device.type] // (4 if quick else 1)
    doubled = itertools.takewhile(lambda tokens: tokens < most, (first << k for k in itertools.count()))
    pattern = Dilated([segment, 2 * segment, 4 * segment, 8 * segment], [1, 2, 4, 8])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    budget_s, dense_s = (10.0, 2.0) if quick else (95.0, 8.0)
    return Settings(pattern, (*doubled, most), is_causal, device, dtype, budget_s, dense_s)


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


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def embed(text: bytes, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a text: a fixed random vector for each byte, plus the position in query and key."""
    tables = torch.randn((3, 256, HEADS * HEAD_DIM), generator=_generator(), device="cpu").to(device)
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
    frequencies = 10000.0 ** -torch.linspace(0.0, 1.0, HEAD_DIM // 2, device=device)
    angles = torch.arange(len(text), device=device)[:, None] * frequencies
    position = torch.cat((angles.sin(), angles.cos()), -1)[None, :, None]
    query, key, value = (table[symbols].view(1, len(text), HEADS, HEAD_DIM) for table in tables)
    return query.add_(position).to(dtype), key.add_(position).to(dtype), value.to(dtype)


def largest_error(out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], pattern: Dilated, *, is_causal: bool) -> float:
    """The largest relative error of a head's output over a sample of rows, against the definition in float64."""
    query, key, value = (x.double() for x in qkv)
    n = query.shape[1]
    sample = torch.randint(n, (_CHECKED_ROWS - 2,), generator=_generator(), device="cpu")
    rows = sorted({0, n - 1, *sample.tolist()})
    weights = attention_weights(query, key, pattern, query_rows=rows, is_causal=is_causal)
    expected = torch.einsum("bhrm,bmhd->brhd", weights, value)
    difference = out[:, rows].double() - expected
    return float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())


class _Attend:
    """A call of dilated attention that keeps its result for the check."""

    def __init__(self, settings: Settings, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        self.settings, self.qkv = settings, qkv
        self.out: Tensor | None = None

    def __call__(self) -> None:
        self.out = attention(*self.qkv, self.settings.pattern, is_causal=self.settings.is_causal)

    def error(self) -> float:
        assert self.out is not None
        return largest_error(self.out, self.qkv, self.settings.pattern, is_causal=self.settings.is_causal)


def measure(settings: Settings, report: Callable[[str, float], None]) -> Iterator[Row]:
    """Yield one row per length, as long as the next one is predicted to end within the budget.

    ``report`` is called with the next step and the fraction of all dilated attention that is done, from 0 to 1.
    """
    end = time.monotonic() + settings.budget_s
    total = sum(map(settings.flops, settings.lengths))
    done = 0.0
    rate = dense_rate = None  # FLOP/s at the last length measured
    for tokens in settings.lengths:
        flops, dense_flops = settings.flops(tokens), settings.flops(tokens, dense=True)
        repeats = 3 if rate is None or flops / rate < _SHORT_CALL_S else 1
        # Besides the repeats, one call warms up and one measures memory.
        if rate is not None and (repeats + 2) * flops / rate * _MARGIN > end - time.monotonic():
            return
        report(f"{tokens:,} tokens: time", done / total)
        call = _Attend(settings, embed(standard_library(tokens), settings.device, settings.dtype))
        seconds = median_seconds(call, settings.device, repeats)
        rate = flops / seconds
        done += flops * (repeats + 1) / (repeats + 2)
        report(f"{tokens:,} tokens: memory", done / total)
        call.out = None  # memory that is freed during the call would be subtracted from what it needs
        extra_bytes = peak_extra_bytes(call, settings.device)
        done += flops / (repeats + 2)
        report(f"{tokens:,} tokens: error", done / total)
        error = call.error()
        dense_seconds = dense_flops / (dense_rate or rate)
        dense_measured = 2 * dense_seconds * _MARGIN < min(settings.dense_s, end - time.monotonic())
        if dense_measured:
            report(f"{tokens:,} tokens: dense attention", done / total)
            q, k, v = (x.transpose(1, 2) for x in call.qkv)
            dense = partial(scaled_dot_product_attention, q, k, v, is_causal=settings.is_causal)
            dense_seconds = median_seconds(dense, settings.device, repeats=1)
            dense_rate = dense_flops / dense_seconds
        output_bytes = call.qkv[0].nbytes  # the output has the shape and type of the query
        yield Row(tokens, seconds, extra_bytes, output_bytes, error, dense_seconds, dense_measured)
