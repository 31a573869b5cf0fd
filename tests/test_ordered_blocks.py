"""Block-sparse attention with an order against the definition: lists over places, causality by original position, both
by loops over positions in float64; on one device and over gloo on several ranks."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

import block_oracle
from block_cases import KINDS, SIZE, assert_same, config, random_inputs, table_of, with_grads
from dilated_attention_pytorch import (
    BlockSparse,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    DistributedSparseConfig,
    Hilbert,
    Identity,
    MultiheadDilatedAttention,
    Order,
    Striped,
    attention,
)
from dilated_attention_pytorch.backends import eager
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.blocks import call as block_call
from dilated_attention_pytorch.blocks import ops as block_ops
from dilated_attention_pytorch.blocks import tiles as block_tiles
from dilated_attention_pytorch.distributed import Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.sequence import rows_of
from test_ring import Received


def scattered(n, batch=0):
    return Order.from_permutation(torch.stack([torch.randperm(n) for _ in range(batch)]) if batch else torch.randperm(n))


def pattern_of(kind, n, heads):
    """A pattern and its table, None if that depends on the content."""
    blocks = -(-n // SIZE)
    if kind in ("mask", "masks"):
        table = torch.rand((heads, blocks, blocks) if kind == "masks" else (blocks, blocks)) < 0.4
        return BlockSparse.custom(table, block_size=SIZE), table
    return BlockSparse.from_config(config(kind)), None if kind == "adaptive" else table_of(kind, "0.4", 0, blocks, False)


def definition(q, k, v, table, order, causal, scale=None):
    """Rows put in order by indexing, the lists of the call that is not causal, and back."""
    batch, positions = torch.arange(q.shape[0])[:, None], order.positions.expand(q.shape[0], -1)
    q, k, v = (x[batch, positions] for x in (q, k, v))
    if table is None:
        used = q.shape[-1] ** -0.5 if scale is None else scale
        table = block_oracle.adaptive(q.detach(), k.detach(), "0.4", SIZE, used, False)
    out, lse = block_oracle.attention(q, k, v, table, SIZE, causal=causal, scale=scale, positions=positions)
    back = batch, positions.argsort(-1)
    return out[back], lse.transpose(1, 2)[back].transpose(1, 2)


def compare(kind, n, order, *, causal=True, backends=("reference", "eager"), heads=4, **options):
    pattern, table = pattern_of(kind, n, heads)
    inputs = random_inputs(2, n, n, heads, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, heads, n, dtype=torch.float64)
    expected = with_grads(lambda *x: definition(*x, table, order, causal, **options), inputs, dout, dlse)
    for backend in backends:
        more = {"is_causal": causal, "order": order, "backend": backend, "return_lse": True, **options}
        assert_same(with_grads(lambda *x: attention(*x, pattern, **more), inputs, dout, dlse), expected)  # noqa: B023
    return expected


@pytest.mark.parametrize("kind", [*KINDS, "adaptive", "mask", "masks"])
def test_causal_by_original_position(kind):
    compare(kind, 70, scattered(70, 2))


def test_one_order_for_all_samples():
    compare("adaptive", 52, scattered(52), backends=("auto",))
    compare("masks", 52, Hilbert.grid(4, 13), backends=("auto",))


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive"])
def test_not_causal(kind):
    for order in (Hilbert.grid(4, 9), scattered(36, 2)):
        compare(kind, 36, order, causal=False, backends=("reference", "sdpa", "eager"))


@pytest.mark.parametrize("n", [1, 15, 32, 33])
def test_short_and_whole_blocks(n):
    compare("masks", n, scattered(n))
    compare("local_window", n, Hilbert.line(n), scale=-0.3)


def test_rows_that_see_nothing_are_exactly_empty():
    """The blocks named hold later positions only, for some rows of them or all."""
    n, pattern = 48, BlockSparse.custom(torch.eye(3).roll(1, 0).bool(), block_size=SIZE)
    order = Order.from_permutation([*range(16, 48), *range(16)])  # block 2 is first: it sees nothing, block 1 all of it
    q, k, v = random_inputs(2, n, n, 4, 2, 4)
    for backend in ("reference", "eager"):
        out, lse = attention(q, k, v, pattern, is_causal=True, order=order, backend=backend, return_lse=True)
        # By place: block 0 (positions 16 to 31) reads block 2 (0 to 15), 1 (32 to 47) reads 0, 2 (0 to 15) reads 1.
        assert (out[:, :16] == 0).all()
        assert (lse[:, :, :16] == -torch.inf).all()
        assert lse[:, :, 16:].isfinite().all()
        for grad in torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v)):
            assert grad.isfinite().all()
            assert (grad[:, 32:] == 0).all() or (grad[:, :16] == 0).all()
    _, lse, *grads = compare("masks", n, scattered(n))
    assert (lse == -torch.inf).any()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("kind", ["masks", "adaptive"])
def test_many_small_calls_and_tiles_that_do_not_count(kind, monkeypatch):
    """As on a device whose block numbers the host cannot read: short last blocks are computed everywhere, weight 0."""
    monkeypatch.setattr(block_tiles, "_host_reads", lambda x: False)
    monkeypatch.setattr("dilated_attention_pytorch.tiles.part_limit", lambda query: 300)
    monkeypatch.setattr(eager, "_MAX_SCORES", 200)
    for n in (32, 41):
        compare(kind, n, scattered(n, 2), backends=("eager",))


def test_one_dense_block_list_is_causal_attention_under_every_order():
    n, pattern = 50, BlockSparse.custom(torch.ones(4, 4, dtype=torch.bool), block_size=SIZE)
    q, k, v = (x.detach() for x in random_inputs(2, n, n, 4, 2, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for order in (Hilbert.line(n), Striped(n, 3), scattered(n, 2), Identity(n)):
        torch.testing.assert_close(attention(q, k, v, pattern, is_causal=True, order=order), expected)


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "masks"])
def test_rows_that_already_lie_in_order(kind):
    for order in (Hilbert.grid(4, 13), scattered(52, 2)):
        pattern, table = pattern_of(kind, 52, 4)
        inputs = [x.detach() for x in random_inputs(2, 52, 52, 4, 2, 8)]
        expected, lse = definition(*inputs, table, order, True)
        rows = torch.arange(2)[:, None], order.positions.expand(2, -1)
        for backend in ("reference", "eager"):
            options = {"is_causal": True, "order": order, "ordered": True, "backend": backend, "return_lse": True}
            out, part = attention(*(x[rows] for x in inputs), pattern, **options)
            torch.testing.assert_close(out, expected[rows], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(part.transpose(1, 2), lse.transpose(1, 2)[rows], rtol=1e-10, atol=1e-10)


def test_identity_is_no_order_at_all():
    inputs, pattern = random_inputs(2, 70, 70, 4, 2, 8), BlockSparse.from_config(config("hierarchical"))
    causal = attention(*inputs, pattern, order=Identity(70), is_causal=True)
    assert torch.equal(causal, attention(*inputs, pattern, is_causal=True))


def test_derivatives():
    order, inputs = scattered(18, 2), random_inputs(2, 18, 18, 2, 1, 3)
    pattern = BlockSparse.custom(torch.tensor([[1, 1], [1, 0]]).bool(), block_size=SIZE)

    def call(q, k, v, backend="eager"):
        out, lse = attention(q, k, v, pattern, is_causal=True, order=order, backend=backend, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x, backend="reference"), inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8)])
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_empty_batches_and_sequences(shape, backend):
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    pattern = BlockSparse.from_config(config("local_window"))
    out = attention(q, k, v, pattern, is_causal=True, order=Hilbert.line(shape[1]), backend=backend)
    out.sum().backward()
    assert out.shape == q.grad.shape == shape


def test_what_cannot_is_refused():
    n, pattern = 256, BlockSparse.from_config(config("local_window"))
    q, order = torch.zeros(1, n, 2, 32), Hilbert.grid(16, 16)
    for backend in ("sdpa", "triton"):
        cannot = rf"{backend}: is_causal under an order masks .* which this backend cannot; use backend='eager'"
        with pytest.raises(ValueError, match=cannot):
            attention(q, q, q, pattern, is_causal=True, order=order, backend=backend)
    with pytest.raises(ValueError, match="the order is over 64 positions, got a sequence of 256"):
        attention(q, q, q, pattern, is_causal=True, order=Hilbert.line(64))
    with pytest.raises(ValueError, match="lengths and cu_seqlens do not go with it"):
        attention(q, q, q, pattern, is_causal=True, order=order, lengths=torch.tensor([3]))
    mask = flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device="cpu")
    with pytest.raises(ValueError, match="this BlockMask is causal by places of the ordered sequence"):
        attention(q, q, q, BlockSparse.from_flex(mask), is_causal=True, order=order)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
def test_kernels_on_a_gpu_are_passed_over(monkeypatch):
    """``auto`` on a GPU: those that could serve the call if it were not causal cannot mask by position."""
    request = Request("cuda", (9, 0), torch.bfloat16, 64, 0.0)
    assert block_call._choose("auto", request, 128, 512, 512) == "hopper"
    assert block_call._choose("auto", request, 64, 512, 512) in ("hopper", "triton")
    ordered = replace(request, ordered=True)
    assert {block_call._choose("auto", ordered, size, 512, 512) for size in (32, 64, 128)} == {"eager"}


@pytest.mark.parametrize("kind", ["hierarchical", "adaptive", "masks"])
def test_operators(kind):
    pattern, _ = pattern_of(kind, 50, 4)
    q, k, v = random_inputs(2, 50, 50, 4, 2, 8)
    for positions in (torch.randperm(50), torch.stack([torch.randperm(50) for _ in range(2)])):
        arguments = (positions, *block_call._arguments(q, k, pattern, None, None, False, 0.3), 0.3, "eager")
        torch.library.opcheck(block_ops.attend_blocks, (q, k, v, *arguments))
        out, lse = block_ops.attend_blocks(q, k, v, *arguments)
        saved = [x.detach() for x in (q, k, v, out, lse)]
        given = (torch.randn_like(out), torch.randn_like(lse), *saved, *arguments)
        torch.library.opcheck(block_ops.attend_blocks_backward, given)


@pytest.mark.parametrize("kind", ["dilated_sparse", "adaptive"])
def test_module_compiled(kind):
    order = scattered(70, 2)
    module = BlockSparseRingDilatedAttention([40, 96], [1, 2], config(kind), order=order)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q, k, v):
        return module((q * 2).sin(), k, v, is_causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(2):
        inputs = random_inputs(2, 70, 70, 4, 2, 8)
        out, expected = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        for a, e in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def test_module():
    order, arguments = Hilbert.grid(7, 10), ([40, 96], [1, 2], config("dilated_sparse"))
    inputs = [x.detach() for x in random_inputs(2, 70, 70, 4, 2, 8)]
    plain, ordered = (BlockSparseRingDilatedAttention(*arguments, order=order, ordered=x) for x in (None, True))
    table = table_of("dilated_sparse", "0.4", 0, 5, False)
    for causal in (False, True):
        expected, _ = definition(*inputs, table, order, causal)
        torch.testing.assert_close(plain(*inputs, is_causal=causal), expected)
        there = ordered(*map(order.permute, inputs), is_causal=causal)
        torch.testing.assert_close(order.unpermute(there), expected)
    assert "order=Hilbert.grid(7, 10), ordered=True" in repr(ordered)
    assert ordered.state_dict() == {}
    assert ordered.to("meta").order.device.type == "meta"
    with pytest.raises(ValueError, match="ordered=True says that rows already lie in an order"):
        BlockSparseRingDilatedAttention(*arguments, ordered=True)
    with pytest.raises(TypeError, match="order must be an Order, got list"):
        BlockSparseRingDilatedAttention(*arguments, order=[1, 0])


# By the number of ranks: kind, rows of the shards, layout, one order for each sample, transport.
RANKED = {
    2: [
        ("hierarchical", (20, 25), "contiguous", False, "auto"),
        ("masks", (17, 20), "zigzag", True, "ring"),
        ("adaptive", (19, 26), "contiguous", True, "ring"),
    ],
    3: [
        ("dilated_sparse", (30, 0, 21), "zigzag", True, "allgather"),
        ("mask", (9, 29, 7), "contiguous", False, "ring"),
        ("masks", (20, 12, 17), "contiguous", True, "auto"),
        ("adaptive", (20, 12, 21), "zigzag", False, "auto"),
    ],
}


def check_ranks(case, causal, group, rank, world) -> None:
    kind, lengths, layout, by_sample, transport = case
    shards = Shards.of(lengths, layout)
    n = shards.length
    torch.manual_seed(n)
    order, (pattern, table) = scattered(n, 2 if by_sample else 0), pattern_of(kind, n, 4)
    inputs = random_inputs(2, n, n, 4, 2, 4)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, n, dtype=torch.float64)
    expected = with_grads(lambda *x: definition(*x, table, order, causal), inputs, dout, dlse)
    rows = torch.arange(2)[:, None], order.positions[..., rows_of(shards, rank, torch.device("cpu"))].expand(2, -1)

    def by_head(x):
        return x.transpose(1, 2)[rows].transpose(1, 2)

    options = {"group": group, "layout": layout, "transport": transport, "return_lse": True}
    call = lambda *x: attention(*x, pattern, is_causal=causal, order=order, **options)  # noqa: E731
    local = [x.detach()[rows].requires_grad_() for x in inputs]
    actual = with_grads(call, local, dout[rows], by_head(dlse))
    assert_same(actual, [by_head(x) if name == 1 else x[rows] for name, x in enumerate(expected)])


def check_traffic(group, world) -> None:
    """A causal call under an order receives what the call that is not causal does: no positions, and no row less."""
    x, order = torch.randn(1, 40, 2, 4), Hilbert.line(40 * world)
    for kind in ("hierarchical", "adaptive"):
        pattern = BlockSparse.from_config(config(kind, 0.3))
        with pytest.MonkeyPatch.context() as monkeypatch:
            received, counts = Received(monkeypatch), []
            for options in ({}, {"order": order}, {"order": order, "is_causal": True}):
                attention(x, x, x, pattern, group=group, transport="ring", **options)
                counts.append(received.take())
        assert counts[0] == counts[1] == counts[2] > 0


def check_modules(group, world) -> None:
    torch.manual_seed(3)
    n, order = 90, Hilbert.grid(9, 10)
    sharding = {"group": group, "layout": "zigzag", "order": order}
    q = torch.randn(1, n, 2, 8, dtype=torch.float64)
    one = BlockSparseRingDilatedAttention([40, 96], [1, 2], config("dilated_sparse"), order=order)
    many = BlockSparseRingDilatedAttention([40, 96], [1, 2], config("dilated_sparse"), **sharding)
    whole = gather_sequence(many(shard_sequence(q, **sharding), is_causal=True), **sharding)
    torch.testing.assert_close(whole, one(q, is_causal=True), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="order once, by shard_sequence"):
        BlockSparseRingDilatedAttention([40], [1], config("local_window"), **sharding, ordered=False)
    settings = DistributedSparseConfig(0.4, "hierarchical", block_size=SIZE, node_size=2)
    head = BlockSparseRingDistributedDilatedAttention(16, 2, [32], [1], settings, dtype=torch.float64, **sharding)
    x = torch.randn(2, n, 16, dtype=torch.float64)
    alone = MultiheadDilatedAttention(16, 2, [32], [1], dtype=torch.float64)
    pattern = settings.pattern(Shards.even(n, world, "zigzag"))
    alone.attention.forward = lambda q, k, v, is_causal, lengths=None: attention(
        q, k, v, pattern, is_causal=is_causal, order=order, backend="reference"
    )
    alone.load_state_dict(head.state_dict())
    part = shard_sequence(x, **sharding)
    out, _ = head(part, part, part, is_causal=True)
    torch.testing.assert_close(gather_sequence(out, **sharding), alone(x, x, x, is_causal=True)[0], rtol=1e-10, atol=1e-10)


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(RANKED))
    groups = {size: dist.new_group(list(range(size))) for size in RANKED}
    for size, cases in RANKED.items():
        for case in cases:
            for causal in (False, True) if case is cases[0] else (True,):
                if rank < size:
                    check_ranks(case, causal, groups[size], rank, size)
    group = dist.group.WORLD
    check_traffic(group, max(RANKED))
    check_modules(group, max(RANKED))
    mask = flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, 384, 384, device="cpu")
    x = torch.zeros(1, 128, 1, 4)
    with pytest.raises(ValueError, match="this BlockMask is causal by places of the ordered sequence"):
        attention(x, x, x, BlockSparse.from_flex(mask), is_causal=True, order=Hilbert.line(384), group=group)
    dist.destroy_process_group()


def test_the_definition_on_several_ranks(tmp_path):
    mp.spawn(work, (str(tmp_path / "store"),), nprocs=max(RANKED))
