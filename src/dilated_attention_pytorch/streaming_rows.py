"""Random rows by a counter: every row of a stream can be made again from its position, with the same bits on each device.

A stream has the tensors ``QUERY``, ``KEY`` and ``VALUE`` (0, 1, 2) of H heads of size D. The number of an element is
``n = (position * H + head) * D + d``. It is made of byte ``n % 4`` of one 32-bit word, the lowest byte first. The counter
of the word is ``c = n // 4``. With M the 32-bit finaliser of MurmurHash3 and all sums modulo 2**32:

    s = M(M(seed mod 2**32) + seed // 2**32)      a = M(s + tensor)      b = M(a xor 0x9E3779B9)
    word = M(M(c mod 2**32 + a) xor (c // 2**32 + b))
    element = (2 * byte - 255) / 128

So an element is one of 256 values from -255 / 128 to 255 / 128, with mean 0 and standard deviation 1.155. All of them are
exact in bfloat16, float16, float32 and float64.

The checksum of results takes its weights from the same words, so that it depends on every bit and on where the bit is. The
bits of an element are a signed integer x. Its row has the weight ``word(ROW_WEIGHT, position) | 1``, its column the weight
``word(COLUMN_WEIGHT, head * D + d) | 1``. The checksum is the sum of ``row * column * x`` over all elements, modulo 2**64.
"""

from __future__ import annotations

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


def word(seed: int, tensor: int, counter: int) -> int:
    """The word of a counter.

    >>> hex(word(0, KEY, 2**40 + 5))
    '0x5aaa38f0'
    """
    a, b = word_keys(seed, tensor)
    found: int = mix(mix(counter + a) ^ ((counter >> 32) + b & _MASK))
    return found


def _signed(number: int) -> int:
    """The signed integer with the same 32 bits."""
    return (number & _MASK) - (number >> 31 << 32 & _MASK + 1)


def _mix_(x: Tensor) -> Tensor:
    """``mix`` in place for 32 bits in int32, which is several times as fast on a CPU as int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x.bitwise_xor_((x >> shift).bitwise_and_(_MASK >> shift)).mul_(_signed(factor))
    return x.bitwise_xor_((x >> 16).bitwise_and_(_MASK >> 16))


def words(seed: int, tensor: int, counters: Tensor) -> Tensor:
    """The words of counters (int64), as int32 with the same bits."""
    a, b = word_keys(seed, tensor)
    high = (counters >> 32).to(torch.int32).add_(_signed(b))
    return _mix_(_mix_((counters + a).to(torch.int32)).bitwise_xor_(high))


def _elements(found: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of words: (..., words) becomes (..., 4 * words). Every step is exact."""
    return found.view(torch.uint8).to(dtype).sub_(127.5).div_(64)


def head_rows(seed: int, tensor: int, positions: Tensor, head: int, shape: tuple[int, int]) -> Tensor:
    """The rows of one head at any positions, (n, D) in float64; ``shape`` is (H, D)."""
    heads, d = shape
    index = ((positions * heads + head) * d).unsqueeze(-1) + torch.arange(d, device=positions.device)
    if d % 4 == 0:  # each word is made once
        return _elements(words(seed, tensor, index[:, ::4] >> 2), torch.float64)
    four = _elements(words(seed, tensor, index >> 2).unsqueeze(-1), torch.float64)
    return four.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def fill_rows(out: Tensor, seed: int, tensor: int, first: int) -> None:
    """Write the rows from position ``first`` on to ``out`` (n, H, D), which is contiguous, with H * D a multiple of 4."""
    counter, count = first * out[0].numel() // 4, out.numel() // 4
    if out.is_cuda:
        from dilated_attention_pytorch.backends.gpu.random_rows import fill_words

        fill_words(out, counter, word_keys(seed, tensor))
        return
    index = torch.arange(counter, counter + count, device=out.device)
    out.view(-1).copy_(_elements(words(seed, tensor, index), out.dtype))


def _weights(seed: int, tensor: int, counters: Tensor) -> Tensor:
    return words(seed, tensor, counters).long().bitwise_and_(_MASK).bitwise_or_(1)


def column_weights(seed: int, columns: int, device: torch.device) -> Tensor:
    """The weights of the columns of a row in the checksum, (columns,) int64."""
    return _weights(seed, COLUMN_WEIGHT, torch.arange(columns, device=device))


def checksum(out: Tensor, columns: Tensor, seed: int, first: int) -> Tensor:
    """The checksum of the results ``out`` (n, H, D) of the rows from position ``first`` on, () int64."""
    bits = out.reshape(len(out), -1).view(_BITS[out.element_size()])
    if out.is_cuda:
        from dilated_attention_pytorch.backends.gpu.random_rows import sum_rows

        return sum_rows(bits, columns, first, word_keys(seed, ROW_WEIGHT))
    rows = _weights(seed, ROW_WEIGHT, torch.arange(first, first + len(out), device=out.device))
    return ((bits * columns).sum(-1) * rows).sum()
