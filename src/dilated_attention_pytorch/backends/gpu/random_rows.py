"""Launches of the kernels that make the random rows of a stream and the checksum of its results.

Tensors are on the current device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.backends.gpu.kernels.random_rows import fill_kernel, sum_kernel
from dilated_attention_pytorch.backends.gpu.launch import FUSED

_WORDS = 1024  # of a program
_ELEMENTS = 8192  # of a program of the checksum


def _numbers(counter: int, keys: tuple[int, int]) -> tuple[int, ...]:
    """A counter as two numbers, and the two 32-bit words as signed ones."""
    return counter >> 24, counter & (1 << 24) - 1, *(key - (key >> 31 << 32) for key in keys)


def fill_words(out: Tensor, counter: int, keys: tuple[int, int]) -> None:
    """Write the elements of the words from ``counter`` on to a contiguous tensor."""
    count = out.numel() // 4
    fill_kernel[(-(-count // _WORDS),)](out, *_numbers(counter, keys), count, BLOCK=_WORDS, **FUSED)


def sum_rows(bits: Tensor, columns: Tensor, first: int, keys: tuple[int, int]) -> Tensor:
    """The weighted sum of integers (rows, width), of which the first row has the position ``first``."""
    bits = bits.contiguous()
    rows, width = bits.shape
    padded = 1 << (width - 1).bit_length()
    block = max(1, _ELEMENTS // padded)
    sums = torch.empty(-(-rows // block), dtype=torch.int64, device=bits.device)
    numbers, constants = _numbers(first, keys), {"ROWS": block, "WIDTH": width, "PADDED": padded}
    sum_kernel[(len(sums),)](bits, columns, sums, *numbers, rows, **constants, **FUSED)
    return sums.sum()
