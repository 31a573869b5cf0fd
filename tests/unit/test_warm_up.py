"""``warm_up`` where nothing is compiled, and what it refuses. tests/kernels/test_warm_up.py has compilations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, attention, warm_up
from dilated_attention_pytorch.backends.gpu.backend import TableBackend
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.operators import problem_and_options
from dilated_attention_pytorch.values import Inputs, Results

PATTERN = Dilated([16, 32], [1, 2])


@pytest.mark.parametrize("pattern", [PATTERN, BlockSparse.custom(torch.ones(3, 3).bool(), block_size=16)])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager", "reference"])
def test_backends_of_operators_compile_nothing(pattern, backend):
    q = torch.empty(1, 48, 2, 8)
    state = torch.random.get_rng_state()
    seconds = warm_up(q, q, q, pattern, is_causal=True, backend=backend, dropout_p=0.0)
    assert 0.0 <= seconds < 60.0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_group_is_refused():
    q = torch.empty(1, 48, 2, 8)
    with pytest.raises(ValueError, match="got group: a sharded call compiles those of its own tiles at its first call"):
        warm_up(q, q, q, PATTERN, group=object())


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.zeros(5, 2, 8), torch.zeros(7, 2, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="got nested ones; pass their rows packed, with cu_seqlens"):
        warm_up(x, x, x, PATTERN)


@pytest.mark.parametrize(
    "options", [{"lengths": [49]}, {"scale": torch.nan}, {"dropout_p": 2.0}, {"mixing_gradient": "some"}, {"backend": "x"}]
)
def test_mistakes_are_those_of_attention(options):
    q = torch.zeros(1, 48, 2, 8)
    with pytest.raises((ValueError, TypeError)) as expected:
        attention(q, q, q, PATTERN, **options)
    with pytest.raises(expected.type) as found:
        warm_up(q, q, q, PATTERN, **options)
    assert str(found.value) == str(expected.value)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def test_first_call_with_gradients_compiles_the_backward(monkeypatch):
    """Once for each kind of kernels: causality, head size and rates decide; the length does not."""
    backend, compiled = TableBackend(), []
    kernels = SimpleNamespace(forward=lambda problem, inputs, options, given: Results(inputs.query, inputs.query[..., 0]))
    monkeypatch.setattr(backend, "kernels", lambda dilated: kernels)
    monkeypatch.setattr(backend, "compile", lambda problem, inputs, options: compiled.append(problem))

    def call(n=64, d=16, gradient=True, leaf=False, is_causal=False, rates=(1,)):
        q = torch.zeros(1, n, 2, d, requires_grad=gradient and not leaf).as_subclass(OnGpu)
        if leaf:
            q.requires_grad_()
        pattern = Dilated([16 * r for r in rates], rates)
        made, _ = make_call(*[torch.zeros(1, n, 2, d)] * 3, pattern, is_causal=is_causal)
        problem, how = problem_and_options(made, q, q)
        backend.forward(problem, Inputs(q, q, q), how)
        return len(compiled)

    assert call(gradient=False) == 0
    assert call(leaf=True) == 0  # it would need gradients under torch.no_grad() as well
    assert call() == 1
    assert call(n=128) == 1
    assert call(is_causal=True) == 2
    assert call(d=32) == 3
    assert call(rates=(1, 2)) == 4
    assert call() == 4


def test_first_call_goes_on_without_memory_for_gradients(monkeypatch):
    """The backward then compiles its kernels itself, or lacks memory itself."""
    backend, q = TableBackend(), torch.zeros(1, 64, 2, 16)
    kernels = SimpleNamespace(forward=lambda problem, inputs, options, given: Results(inputs.query, inputs.query[..., 0]))
    monkeypatch.setattr(backend, "kernels", lambda dilated: kernels)

    def compile_nothing(problem, inputs, options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(backend, "compile", compile_nothing)
    problem, how = problem_and_options(make_call(q, q, q, PATTERN)[0], q, q)
    given = q.clone().requires_grad_().as_subclass(OnGpu)
    assert backend.forward(problem, Inputs(given, given, given), how).out is given
