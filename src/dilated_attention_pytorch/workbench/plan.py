"""The plan of a call or a model: work, memory, messages and time for a number of GPUs, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.targets import find_target
from dilated_attention_pytorch.distributed.cost import BYTES_PER_S, LATENCY_S, MEMORY_SHARE
from dilated_attention_pytorch.distributed.own_rows import fused_backend, stock_backend
from dilated_attention_pytorch.explain import Explanation
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.plan_memory import MemoryParts, attention_memory, model_memory
from dilated_attention_pytorch.workbench.plan_ranks import RankWork, explained, meta_call, rank_bounds, rank_work
from dilated_attention_pytorch.workbench.plan_settings import MOST_TOKENS, PlanSettings
from dilated_attention_pytorch.workbench.plan_time import HOST_S, TimeParts, attention_seconds, model_seconds
from dilated_attention_pytorch.workbench.suggest import pattern_warnings

_PRECISION = 1 / 512  # of the longest sequence


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The same call or model on another number of GPUs."""

    gpus: int
    seconds: float
    memory: int  # bytes of the rank that has most
    received: int  # bytes of a forward, of the rank that receives most; of one layer
    transport: str | None
    longest: int | None  # tokens that fit; 0 if not even one per GPU does, None if not known


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The answer; times and memory are those of the rank with most."""

    settings: PlanSettings
    backend: str  # of own rows
    explanation: Explanation  # of one GPU
    work: RankWork
    memory: MemoryParts  # at the moment of most, of what is asked: a forward, a backward, or a model
    forward: TimeParts  # of one call
    backward: TimeParts | None  # of one call, if training
    step: TimeParts | None  # of a model
    longest: int | None
    scaling: tuple[ScalePoint, ...]
    reason: str  # of the transport
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of what is asked: a step of a model, or a call with its backward if training."""
        if self.step is not None:
            return self.step.total
        return at_least(self.settings, self.forward.total + (0.0 if self.backward is None else self.backward.total))

    @property
    def fits(self) -> bool:
        """Whether the memory of a GPU is enough."""
        return self.memory.total <= self.settings.machine.gpu.memory


def backend_of(settings: PlanSettings) -> str:
    """The backend that computes the own rows of a rank."""
    call, target = meta_call(settings), find_target(settings.machine.target)
    request = Request.of(call, target)
    if settings.gpus == 1 or settings.transport == "ulysses":
        return backends.choose("auto", request).name
    return fused_backend(call, request) or stock_backend("auto", request)


def memory_of(settings: PlanSettings, work: RankWork, backend: str) -> MemoryParts:
    """The most that a rank has at a time, of a call or of a model."""
    if settings.model is not None:
        return model_memory(settings, work, backend)
    return attention_memory(settings, work, backend, backward=settings.train)


def seconds_of(settings: PlanSettings, work: RankWork, backend: str) -> float:
    """The time of a step of a model, or of a call with its backward if training."""
    if settings.model is not None:
        return model_seconds(settings, work, backend).total
    both = (False, True) if settings.train else (False,)
    return at_least(settings, sum(attention_seconds(settings, work, backend, backward=x).total for x in both))


def at_least(settings: PlanSettings, seconds: float) -> float:
    """The time of a call on a GPU, which is not less than what the host needs to launch it."""
    return max(seconds, HOST_S[settings.train]) if settings.machine.gpu.capability[0] else seconds


def fits(settings: PlanSettings, backend: str | None = None) -> bool:
    """Whether the memory of each GPU is enough, by the bounds of a rank's messages."""
    backend = backend_of(settings) if backend is None else backend
    return memory_of(settings, rank_bounds(settings), backend).total <= settings.machine.gpu.memory


def longest_tokens(settings: PlanSettings) -> int | None:
    """The most tokens that fit, to 0.2 %, by bisection over the memory of a rank; None for block-sparse calls of ranks."""
    gpus, backend = settings.gpus, backend_of(settings)
    if not isinstance(settings.pattern, Dilated):
        return _longest_by_rows(settings, backend) if gpus == 1 else None

    def enough(tokens: int) -> bool:
        return fits(settings.on(gpus, tokens), backend)

    # Memory is nearly proportional to tokens, so that the first guess is close.
    memory = memory_of(settings, rank_bounds(settings), backend)
    fixed = memory.weights + memory.weight_gradients + memory.optimizer
    if settings.machine.gpu.memory <= fixed or not enough(gpus):
        return 0
    guess = int(settings.tokens * (settings.machine.gpu.memory - fixed) / max(1, memory.total - fixed))
    low, high = gpus, MOST_TOKENS
    step = 1.02
    for _ in range(64):
        tokens = min(high - 1, max(low + 1, guess))
        if high - low <= max(1, int(low * _PRECISION)) or tokens <= low:
            break
        if enough(tokens):
            low, guess = tokens, int(tokens * step)
        else:
            high, guess = tokens, int(tokens / step)
        if high < MOST_TOKENS and low > gpus:
            guess = (low + high) // 2
        else:
            step = min(16.0, step * step)
    return low


