"""What ``auto`` takes on GPUs that this machine does not have: by type, head size, pattern and capability."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import Dilated, backends, explain
from dilated_attention_pytorch.backends.request import Request

HOPPER = Request("cuda", (9, 0), torch.bfloat16, 64)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")


@needs_triton
@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "hopper"),
        ({"head_dim": 192}, "triton"),
        ({"head_dim": 60}, "triton"),
        ({"dropout_p": 0.1}, "triton"),
        ({"masks_by_position": True}, "hopper"),
        ({"masks_by_position": True, "head_dim": 192}, "triton"),
        ({"capability": (8, 0)}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        # The Triton kernels have no tuned gradients there; PyTorch's operators have no dropout and no masks by position.
        ({"dtype": torch.float32, "head_dim": 136}, "sdpa"),
        ({"dtype": torch.float32, "head_dim": 136, "dropout_p": 0.1}, "triton"),
        ({"dtype": torch.float32, "head_dim": 136, "masks_by_position": True}, "triton"),
        ({"dtype": torch.float64}, "eager"),
        ({"block_size": 128}, "hopper"),
        ({"block_size": 64}, "triton"),
        ({"block_size": 128, "square": False}, "triton"),
        ({"block_size": 128, "masks_by_position": True}, "eager"),
        ({"device": "xpu", "capability": (0, 0)}, "eager"),
    ],
)
def test_what_auto_takes(changes, chosen):
    assert backends.choose("auto", replace(HOPPER, **changes)).name == chosen


def test_a_backend_by_name_gives_all_its_reasons():
    request = Request("cuda", (8, 0), torch.float32, 20, dropout_p=0.5, block_size=64, square=False)
    with pytest.raises(ValueError) as raised:
        backends.choose("hopper", request)
    reasons = str(raised.value).splitlines()[1:]
    assert len(reasons) >= 6
    assert all(line.startswith("  hopper: ") for line in reasons)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "chosen", "kernel", "reasons"),
    [
        ((6, 1), torch.float16, 64, "sdpa", "memory-efficient", ("triton: Triton kernels need compute capability 8.0",)),
        ((6, 1), torch.float32, 64, "sdpa", "memory-efficient", ("this GPU has (6, 1)",)),
        (
            (7, 5),
            torch.bfloat16,
            64,
            "eager",
            None,
            ("sdpa: memory-efficient takes bfloat16 from compute capability (8, 0) on",),
        ),
        (
            (6, 1),
            torch.float32,
            60,
            "eager",
            None,
            ("sdpa: memory-efficient takes head sizes up to 1024 in steps of 8, got 60",),
        ),
    ],
)
def test_gpus_without_triton(capability, dtype, head_dim, chosen, kernel, reasons):
    """Pascal to Turing: PyTorch's operators, or plain products, with the reasons; tensors of a GPU that is not here."""
    query = torch.empty(1, 512, 2, head_dim, dtype=dtype)
    text = str(explain(query, query, query, Dilated([64], [1]), device="cuda:{}.{}".format(*capability)))
    assert text.startswith(f"backend   {chosen}: {kernel or ''}")
    assert "not       hopper: " in text
    assert all(reason in text for reason in reasons)


@pytest.mark.parametrize(("capability", "head_dim", "name"), [((8, 6), 192, "flash"), ((8, 6), 200, "memory-efficient"),
    ((8, 0), 200, "flash"), ((8, 9), 224, "memory-efficient"), ((9, 0), 224, "flash"), ((12, 0), 208, "memory-efficient"),
    ((12, 0), 256, "flash")])  # fmt: skip
def test_stock_operators_that_have_a_backward(capability, head_dim, name):
    """PyTorch's flash attention raises in the backward of some head sizes, on GPUs with little shared memory."""
    assert backends.stock_kernel("sdpa", replace(HOPPER, capability=capability, head_dim=head_dim)).name == name
