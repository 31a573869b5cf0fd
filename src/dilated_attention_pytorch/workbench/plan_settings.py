"""What is planned: a call of attention or a model, on so many GPUs of one kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from dilated_attention_pytorch.hardware import Gpu, Link, find_gpu, find_link
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.patterns.blocks import BlockSparse
from dilated_attention_pytorch.patterns.dilated import Dilated

DTYPES = ("bfloat16", "float16", "float32", "float64")
LAYOUTS = ("contiguous", "zigzag")
TRANSPORTS = ("auto", "ring", "allgather", "ulysses")
MOST_GPUS = 4096
MOST_TOKENS = 2**40
MOST_HEADS = 2**10  # the time of a plan grows with the heads
# Block lists are counted block by block.
MOST_BLOCKS = 5 * 10**7


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one kind, the links inside a node and between nodes, and how the model of time is corrected for them."""

    gpu: Gpu = field(default_factory=lambda: find_gpu("h100"))
    gpus_per_node: int = 8
    between: Link = field(default_factory=lambda: find_link("ndr"))
    forward_factor: float = 1.0  # measured time of a forward over the predicted one
    backward_factor: float = 1.0

    @property
    def inside(self) -> Link:
        """The link between GPUs of a node."""
        return find_link(self.gpu.nvlink or self.gpu.pcie)

    @property
    def target(self) -> str:
        """How ``explain`` names the GPU."""
        major, minor = self.gpu.capability
        return f"cuda:{major}.{minor}" if major else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """A plan's question. Every field is checked.

    ``model`` is None for one call of attention. Else its layers are counted, and it has the pattern, the heads and the head
    size of these settings. ``tokens`` are those of a sample on all GPUs together.
    """

    tokens: int
    pattern: Dilated | BlockSparse
    heads: int = 32
    kv_heads: int | None = None
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    is_causal: bool = False
    train: bool = False
    gpus: int = 1
    machine: Machine = field(default_factory=Machine)
    layout: str = "contiguous"
    transport: str = "auto"
    model: LongNetConfig | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("tokens", MOST_TOKENS), ("heads", MOST_HEADS), ("head_dim", 2**12), ("batch", 2**20), ("gpus", MOST_GPUS),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most:,}, got {value!r}")
        if self.machine.gpus_per_node < 1:
            raise ValueError(f"a node has at least one GPU, got {self.machine.gpus_per_node}")
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads (grouped-query attention), got {self.heads} and {self.kv_heads}"
            )
        for name, known in (("dtype", DTYPES), ("layout", LAYOUTS), ("transport", TRANSPORTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.gpus > self.tokens:
            raise ValueError(f"every GPU needs a token: got {self.tokens:,} tokens for {self.gpus:,} GPUs")
        self._check_pattern()

    def _check_pattern(self) -> None:
        if isinstance(self.pattern, Dilated):
            self.pattern.check_key_heads(self.key_heads)
            return
        if self.gpus > 1 and self.pattern.is_adaptive:
            raise ValueError(
                "what GPUs send in an adaptive pattern follows from the content: plan one GPU, or another type"
            )
        config, blocks = self.pattern.config, -(-self.tokens // self.pattern.block_size)
        ratio = 1.0 if config is None else config.sparsity_ratio
        if blocks * blocks * ratio > MOST_BLOCKS:
            raise ValueError(
                f"block-sparse plans count at most {MOST_BLOCKS:,} blocks, got {blocks:,} x {blocks:,} with a ratio of "
                f"{ratio}; use fewer tokens, a smaller ratio or larger blocks"
            )

    @property
    def key_heads(self) -> int:
        """The number of key heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of query, key and value."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def on(self, gpus: int, tokens: int | None = None) -> PlanSettings:
        """The same on another number of GPUs, with another number of tokens if it is given."""
        return replace(self, gpus=gpus, tokens=self.tokens if tokens is None else tokens)
