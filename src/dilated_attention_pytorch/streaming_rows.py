"""Random rows by a counter: every row of a stream can be made again from its position, with the same bits on each device.

A stream has the tensors ``QUERY``, ``KEY`` and ``VALUE`` of H heads of size D. Element ``n = (position * H + head) * D + d``
of a tensor is made of byte ``n % 4`` of one 32-bit word, the lowest byte first. The counter of the word is ``c = n // 4``.
With M the 32-bit finaliser of MurmurHash3 and all sums modulo 2**32:

    s = M(M(seed mod 2**32) + seed // 2**32)      a = M(s + tensor)      b = M(a xor 0x9E3779B9)
    word = M(M(c mod 2**32 + a) xor (c // 2**32 + b))
    element = (2 * byte - 255) / 128

So an element is one of 256 values from -255 / 128 to 255 / 128, with mean 0 and standard deviation 1.155. All of them are
exact in bfloat16, float16, float32 and float64.

The checksum of results takes its weights from the same words, so that it depends on every bit and on where the bit is. The
bits of an element are a signed integer x. With ``row = word(ROW_WEIGHT, position) | 1`` and
``column = word(COLUMN_WEIGHT, head * D + d) | 1``, it is the sum of ``row * column * x`` over all elements, modulo 2**64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.dropout import mix

QUERY, KEY, VALUE, ROW_WEIGHT, COLUMN_WEIGHT, CHOICE = range(6)
_MASK = 0xFFFFFFFF
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by their size


def word_keys(seed: int, tensor: int) -> tuple[int, int]:
    """The words a and b of a tensor."""
    a = mix(mix(mix(seed) + (seed >> 32)) + tensor)
    return a, mix(a ^ 0x9E3779B9)


def words(seed: int, tensor: int, counter: Any) -> Any:
    """The words of counters, which are an integer or an int64 tensor.

    >>> hex(words(0, KEY, 2**40 + 5)), words(0, KEY, torch.tensor([2**40 + 5])).item() == words(0, KEY, 2**40 + 5)
    ('0x3ebc8d72', True)
    """
    a, b = word_keys(seed, tensor)
    return mix(mix(counter + a) ^ ((counter >> 32) + b & _MASK))


def _elements(found: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of words: (..., words) becomes (..., 4 * words)."""
    shifts = torch.arange(0, 32, 8, device=found.device)
    small = (found.unsqueeze(-1) >> shifts & 255).to(torch.int16).flatten(-2)
    return (small * 2 - 255).to(dtype) / 128


def head_rows(seed: int, tensor: int, positions: Tensor, head: int, shape: tuple[int, int]) -> Tensor:
    """The rows of one head at any positions, (n, D) in float64; ``shape`` is (H, D)."""
    heads, d = shape
    first = (positions * heads + head) * d  # the number of the first element
    index = first.unsqueeze(-1) + torch.arange(d, device=positions.device)
    if d % 4 == 0:  # each word is made once
        return _elements(words(seed, tensor, index[:, ::4] >> 2), torch.float64)
    found = words(seed, tensor, index >> 2) >> 8 * (index & 3) & 255
    return (found * 2 - 255).double() / 128


def fill_rows(out: Tensor, seed: int, tensor: int, first: int) -> None:
    """Write the rows from position ``first`` on to ``out`` (n, H, D), which is contiguous, with H * D a multiple of 4."""
    counter, count = first * out[0].numel() // 4, out.numel() // 4
    if out.is_cuda:
        from dilated_attention_pytorch.backends.gpu.random_rows import fill_words

        fill_words(out, counter, word_keys(seed, tensor))
        return
    index = torch.arange(counter, counter + count, device=out.device)
    out.view(-1).copy_(_elements(words(seed, tensor, index), out.dtype))


def column_weights(seed: int, columns: int, device: torch.device) -> Tensor:
    """The weights of the columns of a row in the checksum, (columns,) int64."""
    weights: Tensor = words(seed, COLUMN_WEIGHT, torch.arange(columns, device=device)) | 1
    return weights


def checksum(out: Tensor, columns: Tensor, seed: int, first: int) -> Tensor:
    """The checksum of the results ``out`` (n, H, D) of the rows from position ``first`` on, () int64."""
    bits = out.reshape(len(out), -1).view(_BITS[out.element_size()])
    if out.is_cuda:
        from dilated_attention_pytorch.backends.gpu.random_rows import sum_rows

        return sum_rows(bits, columns, first, word_keys(seed, ROW_WEIGHT))
    rows = words(seed, ROW_WEIGHT, torch.arange(first, first + len(out), device=out.device)) | 1
    total: Tensor = ((bits * columns).sum(-1) * rows).sum()
    return total
