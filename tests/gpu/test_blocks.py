"""The kernels over block lists on a GPU: against float64, against FlexAttention, against themselves."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

import block_oracle
import oracle
from block_cases import plain, positions_met, with_grads
from dilated_attention_pytorch import BlockSparse, SparsePatternConfig, attention, backends
from dilated_attention_pytorch.backends.gpu import block_tables
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.operators import problem_and_options
from dilated_attention_pytorch.values import Inputs, Saved

pytestmark = pytest.mark.gpu
BACKENDS = ["triton", "hopper"]
HALF, SINGLE = (torch.bfloat16, torch.float16), torch.float32


def inputs(b, n, m, heads, key_heads, d, dtype):
    shapes = ((b, n, heads, d), (b, m, key_heads, d), (b, m, key_heads, d))
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def random_table(*shape):
    """With a block that reads nothing and one that nobody reads."""
    table = torch.rand(shape) < 0.6
    table[..., -2, :] = False
    table[..., :, 0] = False
    return table


def kept_factors(p, seed, batch, heads, n, m):
    """(B, H, n, m): what dropout multiplies weights by, pair by pair."""
    kept = [
        oracle.plain_word(seed, b, h, 0, i, j) >= int(p * oracle.M32)
        for b in range(batch) for h in range(heads) for i in range(m - n, m) for j in range(m)
    ]  # fmt: skip
    return torch.tensor(kept).view(batch, heads, n, m) / (1 - p)


def cotangents(q):
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda", dtype=torch.float32)
    return torch.randn_like(q), dlse


def check(backend, table, size, tensors, causal, dropout=None):
    """All five results; ``dropout`` is p and seed."""
    q, dtype = tensors[0], tensors[0].dtype
    (n, m), (dout, dlse) = (q.shape[1], tensors[1].shape[1]), cotangents(q)
    doubles = [x.detach().double().cpu().requires_grad_() for x in tensors]
    options, factors, placed = {"backend": backend, "is_causal": causal, "return_lse": True}, None, None
    if dropout is not None:
        p, seed = dropout
        options |= {"dropout_p": p, "seed": seed}
        placed, factors = (p, seed, 0, 0), kept_factors(p, seed, q.shape[0], q.shape[2], n, m)
    slow = lambda *x: block_oracle.attention(*x, table, size, causal=causal, dropout=placed)  # noqa: E731
    exact = with_grads(slow, doubles, dout.double().cpu(), dlse.double().cpu())
    yardstick = with_grads(plain(positions_met(table, size, n, m, causal), factors), tensors, dout, dlse)
    pattern = BlockSparse.custom(table, block_size=size)
    call = lambda *x: attention(*x, pattern, **options)  # noqa: E731
    oracle.assert_rounding_only(with_grads(call, tensors, dout, dlse), yardstick, exact, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim"),
    [
        *(("triton", dtype, d) for dtype, d in ((HALF[0], 48), (HALF[0], 64), (HALF[0], 128), (HALF[1], 64), (SINGLE, 64))),
        *(("hopper", dtype, d) for dtype, d in ((HALF[0], 48), (HALF[0], 64), (HALF[0], 128), (HALF[1], 96))),
    ],
)
def test_against_float64(dtype, head_dim, causal, backend):
    check(backend, random_table(4, 3, 3), 128, inputs(1, 300, 300, 4, 2, head_dim, dtype), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "size", "n", "m", "head_dim"),
    [
        ("triton", 16, 100, 100, 64),
        ("triton", 32, 90, 200, 128),
        ("triton", 64, 200, 330, 16),
        ("triton", 128, 9, 300, 64),
        ("triton", 256, 700, 700, 64),
        ("triton", 256, 90, 600, 256),
        ("hopper", 256, 700, 700, 64),
        ("hopper", 256, 900, 900, 128),
    ],
)
def test_block_sizes(backend, size, n, m, head_dim, causal):
    blocks, first = -(-m // size), (m - n) // size
    table = torch.ones(blocks - first, blocks, dtype=torch.bool) if size >= 128 else random_table(blocks - first, blocks)
    check(backend, table, size, inputs(1, n, m, 2, 1, head_dim, torch.bfloat16), causal)


@pytest.mark.parametrize(("size", "head_dim"), [(16, 64), (32, 128), (64, 16), (64, 64), (128, 96), (128, 256), (256, 128)])
def test_float32_sizes(size, head_dim):
    """Products of three TF32 products each are as exact as float32."""
    blocks = 4
    for causal in (False, True):
        tensors = inputs(1, blocks * size - 9, blocks * size - 9, 2, 1, head_dim, SINGLE)
        check("triton", random_table(blocks, blocks), size, tensors, causal)


@pytest.mark.parametrize(("dtype", "head_dim"), [(x, d) for x in (HALF[0], SINGLE) for d in (64, 128, 256)])
def test_tables_of_other_gpus(dtype, head_dim, monkeypatch):
    """The sizes that other GPUs get, on this one."""
    from dilated_attention_pytorch.backends.triton import block_run

    monkeypatch.setattr(block_run, "capability", lambda x: (8, 6))
    for causal in (False, True):
        check("triton", random_table(4, 3, 3), 128, inputs(1, 300, 300, 4, 2, head_dim, dtype), causal)


@pytest.mark.parametrize("kind", ["local_window", "hierarchical", "adaptive"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype", "size", "error"), [("triton", SINGLE, 32, 1e-5), ("hopper", HALF[0], 128, 6e-3)]
)
def test_sequences_of_their_own(backend, dtype, size, error, packed, kind):
    """Against the definition with the same lists; in half precision both round their results, by up to 2**-9 each."""
    pattern = BlockSparse.from_config(SparsePatternConfig(kind, 0.3, block_size=size))
    options = {"lengths": torch.tensor([500, 0, 77], device="cuda")}
    if packed:
        options = {"cu_seqlens": torch.tensor([0, 130, 130, 131, 500], device="cuda")}
    tensors = inputs(3, 500, 500, 4, 2, 64, dtype)
    dout, dlse = cotangents(tensors[0])
    actual, expected = (
        with_grads(
            lambda *x, b=b: attention(*x, pattern, is_causal=True, backend=b, return_lse=True, **options),
            tensors,
            dout,
            dlse,
        )
        for b in (backend, "reference")
    )
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        apart = torch.where(a == e, 0.0, (a - e).float())  # -inf is -inf
        assert apart.norm() <= error * e.float().masked_fill(e.isinf(), 0.0).norm(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_waits_for_nothing(backend):
    """Once its tables exist: the choice, forward, transposition and backward."""
    pattern = BlockSparse.from_config(SparsePatternConfig("adaptive", 0.3, block_size=128))
    tensors = Inputs(*(x.detach() for x in inputs(2, 1000, 1000, 4, 2, 64, torch.bfloat16)))
    made, _ = make_call(*tensors, pattern, is_causal=True, scale=0.125)
    kernels = backends.find(backend)

    def call():
        problem, options = problem_and_options(made, tensors.query, tensors.key)
        results = kernels.forward(problem, tensors, options)
        return kernels.backward(problem, tensors, Saved(*results, dout=results.out), options)

    first = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("backend", "head_dim", "causal"), [("triton", 64, True), ("hopper", 64, False), ("hopper", 128, True)]
)
def test_against_flex_attention(head_dim, causal, backend):
    """PyTorch's own kernels with the same BlockMask, compiled; both against float64."""
    n, size = 1024, 128
    table = torch.rand(2, 4, n // size, n // size) < 0.4
    table |= torch.eye(n // size, dtype=torch.bool)
    on_gpu = table.cuda()

    def blocks(b, h, i, j):
        return on_gpu[b, h, i // size, j // size]

    mod = blocks if not causal else lambda b, h, i, j: blocks(b, h, i, j) & (j <= i)
    block_mask = flex_attention.create_block_mask(mod, 2, 4, n, n, device="cuda")
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    tensors = inputs(2, n, n, 4, 4, head_dim, torch.bfloat16)
    dout, dlse = cotangents(tensors[0])
    pattern = BlockSparse.from_flex(block_mask)
    met = positions_met(table, size, n, n, causal)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    # Without the gradient of lse, which is FlexAttention's only by a newer argument.
    none = torch.zeros_like(dlse)
    exact = with_grads(plain(met), doubles, dout.double(), none.double())

    def flex(q, k, v):
        out = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask).transpose(1, 2)
        return out, exact[1].float() + 0.0 * out.float().sum()

    yardstick = with_grads(flex, tensors, dout, none)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
    oracle.assert_rounding_only(with_grads(call, tensors, dout, none), yardstick, exact, torch.bfloat16)


@pytest.mark.parametrize(
    ("backend", "head_dim", "causal"),
    [("triton", 64, True), ("triton", 128, False), *(("hopper", d, causal) for d in (64, 128) for causal in (False, True))],
)
def test_the_same_bits_in_200_runs(causal, head_dim, backend):
    """More blocks than multiprocessors; fresh memory holds NaN (conftest)."""
    pattern = BlockSparse.custom(torch.rand(6, 64, 64) < 0.2, block_size=128)
    tensors = inputs(1, 64 * 128 - 40, 64 * 128 - 40, 6, 3, head_dim, torch.bfloat16)
    dout, dlse = cotangents(tensors[0])
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
    first = with_grads(call, tensors, dout, dlse)
    assert all(x.isfinite().all() for x in (first[0], *first[2:]))
    for _ in range(200):
        again = with_grads(call, tensors, dout, dlse)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_2_to_the_31_elements(backend):
    """The end of a very long sequence is what it would be alone: groups of eight blocks read one another."""
    blocks, size, group = 264 * 64, 128, 8
    mask = torch.zeros(blocks // group, group, blocks // group, group, dtype=torch.bool, device="cuda")
    mask.diagonal(dim1=0, dim2=2).fill_(True)
    pattern = BlockSparse.custom(mask.view(blocks, blocks), block_size=size)
    del mask
    tensors = inputs(1, blocks * size, blocks * size, 16, 16, 64, torch.bfloat16)
    assert tensors[0].numel() > 2**31
    dout, tail = torch.randn_like(tensors[0]), group * size
    out = attention(*tensors, pattern, backend=backend)
    grads = torch.autograd.grad(out, tensors, dout)
    alone = [x[:, -tail:].detach().requires_grad_() for x in tensors]
    alone_pattern = BlockSparse.custom(torch.ones(group, group, dtype=torch.bool), block_size=size)
    alone_out = attention(*alone, alone_pattern, backend=backend)
    alone_grads = torch.autograd.grad(alone_out, alone, dout[:, -tail:])
    for a, b in zip((out, *grads), (alone_out, *alone_grads), strict=True):
        assert torch.equal(a[:, -tail:], b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_read_nothing_are_0_whatever_others_hold(backend):
    table = torch.ones(3, 3, dtype=torch.bool)
    table[1], table[:, 0] = False, False
    tensors = inputs(1, 384, 384, 2, 2, 64, torch.bfloat16)
    q, k, v = tensors
    with torch.no_grad():
        v[:, :128] = torch.nan
    out, lse = attention(q, k, v, BlockSparse.custom(table, block_size=128), backend=backend, return_lse=True)
    assert (out[:, 128:256] == 0).all()
    assert (lse[:, :, 128:256] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out, tensors, torch.randn_like(out))
    assert (dq[:, 128:256] == 0).all()
    assert (dk[:, :128] == 0).all()
    assert (dv[:, :128] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_one_of_their_query_heads_does_not_list(backend, head_dim):
    """Of three query heads of a key head one lists nothing of block 1, and its queries of block 0 are no numbers."""
    table = torch.ones(3, 3, 3, dtype=torch.bool)
    table[1, :, 1] = table[1, 0] = False
    tensors = inputs(1, 384, 384, 3, 1, head_dim, torch.bfloat16)
    with torch.no_grad():
        tensors[0][:, :128, 1] = torch.nan
    pattern = BlockSparse.custom(table, block_size=128)
    dout = torch.randn_like(tensors[0])
    ours = torch.autograd.grad(attention(*tensors, pattern, backend=backend), tensors, dout)
    others = torch.autograd.grad(attention(*tensors, pattern, backend="sdpa"), tensors, dout)
    for a, b in zip(ours[1:], others[1:], strict=True):
        assert a[:, 128:256].isfinite().all()
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_cuda_graph(backend):
    pattern = BlockSparse.from_config(SparsePatternConfig("local_window", 0.3, block_size=128))
    q, k, v = (x.detach() for x in inputs(1, 1000, 1000, 4, 2, 64, torch.bfloat16))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = attention(q, k, v, pattern, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = attention(q, k, v, pattern, backend=backend)
        block_tables._tables.cache_clear()
        out.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "n", "m"), [(HALF[0], 128, 200, 200), (HALF[0], 32, 70, 90), (SINGLE, 64, 90, 90)]
)
def test_dropout(dtype, size, n, m, causal):
    """Compiled: the weights of the rule, with grouped heads and masks of their own."""
    blocks, first = -(-m // size), (m - n) // size
    table = torch.ones(2, blocks - first, blocks, dtype=torch.bool)
    table[0, -1, 0] = False
    check("triton", table, size, inputs(1, n, m, 2, 1, 64, dtype), causal, dropout=(0.3, 2**40 + 7))


def test_auto_takes_the_kernels():
    for dtype, size, name in (
        (torch.bfloat16, 128, "hopper"),
        (torch.bfloat16, 64, "triton"),
        (torch.float32, 128, "triton"),
        (torch.float64, 128, "eager"),
    ):
        request = Request("cuda", torch.cuda.get_device_capability(), dtype, 64, block_size=size)
        assert backends.choose("auto", request).name == name
