"""The Hopper kernels with samples that have padding in front, without a GPU: their source, by gluon_on_cpu."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import oracle
from dilated_attention_pytorch import BlockSparse, Dilated, attention
from starts_cases import by_itself, poisoned

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton's interpreter is off"),
]
STARTS, LENGTHS = (0, 77, 250, 301), (330, 201, 80, 0)


@pytest.fixture
def install(monkeypatch):
    """A function that says whether gradients are computed at once, or by a kernel for each."""
    import gluon_on_cpu
    from dilated_attention_pytorch.backends.hopper import configs, run

    def setup(at_once):
        gluon_on_cpu.installed(monkeypatch, programs=3, element="bfloat16")
        monkeypatch.setattr(run, "joint_config", lambda _, head_dim: configs.configs(head_dim).joint if at_once else None)

    return setup


def compare(pattern, n, one, *, is_causal):
    """All five results against ``one(backend=...)`` on each sample: rounding as in plain attention, and no NaN."""
    inputs = oracle.random_inputs(4, n, 330, 2, 1, 64)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(4, 2, n, dtype=torch.float64)
    exact = oracle.with_grads(by_itself(one, STARTS, LENGTHS), inputs, dout, dlse)
    floats = [x.detach().float().requires_grad_() for x in inputs]
    plain = oracle.with_grads(by_itself(one, STARTS, LENGTHS), floats, dout, dlse)
    call = lambda *x: attention(  # noqa: E731
        *x, pattern, starts=STARTS, lengths=LENGTHS, is_causal=is_causal, backend="hopper", return_lse=True
    )
    actual = oracle.with_grads(call, poisoned(floats, STARTS, LENGTHS), dout, dlse)
    oracle.assert_rounding_only(actual, plain, exact, torch.float32)


@pytest.mark.parametrize(
    ("n", "is_causal", "at_once"), [(330, True, True), (330, False, False), (120, True, True), (120, False, False)]
)
def test_dilated(n, is_causal, at_once, install):
    install(at_once)
    pattern = Dilated([160, 330], [1, 3])
    one = lambda _, *x: attention(*x, pattern, is_causal=is_causal, backend="reference", return_lse=True)  # noqa: E731
    compare(pattern, n, one, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_block_lists(is_causal, install):
    install(at_once=False)
    mask = torch.rand(3, 3) < 0.7

    def one(_, q, k, v):
        blocks = -(-k.shape[1] // 128)
        own = BlockSparse.custom(mask[:blocks, :blocks], block_size=128)
        return attention(q, k, v, own, is_causal=is_causal, backend="reference", return_lse=True)

    compare(BlockSparse.custom(mask, block_size=128), 330, one, is_causal=is_causal)
