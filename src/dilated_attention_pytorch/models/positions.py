"""Rotary positions and xPos. Everything is computed from integer positions in the forward: modules have no buffers.

A buffer that is computed in a constructor has no values if the module is made on the meta device and then loaded.

Angles are computed in float64. In float32, integers above 2**24 are not exact, and angles at position 1,000,000 are wrong
by up to 0.02.

xPos multiplies the score of a pair by ``scale ** ((i - j) / base)``. This is a factor of the query times a factor of the
key. The authors' code counts the exponents of both from the middle of the sequence. Its factors overflow in float32 above
72,000 positions. Here they are counted from the middle of a *window* of positions. The size of a window is the least common
multiple of the segment lengths. Two positions that meet are therefore in the same window, and the origin cancels. The
result is that of the authors' formula at any length of the sequence.

The bound: a window can have at most 32,768 positions (4,096 in float16). Over longer distances, the factors themselves are
not in the range of float32. A pattern with a larger window is served for sequences of at most that many positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.models.config import LongNetConfig

XPOS_WINDOW = 32768  # scale ** (window / base) = exp(80) for a pair that causality hides, below the 3e38 of float32
XPOS_WINDOW_FLOAT16 = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What turns the queries and keys of all layers of a call. Tensors are (1 or B, N, 1, D / 2)."""

    cos: Tensor
    sin: Tensor
    decay: Tensor | None = None  # the factor of queries; keys have its inverse

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rotation:
        """The same rotation on this device."""
        cos, sin = (x.to(device, non_blocking=non_blocking) for x in (self.cos, self.sin))
        return Rotation(cos, sin, None if self.decay is None else self.decay.to(device, non_blocking=non_blocking))

    def query(self, x: Tensor) -> Tensor:
        """The queries (B, N, H, D) at their positions."""
        return self._turn(x, self.decay)

    def key(self, x: Tensor) -> Tensor:
        """The keys (B, N, G, D) at their positions."""
        return self._turn(x, None if self.decay is None else 1 / self.decay)

    def _turn(self, x: Tensor, decay: Tensor | None) -> Tensor:
        cos, sin = (self.cos, self.sin) if decay is None else (self.cos * decay, self.sin * decay)
        pairs = x.to(cos.dtype).view(*x.shape[:-1], x.shape[-1] // 2, 2)
        first, second = pairs.unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.flatten(-2).to(x.dtype)


def rotation(config: LongNetConfig, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
    """The rotation for integer positions (N,) or (B, N) and for queries of this dtype; None without positions.

    >>> config = LongNetConfig.preset("tiny")
    >>> q, k = torch.randn(2, 1, 1, 4, 16, dtype=torch.float64).unbind(0)
    >>> early, late = (rotation(config, torch.tensor([i]), q.dtype) for i in (0, 100_000_000))
    >>> later = rotation(config, torch.tensor([100_000_003]), q.dtype), rotation(config, torch.tensor([3]), q.dtype)
    >>> far, near = (later[0].query(q) * late.key(k)).sum(-1), (later[1].query(q) * early.key(k)).sum(-1)
    >>> torch.testing.assert_close(far, near)
    """
    if config.positions == "none":
        return None
    own = torch.float64 if dtype == torch.float64 else torch.float32
    where = positions.unsqueeze(0) if positions.dim() == 1 else positions
    where = where[..., None, None]
    half = config.head_dim // 2
    pairs = torch.arange(half, device=positions.device, dtype=torch.float64)
    angles = where * config.rotary_base ** (-pairs / half)
    cos, sin = angles.cos().to(own), angles.sin().to(own)
    if config.positions == "rotary":
        return Rotation(cos, sin)
    scale = (2 * pairs + 0.4 * config.head_dim) / (1.4 * config.head_dim)
    window = min(xpos_window(config), _most(config, dtype))
    exponents = (where % window - window // 2).double() / config.xpos_scale_base
    return Rotation(cos, sin, (scale**exponents).to(own))


def xpos_window(config: LongNetConfig) -> int:
    """The positions of a window: every segment of the pattern lies inside one."""
    return math.lcm(*config.segment_lengths)


def check_xpos(config: LongNetConfig, length: int | None, dtype: torch.dtype) -> None:
    """Raise if xPos cannot be computed for sequences of this length, or of any length if None."""
    if config.positions != "xpos":
        return
    most, window = _most(config, dtype), xpos_window(config)
    if window > most and (length is None or length > most):
        got = "any number of" if length is None else f"{length:,}"
        raise ValueError(
            f"xPos in {dtype} covers {most:,} positions that can meet: got {got} positions and segment lengths "
            f"{config.segment_lengths} with the least common multiple {window:,}; use segment lengths with one of at most "
            f"{most:,}, positions='rotary', or shorter sequences (max_tokens of new_caches, max_new_tokens of stream)"
        )


def _most(config: LongNetConfig, dtype: torch.dtype) -> int:
    """The largest window whose factors the dtype can hold."""
    most = XPOS_WINDOW_FLOAT16 if dtype == torch.float16 else XPOS_WINDOW
    return max(1, int(most * config.xpos_scale_base / 512))
