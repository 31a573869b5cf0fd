"""Every backend against the oracle, through the public function: out, lse, dq, dk, dv, every element."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import oracle
from dilated_attention_pytorch import Dilated, attention, attention_weights, dilated_attention
from oracle import assert_same, random_inputs, with_grads

BACKENDS = ["reference", "sdpa", "eager"]
DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60)
@given(data=st.data(), causal=st.booleans())
def test_any_pattern_and_any_shape(backend, data, causal):
    draw = data.draw
    branches = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=3))
    m = draw(st.integers(0, 33))
    n = draw(st.one_of(st.just(m), st.integers(0, m)))
    key_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rates = [r for _, r in branches]
    explicit = st.lists(st.integers(0, max(rates) - 1), min_size=key_heads, max_size=key_heads)
    offsets = draw(st.one_of(st.sampled_from(["interleaved", "blocked"]), explicit))
    pattern = Dilated([w for w, _ in branches], rates, offsets, draw(st.booleans()))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    inputs = random_inputs(draw(st.integers(0, 3)), n, m, key_heads * group, key_heads, draw(st.integers(1, 9)))
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[0], key_heads * group, n)
    expected = with_grads(lambda *x: oracle.attention(*x, pattern, is_causal=causal), inputs, dout, dlse)
    actual = with_grads(
        lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True), inputs, dout, dlse
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m"), [(96, 96), (97, 97), (5, 97), (1, 64)])
def test_batches_of_several_tiles(backend, n, m, causal):
    """Whole, cut and decoding segments with batch and grouped heads: the folding of samples and tiles into one call."""
    pattern = Dilated([16, 24, 1000], [1, 3, 4])
    inputs = random_inputs(3, n, m, 6, 3, 8)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(3, 6, n)
    expected = with_grads(lambda *x: oracle.attention(*x, pattern, is_causal=causal), inputs, dout, dlse)
    call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
    assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_partial_results_cut_into_many_calls(backend, monkeypatch):
    """The calls that bound memory on long sequences, forced on a short one."""
    from dilated_attention_pytorch.backends import eager
    from dilated_attention_pytorch.execute import loop

    monkeypatch.setattr(loop, "partial_limit", lambda query: 40)
    monkeypatch.setattr(eager, "_MAX_SCORES", 30)
    pattern = Dilated([8, 16, 48], [1, 2, 4])
    for causal in (False, True):
        inputs = random_inputs(2, 50, 50, 8, 4, 4)
        dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 8, 50)
        expected = with_grads(lambda *x: oracle.attention(*x, pattern, is_causal=causal), inputs, dout, dlse)  # noqa: B023
        call = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: B023, E731
        assert_same(with_grads(call, inputs, dout, dlse), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_is_that_of_plain_attention(backend, dtype):
    """At most twice the error of eager attention in the same type, plus its unit of rounding.

    Dense eager attention with the additive bias log(multiplicity) is the yardstick; both are measured against float64.
    """
    pattern = Dilated([16, 64], [1, 2])
    inputs = random_inputs(1, 64, 64, 4, 4, 8, dtype)
    dout, dlse = torch.randn(1, 64, 4, 8).to(dtype), torch.zeros(1, 4, 64)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact = with_grads(lambda *x: oracle.attention(*x, pattern), doubles, dout.double(), dlse)
    yardstick = with_grads(oracle.plain(pattern, False), inputs, dout, dlse)
    actual = with_grads(lambda *x: attention(*x, pattern, backend=backend, return_lse=True), inputs, dout, dlse)
    oracle.assert_rounding_only(actual, yardstick, exact, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_and_shapes_of_the_results(backend):
    for dtype, lse_dtype in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ):
        q, k, v = random_inputs(2, 5, 7, 4, 2, 8, dtype)
        out, lse = attention(q, k, v, Dilated([4], [2]), backend=backend, return_lse=True)
        assert (out.dtype, out.shape, lse.dtype, lse.shape) == (dtype, q.shape, lse_dtype, (2, 4, 5))
        assert out.is_contiguous()
        assert lse.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_meet_nobody_are_exactly_empty(backend):
    q, k, v = random_inputs(2, 20, 20, 2, 2, 4)
    out, lse = attention(q, k, v, Dilated([8], [4]), backend=backend, return_lse=True)
    for h in range(2):
        mine = torch.arange(20) % 8 % 4 == h
        assert (out[:, ~mine, h] == 0).all()
        assert (lse[:, h, ~mine] == -torch.inf).all()
        assert lse[:, h, mine].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
    for grad in (dq, dk, dv):
        assert grad.isfinite().all()
        assert (grad[:, 2:4] == 0).all()  # offsets 0 and 1 own rows 0, 1, 4, 5, ... of each segment


@pytest.mark.parametrize("mixing", ["exact", "detached"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend, mixing):
    """Finite differences, lse included. Detached mixing is checked where it is the exact gradient: one branch."""
    # The time grows with the square of the number of elements. The last segments have one row.
    branches = ([4, 8], [1, 2]) if mixing == "exact" else ([4], [2])
    pattern = Dilated(*branches)
    inputs = random_inputs(1, 9, 9, 2, 1, 2)

    def call(q, k, v):
        out, lse = attention(q, k, v, pattern, is_causal=True, backend=backend, return_lse=True, mixing_gradient=mixing)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n", "m"), [(45, 45), (7, 45)])
def test_detached_mixing_is_the_gradient_with_constant_weights(backend, causal, padding, n, m):
    """Independent: branches as separate oracle calls, mixed with weights that autograd cannot see."""
    pattern = Dilated([8, 20, 100], [1, 2, 3], "blocked", padding)
    inputs = random_inputs(2, n, m, 4, 2, 5)
    dout, dlse = torch.randn_like(inputs[0]), torch.zeros(2, 4, n)

    def mixture(q, k, v):
        parts = [
            oracle.attention(q, k, v, Dilated([w], [r], "blocked", padding), is_causal=causal) for w, r in pattern.branches
        ]
        lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
        weights = [torch.exp(part_lse - lse).detach().nan_to_num().transpose(1, 2) for _, part_lse in parts]
        return sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, parts, strict=True)), lse

    call = lambda *x: attention(  # noqa: E731
        *x, pattern, is_causal=causal, backend=backend, return_lse=True, mixing_gradient="detached"
    )
    expected = with_grads(mixture, inputs, dout, dlse)
    assert_same(with_grads(call, inputs, dout, dlse), expected)
    exact = with_grads(lambda *x: attention(*x, pattern, is_causal=causal, return_lse=True), inputs, dout, dlse)
    assert not torch.allclose(exact[2], expected[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_lse_alone(backend):
    pattern = Dilated([8, 16], [1, 2])
    inputs = random_inputs(2, 24, 24, 4, 4, 4)
    grads = []
    for call in (oracle.attention, lambda *x: attention(*x, backend=backend, return_lse=True)):
        lse = call(*inputs, pattern)[1]
        grads.append(torch.autograd.grad(lse.square().sum(), inputs, allow_unused=True, materialize_grads=True))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_lengths_give_what_each_sample_would_be_alone(backend, causal, padding):
    pattern = Dilated([8, 32], [1, 3], torchscale_padding=padding)
    lengths = torch.tensor([30, 30, 0, 17, 1])
    inputs = random_inputs(5, 30, 30, 4, 2, 4)
    with torch.no_grad():  # rows behind the length are never read
        for b, n in enumerate(lengths.tolist()):
            for x in inputs:
                x[b, n:] = torch.nan
    out, lse = attention(*inputs, pattern, is_causal=causal, lengths=lengths, backend=backend, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = oracle.grads((out, lse), inputs, (dout, dlse))
    for b, n in enumerate(lengths.tolist()):
        alone = [x[b : b + 1, :n].detach().requires_grad_() for x in inputs]
        expected = with_grads(
            lambda *x: oracle.attention(*x, pattern, is_causal=causal), alone, dout[b : b + 1, :n], dlse[b : b + 1, :, :n]
        )
        actual = [out[b : b + 1, :n], lse[b : b + 1, :, :n], *(g[b : b + 1, :n] for g in grads)]
        assert_same(actual, expected)
        assert (out[b, n:] == 0).all()
        assert (lse[b, :, n:] == -torch.inf).all()
        assert all((g[b, n:] == 0).all() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_while_decoding(backend):
    """Query rows are the last positions of the keys, so a sample cannot be shorter than these."""
    q, k, v = (x.detach() for x in random_inputs(3, 6, 20, 2, 2, 4))
    pattern = Dilated([8], [2])
    whole = attention(q, k, v, pattern, is_causal=True, lengths=[20, 20, 20], backend=backend)
    torch.testing.assert_close(whole, oracle.attention(q, k, v, pattern, is_causal=True)[0])
    with pytest.raises(
        ValueError, match=r"cannot be shorter than the 20 keys: got 6 queries and lengths \[20, 16, 9\]; call"
    ):
        attention(q, k, v, pattern, is_causal=True, lengths=torch.tensor([20, 16, 9]), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_as_if_alone(backend, causal):
    pattern = Dilated([8, 32], [1, 3])
    bounds = [0, 13, 13, 14, 40]
    inputs = random_inputs(2, 40, 40, 4, 2, 4)
    dout, dlse = torch.randn(2, 40, 4, 4), torch.randn(2, 4, 40)
    actual = with_grads(
        lambda *x: attention(
            *x, pattern, is_causal=causal, cu_seqlens=torch.tensor(bounds), backend=backend, return_lse=True
        ),
        inputs,
        dout,
        dlse,
    )
    for a, b in pairwise(bounds):
        alone = [x[:, a:b].detach().requires_grad_() for x in inputs]
        expected = with_grads(
            lambda *x: oracle.attention(*x, pattern, is_causal=causal), alone, dout[:, a:b], dlse[:, :, a:b]
        )
        out, lse, dq, dk, dv = actual
        assert_same([out[:, a:b], lse[:, :, a:b], dq[:, a:b], dk[:, a:b], dv[:, a:b]], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_of_the_inputs_do_not_matter(backend):
    pattern = Dilated([8, 16], [1, 2])
    q, k, v = (x.detach() for x in random_inputs(2, 32, 32, 4, 4, 6))
    expected, _ = oracle.attention(q, k, v, pattern)
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "head size not innermost": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        "every other row": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 2).flatten(1, 2)[:, ::2],
        "slice of a wider tensor": lambda x: torch.cat((x, x, x), -1)[..., 6:12],
        "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    }
    for name, layout in layouts.items():
        inputs = [layout(x).requires_grad_() for x in (q, k, v)]
        assert not inputs[0].is_contiguous(), name
        out = attention(*inputs, pattern, backend=backend)
        torch.testing.assert_close(out, expected, msg=lambda m, name=name: f"{name}: {m}")
        out.sum().backward()  # an expanded, non-contiguous gradient
    shared = q[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(attention(shared, shared, shared, pattern, backend=backend)[0], oracle.attention(
        q[:1], q[:1], q[:1], pattern)[0][0])  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_the_same_bit_for_bit(backend):
    inputs = random_inputs(2, 100, 100, 4, 2, 16, torch.float32)
    dout, dlse = torch.randn(2, 100, 4, 16), torch.randn(2, 4, 100)
    call = lambda *x: attention(*x, Dilated([16, 32, 64], [1, 2, 4]), backend=backend, return_lse=True)  # noqa: E731
    first = with_grads(call, inputs, dout, dlse)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(with_grads(call, inputs, dout, dlse), first, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7, 300.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_and_large_scores(backend, scale, causal):
    inputs = random_inputs(1, 40, 40, 2, 2, 8)
    pattern = Dilated([8, 20], [1, 2])
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(1, 2, 40)
    options = {"scale": scale, "is_causal": causal}
    expected = with_grads(lambda *x: oracle.attention(*x, pattern, **options), inputs, dout, dlse)
    call = lambda *x: attention(*x, pattern, backend=backend, return_lse=True, **options)  # noqa: E731
    assert_same(with_grads(call, inputs, dout, dlse), expected, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_fall_with_the_head_in_any_layout(backend):
    pattern = Dilated([8, 16], [4, 2], offsets=[3, 2, 1, 0])
    q, k, v = (x.detach() for x in random_inputs(1, 20, 20, 4, 4, 4))
    expected, _ = oracle.attention(q, k, v, pattern)
    torch.testing.assert_close(attention(q, k, v, pattern, backend=backend), expected)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(attention(*heads_first, pattern, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_gradients_of_lse_in_half_precision(backend):
    q, k, v = random_inputs(1, 16, 16, 2, 2, 4, torch.float16)
    _, lse = attention(q, k, v, Dilated([8, 16], [1, 2]), backend=backend, return_lse=True)
    (dq,) = torch.autograd.grad((lse * 1e5).mean(), q)
    assert dq.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_empty_samples_still_has_gradients(backend):
    inputs = random_inputs(2, 6, 6, 2, 2, 4)
    out, lse = attention(*inputs, Dilated([4], [1]), lengths=torch.tensor([0, 0]), backend=backend, return_lse=True)
    for found in (torch.autograd.grad(x, inputs, torch.ones_like(x), retain_graph=True) for x in (out, lse)):
        assert all((grad == 0).all() for grad in found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", sorted(DATA.glob("attention_*.safetensors")), ids=lambda p: p.stem)
def test_vectors_of_the_paper_authors_code(path, backend):
    """Aligned lengths by the definition alone; padded ones with the effect of their zero keys."""
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["meta"])
        q, k, v, expected = (file.get_tensor(name) for name in ("q", "k", "v", "out"))
    pattern = Dilated(
        meta["segment_lengths"], meta["dilation_rates"], meta["offsets"], torchscale_padding="padded" in path.stem
    )
    out = attention(q, k, v, pattern, is_causal=meta["is_causal"], backend=backend)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    if "padded" in path.stem and not meta["is_causal"]:
        by_definition = Dilated(meta["segment_lengths"], meta["dilation_rates"], meta["offsets"])
        assert (attention(q, k, v, by_definition, backend=backend) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_dense_segment_is_scaled_dot_product_attention(backend):
    q, k, v = (x.detach() for x in random_inputs(2, 33, 33, 4, 2, 8))
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
        out = dilated_attention(q, k, v, [33], [1], is_causal=causal, backend=backend)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("n", "causal"), [(40, False), (40, True), (7, True)])
def test_weights_of_chosen_rows(n, causal):
    pattern = Dilated([8, 16], [1, 2])
    q, k, v = (x.detach() for x in random_inputs(2, n, 40, 4, 2, 8))
    rows = [0, 3, -1]
    weights = attention_weights(q, k, pattern, rows, is_causal=causal)
    out, _ = oracle.attention(q, k, v, pattern, is_causal=causal)
    values = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhrm,bmhd->brhd", weights, values), out[:, rows])
    met = oracle.multiplicities(pattern, n, 40, 4, 2, causal)[:, rows] > 0
    assert ((weights > 0) == met).all()
    if n < 40:
        return
    lengths = torch.tensor([40, 38])
    short = attention_weights(q, k, pattern, rows, is_causal=causal, lengths=lengths)
    expected, _ = oracle.attention(q[1:, :-2], k[1:, :38], v[1:, :38], pattern, is_causal=causal)
    torch.testing.assert_close(torch.einsum("bhrm,bmhd->brhd", short[1:, :, :2], values[1:]), expected[:, rows[:2]])
    assert (short[1, :, 2] == 0).all()
    assert (short[1, :, :, 38:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sequences_have_gradients(backend):
    inputs = random_inputs(2, 5, 5, 2, 2, 4)
    out = attention(*inputs, Dilated([4], [1]), lengths=torch.tensor([0, 0]), backend=backend)
    assert all((x == 0).all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))
