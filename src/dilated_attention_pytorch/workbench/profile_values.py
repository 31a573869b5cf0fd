"""What a profile is asked for, and what it finds, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from dilated_attention_pytorch.patterns.dilated import Dilated

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """One attention call, or one training step if there is a preset."""

    device: torch.device
    dtype: torch.dtype
    tokens: int  # of the call, or the context of the step
    pattern: Dilated | None = None  # of the call
    heads: int = 8
    head_dim: int = 64
    is_causal: bool = False
    backward: bool = False
    backend: str = "auto"
    preset: str | None = None  # of the model

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if (self.preset is None) == (self.pattern is None):
            raise ValueError("a profile is that of a pattern or of a preset, got both or neither; leave out one")

    def description(self) -> dict[str, Any]:
        """All of it for JSON."""
        found: dict[str, Any] = {"device": str(self.device), "dtype": str(self.dtype).removeprefix("torch.")}
        found |= {"preset": self.preset, "tokens": self.tokens}
        if self.pattern is None:
            return found
        lengths, rates = self.pattern.segment_lengths, self.pattern.dilation_rates
        found |= {"segment_lengths": list(lengths), "dilation_rates": list(rates)}
        names = ("heads", "head_dim", "is_causal", "backward", "backend")
        return found | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes of each component after each allocation and each release."""

    names: tuple[str, ...]
    seconds: tuple[float, ...]  # since the start of the call
    sizes: tuple[tuple[int, ...], ...]  # for each time, of each component

    @property
    def peak(self) -> tuple[int, ...]:
        """The components when their sum was largest; zeros if nothing was allocated."""
        return max(self.sizes, key=sum, default=(0,) * len(self.names))

    @property
    def peak_bytes(self) -> int:
        """The largest sum. Like ``peak_extra_bytes`` it is at least 0."""
        return max(0, sum(self.peak))


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The time of an operator on a CPU, or of a kernel on a GPU, without the operators that it calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OperatorSpan:
    """When an operator ran."""

    name: str
    start: float  # seconds since the start of the call
    seconds: float


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """Messages of a rank. They are in flight from the call that starts them until they have arrived."""

    messages: int
    in_flight_seconds: float  # at least one message
    overlapped_seconds: float  # the part of it in which operators ran

    @property
    def overlap(self) -> float:
        """The share of the time in flight in which operators ran."""
        return self.overlapped_seconds / self.in_flight_seconds if self.in_flight_seconds else 0.0


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """What one rank found."""

    rank: int
    seconds: float  # of the call under the profiler, which slows it down
    made_before: tuple[tuple[str, int], ...]  # bytes by component
    memory: MemoryCurve
    operators: tuple[OperatorTime, ...]  # the longest ones first
    spans: tuple[OperatorSpan, ...]  # of the longest operators and of messages
    communication: CommunicationTime | None = None

    def figures(self) -> dict[str, Any]:
        """All of it for JSON."""
        names, peak = self.memory.names, self.memory.peak
        curve = {name: [sizes[i] for sizes in self.memory.sizes] for i, name in enumerate(names)}
        found: dict[str, Any] = {
            "rank": self.rank, "seconds": self.seconds, "made_before_bytes": dict(self.made_before),
            "peak_extra_bytes": self.memory.peak_bytes, "peak_components": dict(zip(names, peak, strict=True)),
            "memory": {"seconds": list(self.memory.seconds), "components": curve},
            "operators": [asdict(x) for x in self.operators],
        }  # fmt: skip
        if self.communication is not None:
            found["communication"] = asdict(self.communication) | {"overlap": self.communication.overlap}
        return found
