"""What a training run does, as plain values. Two runs with equal settings and data have equal losses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.checks import as_number
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training.files import KINDS

DTYPES = ("float32", "bfloat16")
# What may change between two starts of a run: it does not change the losses, except by rounding.
_FREE = ("every", "keep", "sequence_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Every setting of a run. Counts of windows are those of all ranks together.

    NumPy's numbers are converted to Python's, and paths to strings.
    """

    model: LongNetConfig
    context: int
    steps: int
    data: tuple[str, ...] = ()  # files and folders; none stands for the sources of the standard library
    kind: str = "auto"  # of tokens: "bytes", "bases" of FASTA files, or "auto", which decides by the names
    batch: int = 1  # windows of a step
    accumulate: int = 1  # forwards and backwards of a step, each with an equal share of the batch
    learning_rate: float = 1e-3
    last_rate: float = 0.1  # the learning rate of the last step, as a share of the largest
    warm_up: int = 20  # steps in which the learning rate grows
    weight_decay: float = 0.1  # of parameters with two dimensions or more
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # the largest norm of the gradients
    seed: int = 0
    held_out: float = 0.05  # the share of the tokens, at the end, that is only evaluated
    evaluate_every: int = 100  # steps; the last step is always evaluated
    evaluate_windows: int = 4
    dtype: str = "float32"  # of autocast
    sequence_ranks: int = 1  # over which each window is sharded; the batch is distributed over the others
    every: int = 100  # steps between two checkpoints
    keep: int = 2  # checkpoints

    def __post_init__(self) -> None:
        for name in ("context", "steps", "batch", "accumulate", "evaluate_every", "sequence_ranks", "every", "keep"):
            self._store(name, as_integer(name, getattr(self, name), 1))
        for name in ("warm_up", "evaluate_windows"):
            self._store(name, as_integer(name, getattr(self, name), 0))
        self._store("seed", as_integer("seed", self.seed))
        self._store("data", _paths(self.data))
        if not isinstance(self.model, LongNetConfig):
            raise TypeError(
                f"model must be a LongNetConfig, got {type(self.model).__name__}; write LongNetConfig.preset(...)"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        for name, low, high in (
            ("learning_rate", 0.0, math.inf), ("last_rate", 0.0, 1.0), ("weight_decay", 0.0, math.inf),
            ("clip", 0.0, math.inf), ("held_out", 0.0, 0.5),
        ):  # fmt: skip
            self._store(name, _number(name, getattr(self, name)))
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {getattr(self, name)}")
        if self.clip == 0.0:
            raise ValueError("clip must be greater than 0, got 0.0; use a large number to clip nothing")
        if isinstance(self.betas, str) or not isinstance(self.betas, Iterable):
            raise TypeError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}")
        self._store("betas", tuple(_number("betas", beta) for beta in self.betas))
        if not all(0.0 <= beta < 1.0 for beta in self.betas) or len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch must be a multiple of accumulate, got {self.batch} and {self.accumulate}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kind not in ("auto", *KINDS):
            raise ValueError(f"kind must be one of auto, {', '.join(KINDS)}, got {self.kind!r}")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0 on: it grows in the warm-up, and then falls along a cosine.

        The warm-up has at most half of the steps.
        """
        warm_up = min(self.warm_up, self.steps // 2)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - 1 - warm_up)
        return self.learning_rate * (self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * done)))

    def description(self) -> dict[str, Any]:
        """What decides about the losses, as values for JSON."""
        found = {name: value for name, value in asdict(self).items() if name not in (*_FREE, "model")}
        model = {name: value for name, value in self.model.to_dict().items() if name != "checkpoint_layers"}
        return found | {"model": model, "data": list(self.data), "betas": list(self.betas)}

    def compare(self, earlier: dict[str, Any], folder: str) -> None:
        """Raise a ValueError if a run with other settings is in ``folder``."""
        own = self.description()
        different = [
            f"{name} {earlier.get(name)!r} instead of {own.get(name)!r}"
            for name in {**own, **earlier}
            if earlier.get(name) != own.get(name)
        ]
        if different:
            raise ValueError(
                f"{folder} holds a run with other settings: {', '.join(different)}; use the settings of that run, or "
                "another folder"
            )


def _number(name: str, value: Any) -> float:
    """A finite number as Python's float."""
    number = None if isinstance(value, bool) else as_number(name, value)
    if number is None:
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(number)


def _paths(data: Any) -> tuple[str, ...]:
    """Files and folders as strings."""
    if isinstance(data, str | Path) or not isinstance(data, Iterable):
        raise TypeError(f"data must be a tuple of files and folders, got {data!r}; write data=({str(data)!r},)")
    paths = tuple(data)
    for path in paths:
        if not isinstance(path, str | Path):
            raise TypeError(f"data must be a tuple of files and folders, got {path!r} in it")
    return tuple(map(str, paths))
