"""The Hopper kernels in float32 through the public function, without a GPU: their source, by gluon_on_cpu."""

from __future__ import annotations

import functools
import importlib.util
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import Shards

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton's interpreter is off"),
]


@pytest.fixture
def install(monkeypatch):
    """A function that sets up so many programs; and whether gradients are computed at once, or apart."""
    import gluon_on_cpu
    from dilated_attention_pytorch.backends.hopper import configs, run

    def setup(programs=3, element="bfloat16", *, at_once=False):
        gluon_on_cpu.installed(monkeypatch, programs=programs, element=element)
        monkeypatch.setattr(run, "joint_config", lambda _, head_dim: configs.configs(head_dim).joint if at_once else None)

    return setup


def tensors(n, m, head_dim, batch=1, heads=2, key_heads=1):
    """q, k, v, dout, dlse."""
    q, dout = torch.randn(2, batch, n, heads, head_dim).unbind(0)
    k, v = torch.randn(2, batch, m, key_heads, head_dim).unbind(0)
    return q, k, v, dout, torch.randn(batch, heads, n)


def results(call, q, k, v, dout, dlse):
    """out, lse, dq, dk, dv."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*inputs)
    seen = lse.isfinite()  # rows that see nothing have no gradient
    return [out, lse, *oracle.grads((out, lse), inputs, (dout.to(out), torch.where(seen, dlse.to(lse), 0.0)))]


def ours(pattern, **options):
    return lambda *x: attention(*x, pattern, backend="hopper", return_lse=True, **options)


def check(pattern, x, **options):
    """All five results against the definition in float64, with the definition in float32 as the yardstick."""
    reference = lambda *y: attention(*y, pattern, backend="reference", return_lse=True, **options)  # noqa: E731
    exact = results(reference, *(y.double() for y in x))
    oracle.assert_rounding_only(results(ours(pattern, **options), *x), results(reference, *x), exact, torch.float32)


NAMES = ("out", "lse", "dq", "dk", "dv")
TWO = Dilated([160, 330], [1, 3])  # tiles of 160, 10 and 110 rows; parts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 48, 64, 80, 128])
def test_head_sizes(head_dim, is_causal, install):
    install()
    check_with_oracle(head_dim, is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 48, 64, 104, 128])
def test_head_sizes_at_once(head_dim, is_causal, install):
    install(at_once=True)
    check_with_oracle(head_dim, is_causal)


def check_with_oracle(head_dim, is_causal):
    pattern, x = TWO, tensors(330, 330, head_dim)
    call = ours(pattern, is_causal=is_causal)
    exact = results(lambda *y: oracle.attention(*y, pattern, is_causal=is_causal), *(y.double() for y in x))
    oracle.assert_rounding_only(results(call, *x), results(oracle.plain(pattern, is_causal), *x), exact, torch.float32)


@pytest.fixture
def choose(monkeypatch):
    """A function that gives all forwards the configuration of short tiles, or none."""
    from dilated_attention_pytorch.backends.hopper import configs, run

    def chosen(short):
        def config(_, head_dim):
            known = configs.configs(head_dim)
            return known.short.config if short else known.forward

        monkeypatch.setattr(run, "forward_config", config)

    return chosen


@pytest.mark.parametrize(
    ("head_dim", "short", "is_causal"),
    [(64, False, False), (64, False, True), (40, False, True), (128, False, True), (128, True, False), (104, True, False)],
)
def test_forwards_that_these_tiles_do_not_have(head_dim, short, is_causal, install, choose):
    """Blocks of 128 keys where ``test_head_sizes`` has blocks of 64, and the reverse."""
    install()
    choose(short)
    check_with_oracle(head_dim, is_causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_tiles_with_one_stage(head_dim, install, monkeypatch):
    """A group gives back the block that only the other group reads before the next one is loaded."""
    from dilated_attention_pytorch.backends.hopper import run

    install()
    monkeypatch.setattr(run, "stages", lambda *_: 1)
    q, k, v, *_ = tensors(330, 330, head_dim)
    out, lse = ours(TWO, is_causal=True)(q, k, v)
    exact, exact_lse = oracle.attention(*(x.double() for x in (q, k, v)), TWO, is_causal=True)
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", [TWO, BlockSparse.custom(torch.ones(2, 2).bool(), block_size=128)])
def test_a_row_of_nan_stays_one(pattern, install):
    install()
    q, k, v, *_ = tensors(250, 250, 64)
    q[:, 7, 1, 3] = math.nan
    out, lse = ours(pattern)(q, k, v)
    expected = torch.zeros(1, 250, 2).bool()
    expected[:, 7, 1] = True
    assert torch.equal(out.isnan().all(-1), expected)
    assert torch.equal(lse.isnan(), expected.transpose(1, 2))


CASES = {
    "one branch": (Dilated([200], [1]), 300, 300, {}),
    "no branch has all rows": (Dilated([128, 300], [2, 6]), 300, 300, {}),
    "a chain of parts": (Dilated([64, 256, 512], [1, 2, 4]), 400, 400, {}),
    "two parts": (Dilated([128, 256, 384], [1, 2, 3]), 384, 384, {}),
    "decoding": (TWO, 70, 330, {}),
    "causal decoding": (TWO, 200, 330, {"is_causal": True}),
    "lengths": (TWO, 330, 330, {"lengths": torch.tensor([330, 77])}),
    "causal lengths": (TWO, 330, 330, {"lengths": torch.tensor([201, 330]), "is_causal": True}),
    "documents": (TWO, 330, 330, {"cu_seqlens": torch.tensor([0, 50, 51, 330])}),
    "padding as the authors have it": (Dilated([160, 480], [1, 3], torchscale_padding=True), 330, 330, {}),
    "negative scale": (TWO, 330, 330, {"scale": -0.3}),
    "no scale": (TWO, 330, 330, {"scale": 0.0}),
    "detached": (TWO, 330, 330, {"mixing_gradient": "detached"}),
}


# dq by a kernel of its own: other tables, and other rows of other parts.
APART = ["a chain of parts", "causal decoding", "documents", "padding as the authors have it", "detached"]


@pytest.mark.parametrize(("case", "at_once"), [*((x, True) for x in CASES), *((x, False) for x in APART)])
def test_what_is_served(case, at_once, install):
    pattern, n, m, options = CASES[case]
    install(at_once=at_once)
    check(pattern, tensors(n, m, 64, batch=2 if {"lengths", "mixing_gradient"} & options.keys() else 1), **options)


@pytest.mark.parametrize("case", ["a chain of parts", "causal lengths", "padding as the authors have it"])
def test_what_is_served_with_blocks_of_128_keys(case, install, choose):
    pattern, n, m, options = CASES[case]
    install()
    choose(short=False)
    check(pattern, tensors(n, m, 64, batch=2 if "lengths" in options else 1), **options)


# One descriptor serves each tensor where the only branch has tiles of whole blocks.
WHOLE = {
    "of two heads": (Dilated([128], [1]), 256, 2, {}),
    "of packed sequences": (Dilated([256], [1]), 512, 1, {"cu_seqlens": [0, 128, 512]}),
    "of samples": (Dilated([256], [1]), 256, 1, {"lengths": [256, 128]}),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_tiles_of_whole_blocks(name, is_causal, install, monkeypatch):
    from dilated_attention_pytorch.backends.hopper import run

    pattern, n, key_heads, options = WHOLE[name]
    install()
    found, is_whole = [], run._is_whole
    monkeypatch.setattr(run, "_is_whole", lambda *x: found.append(is_whole(*x)) or found[-1])
    q, k, v, dout, dlse = tensors(n, n, 64, batch=1 if "cu_seqlens" in options else 2, key_heads=key_heads)
    # Parts of one tensor, with rows between samples.
    rows = torch.empty(len(q), n + 64, 2 + 2 * key_heads, 64)[:, :n]
    rows[:] = torch.cat([q, k, v], 2)
    q, k, v = rows.split([2, key_heads, key_heads], 2)
    check(pattern, (q, k, v, dout, dlse), is_causal=is_causal, **options)
    assert found == [True]


@pytest.mark.parametrize("at_once", [False, True])
def test_keys_behind_the_end_have_no_weight(at_once, install):
    """Their rows are 0 and their scores 0, where all scores that there are lie at -200: weights of e**200."""
    install(at_once=at_once)
    x = q, k, *_ = tensors(330, 330, 64)
    q[..., 0], k[..., 0] = 40.0, -40.0
    check(TWO, x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_float16_is_online(is_causal, install):
    install(element="float16")
    check(TWO, tensors(330, 330, 64), is_causal=is_causal)


@pytest.mark.parametrize("blocks", [False, True])
def test_rows_that_overflow_are_computed_again(blocks, install):
    """Scores of the last keys are larger by 200 nats than those of the first block: sums overflow, in some items."""
    install()
    pattern = BlockSparse.custom(torch.ones(3, 3, dtype=torch.bool), block_size=128) if blocks else Dilated([384], [1])
    x = q, k, *_ = tensors(384, 384, 64)
    q[:, :100, :, 0] = 40.0
    k[:, 300:, :, 0] = 40.0
    check_by_condition(pattern, x)


def check_by_condition(pattern, x):
    """The results of dense attention. Errors of dq count over the sums whose terms these scores let be wrong.

    Large scores are rounded to multiples of 2**-15. So the weights of a few keys decide the largest error of dq, and it
    differs by factors between CPUs.
    """
    reference = lambda *y: attention(*y, pattern, backend="reference", return_lse=True)  # noqa: E731
    *exact, dq, dk, dv = results(reference, *(y.double() for y in x))
    q, k, v, dout, dlse = (y.double().transpose(1, 2) if y.dim() == 4 else y.double() for y in x)
    weights = (q @ k.mT / 8).softmax(-1)
    dweights = dout @ v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True) + dlse[..., None]) / 8
    assert torch.allclose((dscores @ k).transpose(1, 2), dq)
    condition = (dscores.abs() @ k.abs()).transpose(1, 2)
    exact = [*exact, dq / condition, dk, dv]
    actual, yardstick = results(ours(pattern), *x), results(reference, *x)
    for found in (actual, yardstick):
        found[2] = found[2] / condition
    oracle.assert_rounding_only(actual, yardstick, exact, torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("block_size", "n", "head_dim"), [(128, 500, 64), (256, 300, 128), (128, 389, 48)])
def test_block_lists(block_size, n, head_dim, is_causal, install):
    """A mask for each head; a query block of the first one has no keys."""
    install()
    blocks = -(-n // block_size)
    mask = (torch.rand(2, blocks, blocks) < 0.5) | torch.eye(blocks, dtype=torch.bool)
    mask[0, 0] = False
    check(BlockSparse.custom(mask, block_size=block_size), tensors(n, n, head_dim), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_block_lists_of_several_lengths(is_causal, install):
    install()
    mask = torch.rand(4, 4) < 0.7
    lengths = torch.tensor([500, 200])
    check(BlockSparse.custom(mask, block_size=128), tensors(500, 500, 64, batch=2), is_causal=is_causal, lengths=lengths)


@pytest.mark.parametrize("is_causal", [False, True])
def test_turns_do_not_depend_on_who_takes_them(is_causal, install, monkeypatch):
    """Windows of few items, more and fewer programs: dq is added up in the same order."""
    import gluon_on_cpu
    from dilated_attention_pytorch.backends.hopper.kernels import turns

    pattern, x = Dilated([384, 768], [1, 2]), tensors(768, 768, 64)
    found = []
    for programs, together in ((1, 198), (2, 4), (5, 1)):
        install(programs, at_once=True)
        monkeypatch.setitem(gluon_on_cpu.on_cpu(turns.find_turn).__globals__, "TOGETHER", together)
        found.append(results(ours(pattern, is_causal=is_causal), *x)[2:])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_problem(data, install):
    """Rates that divide one another or do not, segments of any length, few queries, several samples and heads."""
    draw = data.draw
    branches = draw(st.lists(st.tuples(st.integers(8, 300), st.integers(1, 6)), min_size=1, max_size=3))
    keys = draw(st.integers(1, 320))
    queries = draw(st.one_of(st.just(keys), st.integers(1, keys)))
    batch, key_heads, group = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3)]))
    install(draw(st.integers(1, 4)), at_once=draw(st.booleans()))
    x = tensors(queries, keys, draw(st.sampled_from([48, 64, 128])), batch, key_heads * group, key_heads)
    pattern, is_causal = Dilated(*map(list, zip(*sorted(branches), strict=True))), draw(st.booleans())
    exact = results(lambda *y: oracle.attention(*y, pattern, is_causal=is_causal), *(y.double() for y in x))
    for name, a, e in zip(NAMES, results(ours(pattern, is_causal=is_causal), *x), exact, strict=True):
        empty = e == -math.inf
        assert torch.equal(a == -math.inf, empty), name
        # Gradients of a row with one key are 0, but for the rounding of what they are the difference of.
        error, size = (float(y.masked_fill(empty, 0.0).norm()) for y in (a - e, e))
        assert error < 2e-6 * (size + float(x[3].norm())), f"{name}: {error}"


def check_block_ring(group, is_causal: bool, layout: str, head_dim: int) -> None:
    import gluon_on_cpu

    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[0, 1:3] = mask[3, 2] = False
    pattern = BlockSparse.custom(mask, block_size=128)
    chunks = Shards.of([256, 256 if layout == "zigzag" else 180], layout).chunks
    own = [row for chunk in chunks[dist.get_rank()] for row in chunk]
    n = max(chunk.stop for own_chunks in chunks for chunk in own_chunks)
    q, dout = torch.randn(2, 1, n, 2, head_dim, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 1, n, 1, head_dim, generator=torch.Generator().manual_seed(1))
    # Scores of these queries are larger by 91 nats in the second key block than in the first: sums overflow.
    q[:, ::7, :, 0] = 27.0
    k[:, 128:256, :, 0] = 27.0
    reference = functools.partial(attention, pattern=pattern, backend="reference", is_causal=is_causal, return_lse=True)
    exact = results(reference, *(x.double() for x in (q, k, v, dout)), torch.zeros(1, 2, n))
    measure = results(reference, q, k, v, dout, torch.zeros(1, 2, n))
    with pytest.MonkeyPatch.context() as patch:
        launched = gluon_on_cpu.installed(patch, programs=2, element="bfloat16")
        sharded = ours(pattern, group=Sharding(group, layout, transport="ring"), is_causal=is_causal)
        actual = results(sharded, *(x[:, own] for x in (q, k, v, dout)), torch.zeros(1, 2, len(own)))
    at = [x[..., own] if i == 1 else x[:, own] for x_all in (measure, exact) for i, x in enumerate(x_all)]
    oracle.assert_rounding_only(actual, at[:5], at[5:], torch.float32)
    assert set(launched) == {"block_forward_kernel", "block_dq_kernel", "block_dkv_kernel"}


@pytest.mark.parametrize(
    ("is_causal", "layout", "head_dim"), [(False, "contiguous", 64), (True, "contiguous", 48), (True, "zigzag", 64)]
)
def test_block_rings(on_ranks, is_causal, layout, head_dim):
    """Block lists of ranks by Hopper kernels: own chunks, chunks with each other, messages; with rows that overflow."""
    on_ranks(2, check_block_ring, is_causal, layout, head_dim)


def check_rows_without_keys(group) -> None:
    import gluon_on_cpu

    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[0, 2:] = False  # the first block of rank 0 sees nothing of rank 1
    pattern = BlockSparse.custom(mask, block_size=128)
    q, k, v = torch.randn(3, 1, 512, 1, 64, generator=torch.Generator().manual_seed(0))
    expected, expected_lse = attention(q, k, v, pattern, backend="reference", return_lse=True)
    v[:, 256:260] = torch.tensor([math.nan, math.inf] * 2)[:, None, None]  # what the first block does not see
    own = slice(dist.get_rank() * 256, dist.get_rank() * 256 + 256)
    with pytest.MonkeyPatch.context() as patch:
        gluon_on_cpu.installed(patch, programs=2, element="bfloat16")
        sharding = Sharding(group, "contiguous", transport="ring")
        out, lse = ours(pattern, group=sharding)(*(x[:, own] for x in (q, k, v)))
    assert torch.allclose(lse, expected_lse[..., own], rtol=1e-5, atol=1e-5)
    if dist.get_rank() == 0:
        assert torch.allclose(out[:, :128], expected[:, :128], rtol=1e-5, atol=1e-5)
        assert not out[:, 128:].isfinite().any()


def check_keys_of_nan(group) -> None:
    import gluon_on_cpu

    pattern = BlockSparse.custom(torch.ones(4, 4, dtype=torch.bool), block_size=128)
    q, k, v = torch.randn(3, 1, 512, 1, 64, generator=torch.Generator().manual_seed(0))
    k[:, 130] = math.nan
    own = slice(dist.get_rank() * 256, dist.get_rank() * 256 + 256)
    with pytest.MonkeyPatch.context() as patch:
        gluon_on_cpu.installed(patch, programs=2, element="bfloat16")
        sharding = Sharding(group, "contiguous", transport="ring")
        out, lse = ours(pattern, group=sharding)(*(x[:, own] for x in (q, k, v)))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_keys_of_nan_reach_all_rows_that_see_them(on_ranks):
    """By a message, and by what rows hold before a message comes."""
    on_ranks(2, check_keys_of_nan)


def test_rows_that_see_no_key_of_a_message_keep_what_they_hold(on_ranks):
    """Its values are read with weights of 0, and not all are finite."""
    on_ranks(2, check_rows_without_keys)


def check_ring(group, is_causal: bool, layout: str, at_once: bool, head_dim: int) -> None:
    import gluon_on_cpu
    from dilated_attention_pytorch.backends.hopper import configs, run

    pattern, (first, *rest) = Dilated([96, 400], [1, 4]), Shards.of([240, 160], layout).chunks[dist.get_rank()]
    own = [*first, *(row for chunk in rest for row in chunk)]
    batch = 1 if is_causal else 2
    whole = torch.randn(4, batch, 400, 2, head_dim, generator=torch.Generator().manual_seed(0))

    def gradients(*tensors, **options):
        *inputs, dout = (x.clone().requires_grad_() for x in tensors)
        out = attention(*inputs, pattern, **options)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, dout))]

    with pytest.MonkeyPatch.context() as patch:
        launched = gluon_on_cpu.installed(patch, programs=2, element="bfloat16")
        patch.setattr(run, "joint_config", lambda _, head_dim: configs.configs(head_dim).joint if at_once else None)
        exact = gradients(*whole.double(), backend="reference", is_causal=is_causal)
        options = {
            "group": Sharding(group, layout, bucket_size=30, transport="ring"),
            "backend": "hopper",
            "is_causal": is_causal,
        }
        actual = gradients(*(x[:, own] for x in whole), **options)
        for name, a, e in zip(("out", "dq", "dk", "dv"), actual, exact, strict=True):
            error = float((a - e[:, own]).norm() / e[:, own].norm())
            assert error < 2e-6, f"{name}: {error}"
        assert set(launched) == {"forward_kernel", *(["joint_kernel"] if at_once else ["dq_kernel", "dkv_kernel"])}


@pytest.mark.parametrize(
    ("is_causal", "layout", "at_once", "head_dim"),
    [(False, "contiguous", True, 64), (True, "contiguous", False, 64), (True, "zigzag", True, 128)],
)
def test_rings(on_ranks, is_causal, layout, at_once, head_dim):
    """All tiles of ranks by Hopper kernels: own rows, chunks with each other, several messages of two branches."""
    on_ranks(2, check_ring, is_causal, layout, at_once, head_dim)


def test_mistakes_are_found():
    """Of the fakes: what a kernel may not do is an error."""
    import numpy as np

    import gluon_races
    from gluon_on_cpu import GL, Barrier
    from gluon_values import Int, Pointer

    memory = np.arange(8, dtype=np.float32)
    pointer = Pointer(memory, 0, "float32")
    numbers = GL.arange(0, 12, None)
    assert GL.load(pointer + numbers, mask=numbers < 8, other=math.inf).tolist() == [*range(8), *[math.inf] * 4]
    with pytest.raises(AssertionError, match="outside of the tensor"):
        GL.load(pointer + numbers, mask=numbers < 9)
    with pytest.raises(AssertionError, match="more than 32 bits"):
        Int(2**20) * Int(2**12)
    assert (Int(2**20).to("int64") * Int(2**12)).bits == 64
    gluon_races.begin()
    barrier = Barrier(2)
    barrier.arrive(1)
    with pytest.raises(AssertionError, match="more arrivals"):
        barrier.arrive(2)


@pytest.mark.parametrize(
    ("pattern", "batch", "options", "at_once"),
    [
        (TWO, 1, {}, True),
        (TWO, 2, {"is_causal": True}, False),
        (Dilated([64, 128], [2, 4]), 2, {"lengths": (180, 100)}, True),  # launches that only add up parts, too
        (Dilated([64, 100, 128], [1, 2, 4]), 1, {"cu_seqlens": (0, 50, 180)}, False),
    ],
    ids=["heads", "samples and heads", "sums", "documents"],
)
def test_shares_have_the_same_bits(pattern, batch, options, at_once, install, monkeypatch):
    """Parts of one share of samples or heads after the other, in the same memory."""
    from dilated_attention_pytorch.backends.gpu import launch_plan

    install(at_once=at_once)
    options = {name: torch.tensor(x) if isinstance(x, tuple) else x for name, x in options.items()}
    x = tensors(180, 180, 64, batch=batch, heads=4, key_heads=2)
    together = results(ours(pattern, **options), *x)
    made = []
    for_share = launch_plan.shares_of
    monkeypatch.setattr(launch_plan, "shares_of", lambda *sizes: made.append(for_share(*sizes)) or made[-1])
    monkeypatch.setattr(launch_plan, "PARTIAL_ELEMENTS", 64)
    for name, a, b in zip(NAMES, results(ours(pattern, **options), *x), together, strict=True):
        assert torch.equal(a, b), name
    assert {len(shares) for shares in made} == {4 if "cu_seqlens" in options else 2 * batch}
