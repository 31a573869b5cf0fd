"""The multihead module in the place of nn.MultiheadAttention: values, gradients, and the layers of torch.nn around it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import Hilbert, MultiheadDilatedAttention, Sharding

DENSE, DILATED = ([1000], [1]), ([4, 8], [1, 2])
LENGTHS = torch.tensor([12, 5, 9])
PADDING = torch.arange(12)[None, :] >= LENGTHS[:, None]
CAUSAL = torch.ones(12, 12, dtype=torch.bool).triu(1)
LAYOUTS = [{}, {"bias": False}, {"kdim": 10, "vdim": 6}, {"vdim": 6, "bias": False}, {"batch_first": False}]


def both(dtype=torch.float64, **options) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    """The two modules, each initialised with the same seed."""
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(32, 4, **{"batch_first": True, "dtype": dtype} | options)
    torch.manual_seed(3)
    ours = MultiheadDilatedAttention(32, 4, *DENSE, dtype=dtype, **options)
    return theirs, ours


def random_biases(*modules: nn.Module) -> None:
    """The same biases in all modules, because those of a new module are 0."""
    for module in modules:
        generator = torch.Generator().manual_seed(4)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, generator=generator)


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_seed_gives_the_same_parameters(options, dtype):
    theirs, ours = both(dtype, **options)
    after = torch.rand(4)
    torch.manual_seed(3)
    nn.MultiheadAttention(32, 4, **{"batch_first": True, "dtype": dtype} | options)
    assert torch.equal(after, torch.rand(4)), "the generator is in the same state after either constructor"
    expected, actual = theirs.state_dict(), ours.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    torch.manual_seed(3)
    random_biases(ours)
    torch.manual_seed(3)
    ours.reset_parameters()
    assert all(torch.equal(x, expected[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("options", LAYOUTS)
def test_state_dicts_go_both_ways(options):
    theirs, ours = both(**options)
    random_biases(theirs)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(2)
    assert theirs.load_state_dict(ours.state_dict()) == ([], [])
    assert all(torch.equal(x, ours.get_parameter(name)) for name, x in theirs.named_parameters())


def test_gain_of_values_and_output():
    """MAGNETO: the projections of values and of the output are Xavier-uniform, each by its own shape, with the gain."""
    for options, fan in (({}, 64), ({"num_kv_heads": 8}, 32 + 16), ({"vdim": 96}, 96 + 32)):
        torch.manual_seed(5)
        plain = MultiheadDilatedAttention(32, 16, *DENSE, **options)
        torch.manual_seed(5)
        module = MultiheadDilatedAttention(32, 16, *DENSE, gamma_init=3.0, **options)
        name, rows = ("v_proj_weight", slice(None)) if "vdim" in options else ("in_proj_weight", slice(-fan + 32, None))
        value, bound = module.get_parameter(name)[rows], 3.0 * (6 / fan) ** 0.5
        assert 0.95 * bound < value.abs().max() <= bound
        assert 0.95 * 3.0 * (6 / 64) ** 0.5 < module.out_proj.weight.abs().max() <= 3.0 * (6 / 64) ** 0.5
        first = "q_proj_weight" if "vdim" in options else "in_proj_weight"
        assert torch.equal(module.get_parameter(first)[:32], plain.get_parameter(first)[:32])


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", ["no", "bool", "float", "unbatched"])
def test_outputs_and_gradients_equal_torch(options, dtype, causal, padded):
    theirs, ours = both(dtype, **options)
    random_biases(theirs, ours)
    first = options.get("batch_first", True)
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    xs = [torch.randn(3, 12, size, dtype=dtype) for size in sizes]
    xs = xs if "vdim" in options else [xs[0]] * 3  # one tensor: one matrix product
    keep, masks = torch.ones_like(PADDING), {"attn_mask": CAUSAL} if causal else {}
    if padded == "unbatched":
        xs, keep = [x[1] for x in xs], ~PADDING[1]
        masks["key_padding_mask"] = PADDING[1]
    elif padded != "no":
        keep = ~PADDING
        masks["key_padding_mask"] = PADDING
        if padded == "float":
            masks = {name: torch.zeros(x.shape, dtype=dtype).masked_fill(x, -torch.inf) for name, x in masks.items()}
        xs = xs if first else [x.transpose(0, 1) for x in xs]
    elif not first:
        xs = [x.transpose(0, 1) for x in xs]
    results = []
    for module in (theirs, ours):
        inputs = [x.clone().requires_grad_() for x in dict.fromkeys(xs)]
        q, k, v = inputs * (3 // len(inputs))
        out, weights = module(q, k, v, need_weights=False, **masks)
        assert weights is None
        assert out.shape == q.shape
        rows = (out if first or padded == "unbatched" else out.transpose(0, 1))[keep]
        loss = (rows * torch.linspace(-1, 1, rows.numel(), dtype=dtype).view_as(rows)).sum()
        results.append([rows, *torch.autograd.grad(loss, [*inputs, *module.parameters()])])
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


def encoder_layer(attention: nn.Module, norm_first: bool, bias: bool = True) -> nn.TransformerEncoderLayer:
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first, bias=bias, dtype=torch.float64
    )
    layer.self_attn = attention
    return layer


MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "float padding": {"src_key_padding_mask": torch.zeros(3, 12, dtype=torch.float64).masked_fill(PADDING, -torch.inf)},
    "causal": {"src_mask": CAUSAL},
    "hint": {"src_mask": nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64), "is_causal": True},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    "per head": {"src_mask": CAUSAL.expand(12, 12, 12)},
    "nothing hidden": {"src_mask": torch.zeros(12, 12, dtype=torch.bool)},
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", MASKS)
def test_encoder_layer_with_a_dense_segment_is_that_of_torch(norm_first, masks):
    """In evaluation, torch computes its own layer by the fused path and ours by the module."""
    options, keep = MASKS[masks], ~PADDING if "src_key_padding_mask" in MASKS[masks] else torch.ones_like(PADDING)
    theirs, ours = both()
    random_biases(theirs, ours)
    theirs, ours = encoder_layer(theirs, norm_first), encoder_layer(ours, norm_first)
    x = torch.randn(3, 12, 32, dtype=torch.float64)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            expected, actual = (layer.train(training)(x, **options)[keep] for layer in (theirs, ours))
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_evaluation_of_an_encoder_layer_is_dilated(norm_first, bias):
    """By hand and in training: torch's fused path would compute dense attention from the parameters."""
    attention = MultiheadDilatedAttention(32, 4, *DILATED, bias=bias, dtype=torch.float64)
    random_biases(attention)
    layer = encoder_layer(attention, norm_first, bias)
    x = torch.randn(3, 12, 32, dtype=torch.float64)
    feed = lambda y: layer.linear2(layer.linear1(y).relu())  # noqa: E731
    if norm_first:
        y = layer.norm1(x)
        y = x + attention(y, y, y)[0]
        expected = y + feed(layer.norm2(y))
    else:
        y = layer.norm1(x + attention(x, x, x)[0])
        expected = layer.norm2(y + feed(y))
    torch.testing.assert_close(layer.train()(x), expected)
    layer.eval()
    for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with grad_mode():
            torch.testing.assert_close(layer(x), expected)
    dense = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True, dtype=torch.float64)
    dense.load_state_dict(attention.state_dict())
    assert not torch.allclose(encoder_layer(dense, norm_first, bias).eval()(x), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_of_several_layers(when, norm_first):
    """The module is put into the layer that the encoder copies, or into the layers of an encoder.

    In the second case, an encoder of torch makes a nested tensor of a padded batch and passes it to the layers.
    """
    attention = MultiheadDilatedAttention(32, 4, *DILATED, dtype=torch.float64)
    random_biases(attention)
    layer = encoder_layer(nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64), norm_first)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True, but")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        if when == "before":
            layer.self_attn = attention
            encoder = nn.TransformerEncoder(layer, 3)
            assert not encoder.use_nested_tensor
        else:
            encoder = nn.TransformerEncoder(layer, 3)
            assert encoder.use_nested_tensor is not norm_first
            for one in encoder.layers:
                one.self_attn = copy.deepcopy(attention)
        x = torch.randn(3, 12, 32, dtype=torch.float64)
        expected = [x[b : b + 1, :length] for b, length in enumerate(LENGTHS.tolist())]  # each sample by itself
        for one in encoder.train().layers:
            expected = [one(y) for y in expected]
        for training in (True, False):
            for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with grad_mode():
                    out = encoder.train(training)(x, src_key_padding_mask=PADDING)
                assert out.shape == x.shape
                torch.testing.assert_close(out[~PADDING], torch.cat(expected, 1)[0])
                if encoder.use_nested_tensor and not training and grad_mode is not torch.enable_grad:
                    assert out[PADDING].count_nonzero() == 0, "torch passed a nested tensor, and padded the result"
        one_by_one = x
        for one in encoder.layers:
            one_by_one = one(one_by_one, src_mask=CAUSAL)
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode():
                mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)
                torch.testing.assert_close(encoder(x, mask=mask), one_by_one)
                torch.testing.assert_close(encoder(x, mask=CAUSAL, is_causal=True), one_by_one)
    assert not torch.allclose(one_by_one[:, 0], encoder(x)[:, 0]), "causal attention differs"


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder(norm_first, cross, batch_first):
    torch.manual_seed(7)
    options = {"batch_first": batch_first, "dtype": torch.float64}
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, 0.0, norm_first=norm_first, **options), 2)
    ours = copy.deepcopy(theirs)
    for layer in ours.layers:
        for name in ("self_attn", "multihead_attn") if cross else ("self_attn",):
            module = MultiheadDilatedAttention(32, 4, *DENSE, **options)
            module.load_state_dict(getattr(layer, name).state_dict())
            setattr(layer, name, module)
    x, memory = torch.randn(3, 12, 32, dtype=torch.float64), torch.randn(3, 20, 32, dtype=torch.float64)
    x, memory = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    for training in (True, False):
        for masks in ({}, {"tgt_mask": CAUSAL}, {"tgt_mask": CAUSAL, "tgt_is_causal": True}):
            expected, actual = (model.train(training)(x, memory, **masks) for model in (theirs, ours))
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    if cross:
        with pytest.raises(ValueError, match="at most as many as keys: got 20 queries and 12 keys"):
            ours(memory, x)


