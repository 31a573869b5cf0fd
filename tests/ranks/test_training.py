"""Training with a sharded sequence (docs/training.md): in DDP, FSDP2, compile, checkpoints, AMP; next to torch's own ring.

The rule that makes every wrapper right: DDP and FSDP2 average gradients over the ranks, so a step follows the gradient of
the mean of all ranks' losses. Each rank writes its loss so that this mean is the loss that is wanted: for a mean over
tokens, the sum over its own tokens, times the number of ranks, divided by the number of tokens of all ranks together.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    Dilated,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    Sharding,
    attention,
)
from dilated_attention_pytorch.distributed import gather_sequence, shard_sequence

PATTERN = ([4, 16], [1, 2])  # over 13 tokens: both branches cross the shards
LAYOUT = "zigzag"
CLASSES = 5


class Model(nn.Module):
    """One layer. Without biases: that of the keys would never move, a softmax does not see it."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.attend = attend
        self.out = nn.Linear(16, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (2, 8)) for project in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v, is_causal=True).flatten(-2))


def make(group=None, dtype=torch.float64) -> Model:
    """The same numbers on every rank; without a group the model of one device."""
    torch.manual_seed(0)
    attend = RingDilatedAttention(*PATTERN, group=group, layout=LAYOUT) if group else DilatedAttention(*PATTERN)
    model = Model(attend).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 2  # scores that matter
    return model


def all_close(actual: Iterable[Tensor], expected: Iterable[Tensor], what: str) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


# Torch's own ring attention


def compare_with_torch(group, is_causal: bool, layout: str) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = functools.partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)
    theirs._cp_options.convert_to_f32 = False  # else torch merges float64 in float32, and the difference is 5e-7
    n = 8 * dist.get_world_size()  # torch wants equal shards
    theirs._cp_options.enable_load_balance = layout == "zigzag"
    torch.manual_seed(0)
    whole = torch.randn(4, 2, n, 4, 8, dtype=torch.float64)
    *qkv, dout = (shard_sequence(x, group, layout=layout).requires_grad_() for x in whole)
    out, lse = attention(*qkv, Dilated([n], [1]), is_causal=is_causal, return_lse=True, group=group, layout=layout)
    grads = torch.autograd.grad(out, qkv, dout)
    q, k, v, d = (x.detach().transpose(1, 2).contiguous() for x in (*qkv, dout))
    their_out, their_lse = theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=is_causal)
    their_grads = theirs._templated_ring_attention_backward(
        group, 2, backward, d, "grad_out", q, k, v, their_out, their_lse, is_causal
    )
    expected = (their_lse, *(x.transpose(1, 2) for x in (their_out, *their_grads)))
    all_close((lse, out, *grads), expected, f"{layout}, is_causal={is_causal}")  # measured: 1e-15


