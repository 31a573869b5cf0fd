"""The bits of a sample do not depend on what other samples of the batch hold, in the Hopper kernels on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, attention
from neighbours import check_bits_of_a_sample

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton's interpreter is off"),
    pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning"),  # of NumPy
]
PATTERNS = {
    "parts": Dilated([64, 150, 300], [1, 2, 3]),
    "one branch": Dilated([300], [1]),
    "blocks": BlockSparse.custom(torch.ones(3, 3, dtype=torch.bool).tril(), block_size=128),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_bits_of_a_sample_are_its_own(name, monkeypatch):
    """Two programs take items of all samples. What makes one come again must not show in other samples."""
    import gluon_on_cpu

    gluon_on_cpu.installed(monkeypatch, programs=2, element="bfloat16")
    check_bits_of_a_sample(
        lambda *x: attention(*x, PATTERNS[name], backend="hopper", return_lse=True), n=300, heads=2, head_dim=64
    )
