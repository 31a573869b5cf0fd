"""LongNet models against the authors' vectors, a model written out in float64, and each sequence by itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import model_oracle
from dilated_attention_pytorch import Hilbert, LongNetConfig, LongNetDecoder, LongNetEncoder, Order
from dilated_attention_pytorch.models import decoder as decoder_module
from dilated_attention_pytorch.models.layers import FeedForward
from model_cases import SIZES

DATA = Path(__file__).parents[1] / "data"


def make(kind=LongNetEncoder, **changes):
    """A model in float64 with every norm and bias perturbed."""
    model = kind(LongNetConfig(**SIZES | changes), dtype=torch.float64)
    model_oracle.perturb(model)
    return model.eval()


def language_model(**changes):
    return make(LongNetDecoder, **{"vocab_size": 11} | changes)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_golden_vectors_of_the_authors():
    tensors = load_file(DATA / "encoder.safetensors")
    config = LongNetConfig(
        embed_dim=32, num_layers=2, num_heads=4, ffn_dim=64, segment_lengths=[16, 64], dilation_rates=[1, 2],
        offsets="blocked", positions="none",
    )  # fmt: skip
    model = LongNetEncoder(config).eval()
    model.load_state_dict({name[2:]: x for name, x in tensors.items() if name.startswith("w.")})
    torch.testing.assert_close(model(tensors["x"]), tensors["y"], rtol=1e-5, atol=1e-5)


CASES = {
    "plain": {},
    "no positions": {"positions": "none"},
    "xpos": {"positions": "xpos", "xpos_scale_base": 16},
    "blocked swiglu": {"offsets": "blocked", "activation": "swiglu"},
    "grouped": {"num_kv_heads": 2, "rotary_base": 100.0},
    "no sub-norms": {"sub_norm": False, "final_norm": False},
}


@pytest.mark.parametrize("case", CASES)
def test_whole_models_against_the_definition(case):
    for kind, causal in ((LongNetEncoder, False), (LongNetDecoder, True)):
        model = make(kind, vocab_size=11, **CASES[case])
        w = {name: x.requires_grad_() for name, x in model_oracle.weights(model).items()}
        tokens = torch.randint(0, 11, (2, 27))
        expected = torch.stack([model_oracle.forward(w, model.config, row, causal=causal) for row in tokens])
        actual = model(tokens)
        if causal:
            expected = expected @ w["embed_tokens.weight"].T
        close(actual, expected)
        direction = torch.randn_like(expected)
        (expected * direction).sum().backward()
        for name, gradient in gradients(model, (actual * direction).sum()).items():
            close(gradient, w[name].grad)


def test_embeddings_and_states_of_all_layers():
    model, x = make(), torch.randn(2, 20, 16, dtype=torch.float64)
    out, states = model(x, return_all_layers=True)
    assert len(states) == 3
    close(states[0], x)
    close(model.layer_norm(states[-1]), out)
    w = model_oracle.weights(model)
    one = {name: tensor for name, tensor in w.items() if not name.startswith("layers.1")}
    first = model_oracle.forward(one, model.config.replace(num_layers=1, final_norm=False), x[1], causal=False)
    close(states[1][1], first)


def batches(kind):
    """Sequences of different lengths, and the same ones padded behind, padded in front, packed and nested."""
    lengths = [13, 1, 0, 20] if kind is LongNetEncoder else [13, 1, 20]
    tokens = [torch.randint(0, 11, (n,)) for n in lengths]
    padded, front = (torch.full((len(lengths), 22), 7) for _ in range(2))
    for row, late, own in zip(padded, front, tokens, strict=True):
        row[: len(own)] = own
        late[22 - len(own) :] = own
    starts = [22 - n for n in lengths]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
    masks = [[slice(0, n) for n in lengths], [slice(22 - n, 22) for n in lengths]]
    return tokens, [
        (padded, {"lengths": lengths}, lambda out: [row[own] for row, own in zip(out, masks[0], strict=True)]),
        (front, {"starts": torch.tensor(starts)}, lambda out: [row[own] for row, own in zip(out, masks[1], strict=True)]),
        (torch.cat(tokens)[None], {"cu_seqlens": ends}, lambda out: list(torch.split(out[0], lengths))),
        (nested, {}, lambda out: list(out.unbind())),
    ]


@pytest.mark.parametrize("positions", ["rotary", "xpos", "none"])
@pytest.mark.parametrize("kind", [LongNetEncoder, LongNetDecoder])
def test_a_batch_is_each_sequence_by_itself(kind, positions):
    model = make(kind, vocab_size=11, positions=positions)
    tokens, forms = batches(kind)
    alone = [model(own[None])[0] for own in tokens]
    weights = [torch.randn_like(x) for x in alone]
    expected = gradients(model, sum((x * w).sum() for x, w in zip(alone, weights, strict=True)))
    for batch, options, split in forms:
        results = split(model(batch, **options))
        for x, y in zip(results, alone, strict=True):
            close(x, y)
        actual = gradients(model, sum((x * w).sum() for x, w in zip(results, weights, strict=True)))
        for name, gradient in expected.items():
            close(actual[name], gradient)


def test_padding_rows_are_zero_and_may_hold_anything():
    model, x = make(), torch.randn(2, 20, 16, dtype=torch.float64)
    poisoned = x.clone()
    poisoned[1, 8:] = math.nan
    out = model(poisoned, lengths=[20, 8])
    assert (out[1, 8:] == 0).all()
    close(out, model(x, lengths=[20, 8]))
    clean = gradients(model, model(x, lengths=[20, 8]).square().sum())
    for name, gradient in gradients(model, out.square().sum()).items():
        close(gradient, clean[name])


def test_orders_move_rows_once_and_keep_original_positions():
    model, order = make(positions="rotary"), Hilbert.grid(4, 6)
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    w, places = model_oracle.weights(model), order.positions
    moved = torch.stack([model_oracle.forward(w, model.config, row[places], causal=False, positions=places) for row in x])
    expected = torch.empty_like(moved)
    expected[:, places] = moved
    close(model(x, order=order), expected)
    model.order = order
    close(model(x), expected)
    # Samples of different lengths, and documents, each with its own order.
    lengths = [24, 15]
    padded = Order.padded([order, Order.from_permutation(torch.randperm(15))])
    out, model.order = model(x, order=padded, lengths=lengths), None
    close(out[1, :15], model(x[1:, :15], order=Order.from_permutation(padded.positions[1, :15]))[0])
    own = Order.from_permutation(torch.randperm(24)).within(cu_seqlens=[0, 9, 24])
    packed = model(x[:1], order=own, cu_seqlens=[0, 9, 24])
    close(packed[:, 9:], model(x[:1, 9:], order=Order.from_permutation(own.positions[9:] - 9)))


@pytest.mark.parametrize("positions", ["rotary", "xpos"])
@pytest.mark.parametrize("chunks", [(20, 1, 1, 13), (9, 9, 9, 8), (1,) * 35])
def test_chunks_with_caches_equal_one_call(chunks, positions):
    model = language_model(positions=positions, num_kv_heads=2)
    tokens = torch.randint(0, 11, (2, 35))
    with torch.no_grad():
        caches = model.new_caches(2)
        results = [model(own, caches=caches) for own in torch.split(tokens, list(chunks), 1)]
        close(torch.cat(results, 1), model(tokens))
        assert caches[1].tokens_seen.tolist() == [35, 35]


def test_samples_of_different_lengths_continue_in_caches():
    model, tokens = language_model(), torch.randint(0, 11, (2, 30))
    with torch.no_grad():
        caches = model.new_caches(2, max_tokens=40)
        first = model(tokens[:, :16], caches=caches, lengths=[16, 11])
        both = torch.stack([tokens[0, 16:28], tokens[1, 11:23]])
        second = model(both, caches=caches, lengths=torch.tensor([12, 5]))
        close(torch.cat([first[0], second[0]]), model(tokens[:1, :28])[0])
        close(torch.cat([first[1, :11], second[1, :5]]), model(tokens[1:, :16])[0])
        assert caches[0].tokens_seen.tolist() == [28, 16]


def test_what_caches_refuse():
    model, tokens = language_model(drop_path=0.5), torch.zeros(2, 4, dtype=torch.int64)
    caches = model.new_caches(2)
    with torch.no_grad():
        with pytest.raises(ValueError, match="one per layer, 2, got 1"):
            model(tokens, caches=caches[:1])
        with pytest.raises(ValueError, match="got starts; move the padding behind"):
            model(tokens, caches=caches, starts=[0, 1])
        with pytest.raises(ValueError, match=r"model.eval\(\) first"):
            model.train()(tokens, caches=caches)
    with pytest.raises(ValueError, match="a cache has no gradients"):
        model.eval()(tokens, caches=caches)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_is_the_cross_entropy_of_the_logits(monkeypatch, tied):
    monkeypatch.setattr(decoder_module, "_LOGITS", 11 * 7)  # chunks of 7 rows
    model, tokens = language_model(tie_embeddings=tied), torch.randint(0, 11, (2, 30))
    targets = torch.randint(0, 11, (2, 30))
    targets[0, 3] = -100
    full = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss = model.loss(tokens, targets)
    close(loss, full)
    expected = gradients(model, full)
    assert ("output_projection.weight" in expected) != tied
    for name, gradient in gradients(model, loss).items():
        close(gradient, expected[name])
    each = F.cross_entropy(model(tokens).mT, targets, ignore_index=-100, reduction="none")
    close(model.loss(tokens, targets, reduction="none"), each)
    close(model.loss(tokens, targets, reduction="sum"), each.sum())
    short = model.loss(tokens, targets, lengths=[30, 12])
    close(short, torch.cat([each[0], model.loss(tokens[1:, :12], targets[1:, :12], reduction="none")[0]]).sum() / 41)
    nested, ids = (torch.nested.nested_tensor([x[0], x[1, :12]], layout=torch.jagged) for x in (tokens, targets))
    close(model.loss(nested, ids), short)
    close(model.loss(nested, ids, reduction="none").values(), model.loss(
        tokens, targets, lengths=[30, 12], reduction="none")[[0] * 30 + [1] * 12, [*range(30), *range(12)]])  # fmt: skip
    with pytest.raises(ValueError, match="one int64 token id for each token"):
        model.loss(tokens, targets[:, 1:])
    with pytest.raises(ValueError, match="reduction must be one of"):
        model.loss(tokens, targets, reduction="max")


def test_few_logits_exist_at_a_time(monkeypatch):
    monkeypatch.setattr(decoder_module, "_LOGITS", 11 * 5)
    sizes = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, *b: sizes.append((len(x), len(w))) or linear(x, w, *b))
    model = language_model()
    model.loss(torch.zeros(1, 23, dtype=torch.int64), torch.zeros(1, 23, dtype=torch.int64)).backward()
    rows = [n for n, width in sizes if width == 11]
    assert rows == [5, 5, 5, 5, 3, 3, 5, 5, 5, 5]  # forward, then again in the backward


def test_checkpointing_with_dropout_repeats_it():
    options = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1, "drop_path": 0.4}
    plain = language_model(**options).train()
    saving = LongNetDecoder(plain.config.replace(checkpoint_layers=True), dtype=torch.float64).train()
    saving.load_state_dict(plain.state_dict())
    tokens, results = torch.randint(0, 11, (4, 31)), []
    for model in (plain, saving):
        torch.manual_seed(3)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        results.append((loss.detach(), gradients(model, loss)))
    (loss, expected), (again, actual) = results
    assert loss == again
    for name, gradient in actual.items():
        close(gradient, expected[name], 1e-12)
    torch.manual_seed(4)
    assert plain.loss(tokens[:, :-1], tokens[:, 1:]) != loss


def test_dropout_is_inactive_in_evaluation():
    model = language_model(dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, drop_path=0.5)
    tokens = torch.randint(0, 11, (1, 9))
    expected = model_oracle.forward(model_oracle.weights(model), model.config, tokens[0], causal=True)
    close(model.features(tokens)[0], expected)


def test_drop_path_leaves_out_whole_samples_and_documents():
    """A layer whose paths are both dropped returns its input; the other samples get 1 / keep times the change."""
    model = make(drop_path=0.5, num_layers=2, final_norm=False).train()
    x = torch.randn(1, 10, 16, dtype=torch.float64).expand(64, -1, -1)
    _, states = model(x, return_all_layers=True)
    dropped = (states[2] == states[1]).all(-1)
    assert (dropped == dropped[:, :1]).all()  # all rows of a sample or none
    assert 4 < dropped[:, 0].sum() < 32  # about a quarter of 64
    assert not (states[1] == states[0]).all(-1).any()  # the first layer is never dropped
    packed = x.reshape(1, 640, 16)
    _, states = model(packed, cu_seqlens=list(range(0, 641, 10)), return_all_layers=True)
    dropped = (states[2] == states[1]).all(-1).view(64, 10)
    assert (dropped == dropped[:, :1]).all()
    assert 4 < dropped[:, 0].sum() < 32


def test_initialisation_is_that_of_the_authors():
    config = LongNetConfig(**SIZES | {"num_layers": 6, "embed_dim": 64, "ffn_dim": 256, "vocab_size": 500, "num_heads": 4})
    model = LongNetDecoder(config.replace(tie_embeddings=False))
    scale = math.sqrt(math.log(12))
    for layer in model.layers:
        attention, ffn = layer.self_attn, layer.ffn
        for linear, factor in (
            (attention.q_proj, 1), (attention.k_proj, 1), (attention.v_proj, scale), (attention.out_proj, scale),
            (ffn.fc1, scale), (ffn.fc2, scale),
        ):  # fmt: skip
            bound = factor * linear.in_features**-0.5  # of nn.Linear
            assert 0.97 * bound < linear.weight.abs().max() <= bound * 1.0001
            assert 0.7 * bound < linear.bias.abs().max() <= bound * 1.0001
    for table in (model.embed_tokens.weight, model.output_projection.weight):
        assert abs(table.std() * 8 - 1) < 0.05


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activations_are_computed_in_float32(activation):
    ffn = FeedForward(LongNetConfig(**SIZES | {"activation": activation, "sub_norm": False}), dtype=torch.bfloat16)
    x = (torch.randn(5, 16) * 3).to(torch.bfloat16)
    inner = ffn.fc1(x)
    inner = F.gelu(inner.float()).bfloat16() if ffn.gate is None else F.silu(inner.float()).bfloat16() * ffn.gate(x)
    assert ffn(x).equal(ffn.fc2(inner))


@pytest.mark.parametrize("checkpoint_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_decoder_compiles_in_one_graph(checkpoint_layers):
    model = language_model(checkpoint_layers=checkpoint_layers, num_layers=1, drop_path=0.1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 11, (2, 31))
    results = []
    for call in (model, compiled):
        torch.manual_seed(1)
        loss = call(tokens[:, :-1], targets=tokens[:, 1:], lengths=torch.tensor([30, 17]))
        results.append((loss.detach(), gradients(model, loss)))
    close(results[1][0], results[0][0])
    for name, gradient in results[1][1].items():
        close(gradient, results[0][1][name])


@pytest.mark.slow
def test_decoding_steps_compile_in_one_graph():
    model, tokens = language_model(), torch.randint(0, 11, (2, 24))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        caches = model.new_caches(2)
        results = [model(tokens[:, :20], caches=caches)]
        results += [compiled(tokens[:, i : i + 1], caches=caches) for i in range(20, 24)]
        close(torch.cat(results, 1), model(tokens))


def test_autocast_decides_about_queries_and_caches():
    model = LongNetDecoder(LongNetConfig(**SIZES | {"vocab_size": 11})).eval()
    tokens = torch.randint(0, 11, (2, 12))
    with torch.no_grad():
        exact = model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            caches = model.new_caches(2)
            assert caches[0].dtype == torch.bfloat16
            logits = model(tokens, caches=caches)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.05)
    assert model.new_caches(2)[0].dtype == torch.float32


def test_inputs_that_are_refused():
    model = make()
    with pytest.raises(TypeError, match="this model has no vocabulary"):
        model(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"embeddings must be \(batch, sequence, 16\), got \(1, 5, 8\)"):
        model(torch.zeros(1, 5, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"must be a torch.Tensor, got list"):
        model([1, 2])
    with pytest.raises(ValueError, match=r"token ids must be \(batch, sequence\), int64 or int32"):
        language_model()(torch.zeros(5, dtype=torch.int64))
    x = torch.zeros(2, 5, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="lengths must have one entry per sample"):
        model(x, lengths=[5])
    with pytest.raises(ValueError, match="exclude one another"):
        model(x, lengths=[5, 5], cu_seqlens=[0, 5])
    with pytest.raises(TypeError, match="order must be an Order"):
        model(x, order=[0, 1])
    nested = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
    with pytest.raises(ValueError, match="got lengths; leave it out"):
        model(nested, lengths=[5, 2])
    with pytest.raises(TypeError, match=r"make it with layout=torch.jagged"):
        model(torch.nested.as_nested_tensor([x[0], x[1, :2]]))
    with pytest.raises(ValueError, match="a decoder needs a vocabulary"):
        LongNetDecoder(LongNetConfig(**SIZES))
    with pytest.raises(TypeError, match="config must be a LongNetConfig, got dict"):
        LongNetEncoder(SIZES)
    with pytest.raises(ValueError, match="got layout='zigzag' without group"):
        LongNetEncoder(LongNetConfig(**SIZES), layout="zigzag")
