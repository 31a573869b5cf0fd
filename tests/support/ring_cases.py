"""Cases of sharded sequences: a call on several ranks next to the same call on one device, and what goes over the wire."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan
from dilated_attention_pytorch.distributed.schedules import default_bucket_size
from dilated_attention_pytorch.distributed.sequence import rows_of
from dilated_attention_pytorch.plan.problem import Problem
from staged import staged

NAMES = ("out", "lse", "dq", "dk", "dv")
T = TypeVar("T")


def on_first_rank(group, compute: Callable[[], T]) -> T:
    """What the first rank computes, on all ranks: what is the same on all of them need not be computed by each."""
    found = [compute() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, dist.get_process_group_ranks(group)[0], group)
    return found[0]


def sharded(group, **options: Any) -> dict[str, Any]:
    """Options of ``attention``; those of ``Sharding`` are given by their names."""
    names = ("layout", "bucket_size", "transport", "comm_dtype")
    return {"group": Sharding(group, **{name: options.pop(name) for name in names if name in options}), **options}


@dataclass
class Case:
    pattern: Dilated | BlockSparse
    rows: tuple[int, ...] | int  # of the shards, or of the sequence and evenly spread
    layout: str = "contiguous"
    is_causal: bool = False
    heads: int = 2
    key_heads: int = 2
    transport: str = "ring"
    dtype: torch.dtype = torch.float64
    more: dict[str, Any] = field(default_factory=dict)  # lists become tensors

    def __str__(self) -> str:
        kind = getattr(self, "kind", "dilated")
        causal = "-causal" if self.is_causal else ""
        return f"{getattr(kind, 'pattern_type', kind)}-{self.layout}{causal}-{self.transport}"

    def shards(self, world: int) -> Shards:
        return (
            Shards.even(self.rows, world, self.layout) if isinstance(self.rows, int) else Shards.of(self.rows, self.layout)
        )

    def expected_bytes(
        self, shards: Shards, rank: int, options: dict[str, Any], sent: bool, qk: tuple[torch.Tensor, torch.Tensor]
    ) -> int:
        spans = {name: tuple(options[name].tolist()) for name in ("lengths", "cu_seqlens") if name in options}
        sizes = 2, shards.length, shards.length, self.heads, self.key_heads
        plan = dilated_plan(Problem(self.pattern, self.is_causal, *sizes, **spans), shards, rank, 1000)
        if not sent:
            return sum(sequence.bytes(rank, 8, self.dtype.itemsize) for sequence in plan.sequences)
        shapes = (sequence.shape(t.rows) for sequence in plan.sequences for t in sequence.schedule.sends(rank))
        return sum(map(math.prod, shapes)) * 2 * 8 * self.dtype.itemsize

    def choice_bytes(self, shards: Shards, rank: int, options: dict[str, Any]) -> int:
        """The bytes of rows and means that a rank receives before a forward, to choose what it reads."""
        return 0


class Received:
    """Bytes of keys, values, means and gradients that come in over the wire, counted where PyTorch is called."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        plain = dist.batch_isend_irecv

        def counting(operations):
            tensors = [x.tensor for x in operations if x.op is dist.irecv and x.tensor.is_floating_point()]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            return plain(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", counting)

    def take(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def by_world(cases: dict[int, list[Any]], quick: tuple[int, int] | None = None) -> list[Any]:
    """A test for each case: number of ranks, number of the case, the case. ``make quick`` has the case ``quick``."""
    return [
        pytest.param(
            world, number, case, id=f"{world}-{number}-{case}", marks=[pytest.mark.quick] * ((world, number) == quick)
        )
        for world, several in cases.items()
        for number, case in enumerate(several)
    ]


def check_case(group, case: Case, number: int) -> list[torch.Tensor]:
    """The rows of this rank are those of one device, twice with the same bits. Returns them: out, lse, dq, dk, dv."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _check_case(group, case, number, Received(monkeypatch))


def check_staged(group, case: Case, number: int) -> None:
    """Through host memory: the same, with the same bits."""
    direct = check_case(group, case, number)
    with staged():
        through_host = check_case(group, case, number)
    assert all(map(torch.equal, direct, through_host))


def _check_case(group, case: Case, number: int, received: Received) -> list[torch.Tensor]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shards = case.shards(world)
    n = shards.length
    options = {key: torch.tensor(x) if isinstance(x, list) else x for key, x in case.more.items()}
    sharding = Sharding(group, case.layout, options.pop("bucket_size", None), case.transport)
    torch.manual_seed(number)
    q, dout = torch.randn(2, 2, n, case.heads, 8, dtype=torch.float64).to(case.dtype).unbind(0)
    k, v = torch.randn(2, 2, n, case.key_heads, 8, dtype=torch.float64).to(case.dtype).unbind(0)
    dlse = torch.randn(2, case.heads, n, dtype=case.dtype)

    def one_device() -> tuple[list[torch.Tensor], list[float]]:
        """One device in float64 is the truth, and for float32 one device in float32 the measure."""
        wanted, tolerances = [], [1e-10] * 5
        for dtype in (torch.float64, case.dtype):
            whole = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out, lse = attention(*whole, case.pattern, is_causal=case.is_causal, return_lse=True, **options)
            total = (out * dout).sum() + (lse.where(lse.isfinite(), 0.0) * dlse).sum()
            wanted.append([out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(total, whole)])
            if case.dtype == torch.float64:
                break
        if case.dtype == torch.float32:
            errors = [float((a - e).nan_to_num().abs().max()) for a, e in zip(*wanted, strict=True)]
            tolerances = [3 * error + 1e-6 for error in errors]
        return wanted[0], tolerances

    wanted, tolerances = on_first_rank(group, one_device)
    met = wanted[1].transpose(1, 2).isfinite()
    mine = rows_of(shards, rank, torch.device("cpu"))
    local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
    results = []
    # Tensors of operators are measured where the sequence is long enough to tell; it takes more time than the rest.
    measured = (
        case.transport == "ring" and n > 1000 and isinstance(case.pattern, Dilated) and "bucket_size" not in case.more
    )
    largest = LargestTensor()
    measuring = largest if measured else contextlib.nullcontext()
    for _ in range(2):
        received.take()
        with measuring:
            part, part_lse = attention(
                *local, case.pattern, group=sharding, is_causal=case.is_causal, return_lse=True, **options
            )
        forward_bytes = received.take()
        total = (part * dout[:, mine]).sum() + (part_lse.where(met[:, :, mine], 0.0) * dlse[:, :, mine]).sum()
        with measuring:
            grads = torch.autograd.grad(total, local)
        backward_bytes = received.take()
        results.append([part.detach(), part_lse.detach().transpose(1, 2), *grads])
    for label, a, again, e, tolerance in zip(NAMES, *results, wanted, tolerances, strict=True):
        assert torch.equal(a, again), f"{label}: other bits"
        assert a.dtype == case.dtype
        torch.testing.assert_close(
            a.double(), e[:, mine], rtol=0, atol=tolerance, msg=lambda m, label=label: f"{label}: {m}"
        )
    if world == 1:
        assert forward_bytes == backward_bytes == 0
    elif case.transport in ("ring", "allgather"):
        choice_bytes = case.choice_bytes(shards, rank, options)
        assert forward_bytes == choice_bytes + case.expected_bytes(shards, rank, options, False, (q, k))
        if options.get("mixing_gradient") != "detached":  # which computes branches again
            home = case.expected_bytes(shards, rank, options, True, (q, k))
            assert backward_bytes == forward_bytes - choice_bytes + home
    if measured:
        # Nothing of the size of the sequence: the tensors of the rank itself, and a message.
        bucket = default_bucket_size(shards) * 2 * 2 * case.key_heads * 8
        assert largest.numel <= max(len(mine) * 2 * case.heads * 8, bucket)
    return results[0]
