"""What the Hopper kernels over both kinds of tables share: launches of persistent programs, and their inputs.

A persistent program stays on its multiprocessor and computes several items. It makes descriptors in memory of its own.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.backends.gpu import portable
from dilated_attention_pytorch.backends.gpu.portable import RowStatistics, Strides, padded
from dilated_attention_pytorch.backends.hopper.configs import HopperConfig
from dilated_attention_pytorch.execute.loop import positive_scale
from dilated_attention_pytorch.values import Saved

_REGISTERS = 65_536  # of a multiprocessor
# Of a program, for descriptors of 128 bytes. The joint kernel has two for each of five tensors and one for the sums of dq.
# The forward has two for each of three tensors in each of two passes.
_SCRATCH_BYTES = 1536


class GradientInputs(NamedTuple):
    """The tensors of rows that gradient kernels read."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor

    @property
    def strides(self) -> Strides:
        """Of each tensor."""
        return self.query.stride(), self.key.stride(), self.value.stride(), self.dout.stride()


def with_scratch(call: Callable[[], None], programs: int, device: torch.device) -> None:
    """Launch kernels of so many programs in total that make descriptors. The allocator of other code does not change."""
    # All memory is allocated before the first launch, which waits for the former users of it. Each launch has its own,
    # because the programs of the next launch begin before the last of this one are done.
    memory = torch.empty(programs * _SCRATCH_BYTES, dtype=torch.int8, device=device)
    left = memory.numel()

    def scratch(size: int, alignment: int, stream: int | None) -> int:
        nonlocal left
        left -= size
        assert left >= 0, "a kernel makes more descriptors than expected"
        return memory.data_ptr() + left

    def inside() -> None:
        triton.set_allocator(scratch)
        call()

    contextvars.copy_context().run(inside)


def constants(config: HopperConfig, head_dim: int) -> dict[str, Any]:
    """The constants of all Hopper kernels."""
    fixed = {"D": head_dim, "BLOCK_D": padded(head_dim), "STAGES": config.stages, "HELD": config.held}
    return fixed | {"num_warps": 4, "maxnreg": start_registers(config)}


def start_registers(config: HopperConfig) -> int:
    """Registers of a thread when a program starts. Its groups of warps then exchange some."""
    # Two groups that compute 64 rows each, further ones, and one for the warps that load and look ahead.
    warps = config.programs * 4 * (2 + config.helpers + 1)
    return _REGISTERS // (32 * warps) // 8 * 8


def aligned(x: Tensor) -> Tensor:
    """The same tensor with rows at multiples of 16 bytes, as the tensor memory accelerator reads them; it may be a copy."""
    stride_b, stride_n, stride_h, _ = x.stride()
    # 16 is a power of 2: it divides all of them if it divides the bits that any of them has.
    fits = (x.data_ptr() | (stride_b | stride_n | stride_h) * x.element_size()) % 16 == 0 and stride_n > 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # contiguous() may return x itself


def nonzero_scale(scale: float) -> float:
    """A scale to divide lse by. Scores with a smaller scale are 0 to the precision of lse."""
    return math.copysign(max(abs(scale), 1e-30), scale)


def scaled_query(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale: forward kernels mask scores before they scale them."""
    # A scale that float32 cannot hold is 0.
    query, scale, _ = positive_scale(query, scale if abs(scale) > torch.finfo(torch.float32).tiny else 0.0)
    return query, scale


def row_statistics(saved: Saved, scale: float) -> RowStatistics:
    """lse, delta, and both as (B, H, N, 16) bfloat16 shifts (kernels/dkv.py)."""
    shifts = torch.empty((*saved.lse.shape, 16), dtype=torch.bfloat16, device=saved.lse.device)
    return portable.row_statistics(saved, shifts, 1 / nonzero_scale(scale))
