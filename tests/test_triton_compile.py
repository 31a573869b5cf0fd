"""The tuned configurations compiled for sm_90, without a GPU: tensor cores, wide copies, shared memory, spills."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilated_attention_pytorch.backends.triton.configs import _HOPPER

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
SHARED_LIMIT = 232_448  # bytes per block on sm_90


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_half_precision_kernels(kernel, head_dim):
    config = getattr(_HOPPER[2, head_dim], kernel)
    arguments = [kernel, 2, head_dim, config.block_m, config.block_n, config.warps, config.stages]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_sm90.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, json.dumps([arguments])],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    used = json.loads(done.stdout)
    assert used["tensor_cores"]
    assert used["wide_copies"]
    assert used["shared_bytes"] <= SHARED_LIMIT
    if kernel != "dkv":  # dk and dv together still spill a little: docs/kernels.md
        assert used["spilled_bytes"] == 0
