"""Calls of known sizes skip the checks. A call that the checks would treat otherwise never takes this way."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import oracle
from dilated_attention_pytorch import Dilated, api, attention, clear_caches
from dilated_attention_pytorch.known_calls import known_calls

PATTERN = Dilated([4, 10], [1, 3])


def rows(requires_grad: bool = False, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 17, 3, 8, generator=generator).to(dtype).requires_grad_(requires_grad) for _ in range(3)]


@pytest.fixture
def known():
    """The call with these sizes has been made."""
    clear_caches()
    attention(*rows(), PATTERN)
    assert len(known_calls) == 1


@pytest.fixture
def no_checks(monkeypatch):
    """A call that is checked raises."""

    def refuse(*_, **__):
        raise AssertionError("the call was checked again")

    monkeypatch.setattr(api, "make_call", refuse)


@pytest.mark.usefixtures("known", "no_checks")
def test_a_known_call_is_exact_and_not_checked_again():
    inputs = rows(requires_grad=True)
    out, lse = attention(*inputs, PATTERN, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    exact = [x.detach().clone().requires_grad_() for x in inputs]
    exact_out, exact_lse = oracle.attention(*exact, PATTERN)
    wanted = torch.autograd.grad((exact_out, exact_lse), exact, (dout, dlse))
    for x, y in zip((out, lse, *found), (exact_out, exact_lse, *wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("known", "no_checks")
@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": True}, {"scale": 0.5}, {"mixing_gradient": "detached"}, {"backend": "eager"}, {"seed": 3},
        {"lengths": [17, 9]}, {"starts": [0, 3]}, {"dropout_p": 0.1}, {"is_causal": 0}, {"dropout_p": False},
        {"scale": 1}, {"backend": None},
    ],
)  # fmt: skip
def test_another_option_is_checked(change):
    with pytest.raises(AssertionError, match="checked again"):
        attention(*rows(), PATTERN, **change)


@pytest.mark.usefixtures("known", "no_checks")
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.float(), k, v),
        lambda q, k, v: (q[:, 1:], k, v),
        lambda q, k, v: (q, k[..., :4], v),
        lambda q, k, v: (q, k, v.to_sparse()),
        lambda q, k, v: (q.to("meta"), k, v),
        lambda q, k, v: (q, k, v.tolist()),
    ],
)
def test_other_tensors_are_checked(change):
    with pytest.raises(AssertionError, match="checked again"):
        attention(*change(*rows()), PATTERN)


@pytest.mark.usefixtures("known")
def test_forward_derivatives_are_refused_as_before():
    query, key, value = rows()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attention(forward_ad.make_dual(query, query), key, value, PATTERN)


@pytest.mark.usefixtures("known")
def test_transforms_see_the_call():
    query, key, value = rows()
    stacked = torch.stack([query, 2 * query])
    found = torch.func.vmap(lambda q: attention(q, key, value, PATTERN))(stacked)
    wanted = torch.stack([oracle.attention(q, key, value, PATTERN)[0] for q in stacked])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_autocast_is_not_kept():
    clear_caches()
    with torch.autocast("cpu", torch.float16):
        assert attention(*rows(dtype=torch.float32), PATTERN, backend="eager").dtype == torch.float16
    assert len(known_calls) == 0
    assert attention(*rows(dtype=torch.float32), PATTERN, backend="eager").dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert attention(*rows(dtype=torch.float32), PATTERN, backend="eager").dtype == torch.float16


def test_the_number_of_known_calls_is_bounded():
    clear_caches()
    for n in range(known_calls.maxsize + 5):
        attention(*(torch.zeros(1, n, 1, 1) for _ in range(3)), PATTERN)
    assert len(known_calls) == known_calls.maxsize
