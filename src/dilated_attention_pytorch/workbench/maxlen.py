"""The longest sequence that runs, by bisection over tries. Each try is a length and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.integers import as_integer

METHODS = ("dilated", "dense")
_MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class TrySettings:
    """What all tries of a search compute. Only the length differs."""

    method: str = "dilated"
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    is_causal: bool = False
    train: bool = False  # forward and backward
    backend: str = "auto"
    pattern: tuple[tuple[int, int], ...] | None = None  # branches; None for streaming.default_pattern of each length
    preset: str | None = None  # of a LongNetDecoder, instead of one attention call
    memory: int | None = None  # bytes that a try may use; None for all that the GPU has
    seconds: float = 60.0  # that a try may take

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("heads", "head_dim"):
            as_integer(name, getattr(self, name), 1)
        if self.memory is not None:
            as_integer("memory", self.memory, 1)
        if not 0.0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be a positive number, got {self.seconds}")


@dataclass(frozen=True, slots=True)
class TryResult:
    """What became of one length."""

    tokens: int
    outcome: str  # "ran", "out of memory", "too slow", "killed" or "failed"
    memory_bytes: int | None = None  # the peak, tensors of the caller included
    seconds: float | None = None  # of the calls
    reason: str = ""  # why it did not run

    @property
    def ran(self) -> bool:
        """Whether the try has finished."""
        return self.outcome == "ran"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The two lengths between which the longest sequence that runs lies."""

    longest: TryResult | None  # that ran
    failed: TryResult | None  # the shortest that did not run

    @staticmethod
    def of(tries: Sequence[TryResult]) -> Bounds:
        """The bounds that tries show.

        >>> found = Bounds.of([TryResult(8, "ran"), TryResult(16, "too slow"), TryResult(12, "ran")])
        >>> found.longest.tokens, found.failed.tokens
        (12, 16)
        """
        ran, failed = [x for x in tries if x.ran], [x for x in tries if not x.ran]
        tokens = lambda x: x.tokens  # noqa: E731
        return Bounds(max(ran, key=tokens, default=None), min(failed, key=tokens, default=None))


def search(run: Callable[[int], TryResult], start: int, precision: float) -> Iterator[TryResult]:
    """Yield each try of a search: lengths grow by 2 from ``start``, and then the interval is bisected.

    The search ends if the shortest length that failed exceeds the longest that ran by at most ``precision`` of the latter,
    or by one token. If ``start`` fails, lengths fall by 4 until one runs.

    >>> run = lambda tokens: TryResult(tokens, "ran" if tokens <= 1000 else "out of memory")
    >>> [x.tokens for x in search(run, 256, 0.1)]
    [256, 512, 1024, 768, 896, 960]
    """
    tokens, longest, failed = as_integer("start", start, 1), 0, 0
    if not 0.0 <= precision < float("inf"):
        raise ValueError(f"precision must be a number from 0 on, got {precision}")
    while True:
        result = run(tokens)
        yield result
        if result.ran:
            longest = tokens
        else:
            failed = tokens
        if not failed:
            if longest >= _MOST_TOKENS:
                return
            tokens = 2 * tokens
        elif not longest:
            if failed == 1:
                return
            tokens = max(1, failed // 4)
        elif failed - longest <= max(1.0, precision * longest):
            return
        else:
            tokens = (longest + failed) // 2
