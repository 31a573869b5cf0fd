"""Calls under the transformations of ``torch.func`` equal the reference backend under plain autograd, entry by entry."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from block_cases import SIZE, config, random_order
from dilated_attention_pytorch import BlockSparse, Dilated, MultiheadDilatedAttention, attention

N, HEADS, KEY_HEADS, D = 40, 4, 2, 4
DILATED = Dilated([8, 16, 64], [1, 2, 3])
MASK = BlockSparse.custom(torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]]).bool(), block_size=SIZE)
MASKS = BlockSparse.custom(torch.rand(HEADS, 3, 3, generator=torch.Generator().manual_seed(1)) < 0.5, block_size=SIZE)


def _options(batch: int) -> dict[str, tuple[object, dict[str, object]]]:
    """Patterns and options of calls with so many samples."""
    return {
        "dilated": (DILATED, {}),
        "causal": (DILATED, {"is_causal": True}),
        "detached": (DILATED, {"mixing_gradient": "detached"}),
        "lengths": (DILATED, {"lengths": torch.tensor([33, 0, 17][:batch])}),
        "documents": (DILATED, {"cu_seqlens": torch.tensor([0, 9, 9, 40]), "is_causal": True}),
        "order": (DILATED, {"order": random_order(N)}),
        "orders, causal": (DILATED, {"order": random_order(N, batch), "is_causal": True}),
        "rule": (BlockSparse.from_config(config("hierarchical")), {"is_causal": True}),
        "mask": (MASK, {}),
        "masks": (MASKS, {"is_causal": True}),
        "adaptive": (BlockSparse.from_config(config("adaptive")), {}),
        "adaptive, lengths": (BlockSparse.from_config(config("adaptive")), {"lengths": torch.tensor([33, 5, 17][:batch])}),
    }


CASES = list(_options(1))


def _tensors(*batch: int) -> list[torch.Tensor]:
    shapes = ((*batch, N, HEADS, D), (*batch, N, KEY_HEADS, D), (*batch, N, KEY_HEADS, D))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def _loss(pattern, backend, **options):
    """A function of query, key and value that uses out and lse, and gives every row another weight."""
    weight = torch.linspace(-1, 1, N, dtype=torch.float64).view(1, N, 1, 1)

    def loss(q, k, v):
        out, lse = attention(q, k, v, pattern, backend=backend, return_lse=True, **options)
        return (weight * out).sin().sum() + torch.where(lse.isfinite(), lse, 0.0).cos().sum()

    return loss


def _plain_gradients(pattern, inputs, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(_loss(pattern, "reference", **options)(*inputs), inputs)


def _same(found, expected):
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-11, atol=1e-11)


def _backends(case):
    return ["eager"] if case == "orders, causal" else ["auto", "eager"]


@pytest.mark.parametrize("case", CASES)
def test_grad(case):
    pattern, options = _options(2)[case]
    inputs = _tensors(2)
    expected = _plain_gradients(pattern, inputs, **options)
    for backend in (*_backends(case), "reference"):
        _same(grad(_loss(pattern, backend, **options), (0, 1, 2))(*inputs), expected)


@pytest.mark.parametrize("case", CASES)
def test_vmap_of_grad(case):
    """Three entries of two samples; key and value have their mapped dimension in other places than query."""
    pattern, options = _options(2)[case]
    q, k, v = _tensors(3, 2)
    expected = [_plain_gradients(pattern, entry, **options) for entry in zip(q, k, v, strict=True)]
    moved = q, k.movedim(0, 2), v.movedim(0, -1)
    for backend in (*_backends(case), "reference"):
        mapped = vmap(grad(_loss(pattern, backend, **options), (0, 1, 2)), in_dims=(0, 2, -1))(*moved)
        _same(mapped, [torch.stack(own) for own in zip(*expected, strict=True)])
        # The gradient of a mapped call: the sum over the entries.
        mapped = vmap(_loss(pattern, backend, **options), in_dims=(0, 2, -1))
        found = grad(lambda *x, mapped=mapped: mapped(*x).sum(), (0, 1, 2))(*moved)
        back = found[0], found[1].movedim(2, 0), found[2].movedim(-1, 0)
        _same(back, [torch.stack(own) for own in zip(*expected, strict=True)])


@pytest.mark.parametrize("case", CASES)
def test_vmap(case):
    """Also where not every tensor is mapped, and without a warning about slow rules."""
    pattern, options = _options(2)[case]
    q, k, v = _tensors(3, 2)

    def results(backend):
        return lambda *x: attention(*x, pattern, backend=backend, return_lse=True, **options)

    for dims in ((0, 0, 0), (0, None, None), (None, None, 0)):
        inputs = [x if dim == 0 else x[1] for x, dim in zip((q, k, v), dims, strict=True)]
        entries = [[x[s] if dim == 0 else x for x, dim in zip(inputs, dims, strict=True)] for s in range(3)]
        expected = zip(*(results("reference")(*entry) for entry in entries), strict=True)
        expected = [torch.stack(own) for own in expected]
        for backend in (*_backends(case), "reference"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                _same(vmap(results(backend), in_dims=dims)(*inputs), expected)


def test_mapped_options():
    """Lengths, positions and boundaries of documents that differ by entry."""
    q, k, v = _tensors(3, 2)
    lengths = torch.tensor([[40, 3], [0, 17], [21, 22]])
    found = vmap(lambda q, k, v, x: attention(q, k, v, DILATED, lengths=x))(q, k, v, lengths)
    _same(found, [attention(*own, DILATED, lengths=x) for *own, x in zip(q, k, v, lengths, strict=True)])
    documents = torch.tensor([[0, 10, 40], [0, 39, 40], [0, 0, 40]])
    found = vmap(lambda q, k, v, x: attention(q, k, v, DILATED, cu_seqlens=x))(q, k, v, documents)
    _same(found, [attention(*own, DILATED, cu_seqlens=x) for *own, x in zip(q, k, v, documents, strict=True)])


def test_nested():
    q, k, v = _tensors(2, 3, 1)
    expected = torch.stack([torch.stack([_plain_gradients(DILATED, x)[0] for x in zip(*own, strict=True)])
                            for own in zip(q, k, v, strict=True)])  # fmt: skip
    _same([vmap(vmap(grad(_loss(DILATED, "auto"))))(q, k, v)], [expected])
    # Around plain autograd.
    q.requires_grad_()
    (found,) = torch.autograd.grad(vmap(vmap(_loss(DILATED, "auto")))(q, k, v).sum(), q)
    _same([found], [expected])


@pytest.mark.parametrize("kind", ["dilated", "masks"])
def test_jacobians(kind):
    pattern = {"dilated": Dilated([4, 8], [1, 2]), "masks": BlockSparse.custom(torch.eye(1).bool(), block_size=16)}[kind]
    q, k, v = (torch.randn(2, 9, 2, 3, dtype=torch.float64) for _ in range(3))

    def call(backend):
        return lambda *x: attention(*x, pattern, is_causal=True, backend=backend)

    expected = torch.autograd.functional.jacobian(call("reference"), (q, k, v))
    for backend in ("auto", "eager", "reference"):
        _same(jacrev(call(backend), (0, 1, 2))(q, k, v), expected)
        _same(jacrev(call(backend), (0, 1, 2), chunk_size=7)(q, k, v), expected)
    _same(jacfwd(call("reference"), (0, 1, 2))(q, k, v), expected)
    out, pull = vjp(call("auto"), q, k, v)
    _same(pull(out), [torch.einsum("bnhd,bnhdijkl->ijkl", out, own) for own in expected])


def test_modules():
    torch.manual_seed(0)
    models = [MultiheadDilatedAttention(8, 2, [4, 8], [1, 2], dtype=torch.float64) for _ in range(3)]
    x = torch.randn(3, 2, 10, 8, dtype=torch.float64)
    params, buffers = stack_module_state(models)
    skeleton = models[0]

    def loss(params, buffers, x):
        out = functional_call(skeleton, (params, buffers), (x, x, x))
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    found = vmap(grad(loss))(params, buffers, x)
    single = grad(loss)({name: p.detach() for name, p in models[1].named_parameters()}, {}, x[1])
    for number, model in enumerate(models):
        loss(dict(model.named_parameters()), {}, x[number]).backward()
        for name, parameter in model.named_parameters():
            _same([found[name][number]], [parameter.grad])
            if number == 1:
                _same([single[name]], [parameter.grad])


def test_dropout_follows_the_randomness_of_vmap():
    q, k, v = _tensors(3, 2)

    def call(seed=None):
        return lambda *x: attention(*x, DILATED, dropout_p=0.5, seed=seed)

    _same([vmap(call(5))(q, k, v)], [torch.stack([call(5)(*own) for own in zip(q, k, v, strict=True)])])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call())(q, k, v)
    same, different = (vmap(call(), randomness=x)(q[:1].expand_as(q), k[:1].expand_as(k), v[:1].expand_as(v))
                       for x in ("same", "different"))  # fmt: skip
    assert same[0].equal(same[1])
    assert not different[0].equal(different[1])


def test_second_and_forward_derivatives_name_the_way_out():
    q, k, v = (torch.randn(1, 6, 2, 3, dtype=torch.float64) for _ in range(3))
    pattern = Dilated([4, 8], [1, 2])

    def loss(backend):
        return lambda q: attention(q, k, v, pattern, backend=backend).sin().sum()

    exact = torch.autograd.functional.hessian(loss("reference"), q)
    transforms = {
        "hessian": hessian,
        "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
        "grad of grad": lambda f: grad(lambda q: (grad(f)(q) * v).sum()),
        "vmap of grad of grad": lambda f: lambda q: vmap(grad(lambda q: (grad(f)(q) * v).sum()))(q[None])[0],
        "jacfwd": jacfwd,
        "jvp": lambda f: lambda q: jvp(f, (q,), (v,))[1],
        "vmap of jvp": lambda f: lambda q: vmap(lambda q: jvp(f, (q,), (v,))[1])(q[None])[0],
    }
    product = torch.einsum("bnhdijkl,bnhd->ijkl", exact, v)
    first = torch.autograd.functional.jacobian(loss("reference"), q)
    expected = dict.fromkeys(transforms, exact) | {"grad of grad": product, "vmap of grad of grad": product}
    expected |= {"jacfwd": first, "jvp": (first * v).sum(), "vmap of jvp": (first * v).sum()}
    for name, transform in transforms.items():
        _same([transform(loss("reference"))(q)], [expected[name]])
        for backend in ("auto", "eager"):
            with pytest.raises((RuntimeError, NotImplementedError), match="backend='reference'"):
                transform(loss(backend))(q)
