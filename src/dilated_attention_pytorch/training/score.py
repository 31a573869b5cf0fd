"""Log-probabilities of a whole file in one pass through the caches of a decoder, in bounded memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.training.checkpoint import Checkpoints
from dilated_attention_pytorch.training.data import Corpus
from dilated_attention_pytorch.training.files import kind_of


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LongNetDecoder:
    """The decoder in a folder: of ``save_pretrained``, or the last checkpoint of a training run."""
    if (folder / "config.json").exists():
        return LongNetDecoder.from_pretrained(folder).to(device=device, dtype=dtype).eval()
    checkpoints, step = _last_step(folder)
    config = LongNetConfig.from_dict(checkpoints.state(step)["settings"]["model"])
    model = LongNetDecoder(config, device=device)
    checkpoints.load(step, {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, together=False)
    return model.to(dtype).eval()


def trained_kind(folder: Path) -> str | None:
    """The kind of tokens that the run in a folder was trained on. None for a folder of ``save_pretrained``."""
    if (folder / "config.json").exists():
        return None
    checkpoints, step = _last_step(folder)
    state = checkpoints.state(step)
    kind = str(state["settings"]["kind"])
    return kind_of([Path(name) for name in state["data"]]) if kind == "auto" else kind


def _last_step(folder: Path) -> tuple[Checkpoints, int]:
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    steps = checkpoints.steps()
    if not steps:
        raise FileNotFoundError(f"{folder} holds no model: neither config.json nor a complete folder in checkpoints/")
    return checkpoints, steps[-1]


def log_probabilities(model: LongNetDecoder, corpus: Corpus, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """The log-probability of each token given those before it, chunk by chunk: (first token, float32 values in nats).

    The first token of the data has no prediction, so that values begin at token 1. The first token of a document is NaN.
    """
    tokens = (corpus.read(first, min(first + chunk, len(corpus))) for first in range(0, len(corpus), chunk))
    first, starts = 1, corpus.documents
    for values in model.score(tokens):
        own = starts[bisect_left(starts, first) : bisect_left(starts, first + len(values))]
        on_host = values.float().cpu()
        on_host[[start - first for start in own]] = math.nan
        yield first, on_host
        first += len(values)


class ScoreBins:
    """Bits per token of a file: over all tokens, and over equal ranges of positions. NaN values do not count."""

    def __init__(self, length: int, bins: int) -> None:
        self.length, self.bins = length, min(bins, length)
        self._sums = torch.zeros(self.bins, dtype=torch.float64, device="cpu")
        self._counts = torch.zeros(self.bins, dtype=torch.float64, device="cpu")

    def add(self, first: int, values: Tensor) -> None:
        """Add the log-probabilities, in nats, of the tokens from ``first`` on."""
        index = torch.arange(first, first + len(values), device="cpu") * self.bins // self.length
        counted = ~values.isnan()
        self._sums.index_add_(0, index[counted], values[counted].double() / -math.log(2))
        self._counts.index_add_(0, index, counted.double())

    @property
    def tokens(self) -> int:
        """The number of tokens that count."""
        return int(self._counts.sum())

    @property
    def bits(self) -> float:
        """The mean over all tokens."""
        return float(self._sums.sum() / self._counts.sum())

    @property
    def positions(self) -> list[float]:
        """The middle of each range."""
        return [(i + 0.5) * self.length / self.bins for i in range(self.bins)]

    @property
    def means(self) -> list[float | None]:
        """The mean of each range; None if nothing in it counts."""
        pairs = zip(self._sums.tolist(), self._counts.tolist(), strict=True)
        return [total / count if count else None for total, count in pairs]
