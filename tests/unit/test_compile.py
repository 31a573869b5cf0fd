"""The custom operators with PyTorch's compilers and transformations."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import programs
from dilated_attention_pytorch import Dilated, MultiheadDilatedAttention, attention, dilated_attention, operators

PATTERN = Dilated([8, 16], [1, 2])

pytestmark = pytest.mark.slow


def inputs(n=30, dtype=torch.float64, batch=2):
    return [torch.randn(batch, n, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


# The operator of SDPA has no mask by positions.
MODES = [("sdpa", mode) for mode in ("plain", "lengths", "cu_seqlens")]
MODES += [("eager", mode) for mode in ("plain", "lengths", "cu_seqlens", "positions")]


@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_opcheck(backend, mode):
    lengths = torch.tensor([30, 11]) if mode == "lengths" else None
    cu_seqlens = torch.tensor([0, 12, 30]) if mode == "cu_seqlens" else None
    positions = torch.randperm(30) if mode == "positions" else None
    constants = (None, positions, None, None, None, PATTERN.spec, positions is None, 0.3, 0.0, False, False, backend)
    q, k, v = inputs()
    torch.library.opcheck(operators.attend, (q, k, v, lengths, cu_seqlens, *constants))
    out, lse = operators.attend(q, k, v, lengths, cu_seqlens, *constants)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            operators.attend_backward, (torch.randn_like(out), dlse, *saved, lengths, cu_seqlens, *constants)
        )


class Seen(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.append(function)
        return function(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A class of tensors of its own, which notes nothing."""


def forward_and_backward(q, k, v):
    out, lse = attention(q, k, v, PATTERN, return_lse=True)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))]


def test_operators_are_seen_by_all_that_look_at_them():
    """Without them the same functions run without PyTorch's dispatcher, to the same results, bit by bit."""
    arguments = inputs()
    expected = forward_and_backward(*arguments)
    with Seen() as seen:
        results = forward_and_backward(*arguments)
    assert operators.attend in seen.operators
    assert operators.attend_backward in seen.operators
    assert all(torch.equal(a, e) for a, e in zip(results, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(attention(*arguments, PATTERN), expected[0])
    with torch.profiler.profile() as profile:
        forward_and_backward(*arguments)
    assert {"dilated_attention::attend", "dilated_attention::attend_backward"} <= {e.name for e in profile.events()}
    functions = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            functions.append(function)
            return function(*args, **(kwargs or {}))

    with Functions():
        attention(*arguments, PATTERN)
    assert operators.attend in functions
    graph = make_fx(lambda *x: attention(*x, PATTERN))(*(x.detach() for x in arguments)).graph
    assert operators.attend in {node.target for node in graph.nodes}
    assert isinstance(attention(*(x.detach().as_subclass(Wrapped) for x in arguments), PATTERN), Wrapped)
    mapped = torch.vmap(lambda *x: attention(*x, PATTERN))(*(x.detach().unsqueeze(0) for x in arguments))
    torch.testing.assert_close(mapped[0], expected[0])


def layer(q, k, v):
    return dilated_attention(q * 2, k, v, [8, 16], [1, 2], is_causal=True).sin()


def test_compile_serves_new_lengths_with_one_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    compiled(*inputs(30))
    graphs = counter.frame_count
    for n in (30, 31, 64, 100):
        args = inputs(n)
        out = compiled(*args)
        torch.testing.assert_close(out, layer(*args))
        dout = torch.randn_like(out)
        for a, e in zip(torch.autograd.grad(out, args, dout), torch.autograd.grad(layer(*args), args, dout), strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == graphs


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler")
def test_compile_with_inductor_as_the_first_call_of_a_process(tmp_path):
    code = """
import torch
from dilated_attention_pytorch import MultiheadDilatedAttention
torch.manual_seed(0)
module = MultiheadDilatedAttention(32, 4, segment_lengths=[8, 16], dilation_rates=[1, 2])
x = torch.randn(2, 50, 32, requires_grad=True)
compiled = torch.compile(module, fullgraph=True, dynamic=True)
out = compiled(x, x, x, is_causal=True)[0]
dx, = torch.autograd.grad(out.square().sum(), x)
expected = module(x, x, x, is_causal=True)[0]
dx_expected, = torch.autograd.grad(expected.square().sum(), x)
torch.testing.assert_close(out, expected)
torch.testing.assert_close(dx, dx_expected)
"""
    result = programs.run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_export_with_a_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return layer(q, k, v)

    n = torch.export.Dim("n", min=2, max=10_000)
    program = torch.export.export(Model(), tuple(inputs(30)), dynamic_shapes=({1: n},) * 3)
    assert sum("dilated_attention.attend" in str(node.target) for node in program.graph.nodes) == 1
    for length in (30, 77):
        args = inputs(length)
        torch.testing.assert_close(program.module()(*args), layer(*args))


def test_autocast_computes_in_its_type():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, PATTERN)
        double = attention(q.double(), k.double(), v.double(), PATTERN)
    assert out.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    expected = attention(*(x.bfloat16() for x in (q, k, v)), PATTERN)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 for g in grads)
    compiled = torch.compile(lambda *x: attention(*x, PATTERN), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_autocast_with_inputs_of_two_types(backend):
    """As after a rotary embedding in float32 beside values from a linear layer."""
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(q, k, v.bfloat16(), PATTERN, return_lse=True, backend=backend)
    expected, expected_lse = attention(*(x.bfloat16() for x in (q, k, v)), PATTERN, return_lse=True, backend=backend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_gradients(dropout_p):
    q, k, v = inputs()

    def run(*x):
        return attention(*x, PATTERN, dropout_p=dropout_p).sin()

    torch.manual_seed(3)
    expected = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    torch.manual_seed(3)
    actual = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).sum(), (q, k, v))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def test_functional_call():
    module = MultiheadDilatedAttention(32, 4, segment_lengths=[8, 16], dilation_rates=[1, 2])
    x = torch.randn(2, 20, 32)
    scaled = {name: 2 * parameter for name, parameter in module.named_parameters()}
    out, _ = torch.func.functional_call(module, scaled, (x, x, x))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(out, module(x, x, x)[0])


def test_second_derivatives_are_refused_and_the_reference_has_them():
    q, k, v = inputs(10)
    for backend in ("sdpa", "eager"):
        (dq,) = torch.autograd.grad(attention(q, k, v, PATTERN, backend=backend).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="backend='reference' has them"):
            dq.sum().backward()
    few = [torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, PATTERN, backend="reference"), few)