def test_training_step_through_an_encoder():
    """An optimiser step on the parameters inside torch's layer equals that of torch's own module."""
    theirs, ours = both()
    x, results = torch.randn(3, 12, 32, dtype=torch.float64), []
    for attention in (theirs, ours):
        layer = encoder_layer(attention, norm_first=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(x, src_key_padding_mask=PADDING)[~PADDING].square().sum().backward()
        optimizer.step()
        results.append(layer.state_dict())
    assert list(results[0]) == list(results[1])
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-10, atol=1e-10)


def test_masks_that_are_accepted():
    module = MultiheadDilatedAttention(32, 4, *DILATED)
    x = torch.randn(2, 12, 32)
    causal, plain = module(x, x, x, is_causal=True)[0], module(x, x, x)[0]
    bias = torch.zeros(12, 12).masked_fill(CAUSAL, -torch.inf)
    for mask in (CAUSAL, bias, bias.double(), CAUSAL.expand(8, 12, 12), bias.expand(8, 12, 12).contiguous()):
        for hint in (False, True):
            assert torch.equal(module(x, x, x, attn_mask=mask, is_causal=hint)[0], causal)
    for mask in (torch.zeros_like(CAUSAL), -torch.zeros(12, 12), torch.zeros(8, 12, 12)):
        assert torch.equal(module(x, x, x, attn_mask=mask)[0], plain)
    assert torch.equal(module(x[0], x[0], x[0], attn_mask=CAUSAL.expand(4, 12, 12))[0], causal[0])
    last = x[:, 9:]  # fewer queries: they are the last positions
    assert torch.equal(module(last, x, x, attn_mask=CAUSAL[9:])[0], module(last, x, x, is_causal=True)[0])
    one = x[:, :1]  # one position: the causal mask hides nothing
    for hint in (False, True):
        assert torch.equal(module(one, one, one, attn_mask=CAUSAL[:1, :1], is_causal=hint)[0], module(one, one, one)[0])
    order = Hilbert.grid(3, 4)
    ordered = module(x, x, x, attn_mask=CAUSAL, order=order)[0]
    assert torch.equal(ordered, module(x, x, x, is_causal=True, order=order)[0])
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x, x, x, attn_mask=CAUSAL)[0], causal)


