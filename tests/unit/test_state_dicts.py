"""State dicts with separate projections: the paper authors' checkpoints, and those of older versions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import MultiheadDilatedAttention

LAYOUTS = [
    {"layer_norm": True},
    {"bias": False},
    {"num_kv_heads": 2},
    {"kdim": 10, "vdim": 6},
    {"kdim": 10, "num_kv_heads": 2, "bias": False},
]


class Authors(nn.Module):
    """Attention as in the paper authors' code, on one dense segment, by nn.Linear and softmax."""

    def __init__(self, layer_norm=False, bias=True, num_kv_heads=4, kdim=16, vdim=16):
        super().__init__()
        options = {"bias": bias, "dtype": torch.float64}
        self.q_proj = nn.Linear(16, 16, **options)
        self.k_proj = nn.Linear(kdim, 4 * num_kv_heads, **options)
        self.v_proj = nn.Linear(vdim, 4 * num_kv_heads, **options)
        self.out_proj = nn.Linear(16, 16, **options)
        if layer_norm:
            self.inner_attn_ln = nn.LayerNorm(16, dtype=torch.float64)
            nn.init.normal_(self.inner_attn_ln.weight)

    def forward(self, query, key, value):
        q, k, v = (x.unflatten(-1, (-1, 4)) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        k, v = (x.repeat_interleave(4 // x.shape[2], 2) for x in (k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(0.5).softmax(-1)
        x = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        return self.out_proj(self.inner_attn_ln(x) if hasattr(self, "inner_attn_ln") else x)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn, self.final_layer_norm = attention, nn.LayerNorm(16, dtype=torch.float64)


class Encoder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.layers = nn.ModuleList([Block(copy.deepcopy(attention)) for _ in range(2)])


def make(**options) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(16, 4, [1000], [1], **{"dtype": torch.float64} | options)


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("assign", [False, True])
def test_authors_checkpoints_load(options, assign):
    """On a device without memory, assign=True gives the parameters their memory."""
    theirs, ours = Authors(**options), make(**options, device="meta" if assign else "cpu")
    state = theirs.state_dict()
    kept = dict(state)
    assert ours.load_state_dict(state, assign=assign) == ([], [])
    assert list(state) == list(kept)
    assert all(state[name] is kept[name] for name in kept), "the state dict of the caller stays as it is"
    sizes = 16, options.get("kdim", 16), options.get("vdim", 16)
    query, key, value = (torch.randn(2, 9, size, dtype=torch.float64) for size in sizes)
    torch.testing.assert_close(ours(query, key, value)[0], theirs(query, key, value))
    assert all(isinstance(x, nn.Parameter) and x.requires_grad for x in ours.parameters())
    again = make(**options)
    assert again.load_state_dict(ours.state_dict()) == ([], [])
    torch.testing.assert_close(again(query, key, value)[0], theirs(query, key, value))


def test_authors_checkpoints_load_inside_a_model():
    theirs, ours = Encoder(Authors(layer_norm=True)), Encoder(make(layer_norm=True))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        torch.testing.assert_close(b.self_attn(x, x, x)[0], a.self_attn(x, x, x))
    state = theirs.state_dict()
    del state["layers.1.self_attn.k_proj.bias"]
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert missing == ["layers.1.self_attn.k_proj.bias"]
    assert unexpected == ["layers.1.self_attn.q_proj.bias", "layers.1.self_attn.v_proj.bias"]


def test_incomplete_states_are_reported_by_their_names():
    module = make()
    before, full = copy.deepcopy(module.state_dict()), Authors().state_dict()
    partial = {name: x for name, x in full.items() if name != "v_proj.weight"}
    message = r'Missing key\(s\) in state_dict: "v_proj.weight". \n.*Unexpected .*: "q_proj.weight", "k_proj.weight". $'
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(partial)
    module.load_state_dict(before)
    assert module.load_state_dict(partial, strict=False) == (["v_proj.weight"], ["q_proj.weight", "k_proj.weight"])
    assert torch.equal(module.in_proj_weight, before["in_proj_weight"]), "a part of it is not loaded"
    assert torch.equal(module.in_proj_bias, torch.cat([full[f"{name}_proj.bias"] for name in "qkv"]))
    # No biases at all, and biases that the module does not have.
    weights = {name: x for name, x in full.items() if name.endswith("weight")}
    missing = [f"{name}_proj.bias" for name in "qkv"] + ["out_proj.bias"]
    assert module.load_state_dict(weights, strict=False) == (missing, [])
    assert make(bias=False).load_state_dict(full, strict=False).unexpected_keys == missing
    # Nothing at all: the names are those of the module.
    names = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert module.load_state_dict({}, strict=False) == (names, [])
    # Both forms: the module's own is loaded.
    other = module.load_state_dict({**full, "in_proj_weight": before["in_proj_weight"]}, strict=False)
    assert other == ([], ["q_proj.weight", "k_proj.weight", "v_proj.weight"])
    assert torch.equal(module.in_proj_weight, before["in_proj_weight"])
    # The normalisation is not asked for, or is not there.
    normed = Authors(layer_norm=True).state_dict()
    assert module.load_state_dict(normed, strict=False) == ([], ["inner_attn_ln.weight", "inner_attn_ln.bias"])
    assert make(layer_norm=True).load_state_dict(full, strict=False).missing_keys == [
        "inner_attn_ln.weight", "inner_attn_ln.bias",
    ]  # fmt: skip
    # Separate weights load one by one.
    separate = make(kdim=10)
    state = Authors(kdim=10).state_dict()
    del state["k_proj.weight"]
    assert separate.load_state_dict(state, strict=False) == (["k_proj.weight"], [])
    assert torch.equal(separate.q_proj_weight, state["q_proj.weight"])


def test_wrong_shapes_are_reported_by_their_names():
    module, state = make(), Authors(num_kv_heads=2).state_dict()
    message = r"size mismatch for k_proj.weight: copying a param with shape torch.Size\(\[8, 16\]\) from checkpoint, the"
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=f"(?s)loading state_dict for MultiheadDilatedAttention:\n\t{message}"
        ) as error:
            module.load_state_dict(state, strict=strict)
        assert "issing" not in str(error.value)
        assert "size mismatch for v_proj.bias" in str(error.value)
    state = Authors().state_dict()
    state["q_proj.weight"] = state["q_proj.weight"].tolist()
    with pytest.raises(RuntimeError, match=r'the parameter named "q_proj.weight", expected torch.Tensor, but received'):
        module.load_state_dict(state)


def test_parameters_that_require_gradients_load():
    theirs, ours = Authors(), make()
    assert ours.load_state_dict(theirs.state_dict(keep_vars=True)) == ([], [])
    assigned = make()
    assert assigned.load_state_dict(theirs.state_dict(keep_vars=True), assign=True) == ([], [])
    for module in (ours, assigned):
        x = torch.randn(1, 9, 16, dtype=torch.float64)
        module(x, x, x)[0].sum().backward()
        assert module.in_proj_weight.is_leaf
        assert module.in_proj_weight.grad is not None
