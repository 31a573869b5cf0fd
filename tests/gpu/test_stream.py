"""A stream on a GPU: rows have the bits of the CPU's, results pass the check, and a run goes on from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import streaming_rows as rows_of
from dilated_attention_pytorch.streaming import Stream, StreamSettings, default_pattern

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_and_checksums_have_the_bits_of_the_cpu(dtype):
    first, seed = 2**29 - 5, 9
    expected, actual = (torch.empty(3000, 8, 64, dtype=dtype, device=device) for device in ("cpu", CUDA))
    for tensor in (rows_of.QUERY, rows_of.KEY, rows_of.VALUE):
        rows_of.fill_rows(expected, seed, tensor, first)
        rows_of.fill_rows(actual, seed, tensor, first)
        assert actual.cpu().equal(expected)
    found = (rows_of.checksum(x, rows_of.column_weights(seed, 512, x.device), seed, first) for x in (expected, actual))
    assert len(set(map(int, found))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_passes_its_check_and_goes_on_from_a_checkpoint(tmp_path, dtype):
    settings = StreamSettings(300_000, default_pattern(300_000), 8, 64, dtype, CUDA, chunk=40_000)
    whole = Stream(settings)
    points = list(whole.run())
    result = whole.result()
    assert len(result.checked) == 64
    assert not result.failed
    assert result.peak_bytes < 2**31
    stopped = Stream(settings)
    run = stopped.run()
    next(run)
    next(run)
    stopped.save(tmp_path / "state")
    again = Stream(settings)
    again.load(tmp_path / "state")
    list(again.run())
    assert again.result().checksum == result.checksum
    assert again.result().checked == result.checked
    assert points[-1].position == 300_000
