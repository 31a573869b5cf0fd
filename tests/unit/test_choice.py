"""What ``auto`` takes where the length decides: by type, head size and the size of calls."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import Dilated, backends, explain, fused, ops
from dilated_attention_pytorch.backends import sdpa
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.plan.problem import Problem

HOPPER = Request("cuda", (9, 0), torch.bfloat16, 64, 0.0)


@pytest.mark.parametrize(
    ("backend", "chosen", "changes", "told"),
    [
        ("auto", "hopper", {}, "hopper or sdpa"),
        ("auto", "triton", {"dtype": torch.float32}, "triton or sdpa"),
        ("auto", "triton", {"dtype": torch.float32, "head_dim": 128}, "triton"),
        ("auto", "triton", {"dropout_p": 0.1}, "triton"),
        ("auto", "triton", {"head_dim": 60}, "triton"),
        ("auto", "triton", {"ordered": True}, "triton"),
        ("auto", "triton", {"capability": (8, 0)}, "triton"),
        ("auto", "sdpa", {}, "sdpa"),
        ("hopper", "hopper", {}, "hopper"),
    ],
)
def test_where_the_length_decides(backend, chosen, changes, told, monkeypatch):
    table = {(2, 64): (10, math.inf), (4, 64): (math.inf, 10), (4, 128): (math.inf, math.inf)}
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", table)
    assert backends.for_operator(backend, chosen, replace(HOPPER, **changes)) == told


def test_the_shipped_table():
    """Both names for all types and head sizes above 128 that stock operators take, on Hopper GPUs, and for no others."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for head_dim in range(1, 257):
            for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
                request = replace(HOPPER, dtype=dtype, head_dim=head_dim, capability=capability)
                both = capability == (9, 0) and head_dim > 128 and head_dim % 8 == 0
                assert backends.for_operator("auto", "triton", request) == ("triton or sdpa" if both else "triton")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
@pytest.mark.parametrize(
    ("documents", "length", "single", "half"),
    [(1, 2**15, "sdpa", "sdpa"), (64, 2**14, "sdpa", "triton"), (1024, 128, "triton", "triton")],
)
def test_many_documents_stay_with_our_kernels(documents, length, single, half, monkeypatch):
    """Each is several calls of stock operators, and, in half precision, too many for one merge."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(fused, "serves", lambda query: query.dtype != torch.float32)
    pattern = Dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    bounds = tuple(range(0, documents * length + 1, length))
    problem = Problem(pattern, False, 1, bounds[-1], bounds[-1], 3, 3, None, bounds)
    for dtype, name in ((torch.float32, single), (torch.bfloat16, half)):
        query = torch.empty(1, 1, 3, 256, dtype=dtype)
        assert backends.fastest("triton or sdpa", problem, query, backward=True) == name
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert backends.fastest("triton or sdpa", problem, torch.empty(1, 1, 3, 256), backward=True) == "triton"


def test_the_operator_runs_what_the_length_decides(monkeypatch):
    """Forward and backward apart, by the table, whatever ``explain`` says."""
    used, kernel_of = [], ops.tile_kernel
    monkeypatch.setattr(ops, "tile_kernel", lambda backend, query: used.append(backend) or kernel_of(backend, query))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    for choice, names in (((0, math.inf), ["sdpa", "eager"]), ((math.inf, 0), ["eager", "sdpa"])):
        monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 16): choice})
        q, k, v = torch.randn(3, 1, 100, 2, 16).unbind(0)
        q.requires_grad_()
        pattern = Dilated([64], [1]).spec
        out, _ = ops.call_attend(q, k, v, None, None, None, None, pattern, False, 0.25, 0.0, False, "eager or sdpa")
        out.sum().backward()
        assert used == names
        used.clear()


def test_the_length_decides_between_our_kernels_and_stock_operators(monkeypatch):
    """The measured table, with numbers of our own; a call of [8, 8] tiles of 64 rows has few pairs."""
    query, pairs = torch.empty(1, 512, 2, 16), 512 * 64 * 2
    problem = Problem(Dilated([64], [1]), False, 1, 512, 512, 2, 2, None, None)
    assert fused.pairs_per_piece(problem, 16) == pairs
    fastest = lambda backward: backends.fastest("triton or sdpa", problem, query, backward=backward)  # noqa: E731
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 8): (0, 0), (4, 16): (pairs, pairs + 1), (4, 32): (0, 0)})
    assert [fastest(False), fastest(True)] == ["sdpa", "triton"]
    assert backends.fastest("triton", problem, query, backward=False) == "triton"
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 16): (0, 0)})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [fastest(False), fastest(True)] == ["sdpa", "triton"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert [fastest(False), fastest(True)] == ["sdpa", "sdpa"]


def test_explain_says_what_the_length_decides(monkeypatch):
    query = torch.empty(1, 512, 2, 16)
    monkeypatch.setattr(backends, "choose", lambda backend, request: "hopper")
    monkeypatch.setattr(backends, "candidates", lambda backend, request: ["hopper"])
    monkeypatch.setattr(backends, "for_operator", lambda backend, chosen, request: "hopper or sdpa")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    pairs = 512 * 64 * 2
    faster = "for this type and head size PyTorch's operators are faster"
    rule = faster + " from {} query-key pairs a call on, here they have 65,536"
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 64): (pairs, 2 * pairs)})
    lines = str(explain(query, query, query, Dilated([64], [1]))).splitlines()
    assert lines[:3] == [
        "backend   sdpa: CPU flash",
        f"backward  hopper: warp-specialised kernels over launch tables; {rule.format('131,072')}",
        f"not       hopper: {rule.format('65,536')}",
    ]
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 64): (math.inf, pairs)})
    lines = str(explain(query, query, query, Dilated([64], [1]))).splitlines()
    assert lines[1] == f"backward  sdpa: CPU flash; {rule.format('65,536')}"
    monkeypatch.setattr(backends, "_SDPA_FROM_PAIRS", {(4, 64): (0, 0)})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    lines = str(explain(query, query, query, Dilated([64], [1]))).splitlines()
    assert lines[1].endswith("deterministic algorithms are asked for, and PyTorch's operators may add up dq in any order")


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
def test_gpus_without_triton(capability, dtype, head_dim, chosen, kernel, reasons, monkeypatch):
    """Pascal to Turing: PyTorch's operators, or plain products, with the reasons; tensors of a GPU that is not here."""
    request = replace(HOPPER, capability=capability, dtype=dtype, head_dim=head_dim)
    monkeypatch.setattr(Request, "of", lambda query, dropout_p, ordered=False: request)
    query = torch.empty(1, 512, 2, head_dim, dtype=dtype)
    text = str(explain(query, query, query, Dilated([64], [1])))
    assert text.startswith(f"backend   {chosen}: {kernel or ''}")
    assert "not       hopper: " in text
    assert all(reason in text for reason in reasons)


@pytest.mark.parametrize(("capability", "head_dim", "name"), [((8, 6), 192, "flash"), ((8, 6), 200, "memory-efficient"),
    ((8, 0), 200, "flash"), ((8, 9), 224, "memory-efficient"), ((9, 0), 224, "flash"), ((12, 0), 208, "memory-efficient"),
    ((12, 0), 256, "flash")])  # fmt: skip
def test_stock_operators_that_have_a_backward(capability, head_dim, name):
    """PyTorch's flash attention raises in the backward of some head sizes, on GPUs with little shared memory."""
    assert sdpa.kernel(replace(HOPPER, capability=capability, head_dim=head_dim)).name == name