def _longest_by_rows(settings: PlanSettings, backend: str) -> int:
    """Memory of a block-sparse call on one GPU is proportional to tokens, but for weights."""
    memory = memory_of(settings, rank_work(settings), backend)
    fixed = memory.weights + memory.weight_gradients + memory.optimizer
    return max(0, int(settings.tokens * (settings.machine.gpu.memory - fixed) / max(1, memory.total - fixed)))


def powers(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to a number of GPUs.

    >>> powers(20)
    (1, 2, 4, 8, 16)
    """
    return tuple(2**i for i in range(most.bit_length()) if 2**i <= most)


def scale(settings: PlanSettings, gpus: tuple[int, ...]) -> Iterator[ScalePoint]:
    """The call or model on several numbers of GPUs, as far as each has a token."""
    for count in gpus:
        if count > settings.tokens:
            return
        own = settings.on(count)
        work, backend = rank_work(own), backend_of(own)
        yield ScalePoint(
            gpus=count,
            seconds=seconds_of(own, work, backend),
            memory=memory_of(own, work, backend).total,
            received=work.received,
            transport=work.transport,
            longest=longest_tokens(own),
        )


def scaling_warnings(points: tuple[ScalePoint, ...]) -> list[str]:
    """Whether the most GPUs take longer than fewer of them, by more than 5 %.

    >>> a, b, c = (ScalePoint(n, seconds, 0, 0, "ring", None) for n, seconds in ((4, 0.04), (8, 0.02), (16, 0.03)))
    >>> scaling_warnings((a, b, c))
    ['8 GPUs are fastest: 16 take 1.50 times as long, because communication costs more time than they save']
    >>> scaling_warnings((a, b)), scaling_warnings(())
    ([], [])
    """
    if not points:
        return []
    fastest, most = min(points, key=lambda x: x.seconds), points[-1]
    if most.seconds <= 1.05 * fastest.seconds:
        return []
    longer = most.seconds / fastest.seconds
    return [
        f"{fastest.gpus:,} GPUs are fastest: {most.gpus:,} take {longer:.2f} times as long, because communication costs "
        "more time than they save"
    ]


def transport_reason(settings: PlanSettings, work: RankWork) -> str:
    """Why rows travel as they do."""
    if work.transport is None:
        return "one GPU sends nothing"
    if not work.received:
        return "no segment crosses ranks, so nothing is sent"
    if settings.transport != "auto":
        return f"{work.transport} was asked for"
    texts = {
        "ring": "a rank waits for one message after the other and has memory for two in each direction; all messages at "
        f"once would take more than {MEMORY_SHARE:.1%} of a rank's tensors, or would not be faster",
        "allgather": f"all messages at once take less than {MEMORY_SHARE:.1%} of a rank's tensors, and a rank waits once",
        "ulysses": "one dense segment: exchanging heads brings fewer bytes than rows",
    }
    model = f"least time by {LATENCY_S * 1e6:.0f} us a wait and {BYTES_PER_S / 1e9:.0f} GB/s"
    return f"{texts[work.transport]} ({model})"


def make_report(settings: PlanSettings, points: tuple[ScalePoint, ...] = ()) -> PlanReport:
    """Plan a call or a model. ``points`` are those of ``scale``."""
    work, backend = rank_work(settings), backend_of(settings)
    found = explained(settings.on(1))
    point = next((x for x in points if x.gpus == settings.gpus), None)
    warnings = list(found.warnings)
    if isinstance(settings.pattern, Dilated):
        warnings += pattern_warnings(settings.pattern, settings.tokens, settings.key_heads)
    warnings += scaling_warnings(points)
    if backend != "hopper" and settings.machine.forward_factor == 1.0:
        warnings.append(
            f"the time of backend {backend!r} on this GPU is an estimate from its data sheet: only the Hopper kernels were "
            "measured in detail, on an H200"
        )
    return PlanReport(
        settings=settings,
        backend=backend,
        explanation=found,
        work=work,
        memory=memory_of(settings, work, backend),
        forward=attention_seconds(settings, work, backend, backward=False),
        backward=attention_seconds(settings, work, backend, backward=True) if settings.train else None,
        step=None if settings.model is None else model_seconds(settings, work, backend),
        longest=longest_tokens(settings) if point is None else point.longest,
        scaling=points,
        reason=transport_reason(settings, work),
        warnings=tuple(warnings),
    )
