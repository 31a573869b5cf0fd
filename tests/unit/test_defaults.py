"""PyTorch's default device and default dtype change nothing: a sample of everything, once with and once without them.

On the default device "meta", a tensor that the library makes without naming a device has no values, which shows at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from dataclasses import astuple

import pytest
import torch

from block_cases import KINDS, SIZE, config
from dilated_attention_pytorch import (
    Attention,
    BlockSparse,
    BlockSparseRingDilatedAttention,
    Dilated,
    DilatedAttention,
    DistributedSparseConfig,
    Hilbert,
    MultiheadDilatedAttention,
    Order,
    attention,
    attention_weights,
    clear_caches,
    explain,
)
from dilated_attention_pytorch.distributed import Shards, simulate_ring
from dilated_attention_pytorch.orders.kinds import Identity
from dilated_attention_pytorch.patterns.tiers import TIER_PATTERNS

N = 75
CPU = {"device": "cpu"}
DILATED = Dilated([16, 40, 128], [1, 2, 3])


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


DEFAULTS = {
    "with torch.device": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


MORE_DEFAULTS = {
    "set_default_device": lambda: default_device("meta"),
    "float16": lambda: default_dtype(torch.float16),
}


def tensors(n=N, m=N):
    generator = torch.Generator("cpu").manual_seed(3)
    shapes = (2, n, 4, 8), (2, m, 2, 8), (2, m, 2, 8)
    return [torch.randn(x, generator=generator, dtype=torch.float32, **CPU).requires_grad_() for x in shapes]


def index(values):
    return torch.tensor(values, dtype=torch.int64, **CPU)


def mask(shape, seed=4):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float32, **CPU) < 0.5


def permutation(seed=5):
    return torch.randperm(N, generator=torch.Generator("cpu").manual_seed(seed), **CPU)


def with_gradients(call, inputs):
    out, lse = call(*inputs)
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def attend(pattern, n=N, m=N, **options):
    return with_gradients(lambda *x: attention(*x, pattern, return_lse=True, **options), tensors(n, m))


def _by_rank(kind):
    return DistributedSparseConfig(0.5, kind, block_size=SIZE, node_size=2).pattern(SHARDS)


SHARDS = Shards.of([16, 32, 16, 11], "contiguous")
PATTERNS = {kind: lambda kind=kind: BlockSparse.from_config(config(kind)) for kind in (*KINDS, "adaptive")}
PATTERNS |= {f"by rank, {kind}": lambda kind=kind: _by_rank(kind) for kind in TIER_PATTERNS}
PATTERNS |= {
    "mask": lambda: BlockSparse.custom(mask((5, 5)), block_size=SIZE),
    "masks": lambda: BlockSparse.custom(mask((4, 5, 5)), block_size=SIZE),
}


def dilated_samples():
    for backend in ("auto", "eager", "reference"):
        yield f"{backend}", attend(DILATED, backend=backend)
        yield f"{backend}, causal", attend(DILATED, backend=backend, is_causal=True, scale=-0.3)
        yield f"{backend}, decoding", attend(DILATED, 20, backend=backend, is_causal=True)
        yield f"{backend}, lengths", attend(DILATED, backend=backend, lengths=index([33, 75]))
        yield f"{backend}, documents", attend(DILATED, backend=backend, cu_seqlens=index([0, 20, 20, 75]))
        yield f"{backend}, detached", attend(DILATED, backend=backend, mixing_gradient="detached")
        order = Order.from_permutation(permutation(), device="cpu")
        yield f"{backend}, order", attend(DILATED, backend=backend, order=order)
        if backend != "auto":
            yield f"{backend}, dropout", attend(DILATED, backend=backend, dropout_p=0.3, seed=7)
            yield f"{backend}, causal order", attend(DILATED, backend=backend, order=order, is_causal=True)
    torch.manual_seed(0)
    yield "drawn seed", attend(DILATED, dropout_p=0.3)
    yield "padding", attend(Dilated([16, 40], [1, 3], torchscale_padding=True))
    q, k, _ = tensors()
    yield "weights", [attention_weights(q, k, DILATED, [0, 3, -1])]


def block_samples(name):
    pattern = PATTERNS[name]()
    for backend in ("auto", "reference"):
        yield f"{backend}", attend(pattern, backend=backend)
        yield f"{backend}, causal", attend(pattern, backend=backend, is_causal=True)
        if pattern.given is None:
            yield f"{backend}, documents", attend(pattern, backend=backend, cu_seqlens=index([0, 20, 20, 75]))
            yield f"{backend}, decoding", attend(pattern, 20, backend=backend, is_causal=True)
        yield f"{backend}, lengths", attend(pattern, backend=backend, lengths=index([33, 75]))
    yield "dropout", attend(pattern, dropout_p=0.3, seed=7)
    if not pattern.only_causal:
        order = Order.from_permutation(permutation(), device="cpu")
        yield "causal order", attend(pattern, order=order, is_causal=True)
    q, k, _ = tensors()
    yield "weights", [attention_weights(q, k, pattern, [0, 3, -1])]
    told = explain(*tensors(), pattern, is_causal=True)
    yield "explain", [told.pairs, told.dense_pairs, told.blocks.computed, told.blocks.visible]


def other_samples():
    yield "orders", [
        Hilbert.grid(5, 15, device="cpu").positions,
        Hilbert.coordinates(torch.rand(N, 2, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float32, **CPU),
                            device="cpu").positions,
        Identity(N, device="cpu").positions,
    ]  # fmt: skip
    order = Hilbert.grid(5, 15, device="cpu")
    yield "hilbert", attend(DILATED, order=order)
    points = torch.rand(2, N, 2, generator=torch.Generator("cpu").manual_seed(2), dtype=torch.float32, **CPU)
    slides = Hilbert.coordinates(points, lengths=[33, 75], device="cpu")
    yield "slides", attend(DILATED, order=slides, lengths=[33, 75])
    sequences = [[x[0, :n].detach() for n in (33, 75)] for x in tensors()]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged, device="cpu") for x in sequences]
    yield "nested", [attention(*nested, DILATED).values()]
    told = explain(*tensors(), DILATED, is_causal=True, lengths=index([33, 75]))
    yield "explain", [told.pairs, told.dense_pairs, told.tiles]
    told = explain(*tensors(), DILATED, world_size=3)
    yield "explain ranks", [told.sharding.bytes, told.sharding.waits]
    with torch.no_grad():
        out, lse, memory = simulate_ring(*tensors(), DILATED, 3, is_causal=True)
    yield "ring", [out, lse, *(number for one in memory for number in astuple(one)[:5])]
    modules = [
        DilatedAttention([16, 40], [1, 2]),
        Attention(BlockSparse.custom(mask((5, 5)), block_size=SIZE)),
        BlockSparseRingDilatedAttention(sparse_config=config("local_window")),
    ]
    for module in modules:
        yield type(module).__name__, with_gradients(lambda *x, module=module: (module(*x), x[0].sum(-1)), tensors())
    with torch.random.fork_rng([]):
        torch.manual_seed(6)
        with torch.device("cpu"):
            projected = MultiheadDilatedAttention(16, 4, [16, 40], [1, 2], dtype=torch.float32)
    x = tensors()[0].detach()[..., :4].flatten(2)
    hidden = torch.arange(N, **CPU) >= index([33, 75])[:, None]
    out = projected(x, x, x, key_padding_mask=hidden)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    yield "projected", [out, *(parameter.grad for parameter in projected.parameters())]


def collected(samples, *arguments):
    clear_caches()  # so that plans and lists are made again
    return {name: values for name, values in samples(*arguments)}  # noqa: C416


@functools.cache
def _expected(samples, *arguments):
    return collected(samples, *arguments)


def assert_unchanged(default, samples, *arguments):
    expected = _expected(samples, *arguments)
    with (DEFAULTS | MORE_DEFAULTS)[default]():
        found = collected(samples, *arguments)
    clear_caches()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for a, b in zip(found[name], values, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.device.type == "cpu", name
                assert a.dtype == b.dtype, name
                assert torch.equal(a.detach().nan_to_num(0, math.inf, -math.inf), b.detach()), name
            else:
                assert a == b, name


@pytest.mark.parametrize("default", DEFAULTS)
def test_dilated(default):
    assert_unchanged(default, dilated_samples)


@pytest.mark.parametrize("default", ["with torch.device", "float64"])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks(name, default):
    assert_unchanged(default, block_samples, name)


@pytest.mark.parametrize("default", [*DEFAULTS, *MORE_DEFAULTS])
def test_others(default):
    assert_unchanged(default, other_samples)


def triton_samples():
    """Few and small, because kernels are interpreted."""
    q, k, v = (x.detach()[:1, :20, :, :].requires_grad_() for x in tensors())
    for pattern in (Dilated([8, 16], [1, 2]), BlockSparse.custom(mask((2, 2)), block_size=SIZE)):
        call = lambda *x, pattern=pattern: attention(*x, pattern, backend="triton", return_lse=True)  # noqa: E731
        yield type(pattern).__name__, with_gradients(call, [q, k, v])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
def test_triton():
    assert_unchanged("with torch.device", triton_samples)
