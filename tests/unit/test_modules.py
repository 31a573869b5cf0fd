"""The modules, next to the functions and nn.MultiheadAttention."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import oracle
from dilated_attention_pytorch import (
    Attention,
    BlockSparse,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    Dilated,
    DilatedAttention,
    DistributedSparseConfig,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    Sharding,
    SparsePatternConfig,
    attention,
)

SPARSE = SparsePatternConfig("hierarchical", 0.5, block_size=16)
WIDE = ([1000], [1])  # one dense segment: plain attention


def like_torch(batch_first=True, **options) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    """The same weights in both."""
    theirs = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=torch.float64)
    ours = MultiheadDilatedAttention(32, 4, *WIDE, batch_first=batch_first, dtype=torch.float64, **options)
    nn.init.normal_(theirs.in_proj_bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_equals_torch_multihead_attention_on_one_dense_segment(batch_first, average):
    theirs, ours = like_torch(batch_first)
    x = torch.randn(20, 3, 32, dtype=torch.float64)
    x = x.transpose(0, 1) if batch_first else x
    mask = torch.arange(20)[None, :] >= torch.tensor([20, 7, 13])[:, None]
    for padding in (None, mask, torch.zeros(3, 20, dtype=torch.float64).masked_fill(mask, -torch.inf)):
        args = {"key_padding_mask": padding, "need_weights": True, "average_attn_weights": average}
        expected, expected_weights = theirs(x, x, x, **args)
        out, weights = ours(x, x, x, **args)
        assert weights.shape == expected_weights.shape
        keep = ~mask if padding is not None else torch.ones_like(mask)
        by_row = (lambda y: y) if batch_first else (lambda y: y.transpose(0, 1))
        torch.testing.assert_close(by_row(out)[keep], by_row(expected)[keep])
        rows = keep if average else keep[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(weights[rows], expected_weights[rows])


def test_unbatched_and_causal_like_torch():
    theirs, ours = like_torch()
    x = torch.randn(20, 32, dtype=torch.float64)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    expected, expected_weights = theirs(x, x, x, attn_mask=hidden, is_causal=True)
    out, weights = ours(x, x, x, is_causal=True, need_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert ours(x, x, x)[1] is None


def test_whole_module_by_hand():
    """Grouped heads, sub-LN, other key sizes, a dilated pattern: projections around the oracle."""
    pattern = Dilated([8, 16], [1, 2], "blocked")
    module = MultiheadDilatedAttention(
        24, 6, [8, 16], [1, 2], num_kv_heads=3, kdim=10, vdim=14, offsets="blocked", scale=0.7, layer_norm=True,
        dtype=torch.float64,
    )  # fmt: skip
    nn.init.normal_(module.in_proj_bias)
    query, key, value = (torch.randn(2, 21, size, dtype=torch.float64) for size in (24, 10, 14))
    biases = module.in_proj_bias.split([24, 12, 12])
    q = (query @ module.q_proj_weight.T + biases[0]).view(2, 21, 6, 4)
    k = (key @ module.k_proj_weight.T + biases[1]).view(2, 21, 3, 4)
    v = (value @ module.v_proj_weight.T + biases[2]).view(2, 21, 3, 4)
    attended, _ = oracle.attention(q, k, v, pattern, is_causal=True, scale=0.7)
    normed = nn.functional.layer_norm(
        attended.flatten(2), (24,), module.inner_attn_ln.weight, module.inner_attn_ln.bias, 1e-5
    )
    out, weights = module(query, key, value, is_causal=True)
    torch.testing.assert_close(out, module.out_proj(normed))
    assert weights is None


def test_attention_map_of_chosen_rows():
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2], num_kv_heads=2)
    x = torch.randn(2, 40, 32)
    _, weights = module(x, x, x, need_weights=True, average_attn_weights=False, is_causal=True)
    torch.testing.assert_close(module.attention_map(x, x, [3, -1], is_causal=True), weights[:, :, [3, -1]])
    torch.testing.assert_close(module.attention_map(x[0], x[0], [3], is_causal=True), weights[0, :, [3]])
    long = torch.randn(1, 100_000, 32)
    assert module.attention_map(long, long, [99_999]).shape == (1, 4, 1, 100_000)


def test_dropout_acts_in_training_only():
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2], dropout_p=0.5)
    plain = DilatedAttention([8], [1], dropout_p=0.5)
    x = torch.randn(2, 20, 32)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    assert not torch.equal(plain(*[x.view(2, 20, 4, 8)] * 3), plain(*[x.view(2, 20, 4, 8)] * 3))
    module.eval()
    plain.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    assert torch.equal(plain(*[x.view(2, 20, 4, 8)] * 3), plain(*[x.view(2, 20, 4, 8)] * 3))


def test_dilated_attention_module_is_the_function():
    module = DilatedAttention([8, 16], [1, 2], scale=0.4, offsets="blocked", backend="eager")
    q, k, v = torch.randn(3, 2, 20, 4, 8).unbind(0)
    expected = attention(q, k, v, Dilated([8, 16], [1, 2], "blocked"), scale=0.4, is_causal=True, backend="eager")
    assert torch.equal(module(q, k, v, is_causal=True), expected)
    assert "segment_lengths=(8, 16)" in repr(module)


@pytest.mark.parametrize("pattern", [Dilated([8, 16], [1, 2]), BlockSparse.from_config(SPARSE)])
def test_attention_module_is_the_function(pattern):
    module = Attention(pattern, scale=0.4, backend="eager")
    q, k, v = torch.randn(3, 2, 20, 4, 8).unbind(0)
    options = {"scale": 0.4, "backend": "eager", "is_causal": True}
    for sequences in ({}, {"lengths": torch.tensor([20, 7])}, {"cu_seqlens": torch.tensor([0, 3, 20])}):
        expected = attention(q, k, v, pattern, **options, **sequences)
        assert torch.equal(module(q, k, v, True, **sequences), expected)
        assert torch.equal(module(q, k, is_causal=True, **sequences), attention(q, k, k, pattern, **options, **sequences))
        assert torch.equal(module(q, is_causal=True, **sequences), attention(q, q, q, pattern, **options, **sequences))
    with pytest.raises(ValueError, match="got value without key: pass both, or neither"):
        module(q, None, v)
    assert module.state_dict() == {}
    assert "scale=0.4, dropout_p=0.0, mixing_gradient='exact', backend='eager'" in repr(module)


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_lengths_in_any_form(form):
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2])
    x, mask = torch.randn(2, 20, 32), torch.arange(20) >= torch.tensor([[13], [20]])
    q, lengths = x.view(2, 20, 4, 8), form([13, 20])
    out = module(x, x, x, lengths=lengths)[0]
    torch.testing.assert_close(out[0, :13], module(*[x[0, :13]] * 3)[0])
    assert torch.equal(out, module(x, x, x, key_padding_mask=mask)[0])
    plain = DilatedAttention([8, 16], [1, 2])
    torch.testing.assert_close(plain(q, lengths=lengths)[0, :13], plain(q[:1, :13])[0])
    torch.testing.assert_close(plain(q, cu_seqlens=form([0, 13, 20]))[:, :13], plain(q[:, :13]))
    weights = module(x, x, x, lengths=lengths, need_weights=True, average_attn_weights=False)[1]
    torch.testing.assert_close(module.attention_map(x, x, [3, 15], lengths=lengths), weights[:, :, [3, 15]])


def test_packed_documents_in_a_multihead_module():
    module = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2])
    x, cu_seqlens = torch.randn(2, 20, 32), torch.tensor([0, 13, 20])
    expected = torch.cat([module(*[x[:, a:b]] * 3, is_causal=True)[0] for a, b in ((0, 13), (13, 20))], 1)
    torch.testing.assert_close(module(x, x, x, is_causal=True, cu_seqlens=cu_seqlens)[0], expected)
    torch.testing.assert_close(module(*[x[0]] * 3, is_causal=True, cu_seqlens=cu_seqlens)[0], expected[0])
    with pytest.raises(ValueError, match="needs one sequence per sample; call once for each sequence"):
        module(x, x, x, need_weights=True, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"lengths .* and cu_seqlens .* exclude one another"):
        module(x, x, x, lengths=torch.tensor([20, 3]), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: Attention(Dilated([8], [2]), **options),
        lambda **options: DilatedAttention([8], [2], **options),
        lambda **options: RingDilatedAttention([8], [2], **options),
        lambda **options: BlockSparseRingDilatedAttention(sparse_config=SPARSE, **options),
        lambda **options: MultiheadDilatedAttention(32, 4, [8], [2], **options),
        lambda **options: BlockSparseRingDistributedDilatedAttention(32, 4, **options),
    ],
)
def test_all_modules_take_the_same_options(make):
    make(scale=0.5, dropout_p=0.1, mixing_gradient="exact", backend="eager", order=None, ordered=None, group=None)
    for name in ("softmax_scale", "attention_dropout", "dropout", "bucket_size", "transport", "comm_dtype"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            make(**{name: None})
    if make(group=None).__class__.__name__.startswith("Multihead"):
        with pytest.raises(
            TypeError, match="unexpected keyword argument 'dropout'; dropout is called dropout_p; its docstring"
        ):
            make(dropout=0.1)
    for name, wrong, error, message in (
        ("scale", torch.ones(1), TypeError, "scale must be a number, got Tensor; multiply the query by a learned scale"),
        ("dropout_p", 1.0, ValueError, "0 <= dropout_p < 1, got 1.0"),
        ("mixing_gradient", "none", ValueError, "mixing_gradient must be 'exact' or 'detached', got 'none'"),
        ("backend", "cuda", ValueError, "backend must be one of 'auto'"),
        ("order", [0, 1], TypeError, "order must be an Order, got list"),
        ("ordered", True, ValueError, "pass that order as order"),
        ("layout", "spiral", ValueError, "layout"),
        ("group", Sharding(None, transport="pigeon"), ValueError, "transport must be one of .*, got 'pigeon'"),
        ("group", Sharding(None, bucket_size=0), ValueError, "bucket_size is a number of rows, at least 1, or None, got 0"),
        ("group", Sharding(None, comm_dtype="float32"), TypeError, "comm_dtype must be one of torch.float64, .* or None"),
    ):
        with pytest.raises(error, match=message):
            make(**{name: wrong})


def test_sharded_modules_without_a_process_group():
    x, config = torch.zeros(1, 4, 2, 8), DistributedSparseConfig(block_size=16)
    for module in (
        Attention(config, group=Sharding(None)),
        DilatedAttention([4], [1], group=Sharding(None)),
        RingDilatedAttention([4], [1], layout="zigzag"),
    ):
        with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
            module(x)
        assert copy.deepcopy(module).sharding is module.sharding
    assert RingDilatedAttention([4], [1], layout="zigzag").sharding == Sharding(None, "zigzag")
    with pytest.raises(ValueError, match=r"follows from the shards of the ranks: pass group, or pattern=config.pattern"):
        Attention(config)
    with pytest.raises(ValueError, match="layout='zigzag' without group"):
        DilatedAttention([4], [1], layout="zigzag")
    with pytest.raises(ValueError, match="layout is a field of Sharding"):
        RingDilatedAttention([4], [1], group=Sharding(None), layout="zigzag")
    with pytest.raises(ValueError, match="a sharded sequence has no torchscale_padding"):
        MultiheadDilatedAttention(16, 2, [4], [1], torchscale_padding=True, group=Sharding(None))
    with pytest.raises(ValueError, match=r"so it has no bucket_size: got 3; leave it out"):
        BlockSparseRingDilatedAttention(sparse_config=SPARSE, group=Sharding(None, bucket_size=3))


def test_branches_that_no_pattern_reads():
    with pytest.raises(ValueError, match=r"read by 'dilated_sparse' only, got \(\(16, 1\),\) for 'hierarchical'"):
        BlockSparseRingDilatedAttention([16], [1], SPARSE)
    with pytest.raises(ValueError, match=r"same number of entries, at least one: got 1 segment lengths \(16,\) and 0"):
        BlockSparseRingDilatedAttention([16])
    with pytest.raises(ValueError, match="'dilated_sparse' needs segment_lengths and dilation_rates, got none"):
        BlockSparseRingDilatedAttention()
    config = DistributedSparseConfig(segment_lengths=[32], dilation_rates=[1])
    with pytest.raises(ValueError, match=r"has the branches \(\(32, 1\),\), the module \(\(16, 1\),\); leave out one"):
        BlockSparseRingDistributedDilatedAttention(32, 4, [16], [1], config)
    with pytest.raises(ValueError, match=r"same number of entries, at least one: got 1 segment lengths \(16,\) and 0"):
        BlockSparseRingDistributedDilatedAttention(32, 4, [16])


def test_options_of_the_authors_code_reach_the_attention():
    plain, theirs = (
        MultiheadDilatedAttention(
            16, 4, [8, 16], [1, 2], dtype=torch.float64, torchscale_padding=padding, mixing_gradient=mixing
        )
        for padding, mixing in ((False, "exact"), (True, "detached"))
    )
    theirs.load_state_dict(plain.state_dict())
    x = torch.randn(1, 19, 16, dtype=torch.float64)
    heads = [(x @ weight.T).view(1, 19, 4, 4) for weight in theirs.in_proj_weight.chunk(3)]
    expected = oracle.attention(*heads, Dilated([8, 16], [1, 2], torchscale_padding=True))[0]
    torch.testing.assert_close(theirs(x, x, x)[0], theirs.out_proj(expected.flatten(2)))
    theirs.attention.pattern = plain.attention.pattern
    for module in (plain, theirs):
        module(x, x, x)[0].square().sum().backward()
    torch.testing.assert_close(plain.out_proj.weight.grad, theirs.out_proj.weight.grad)
    assert not torch.allclose(plain.in_proj_weight.grad[:16], theirs.in_proj_weight.grad[:16])


def test_sizes_may_be_integers_of_numpy():
    module = MultiheadDilatedAttention(np.int64(32), np.int32(4), [8], [1], kdim=np.int64(10), num_kv_heads=np.int64(2))
    assert all(type(x) is int for x in (module.embed_dim, module.num_heads, module.num_kv_heads, module.kdim))
    assert module(torch.randn(2, 9, 32), torch.randn(2, 9, 10), torch.randn(2, 9, 32))[0].shape == (2, 9, 32)


@pytest.mark.parametrize("options", [{}, {"kdim": 10}])
def test_embeddings_of_another_type_than_the_weights(options):
    module = MultiheadDilatedAttention(32, 4, [8], [1], **options)
    query, key, value = torch.randn(2, 9, 32), torch.randn(2, 9, module.kdim), torch.randn(2, 9, 32)
    rule = "must have the dtype of the module's weights, got torch.float64 and torch.float32; use"
    for name, inputs in (
        ("query", (query.double(), key, value)),
        ("key", (query, key.double(), value)),
        ("value", (query, key, value.double())),
    ):
        ways = rf"{name}.to\(torch.float32\) or module.to\(torch.float64\)$"
        for training in (True, False):
            with pytest.raises(TypeError, match=f"{name} {rule} {ways}"):
                module.train(training)(*inputs)
        with pytest.raises(TypeError, match=f"{name} {rule}"), torch.autocast("cpu"):  # which leaves float64 as it is
            module(*inputs)
    with pytest.raises(TypeError, match=f"query {rule}"):
        module.attention_map(query.double(), key, [0])
    for autocast in (True, False):
        for dtype in (torch.int64, torch.bool, torch.complex64):
            ids = torch.ones(2, 9, 32, dtype=dtype)
            with (
                pytest.raises(TypeError, match=f"query must hold floating-point embeddings, got {dtype}; use"),
                torch.autocast("cpu", enabled=autocast),
            ):
                module(ids, key, value)


def test_autocast_casts_embeddings_and_weights():
    module = MultiheadDilatedAttention(32, 4, [8], [1], layer_norm=True)
    x = torch.randn(2, 9, 32)
    half = copy.deepcopy(module).bfloat16()
    for y in (x, x.bfloat16(), x.half()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(y, y, y)[0]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), half(*[y.bfloat16()] * 3)[0].float(), atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.double()(*[x.double()] * 3)[0].dtype == torch.float64


def replica(module):
    """A replica as nn.DataParallel makes it on each GPU: shallow copies of all modules, parameters as plain attributes."""
    copies = {one: one._replicate_for_data_parallel() for one in module.modules()}
    for one, other in copies.items():
        for name, child in one._modules.items():
            other._modules[name] = copies[child]
        for name, parameter in one._parameters.items():
            setattr(other, name, None if parameter is None else parameter.clone())
    return copies[module]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: DilatedAttention([16, 32], [1, 2]), (4, 40, 2, 8)),
        (lambda: MultiheadDilatedAttention(16, 2, [16, 32], [1, 2], dtype=torch.float64), (4, 40, 16)),
        (lambda: BlockSparseRingDilatedAttention(sparse_config=SPARSE), (4, 40, 2, 8)),
    ],
)
def test_replicas_in_threads(make, shape):
    """Each replica attends over its part of the batch, at the same time, and gradients come home to the module."""
    module = make()
    x = torch.randn(shape, dtype=torch.float64)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    expected = first(module(x, x, x))
    inputs = [*module.parameters()]
    grads = torch.autograd.grad(expected.square().sum(), inputs) if inputs else ()
    replicas = [replica(module) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(lambda both: first(both[0](*[both[1]] * 3)), zip(replicas, x.split(2), strict=True)))
    out = torch.cat(halves)
    torch.testing.assert_close(out, expected)
    if inputs:
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), inputs), grads)
