"""What a benchmark measures, as plain values: problems, methods and rows of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.explain import explain
from dilated_attention_pytorch.measure import Spread
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated

SUITES = ("single", "ring", "sparse", "streaming", "peers")
DTYPES = ("float32", "bfloat16", "float16")
FORWARD, BOTH = "forward", "forward and backward"
_SMALL_TOKENS = 400  # of the small problem, which is not a multiple of segments or blocks


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """NATTEN's pattern in one dimension: the ``size`` nearest positions of the same residue modulo ``dilation``.

    A window that would reach beyond an end of the sequence is moved inside. Under causality a window ends at its own
    position.
    """

    size: int
    dilation: int

    def visible(self, rows: Tensor, tokens: int, is_causal: bool) -> Tensor:
        """Whether each row meets each position, (rows, tokens).

        >>> Neighborhood(3, 1).visible(torch.tensor([0, 2]), 5, False).int().tolist()
        [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
        """
        keys, own = torch.arange(tokens, device=rows.device), rows[:, None]
        residue, place, key_place = own % self.dilation, own // self.dilation, keys // self.dilation
        last = (tokens - 1 - residue) // self.dilation  # the last place of the residue
        first = place - self.size + 1 if is_causal else place - self.size // 2
        first = first if is_causal else torch.minimum(first.clamp(min=0), last - self.size + 1)
        inside = (key_place >= first) & (key_place < first + self.size)
        return inside & (keys % self.dilation == residue)


@dataclass(frozen=True, slots=True)
class BenchProblem:
    """Attention over the pairs of a pattern, of random tensors of one shape."""

    name: str
    pattern: Dilated | BlockSparse | Neighborhood
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = False
    batch: int = 1
    mixing_gradient: str = "exact"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of query, key and value."""
        return self.batch, self.tokens, self.heads, self.head_dim

    def tensors(self) -> list[Tensor]:
        """Query, key and value, which need gradients, and the gradient of the result. They are always the same."""
        generator = torch.Generator(self.device).manual_seed(0)
        made = [torch.randn(self.shape, generator=generator, dtype=self.dtype, device=self.device) for _ in range(4)]
        return [x.requires_grad_() for x in made[:3]] + made[3:]

    def flops(self) -> int:
        """Floating-point operations of a forward: 4 D for each pair that meets. A backward has 2.5 times as many."""
        if isinstance(self.pattern, Neighborhood):
            rows = torch.arange(self.tokens)
            chunks = torch.split(rows, max(1, 2**24 // self.tokens))
            pairs = sum(int(self.pattern.visible(x, self.tokens, self.is_causal).sum()) for x in chunks)
            return 4 * self.head_dim * self.batch * self.heads * pairs
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return explain(like, like, like, self.pattern, is_causal=self.is_causal, device="cpu").forward_flops

    def small(self) -> BenchProblem:
        """A problem of the same kind, type, heads and head size that the definition computes in moments."""
        tokens = min(_SMALL_TOKENS, self.tokens)
        pattern = self.pattern
        if isinstance(pattern, Dilated):
            factor = max(1, pattern.segment_lengths[-1] // tokens)
            lengths = tuple(max(w // factor, r, 8) for w, r in pattern.branches)
            pattern = replace(pattern, segment_lengths=lengths)
        elif isinstance(pattern, BlockSparse) and pattern.config is None:
            blocks = -(-tokens // pattern.block_size)
            mask = torch.ones(blocks, blocks, dtype=torch.bool).tril_() & (torch.arange(blocks) != 1)
            pattern = BlockSparse.custom(mask.to(self.device), block_size=pattern.block_size)
        elif isinstance(pattern, Neighborhood):
            pattern = replace(pattern, size=min(pattern.size, tokens // pattern.dilation // 2))
        return replace(self, pattern=pattern, tokens=tokens, batch=1)


@dataclass(frozen=True, slots=True)
class BenchMethod:
    """One way to compute a problem."""

    name: str
    problem: BenchProblem
    computes: str  # in words
    run: Callable[[BenchProblem, Tensor, Tensor, Tensor], Tensor]
    peer: bool = False  # of another library: an error is a reason, and not a failure
    backward: bool = True
    refused: str = ""  # why it cannot run
    # What is timed, if it is not ``run``: a function that makes a call from the tensors, and the tokens of a call.
    prepare: Callable[[Sequence[Tensor], BenchProblem], Callable[[], Any]] | None = None
    call_tokens: int | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """What is timed."""
        return (FORWARD, BOTH) if self.backward else (FORWARD,)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The figures of a method in one direction. Only a row that is ``measured`` or ``predicted`` has a time."""

    suite: str
    setting: str
    method: str
    direction: str
    computes: str
    status: str  # measured, predicted, wrong, failed or not run
    reason: str = ""
    tokens: int = 0  # of a call
    flops: int | None = None  # of a call
    time: Spread | None = None
    extra_bytes: int | None = None  # that a call allocates, its results included
    error: float | None = None  # the largest of rows (forward) and of gradients (backward)
    tolerance: float | None = None
    ranks: int = 1
    received_bytes: int | None = None  # of the rank that receives most
    planned_bytes: int | None = None  # the memory of a rank beyond its inputs, as the simulation says

    @property
    def key(self) -> tuple[str, str, str, str]:
        """By which rows of two runs are compared."""
        return self.suite, self.setting, self.method, self.direction

    @property
    def tflops(self) -> float | None:
        """The rate on the pairs that meet."""
        return self.flops / self.time.median / 1e12 if self.time is not None and self.flops is not None else None

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of tokens."""
        return self.tokens / self.time.median if self.time is not None else None

    def figures(self) -> dict[str, Any]:
        """All figures for JSON. Times are in seconds."""
        found = {name: value for name, value in asdict(self).items() if name != "time"}
        for name in ("median", "least", "most"):
            found[f"{name}_seconds"] = None if self.time is None else getattr(self.time, name)
        found["turns"] = 0 if self.time is None else self.time.turns
        return found | {"tflops": self.tflops, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is asked for. ``None`` stands for the default of a suite on the device."""

    device: torch.device
    dtype: torch.dtype
    tokens: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    is_causal: bool = False
    only: tuple[str, ...] = ()  # settings and methods; all if empty
    turns: int = 3
    seconds: float = 0.1  # counted time of a call in a turn

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "head_dim", "turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not 0 <= self.seconds <= 60:
            raise ValueError(f"--seconds must be from 0 to 60, got {self.seconds}")

    def problem(self, name: str, pattern: Dilated | BlockSparse, sizes: tuple[int, int, int]) -> BenchProblem:
        """A problem of the given tokens, heads and head size, unless others are asked for."""
        wanted = (self.tokens, self.heads, self.head_dim)
        tokens, heads, head_dim = (size if own is None else own for own, size in zip(wanted, sizes, strict=True))
        return BenchProblem(name, pattern, tokens, heads, head_dim, self.dtype, self.device, self.is_causal)

    def description(self) -> dict[str, Any]:
        """What two runs must have in common to be compared."""
        dtype = str(self.dtype).removeprefix("torch.")
        found = {name: getattr(self, name) for name in ("tokens", "heads", "head_dim", "is_causal")}
        return {"device": self.device.type, "dtype": dtype} | found
