"""Models that apply an order once: rows that already lie in it, modules, compilers, and docs/orders.md as it stands."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import oracle
import ranks
from dilated_attention_pytorch import (
    Dilated,
    DilatedAttention,
    Hilbert,
    Identity,
    MultiheadDilatedAttention,
    Order,
    attention,
    dilated_attention,
)
from oracle import M32, assert_same, plain_word, with_grads

PATTERN = Dilated([8, 12, 100], [1, 3, 4])
PAGE = (Path(__file__).parents[2] / "docs" / "orders.md").read_text()
WORLD = 2


def random_inputs(n=30, heads=6, key_heads=3):
    shapes = ((2, n, heads, 5), (2, n, key_heads, 5), (2, n, key_heads, 5))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def random_orders(n=30):
    each = torch.stack([torch.randperm(n) for _ in range(2)])
    return Hilbert.line(n), Order.from_permutation(each[0]), Order.from_permutation(each)


def by_place(x, order, dim=1):
    """Rows in order, by the order's numbers alone."""
    rows = torch.arange(2)[:, None], order.positions.expand(2, -1)
    return x[rows] if dim == 1 else x.transpose(1, dim)[rows].transpose(1, dim)


@pytest.mark.parametrize("backend", ["reference", "eager", "auto"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_already_lie_in_order(backend, causal):
    for order in random_orders():
        inputs = random_inputs()
        dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 6, 30, dtype=torch.float64)
        expected = with_grads(lambda *x: oracle.ordered_attention(*x, PATTERN, order, causal), inputs, dout, dlse)  # noqa: B023
        options = {"is_causal": causal, "order": order, "ordered": True, "backend": backend, "return_lse": True}
        call = lambda *x: attention(*x, PATTERN, **options)  # noqa: B023, E731
        there = [by_place(x.detach(), order).requires_grad_() for x in inputs]
        actual = with_grads(call, there, by_place(dout, order), by_place(dlse, order, 2))
        assert_same(actual, [by_place(x, order, 2 if name == 1 else 1) for name, x in enumerate(expected)])


def test_modules_and_functions_say_the_same():
    order = Hilbert.grid(5, 6)
    q, k, v = (x.detach() for x in random_inputs())
    ordered = [order.permute(x) for x in (q, k, v)]
    for causal in (False, True):
        options = {"is_causal": causal, "order": order}
        expected, _ = oracle.ordered_attention(q, k, v, PATTERN, order, causal)
        branches = PATTERN.segment_lengths, PATTERN.dilation_rates
        for result in (
            dilated_attention(*ordered, *branches, ordered=True, **options),
            DilatedAttention(*branches, order=order, ordered=True)(*ordered, is_causal=causal),
        ):
            torch.testing.assert_close(order.unpermute(result), expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(dilated_attention(q, k, v, *branches, ordered=False, **options), expected)
        plain = attention(q, k, v, PATTERN, is_causal=causal)
        assert torch.equal(attention(q, k, v, PATTERN, is_causal=causal, order=Identity(30), ordered=True), plain)
    assert "order=Hilbert.grid(5, 6), ordered=True" in repr(DilatedAttention(*branches, order=order, ordered=True))
    with pytest.raises(ValueError, match="ordered=True says that rows are in an order already: pass that order as order"):
        DilatedAttention([8], [1], ordered=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead(batch_first):
    order = Hilbert.grid(5, 6)
    torch.manual_seed(1)
    per_call = MultiheadDilatedAttention(
        16, 2, [8, 30], [1, 2], order=order, batch_first=batch_first, layer_norm=False, dtype=torch.float64
    )
    once = MultiheadDilatedAttention(
        16, 2, [8, 30], [1, 2], order=order, ordered=True, batch_first=batch_first, layer_norm=False, dtype=torch.float64
    )
    once.load_state_dict(per_call.state_dict())
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    q, k, v = (project(x).unflatten(-1, (2, 8)) for project in (per_call.q_proj, per_call.k_proj, per_call.v_proj))
    attended, _ = oracle.ordered_attention(q, k, v, per_call.attention.pattern, order, True)
    expected, place = per_call.out_proj(attended.flatten(-2)), 1 if batch_first else 0
    given = x if batch_first else x.transpose(0, 1)
    out, weights = per_call(given, given, given, is_causal=True)
    assert weights is None
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected, rtol=1e-11, atol=1e-11)
    there = order.permute(given, dim=place)
    torch.testing.assert_close(order.unpermute(once(there, there, there, is_causal=True)[0], dim=place), out)
    for ask in (lambda: once(given, given, given, need_weights=True), lambda: once.attention_map(given, given, [0])):
        with pytest.raises(ValueError, match="is not available with an order; attention_weights of tensors that"):
            ask()


def dropped(q, k, v, pattern, order, p, seed, causal):
    """Dropout from the definition: whether a weight is kept goes by the places of its pair, and by its branch."""
    batch, _, heads, d = q.shape
    _, lse = oracle.ordered_attention(q, k, v, pattern, order, causal)
    out = torch.zeros_like(q)
    for b in range(batch):
        positions = order.positions.expand(batch, -1)[b].tolist()
        for h in range(heads):
            for a, i in enumerate(positions):
                for c, j in enumerate(positions):
                    if causal and j > i:
                        continue
                    for branch, (w, r) in enumerate(pattern.branches):
                        met = oracle.met_in((w, r), oracle.offset(pattern.offsets, h, heads, r), a, c)
                        if met and plain_word(seed, b, h, branch, a, c) >= int(p * M32):
                            s = q[b, i, h] @ k[b, j, h] * d**-0.5
                            out[b, i, h] += torch.exp(s - lse[b, h, i]) / (1 - p) * v[b, j, h]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_counts_places(causal):
    pattern = Dilated([8, 16], [1, 2])
    for order in random_orders(20)[1:]:
        q, k, v = (x.detach() for x in random_inputs(20, 2, 2))
        expected = dropped(q, k, v, pattern, order, 0.3, 7, causal)
        options = {"is_causal": causal, "order": order, "dropout_p": 0.3, "seed": 7}
        for backend in ("reference", "eager"):
            torch.testing.assert_close(attention(q, k, v, pattern, backend=backend, **options), expected)
            once = attention(*(by_place(x, order) for x in (q, k, v)), pattern, backend=backend, ordered=True, **options)
            torch.testing.assert_close(once, by_place(expected, order))


# docs/orders.md


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def names_of_page() -> dict:
    """After the page's first code; numbers are double precision."""
    torch.set_default_dtype(torch.float64)
    names: dict = {}
    try:
        exec(blocks()[0], names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names


def per_call(names: dict):
    """The page's model with an order around every attention instead."""
    model = copy.deepcopy(names["model"])
    for layer in model.layers:
        layer.attend = DilatedAttention([16, 64], [1, 2], order=names["order"])
    model.put_in_order = model.undo = lambda x: x
    return model


def out_and_gradients(model, patches) -> list[torch.Tensor]:
    out = model(patches)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


def test_page():
    names = names_of_page()
    expected = out_and_gradients(per_call(names), names["patches"])
    for a, e in zip(out_and_gradients(names["model"], names["patches"]), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
    assert torch.equal(names["predicted"], names["model"](names["patches"]))
    # Causal by original position: what comes after a patch does not change what is predicted of it.
    changed = names["patches"].clone()
    changed[:, 40:] += 1
    before, after = (names["model"](x)[:, :40] for x in (names["patches"], changed))
    torch.testing.assert_close(after, before)


def test_compiled_model():
    names = names_of_page()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(names["model"], fullgraph=True, backend=counter)
    for _ in range(2):
        patches = torch.randn(2, 63, 12, dtype=torch.float64)
        expected = out_and_gradients(names["model"], patches)
        for a, e in zip(out_and_gradients(compiled, patches), expected, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def on_ranks(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    names = names_of_page()
    torch.set_default_dtype(torch.float64)
    exec(blocks()[1], names)
    expected = out_and_gradients(per_call(names), names["patches"])
    torch.testing.assert_close(names["whole"], expected[0], rtol=1e-10, atol=1e-10)
    early, late = ((0, 16), (47, 63)) if rank == 0 else ((16, 32), (32, 47))  # 63 rows, zigzag
    places = [*range(*early), *range(*late)]
    assert names["mine"].tolist() == [names["order"].positions.tolist()[place] for place in places]
    compiled = torch.compile(names["sharded"], backend="aot_eager")
    for model in (names["sharded"], copy.deepcopy(names["sharded"]), compiled):
        out, *grads = out_and_gradients(model, names["patches"])
        torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
        for a, e in zip(grads, expected[1:], strict=True):
            dist.all_reduce(a)  # every rank has computed the loss of the whole
            torch.testing.assert_close(a / WORLD, e, rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()


def test_page_on_ranks(tmp_path):
    ranks.start(on_ranks, (str(tmp_path / "store"),), WORLD)
