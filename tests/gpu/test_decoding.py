"""The cache on a GPU: fused steps and chunks against the definition in float64, CUDA graphs, no device synchronisation."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import Dilated, DilatedKVCache, attention

pytestmark = pytest.mark.gpu
PATTERN = Dilated([64, 250, 1024], [1, 3, 8])
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}
CHUNKS = (300, 1, 1, 7, 1, 90, 8, 1, 500, *(1,) * 40, 9, 200)


def rows(dtype: torch.dtype, heads: int, key_heads: int, head_dim: int, batch: int = 2, total: int = sum(CHUNKS)) -> list:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, total, h, head_dim) for h in (heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype) for shape in shapes]


def exact(tensors: list[torch.Tensor], pattern: Dilated = PATTERN) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(*(x.double() for x in tensors), pattern, is_causal=True, backend="reference", return_lse=True)


@pytest.mark.parametrize(
    ("dtype", "heads", "key_heads", "head_dim"),
    [
        (torch.bfloat16, 4, 4, 64), (torch.bfloat16, 8, 2, 128), (torch.float16, 6, 2, 40), (torch.float32, 4, 1, 64),
        (torch.float32, 3, 3, 20), (torch.float64, 4, 2, 16),
    ],
)  # fmt: skip
def test_chunks_and_steps(dtype, heads, key_heads, head_dim):
    tensors = rows(dtype, heads, key_heads, head_dim)
    out, lse = exact(tensors)
    cache = DilatedKVCache(PATTERN, 2, key_heads, head_dim, dtype=dtype, device="cuda")
    at = 0
    for n in CHUNKS:
        own, own_lse = cache.attend(*(x[:, at : at + n] for x in tensors), return_lse=True)
        torch.testing.assert_close(own.double(), out[:, at : at + n], rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(own_lse.double(), lse[..., at : at + n], rtol=0, atol=TOLERANCE[dtype])
        at += n
    assert cache.tokens_seen.tolist() == [at, at]


def test_samples_are_independent():
    tensors = rows(torch.bfloat16, 4, 2, 64, batch=3)
    out, _ = exact(tensors)
    cache = DilatedKVCache(PATTERN, 3, 2, 64, dtype=torch.bfloat16, device="cuda")
    seen = [0, 0, 0]
    generator = torch.Generator().manual_seed(1)
    for n in (1, 100, 1, 4, 250, 1, 1, 33):
        lengths = torch.randint(0, n + 1, (3,), generator=generator)
        chunk = [torch.full((3, n, x.shape[2], 64), torch.nan, dtype=x.dtype, device="cuda") for x in tensors]
        for b, length in enumerate(lengths.tolist()):
            for part, whole in zip(chunk, tensors, strict=True):
                part[b, :length] = whole[b, seen[b] : seen[b] + length]
        own = cache.attend(*chunk, lengths=lengths.cuda() if n == 1 else lengths)
        for b, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(
                own[b, :length].double(), out[b, seen[b] : seen[b] + length], rtol=0, atol=TOLERANCE[torch.bfloat16]
            )
            assert not own[b, length:].any()
            seen[b] += length
    assert cache.tokens_seen.tolist() == seen


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2)])
def test_graph_of_200_steps(heads, key_heads):
    """The same bits as eager steps, then chunks again: the host does not know the positions of a captured cache."""
    tensors = rows(torch.bfloat16, heads, key_heads, 64, total=700)
    caches = [DilatedKVCache(PATTERN, 2, key_heads, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for cache in caches:
        cache.attend(*(x[:, :300] for x in tensors))
    token = [x[:, 300:301].clone() for x in tensors]
    state = caches[0].state_dict()
    caches[0].attend(*token)  # compiles
    caches[0].load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = caches[0].attend(*token)
    for at in range(300, 500):
        for own, whole in zip(token, tensors, strict=True):
            own.copy_(whole[:, at : at + 1])
        graph.replay()
        torch.testing.assert_close(out, caches[1].attend(*(x[:, at : at + 1] for x in tensors)), rtol=0, atol=0)
    found = [cache.attend(*(x[:, 500:] for x in tensors)) for cache in caches]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert caches[0].tokens_seen.tolist() == [700, 700]


def test_steps_and_chunks_do_not_wait():
    tensors = rows(torch.bfloat16, 4, 2, 64)
    cache = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    for own_mode in ("default", "error"):  # the first round compiles
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        at = 0
        for n in CHUNKS:
            torch.cuda.set_sync_debug_mode(own_mode)
            try:
                if at == 0:
                    cache.reset()
                cache.attend(*(x[:, at : at + n] for x in tensors))
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            at += n


def test_rollback():
    tensors = rows(torch.bfloat16, 4, 2, 64, total=400)
    out, _ = exact(tensors)
    cache = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda", max_rollback=20)
    cache.attend(*(x[:, :248] for x in tensors))
    wrong = [torch.full_like(x[:, :15], torch.nan) for x in tensors]  # across the end of a segment
    cache.attend(*wrong)
    cache.rollback(15)
    for n in (5, 147):
        at = cache.tokens_seen.tolist()[0]
        own = cache.attend(*(x[:, at : at + n] for x in tensors))
        torch.testing.assert_close(own.double(), out[:, at : at + n], rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_compiled_steps():
    tensors = rows(torch.bfloat16, 4, 2, 64, total=360)
    out, _ = exact(tensors)
    cache = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache.attend(*(x[:, :300] for x in tensors))
    step = torch.compile(lambda q, k, v: cache.attend(q, k, v) * 1.0, fullgraph=True)
    for at in range(300, 360):
        own = step(*(x[:, at : at + 1] for x in tensors))
        torch.testing.assert_close(own.double(), out[:, at : at + 1], rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_causal", [True, False])
def test_last_row(dtype, is_causal):
    """``attention`` with one query goes through the decoding kernel; gradients as well."""
    query, key, value = rows(dtype, 8, 2, 64)
    tensors = [x.requires_grad_() for x in (query[:, -1:].clone(), key, value)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    found = attention(*tensors, PATTERN, is_causal=is_causal)
    wanted = attention(*doubles, PATTERN, is_causal=is_causal, backend="reference")
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    dout = torch.randn_like(found)
    grads = torch.autograd.grad(found, tensors, dout), torch.autograd.grad(wanted, doubles, dout.double())
    for own, exact_grad in zip(*grads, strict=True):
        torch.testing.assert_close(own.double(), exact_grad, rtol=0, atol=4 * TOLERANCE[dtype])


def test_positions_beyond_32_bits():
    tensors = rows(torch.bfloat16, 4, 2, 64, total=1100)
    period = 1024 * 125  # of all segments
    out, _ = exact(tensors)
    moved = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda", max_rollback=0)
    start = period * (2**33 // period + 1)
    fresh = moved.state_dict()
    fresh["tokens_seen"].fill_(start)
    moved.load_state_dict(fresh)
    found = [moved.attend(*(x[:, a:b] for x in tensors)) for a, b in ((0, 500), (500, 501), (501, 1100))]
    torch.testing.assert_close(torch.cat(found, 1).double(), out, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_graph_of_a_compiled_step():
    """The host must not believe positions that it read before a replay."""
    tensors = rows(torch.bfloat16, 4, 2, 64, total=400)
    out, _ = exact(tensors)
    cache = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache.attend(*(x[:, :100] for x in tensors))
    token = [x[:, 100:101].clone() for x in tensors]
    state = cache.state_dict()
    step = torch.compile(cache.attend)
    step(*token)
    cache.load_state_dict(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*token)
    graph.replay()
    cache.attend(*(x[:, 101:201] for x in tensors))
    for at in range(201, 206):
        for own, whole in zip(token, tensors, strict=True):
            own.copy_(whole[:, at : at + 1])
        graph.replay()
    own = cache.attend(*(x[:, 206:] for x in tensors))
    torch.testing.assert_close(own.double(), out[:, 206:], rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_long_chunks_are_not_captured():
    tensors = rows(torch.bfloat16, 4, 2, 64, total=96)
    cache = DilatedKVCache(PATTERN, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache.attend(*(x[:, :32] for x in tensors))
    with pytest.raises(RuntimeError, match="capture steps of at most 8 tokens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache.attend(*(x[:, 32:64] for x in tensors))
    assert cache.tokens_seen.tolist() == [32, 32]


def test_negative_rollbacks_are_refused():
    cache = DilatedKVCache(PATTERN, 1, 2, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="0 or more tokens"):
        cache.rollback(torch.tensor([-3], device="cuda"))
