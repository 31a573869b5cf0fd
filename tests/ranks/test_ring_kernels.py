"""The tiles of ranks through the fused kernels (interpreted): results and gradients as on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, SparsePatternConfig, attention, explain
from dilated_attention_pytorch.backends.hopper.backend import HopperBackend
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.backends.triton.backend import TRITON
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.distributed import Shards, simulate_ring
from dilated_attention_pytorch.distributed.own_rows import FusedStep, OwnRows, fused_backend, fused_step
from dilated_attention_pytorch.execute import loop
from dilated_attention_pytorch.plan.problem import BlockRule, Problem

pytest.importorskip("triton", reason="Triton has no build for this platform")
import fast_interpreter
from ring_cases import on_first_rank

fast_interpreter.install()  # in each rank

# Pattern, rows of the three ranks, heads, key heads, causal, and sequences of their own. All with both layouts.
CASES = [
    (Dilated([16, 64, 128], [1, 2, 4]), (40, 50, 38), 2, 2, False, {}),
    (Dilated([16, 64, 128], [1, 2, 4]), (48, 48, 21), 2, 1, True, {}),
    (Dilated([32, 100], [1, 3]), (37, 0, 74), 3, 3, False, {}),  # no launch for an empty shard, segments cut anywhere
    (Dilated([64], [2]), (33, 33, 34), 2, 2, True, {}),  # rows without a tile
    (Dilated([16, 64], [1, 4]), (30, 31, 29), 2, 1, True, {"cu_seqlens": [0, 30, 31, 90]}),
    (Dilated([16, 64], [1, 4]), (20, 21, 19), 1, 1, False, {"lengths": [60, 33]}),
]


def check(group, case, layout) -> None:
    pattern, rows, heads, key_heads, causal, options = case
    shards = Shards.of(rows, layout)
    n, own = sum(rows), torch.cat([torch.arange(x.start, x.stop) for x in shards.chunks[dist.get_rank()]])
    options = {name: torch.tensor(x) for name, x in options.items()} | {"is_causal": causal, "return_lse": True}
    torch.manual_seed(0)
    samples = len(options["lengths"]) if "lengths" in options else 1
    whole = [torch.randn(samples, n, h, 16).requires_grad_() for h in (heads, key_heads, key_heads)]
    dout = torch.randn(samples, n, heads, 16)
    weights = torch.linspace(-1, 1, n * heads).view(heads, n)

    def run(call, inputs, dout, weights):
        out, lse = call(*inputs)
        seen = torch.where(lse.isinf(), 0.0, lse)
        grads = torch.autograd.grad([out, seen], inputs, [dout, weights.to(lse.dtype).expand_as(lse)])
        return [out, seen, *grads]

    doubles = [x.detach().double().requires_grad_() for x in whole]
    reference = lambda *x: attention(*x, pattern, backend="reference", **options)  # noqa: E731
    expected = on_first_rank(group, lambda: [x.detach() for x in run(reference, doubles, dout.double(), weights)])
    local = [x.detach()[:, own].clone().requires_grad_() for x in whole]
    bucket_size = 24 if isinstance(pattern, Dilated) else None
    sharded = {"group": Sharding(group, layout, bucket_size, transport="ring"), "backend": "triton"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "attend_", None)  # no stock operator computes a tile
        patch.setattr(loop, "add_gradients_", None)
        actual = run(lambda *x: attention(*x, pattern, **options, **sharded), local, dout[:, own], weights[:, own])
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        part = e[..., own] if name == "lse" else e[:, own]
        torch.testing.assert_close(a.double(), part, rtol=2e-5, atol=5e-6, msg=lambda m, name=name: f"{case} {name}: {m}")


def both_layouts(cases: list) -> list:
    """The cases in turn in one of the two layouts. The interpreter takes seconds for each."""
    layouts = ["contiguous", "zigzag"] * len(cases)
    return [pytest.param(case, x, id=f"{case[1]}-{case[5]}-{x}") for case, x in zip(cases, layouts, strict=False)]


MASK = torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.4
WINDOW = BlockSparse.from_config(SparsePatternConfig("local_window", 0.4, block_size=16))
# Chunks that begin with a block and chunks that do not, of three ranks.
BLOCK_CASES = [
    (BlockSparse.custom(MASK, block_size=16), (48, 32, 40), 2, 1, False, {}),
    (WINDOW, (40, 27, 50), 2, 2, True, {}),
    (WINDOW, (48, 32, 40), 2, 1, True, {"lengths": [120, 70]}),
    (WINDOW, (32, 50, 30), 2, 2, False, {"cu_seqlens": [0, 70, 112]}),
    (BlockSparse.custom(MASK, block_size=16), (48, 33, 40), 2, 2, True, {}),
]


@pytest.mark.parametrize(("case", "layout"), both_layouts(BLOCK_CASES))
def test_blocks_are_those_of_one_device(on_ranks, case, layout):
    on_ranks(3, check, case, layout)


def on_a_hopper_gpu(patch: pytest.MonkeyPatch) -> list[str]:
    """As if this were one, with Triton's kernels in the place of Hopper's; the names of what is run."""
    launched = []
    for name in ("forward", "gradients"):

        def run(self, *args, name=name, **options):
            launched.append(name)
            return getattr(TRITON, name)(*args, **options)

        patch.setattr(HopperBackend, name, run)
    patch.setattr(HopperBackend, "row_statistics", lambda self, *args: TRITON.row_statistics(*args))
    patch.setattr(HopperBackend, "why_not", lambda self, request: [])
    return launched


@pytest.mark.parametrize(("case", "layout"), both_layouts(CASES))
def test_rows_are_those_of_one_device(on_ranks, case, layout):
    on_ranks(3, check, case, layout)


def check_refusals(group) -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match="dropout"):
        attention(x, x, x, Dilated([4], [1]), group=group, backend="triton", dropout_p=0.1, seed=1)


def test_refusals(on_ranks):
    on_ranks(3, check_refusals)


def check_auto(group, pattern, layout) -> None:
    rank, whole = dist.get_rank(), torch.randn(3, 1, 48, 1, 16, generator=torch.Generator().manual_seed(1))
    shards = layout if isinstance(layout, Shards) else Shards.even(48, 3, layout)
    own = torch.cat([torch.arange(x.start, x.stop) for x in shards.chunks[rank]])
    with pytest.MonkeyPatch.context() as patch:
        launched = on_a_hopper_gpu(patch)
        q, k, v = (x[:, own].clone().requires_grad_() for x in whole)
        out = attention(q, k, v, pattern, group=Sharding(group, layout, transport="ring"))
        expected = attention(*whole.double(), pattern, backend="reference")[:, own]
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=5e-6)
        out.sum().backward()
    # Own rows, two messages, and the tiles between the two chunks of zigzag shards.
    steps = 3 if layout != "zigzag" else 4
    assert launched == ["forward"] * steps + ["gradients"] * steps


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        (Dilated([16, 48], [1, 2]), "contiguous"),
        (Dilated([16, 48], [1, 2]), Shards.of([16] * 3, "contiguous")),
        (Dilated([48], [2]), "contiguous"),
        (Dilated([16, 48], [1, 2]), "zigzag"),
    ],
    ids=["contiguous", "lengths", "one branch", "zigzag"],
)
def test_auto(on_ranks, pattern, layout):
    """Own rows and those of messages go through the kernels."""
    on_ranks(3, check_auto, pattern, layout)


def test_what_auto_takes_for_own_rows():
    """On a Hopper GPU its kernels, wherever they can; without one, and if asked for others, none."""
    request = Request("cuda", (9, 0), torch.bfloat16, 64, 0.0)
    several, one = Dilated([16, 64], [1, 4]), Dilated([64], [4])
    blocks = BlockSparse.custom(torch.ones(2, 2, dtype=torch.bool), block_size=128)

    def taken(request=request, pattern=several, layout="contiguous", mixing_gradient="exact", backend="auto"):
        x = torch.empty(1, 256, 2, 64)
        call, _ = make_call(x, x, x, pattern, mixing_gradient=mixing_gradient, backend=backend)
        return fused_backend(replace(call, sharding=Sharding(None, layout)), request)

    assert taken() == "hopper"
    assert taken(layout=Shards.of([3, 0, 5], "contiguous")) == "hopper"
    assert taken(pattern=one) == "hopper"
    assert taken(pattern=blocks) == "hopper"
    by_head = BlockSparse.custom(torch.ones(2, 2, 2, dtype=torch.bool), block_size=128)
    adaptive = BlockSparse.from_config(SparsePatternConfig("adaptive", 0.5, block_size=128))
    for pattern in (by_head, adaptive):
        assert taken(pattern=pattern) is None
        with pytest.raises(ValueError, match="differ by head go through"):
            taken(pattern=pattern, backend="hopper")
    for layout in ("zigzag", Shards.of([3, 0, 5], "zigzag")):
        assert taken(layout=layout) == "hopper"
    assert taken(mixing_gradient="detached") is None
    for other in (
        {"device": "cpu", "capability": (0, 0)}, {"capability": (8, 0)}, {"capability": (10, 0)}, {"dtype": torch.float32},
        {"head_dim": 256}, {"head_dim": 20}, {"dropout_p": 0.1}, {"masks_by_position": True},
    ):  # fmt: skip
        assert taken(replace(request, **other)) is None
    assert {taken(backend=name) for name in ("sdpa", "eager")} == {None}
    with pytest.raises(ValueError, match=r"cannot serve this call:\n.*got torch.float32\n  detached mixing"):
        taken(replace(request, dtype=torch.float32), mixing_gradient="detached", backend="hopper")


def test_hopper_takes_chunks_that_begin_with_blocks():
    """Known when the shards are; ``auto`` takes stock operators instead, a named backend is an error on every rank."""
    blocks = BlockSparse.custom(torch.ones(4, 4, dtype=torch.bool), block_size=128)
    x = torch.empty(1, 256, 2, 64)

    def taken(rows, layout, backend="auto", cu_seqlens=None):
        shards = Shards.of(rows, layout)
        problem = Problem(BlockRule(128, None, blocks.given), False, 1, *[sum(rows)] * 2, 2, 2, cu_seqlens=cu_seqlens)
        call, _ = make_call(x, x, x, Dilated([64], [1]), backend=backend)
        return fused_step(call, "hopper", OwnRows.of(problem, shards, 0)) is not None

    assert taken((256, 0, 200), "contiguous")
    assert taken((256, 256), "zigzag")
    assert taken((100, 128, 200), "contiguous", cu_seqlens=(0, 100, 428))
    for bad in (((200, 256), "contiguous", None), ((256, 200), "zigzag", None), ((256, 256), "contiguous", (0, 100, 512))):
        assert not taken(*bad[:2], cu_seqlens=bad[2])
        with pytest.raises(ValueError, match="begin at multiples of 128"):
            taken(*bad[:2], "hopper", cu_seqlens=bad[2])


def test_what_explain_and_the_simulation_say(monkeypatch):
    x = torch.randn(1, 96, 2, 16)
    several = Dilated([16, 96], [1, 2])
    told = explain(x, x, x, several, world_size=2)
    assert (told.sharding.own_rows, told.sharding.other_rows) == ("sdpa", "sdpa")
    assert explain(x, x, x, several, world_size=2, dropout_p=0.1).sharding.own_rows == "eager"
    with pytest.raises(ValueError, match="needs whole sequences"):
        explain(x, x, x, several, world_size=2, backend="reference")
    expected, _, _ = simulate_ring(x, x, x, several, 3)
    launched = on_a_hopper_gpu(monkeypatch)
    told = explain(x, x, x, several, world_size=2)
    assert "own rows  hopper; rows of others hopper" in str(told)
    assert explain(x, x, x, several, world_size=2, layout="zigzag").sharding.own_rows == "hopper"
    assert explain(x, x, x, Dilated([96], [2]), world_size=2).sharding.own_rows == "hopper"
    exchanged = explain(x, x, x, Dilated([96], [1]), world_size=2, backend="eager").sharding
    assert exchanged.own_rows == "eager"
    out, _, _ = simulate_ring(x, x, x, several, 3)
    assert launched == ["forward"] * 3 * 3  # on each rank: own rows and two messages
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=5e-6)


def share_a_gpu(group) -> None:
    pattern, own = Dilated([128, 1000], [1, 4]), slice(0, 600) if dist.get_rank() == 0 else slice(600, 1000)
    whole = torch.randn(4, 2, 1000, 4, 64, generator=torch.Generator().manual_seed(0)).cuda().bfloat16()

    def run(*tensors, **options):
        *inputs, dout = (x.clone().requires_grad_() for x in tensors)
        out = attention(*inputs, pattern, **options)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, dout))]

    with pytest.MonkeyPatch.context() as patch:
        launched = []
        for method in ("attend_message_", "gradients"):
            plain = getattr(FusedStep, method)

            def counted(self, *a, plain=plain):
                launched.append(self.backend)
                return plain(self, *a)

            patch.setattr(FusedStep, method, counted)
        for causal in (False, True):
            exact = run(*whole.double(), backend="reference", is_causal=causal)
            measure = run(*whole, backend="sdpa", is_causal=causal)
            actual = run(*(x[:, own] for x in whole), group=Sharding(group, transport="ring"), is_causal=causal)
            for name, a, m, e in zip(("out", "dq", "dk", "dv"), actual, measure, exact, strict=True):
                error, stock_error = (float((x - e[:, own]).norm()) for x in (a, m[:, own]))
                assert error < 2 * stock_error, f"{name}, causal={causal}: {error} and {stock_error}"
    hopper = torch.cuda.get_device_capability()[0] == 9
    # A message and a backward; if causal, only the second rank receives one.
    assert launched == ["hopper"] * (4 if dist.get_rank() else 3) * hopper


@pytest.mark.gpu
def test_rings_on_a_gpu(on_ranks):
    """Two ranks on one GPU, over gloo and host memory, as ``auto`` does it: as exact as PyTorch's operators on one."""
    on_ranks(2, share_a_gpu)
