"""The kernels of a stream against stock operators: the same bits."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dilated_attention_pytorch import streaming_rows as rows_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**35 - 7])
def test_rows_have_the_same_bits(first, dtype):
    """The last start has counters on both sides of a multiple of 2**32, and all have more words than one program."""
    from dilated_attention_pytorch.backends.gpu.random_rows import fill_words

    shape, seed = (300, 2, 8), 2**50 + 1
    expected, actual = (torch.full(shape, torch.nan, dtype=dtype, device=x) for x in ("cpu", DEVICE))
    for tensor in (rows_of.QUERY, rows_of.KEY, rows_of.VALUE):
        rows_of.fill_rows(expected, seed, tensor, first)
        fill_words(actual, first * 16 // 4, rows_of.word_keys(seed, tensor))
        assert actual.cpu().equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [12, 64])
def test_checksums_are_equal(width, dtype):
    from dilated_attention_pytorch.backends.gpu.random_rows import sum_rows

    out, seed, first = torch.randn(1100, 1, width).to(dtype), 5, 2**33 - 9
    columns = rows_of.column_weights(seed, width, torch.device("cpu"))
    expected = rows_of.checksum(out, columns, seed, first)
    bits = out[:, 0].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[out.element_size()]).to(DEVICE)
    assert int(sum_rows(bits, columns.to(DEVICE), first, rows_of.word_keys(seed, rows_of.ROW_WEIGHT))) == int(expected)


@pytest.mark.parametrize("counter", [0, 1, 2**24 - 1, 2**24, 2**31, 2**40 + 3, 2**54])
def test_numbers_have_the_same_type_at_every_position(counter):
    """Otherwise Triton would compile another kernel in the middle of a stream."""
    from dilated_attention_pytorch.backends.gpu.random_rows import _numbers

    keys = rows_of.word_keys(counter, 1)
    high, low, *words = numbers = _numbers(counter, keys)
    assert all(-(2**31) <= x < 2**31 for x in numbers)
    assert high * 2**24 + low == counter
    assert tuple(x % 2**32 for x in words) == keys
