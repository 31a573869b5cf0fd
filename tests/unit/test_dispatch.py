"""The shortcut around PyTorch's dispatcher: without one of the private names, calls go through the operator."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import Dilated, attention, dispatch


def _call(requires_grad: bool = True):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 50, 2, 8, requires_grad=requires_grad) for _ in range(3))
    out = attention(q, k, v, Dilated([16, 64], [1, 2]), is_causal=True)
    return out, *(torch.autograd.grad(out.sum(), (q, k, v)) if requires_grad else ())


def test_all_private_names_exist_in_this_version():
    assert dispatch.find_queries() is not None


@pytest.mark.parametrize("name", dispatch.PRIVATE_QUERIES)
def test_without_a_private_name_calls_go_through_the_operator(name, monkeypatch):
    expected = _call()
    owner = torch._C
    *path, last = name.split(".")
    for attribute in path:
        owner = getattr(owner, attribute)
    monkeypatch.delattr(owner, last)
    assert dispatch.find_queries() is None
    monkeypatch.undo()
    # The module resolves the names when it is imported, so the answer is put where it keeps it.
    monkeypatch.setattr(dispatch, "_queries", None)
    through_operator = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            through_operator.append(str(func))
            return func(*args, **(kwargs or {}))

    assert dispatch._observed((torch.zeros(1),))
    found = _call()
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
    with Seen():
        _call()
    assert any("dilated_attention.attend" in name for name in through_operator)


def test_the_shortcut_is_taken_in_a_plain_eager_call():
    assert not dispatch._observed((torch.zeros(1), None, "text", 1.0))
    assert dispatch._observed((torch.zeros(1, device="meta"),))