def test_masks_that_are_refused():
    module = MultiheadDilatedAttention(32, 4, *DILATED)
    x = torch.randn(2, 12, 32)
    bias = torch.zeros(12, 12).masked_fill(CAUSAL, -torch.inf)
    per_head = CAUSAL.repeat(8, 1, 1)
    per_head[5, 3, 3] = True
    way_out = "use is_causal=True for causal attention, key_padding_mask or lengths for padding, and the pattern"
    for mask in (CAUSAL.T, ~CAUSAL, CAUSAL.roll(1), CAUSAL.triu(2), per_head, bias / 2 + 1, bias.clamp(min=-1e9),
                 bias.nan_to_num(), torch.full((12, 12), torch.nan)):  # fmt: skip
        with pytest.raises(ValueError, match=f"attn_mask must be causal, or hide nothing .*{way_out}"):
            module(x, x, x, attn_mask=mask)
        with pytest.raises(
            ValueError, match="is_causal=True with an attn_mask says that the mask is causal, got a mask that"
        ):
            module(x, x, x, attn_mask=mask, is_causal=True)
    with pytest.raises(ValueError, match="is_causal=True with an attn_mask says that the mask is causal"):
        module(x, x, x, attn_mask=torch.zeros(12, 12), is_causal=True)
    with pytest.raises(ValueError, match="or hide nothing"):
        module(x[:, 9:], x, x, attn_mask=CAUSAL[:3])  # causal by rows, not by the last positions
    sizes = r"\(queries, keys\) = \(12, 12\) or \(batch \* heads, queries, keys\) = \(8, 12, 12\)"
    for shape in ((11, 12), (12, 11), (12,), (2, 12, 12), (2, 4, 12, 12), (1, 12, 12)):
        with pytest.raises(ValueError, match=f"attn_mask must be {sizes}, got \\({', '.join(map(str, shape))}"):
            module(x, x, x, attn_mask=torch.zeros(shape))
    with pytest.raises(TypeError, match=r"attn_mask must be bool or floating-point, got torch.int64; use mask.bool\(\)"):
        module(x, x, x, attn_mask=CAUSAL.long())
    with pytest.raises(TypeError, match=r"attn_mask must be a torch.Tensor, got list; use torch.tensor\(mask\)"):
        module(x, x, x, attn_mask=CAUSAL.tolist())
    with pytest.raises(ValueError, match="attn_mask gets no gradient here, got one that requires it"):
        module(x, x, x, attn_mask=torch.zeros(12, 12, requires_grad=True))
    with pytest.raises(TypeError, match=r"is_causal must be True or False, got Tensor of shape \(12, 12\)"):
        module(x, x, x, attn_mask=CAUSAL, is_causal=CAUSAL)
    with pytest.raises(ValueError, match="which differ with ordered=True; use is_causal=True without attn_mask"):
        module(x, x, x, attn_mask=CAUSAL, order=Hilbert.grid(3, 4), ordered=True)
    sharded = MultiheadDilatedAttention(32, 4, *DILATED, group=Sharding(None))
    with pytest.raises(RuntimeError, match="needs a process group"):  # a mistake is reported to the other ranks
        sharded(x, x, x, attn_mask=CAUSAL)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors_are_a_batch_of_sequences(layout, causal):
    module = MultiheadDilatedAttention(32, 4, *DILATED, num_kv_heads=2, dtype=torch.float64)
    random_biases(module)
    sequences = [torch.randn(n, 32, dtype=torch.float64, requires_grad=True) for n in (12, 5, 1, 9)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        x = torch.nested.as_nested_tensor(sequences, layout=layout)
        out, weights = module(x, x, x, is_causal=causal)
        assert weights is None
        assert out.is_nested
        assert out.layout == layout
        assert (
            out.shape[1] == x.shape[1]
            if layout == torch.jagged
            else torch.equal(out._nested_tensor_size(), x._nested_tensor_size())
        )
        results = out.unbind()
        (x + out).unbind()  # a residual connection
        inputs = [*sequences, *module.parameters()]
        grads = torch.autograd.grad(sum(y.square().sum() for y in results), inputs)
        expected = [module(y, y, y, is_causal=causal)[0] for y in sequences]
        for actual, one in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, one)
        torch.testing.assert_close(grads, torch.autograd.grad(sum(y.square().sum() for y in expected), inputs))
        with pytest.raises(
            ValueError, match="got key_padding_mask, attn_mask, lengths or cu_seqlens beside it; leave them out"
        ):
            module(x, x, x, lengths=torch.tensor([12, 5, 1, 9]))
        with pytest.raises(ValueError, match="need_weights=True needs one sequence per sample"):
            module(x, x, x, need_weights=True)
        with pytest.raises(TypeError, match=r"must all be .*nested tensors if one is, value is not; use"):
            module(x, x, sequences[0][None])
        other = torch.nested.as_nested_tensor(sequences[::-1], layout=layout)
        with pytest.raises(ValueError, match=r"must have the same lengths, .*key.*; call"):
            module(x, other, other)
        with pytest.raises(ValueError, match=r"query must be \(batch, sequence, embedding\), got 4 dimensions"):
            module(*[torch.nested.as_nested_tensor([y[:, None] for y in sequences], layout=layout)] * 3)
        with pytest.raises(TypeError, match="attention_map needs sequences of one length, got a nested tensor"):
            module.attention_map(x, x, [0])
