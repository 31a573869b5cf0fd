"""The patch of Triton's interpreter that the other tests here run with: the same bits, and only where it belongs."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import Dilated, attention

pytest.importorskip("triton", reason="Triton has no build for this platform")
import triton
from triton.runtime.interpreter import InterpretedFunction

import fast_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")


@pytest.fixture
def calls(monkeypatch):
    """Calls of the interpreter that go through the patch."""
    found, patched = [], fast_interpreter._call
    monkeypatch.setattr(fast_interpreter, "_call", lambda *args, **kwargs: (found.append(1), patched(*args, **kwargs))[1])
    return found


def results() -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 40, heads, 16, requires_grad=True) for heads in (2, 1, 1)]
    out, lse = attention(
        *inputs, Dilated([16, 40], [1, 3]), is_causal=True, backend="triton", dropout_p=0.2, seed=3, return_lse=True
    )
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)]


@pytest.mark.skipif(not fast_interpreter.applies(triton.__version__), reason="the patch is not for this version of Triton")
def test_same_bits(calls):
    with fast_interpreter.not_installed():
        plain = results()
        assert not calls
        fast_interpreter.install()
        patched = results()
        assert calls
    for a, b in zip(plain, patched, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.9.0+git", "3.10.0"])
def test_versions(version):
    with fast_interpreter.not_installed():
        plain = InterpretedFunction.__call__
        fast_interpreter.install(version)
        assert (InterpretedFunction.__call__ is not plain) == (version in ("3.6.0", "3.9.0+git"))
