"""The adapter of NATTEN, with a module in its place that computes and refuses what its documentation says."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.workbench.bench_values import FORWARD, BenchProblem
from dilated_attention_pytorch.workbench.exactness import row_error
from dilated_attention_pytorch.workbench.peers import peer_methods


def na1d(q, k, v, *, kernel_size, dilation, is_causal):
    """Each position attends to the nearest keys of its residue; (B, N, H, D)."""
    if any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("FlexAttention does not support backward on CPU")
    assert dilation == 1
    n, out = q.shape[1], torch.empty_like(q)
    for i in range(n):
        first = i - kernel_size + 1 if is_causal else min(max(0, i - kernel_size // 2), n - kernel_size)
        own = slice(max(0, first), min(n, first + kernel_size))
        s = torch.einsum("bhd,bmhd->bhm", q[:, i], k[:, own]) * q.shape[-1] ** -0.5
        out[:, i] = torch.einsum("bhm,bmhd->bhd", s.softmax(-1), v[:, own])
    return out


@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_on_a_cpu(is_causal, monkeypatch):
    natten = ModuleType("natten")
    natten.na1d, natten.__spec__ = na1d, importlib.machinery.ModuleSpec("natten", None)
    monkeypatch.setitem(sys.modules, "natten", natten)
    whole = BenchProblem("dense", Dilated([61], [1]), 61, 2, 16, torch.float32, torch.device("cpu"), is_causal)
    (method,) = (x for x in peer_methods(whole, whole, compile_on_cpu=False) if x.name == "natten")
    assert method.directions == (FORWARD,)
    inputs = method.problem.tensors()
    assert inputs[0].requires_grad
    assert row_error(method.run(method.problem, *inputs[:3]), method.problem, inputs) < 1e-5