@pytest.mark.parametrize(("is_causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
def test_one_dense_segment_is_torch_ring_attention(on_ranks, is_causal, layout):
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    theirs = pytest.importorskip(name, reason="this torch keeps its ring attention elsewhere")
    if not hasattr(theirs, "_templated_ring_attention_backward"):
        pytest.skip("this torch has no _templated_ring_attention_backward")
    on_ranks(3, compare_with_torch, is_causal, layout)


# Training steps


def batch(some_count: bool = False) -> tuple[Tensor, Tensor]:
    """Three texts of 13 tokens; with ``some_count`` those of the second of two ranks do not (the first has 0-3, 10-12)."""
    torch.manual_seed(1)
    x, targets = torch.randn(3, 13, 16, dtype=torch.float64), torch.randint(0, CLASSES, (3, 13))
    if some_count:
        targets[:, 4:10] = -100  # cross_entropy ignores them
    return x, targets


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    # The sum over no tokens is 0 and belongs to the graph, so a rank without any takes part in backward, as all must.
    # The mean over no tokens would be NaN, and a rank that leaves its result out would keep the others waiting.
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def steps_of_one_device(some_count: bool) -> list[Tensor]:
    x, targets = batch(some_count)
    model = make()
    after = train(model, lambda: F.cross_entropy(model(x).flatten(0, 1), targets.flatten()))
    assert all((a - b).abs().max() > 0.05 for a, b in zip(after, make().parameters(), strict=True))
    return after


def steps_of_many(
    mesh: DeviceMesh, wrap: Callable[[Model], nn.Module], *, some_count: bool = False, gather: bool = False
) -> list[Tensor]:
    """Texts over ``dp`` (two and one), tokens over ``cp`` (seven and six)."""
    mine = slice(0, 2) if mesh.get_local_rank("dp") == 0 else slice(2, 3)
    x, whole_targets = (t[mine] for t in batch(some_count))
    x, targets = (shard_sequence(t, mesh, layout=LAYOUT) for t in (x, whole_targets))
    count = (targets != -100).sum()
    assert (count > 0) == (not some_count or mesh.get_local_rank("cp") == 0)
    dist.all_reduce(count)
    model = wrap(make(mesh))

    def loss() -> Tensor:
        if gather:  # the ranks of cp have one loss, so the mean is one over dp
            logits = gather_sequence(model(x), mesh, layout=LAYOUT)
            return sum_of_losses(logits, whole_targets) * mesh["dp"].size() / count
        return sum_of_losses(model(x), targets) * dist.get_world_size() / count

    return train(model, loss)


def shard_over(mesh: DeviceMesh | None) -> Callable[[Model], nn.Module]:
    """FSDP2: over all ranks without a mesh; a mesh of two dimensions copies over the first and shards over the second."""

    def wrap(model: Model) -> nn.Module:
        for layer in (model.q, model.k, model.v, model.out):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


DDP = DistributedDataParallel
MESHES = [("dp", "cp"), ("cp", "dp")]


def check_steps(group, wrapper: str, names: tuple[str, str], some_count: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    wrap, gather = {
        "DDP": (DDP, False),
        "FSDP2": (shard_over(None), False),
        "FSDP2 in 2-D": (shard_over(mesh), False),
        "gathered": (DDP, True),
        "compiled": (lambda model: DDP(torch.compile(model, backend="aot_eager")), False),
    }[wrapper]
    actual = steps_of_many(mesh, wrap, some_count=some_count, gather=gather)
    all_close(actual, steps_of_one_device(some_count), wrapper)  # measured: 2e-16


@pytest.mark.parametrize("some_count", [False, True], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize(
    ("wrapper", "names"),
    [(wrapper, names) for wrapper in ("DDP", "FSDP2", "FSDP2 in 2-D") for names in MESHES] + [("gathered", MESHES[1])],
    ids=str,
)
def test_steps_are_those_of_one_device(on_ranks, wrapper, names, some_count):
    on_ranks(4, check_steps, wrapper, names, some_count)


def test_steps_of_a_compiled_model(on_ranks):
    on_ranks(4, check_steps, "compiled", MESHES[1], True)


def check_docs(group) -> None:
    page = Path(__file__).parents[2] / "docs" / "training.md"
    torch.set_default_dtype(torch.float64)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(re.sub(r"^dist\.(init|destroy)_process_group\(.*\)\n", "", code, flags=re.MULTILINE), names)
    torch.manual_seed(0)
    one = names["Model"](DilatedAttention([8, 32], [1, 2]))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(3):
        inputs, targets = names["texts"][:, :-1], names["texts"][:, 1:]
        logits = one(inputs, torch.arange(inputs.shape[1]))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    all_close(names["model"].parameters(), one.parameters(), "docs/training.md")


def test_page(on_ranks):
    """The code of docs/training.md, run as it is, next to one device."""
    on_ranks(4, check_docs)


# DDP over samples, without a group of its own


def multihead() -> nn.Module:
    torch.manual_seed(1)
    return MultiheadDilatedAttention(16, 4, [8, 16], [1, 2], num_kv_heads=2, dtype=torch.float64)


def one_step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x, x, x, is_causal=True)[0].square().mean().backward()
    optimizer.step()


def check_samples_over_ranks(group) -> None:
    samples = torch.randn(4, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    together, one = DDP(multihead()), multihead()
    one_step(together, samples.chunk(2)[dist.get_rank()])
    one_step(one, samples)
    for (name, a), b, before in zip(
        together.module.named_parameters(), one.parameters(), multihead().parameters(), strict=True
    ):
        assert not torch.equal(b, before), name
        torch.testing.assert_close(a, b)


def test_samples_over_ranks(on_ranks):
    on_ranks(2, check_samples_over_ranks)


# Compile, checkpoints, AMP, copies


def out_and_gradients(run: Callable[[Tensor], Tensor], model: Model, dtype=torch.float64) -> list[Tensor]:
    """Of the whole sequence and all ranks: out, the gradients of the input and of the weights."""
    world = dist.group.WORLD
    ring = isinstance(model.attend, RingDilatedAttention)
    place = functools.partial(shard_sequence, group=world, layout=LAYOUT) if ring else lambda t: t
    x = place(batch()[0].to(dtype)).requires_grad_()
    out = run(x)
    dout = torch.randn(3, 13, CLASSES, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    dx, *grads = torch.autograd.grad(out, [x, *model.parameters()], place(dout))
    if ring:
        out, dx = (gather_sequence(t, world, layout=LAYOUT) for t in (out, dx))
        for grad in grads:
            dist.all_reduce(grad)
    return [out.detach(), dx, *grads]


def check_eager(model: Model, expected: list[Tensor]) -> None:
    all_close(out_and_gradients(model, model), expected, "eager")


def check_compile(model: Model, expected: list[Tensor]) -> None:
    explained = torch._dynamo.explain(model)(shard_sequence(batch()[0], dist.group.WORLD, layout=LAYOUT))
    # The projections are one graph, the output layer is one; only the exchange lies between them.
    reasons = [reason.reason for reason in explained.break_reasons]
    assert explained.graph_count <= 2, reasons
    assert all("sharded_attention" in reason for reason in reasons), reasons
    all_close(out_and_gradients(torch.compile(model, backend="aot_eager"), model), expected, "compiled")


def check_checkpoint(model: Model, expected: list[Tensor]) -> None:
    calls: list[int] = []
    handle = model.attend.register_forward_hook(lambda *_: calls.append(1))
    actual = out_and_gradients(lambda x: checkpoint(model, x, use_reentrant=False), model)
    handle.remove()
    assert len(calls) == 2  # forward, and again in backward
    all_close(actual, expected, "checkpoint")


def check_copies(model: Model, expected: list[Tensor]) -> None:
    """A copy attends over the same ranks. Torch pickles meshes, but no groups."""
    meshed = make(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))
    unnamed = make(dist.group.WORLD)
    unnamed.attend.sharding = Sharding(None, LAYOUT)  # all ranks
    copies = [copy.deepcopy(x) for x in (model, meshed, unnamed)]
    copies += [pickle.loads(pickle.dumps(x)) for x in (meshed, unnamed)]
    assert copies[0].attend.sharding is model.attend.sharding
    assert copies[0].q.weight is not model.q.weight
    for number, other in enumerate(copies):
        all_close(out_and_gradients(other, other), expected, f"copy {number}")
    # Without a GPU, nn.DataParallel calls the module as it is.
    all_close(out_and_gradients(nn.DataParallel(model), model), expected, "DataParallel")


def check_autocast(group) -> None:
    one = make()
    exact = out_and_gradients(one, one)
    results = []
    for some in (None, group):
        model = make(some, torch.float32)
        types: list[torch.dtype] = []
        model.attend.register_forward_hook(lambda _, args, out, types=types: types.extend((args[0].dtype, out.dtype)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(out_and_gradients(model, model, torch.float32))
            x = torch.randn(1, 4, 2, 8)  # as after a rotary embedding in float32 beside values from a linear layer
            assert model.attend(x, x, x.bfloat16()).dtype == torch.bfloat16
        assert types[:2] == [torch.bfloat16] * 2
        assert [x.dtype for x in results[-1]] == [torch.bfloat16] + [torch.float32] * 5
    for one, many, e in zip(*results, exact, strict=True):
        difference, error_of_one, error = (float((a - b).norm() / e.norm()) for a, b in ((many, one), (one, e), (many, e)))
        assert difference < 0.01  # measured: 0.005; rounding to bfloat16 alone is up to 0.004
        assert error < 1.5 * error_of_one  # measured: 1.06


def check_second_derivatives(group) -> None:
    x = torch.randn(1, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(gather_sequence(x, dist.group.WORLD).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
    for transport in ("ring", "ulysses"):
        q = torch.randn(1, 4, 3, 8, requires_grad=True)
        out = attention(q, q, q, Dilated([64], [1]), group=Sharding(dist.group.WORLD, transport=transport))
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            dq.sum().backward()


CHECKS = {"eager": check_eager, "compile": check_compile, "checkpoint": check_checkpoint, "copies": check_copies}


def check_model(group, name: str) -> None:
    one = make()
    CHECKS[name](make(group), out_and_gradients(one, one))  # measured: 5e-15, as all of these


@pytest.mark.parametrize("name", CHECKS)
def test_model(on_ranks, name):
    """Out and gradients of all ranks are those of one device."""
    on_ranks(3, check_model, name)


def test_autocast(on_ranks):
    on_ranks(3, check_autocast)


def test_second_derivatives(on_ranks):
    """Refused: autograd does not see what other ranks do."""
    on_ranks(3, check_second_derivatives)
