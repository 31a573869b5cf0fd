"""How the next token follows from logits: greedy, or drawn, with top-k, top-p and a repetition penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilated_attention_pytorch.checks import as_number
from dilated_attention_pytorch.integers import as_integer

# Temperatures and penalties outside count as these, because float32 holds neither 1e-300 nor 1e300.
_LEAST, _MOST = 1e-30, 1e30


class SamplingOptions(TypedDict, total=False):
    """The arguments of ``Sampling``."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The steps are in the order of the fields, except that the penalty is the first one.

    Args:
        temperature: divides the logits; None or 0 takes the most probable token (greedy).
        top_k: keep the ``top_k`` most probable tokens, and those of the same probability as the last of them.
        top_p: then keep the fewest tokens, the most probable ones, whose probabilities sum to at least ``top_p``. Of tokens
            of the same probability, the smaller id comes first.
        repetition_penalty: divides positive logits and multiplies negative ones of tokens that have occurred. It applies
            to greedy decoding as well.

    >>> Sampling(top_k=2, temperature=0.5).probabilities(torch.tensor([[1.0, 3.0, 2.0]]), None)
    tensor([[0.0000, 0.8808, 0.1192]])
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        temperature = self._number("temperature")
        if temperature is not None and temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}; 0 or None takes the most probable token")
        if self.top_k is not None:
            object.__setattr__(self, "top_k", as_integer("top_k", self.top_k, 1))
        top_p = self._number("top_p")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is a sum of probabilities, 0 < top_p <= 1, got {top_p}; None keeps all tokens")
        penalty = self._number("repetition_penalty")
        if penalty is not None and penalty <= 0:
            raise ValueError(
                f"repetition_penalty must be positive, got {penalty}; values above 1 make repetition less likely"
            )
        given = [name for name in ("top_k", "top_p") if getattr(self, name) is not None]
        if self.is_greedy and given:
            raise ValueError(
                f"{' and '.join(given)} select among the tokens that can be drawn, but temperature={self.temperature} "
                "takes the most probable token; pass a temperature, for example 1.0, or leave them out"
            )

    def _number(self, name: str) -> float | None:
        value: Any = getattr(self, name)
        number = as_number(name, value)
        if isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r}")
        object.__setattr__(self, name, None if number is None else float(number))
        return number

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return not self.temperature

    def choose(self, logits: Tensor, occurred: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """The next tokens (B,) from logits (B, vocabulary), on the device and without reading a value.

        ``occurred`` is a mask (B, vocabulary) for the penalty. A token is drawn as ``argmax(p / e)`` with exponentially
        distributed ``e`` (B, vocabulary) of the generator. ``torch.multinomial`` draws the same tokens, but reads a value.
        """
        if self.is_greedy:
            return self._penalised(logits, occurred).argmax(-1)
        probabilities = self.probabilities(logits, occurred)
        noise = torch.empty_like(probabilities).exponential_(1.0, generator=generator)
        return (probabilities / noise.clamp_(min=torch.finfo(noise.dtype).tiny)).argmax(-1)

    def probabilities(self, logits: Tensor, occurred: Tensor | None) -> Tensor:
        """The probabilities (B, vocabulary) with which tokens are drawn, float32 or float64."""
        if not self.temperature:
            raise ValueError(f"temperature={self.temperature} takes the most probable token; pass a temperature above 0")
        logits = self._penalised(logits, occurred)
        scores = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, _LEAST)  # finite for small temperatures
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1]), -1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        probabilities = scores.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return probabilities
        ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # of more probable tokens; exactly 0 for the first
        late = before >= self.top_p
        dropped = torch.empty_like(late).scatter_(-1, index, late)
        return scores.masked_fill(dropped, -torch.inf).softmax(-1)

    def _penalised(self, logits: Tensor, occurred: Tensor | None) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        penalty = self.repetition_penalty
        if penalty is None or occurred is None:
            return logits
        penalty = min(max(penalty, _LEAST), _MOST)
        return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
