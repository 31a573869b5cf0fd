"""Calls on one device and on ranks: their time, their memory, and their error against the definition in float64."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch import BlockSparse, Dilated, Hilbert, Order, Sharding, attention, attention_weights
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.measure import peak_extra_bytes

LIMIT = 64 * torch.finfo(torch.float32).eps  # largest error of a float32 result, inputs are normal numbers
WORLDS = (1, 2, 3, 5, 7)
_PRELOAD = ["torch._dynamo", "dilated_attention_pytorch.nn", "dilated_attention_pytorch.distributed"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward of self-attention in float32."""

    tokens: int
    pattern: Dilated | BlockSparse
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    is_causal: bool = False
    bucket_size: int | None = None
    transport: str = "auto"
    grid: tuple[int, int] | None = None  # rows and columns of a Hilbert order

    @property
    def order(self) -> Order | None:
        return None if self.grid is None else Hilbert.grid(*self.grid)


# Inputs. Every process makes the same whole tensors, one at a time, and keeps its rows.
@lru_cache(maxsize=2)
def inputs(case: Case, rank: int, world: int) -> tuple[Tensor, ...]:
    (rows,) = Shards.even(case.tokens, world, "contiguous").chunks[rank]
    mine = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shape = case.batch, case.tokens, case.heads, case.head_dim
        whole = torch.randn(shape, generator=generator)
        if world > 1 and case.order is not None:
            whole = case.order.permute(whole)
        mine.append(whole[:, rows.start : rows.stop].contiguous())
    return tuple(mine)


def checked_rows(tokens: int) -> list[int]:
    """The ends of the sequence and of its halves, and others; all rows of a short sequence."""
    if tokens <= 512:
        return list(range(tokens))
    half = -(-tokens // 2)
    others = [(tokens * i // 7) | 1 for i in range(1, 7)]
    return sorted({0, 1, half - 1, half, tokens - 2, tokens - 1, *(i for i in others if i < tokens)})


def multiplicity(case: Case, places: Tensor, head: int) -> Tensor:
    """(rows, N): in how many branches a row and a key meet. The definition of dilated attention."""
    i, j = places.unsqueeze(1), torch.arange(case.tokens).unsqueeze(0)
    count = torch.zeros(len(places), case.tokens, dtype=torch.float64)
    for w, r in case.pattern.branches:
        offset = head % r
        count += (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)
    return count.masked_fill(j > i, 0.0) if case.is_causal else count


@lru_cache(maxsize=2)
def definition(case: Case) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the checked rows in float64, (B, rows, H, D) and (B, H, rows); no lse for blocks."""
    torch.set_num_threads(1)  # many small operations
    q, k, v = (x if case.order is None else case.order.permute(x) for x in inputs(case, 0, 1))
    rows = torch.tensor(checked_rows(case.tokens))
    places = rows if case.order is None else case.order.places[rows]
    if isinstance(case.pattern, BlockSparse):
        weights = attention_weights(q.double(), k.double(), case.pattern, places, is_causal=case.is_causal)
        return torch.einsum("bhrm,bmhd->brhd", weights, v.double()), torch.empty(0)
    out = torch.zeros(case.batch, len(rows), case.heads, case.head_dim, dtype=torch.float64)
    lse = torch.full((case.batch, case.heads, len(rows)), -torch.inf, dtype=torch.float64)
    for head in range(case.heads):
        count = multiplicity(case, places, head)
        meets = (count > 0).any(1)  # the other rows are 0, and their lse is -inf
        for sample in range(case.batch):
            scores = q[sample, places[meets], head].double() @ k[sample, :, head].double().T * case.head_dim**-0.5
            scores += count[meets].log()
            out[sample, meets, head] = scores.softmax(-1) @ v[sample, :, head].double()
            lse[sample, head, meets] = scores.logsumexp(-1)
    return out, lse


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference. NaN anywhere, and another shape, is infinite."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    same = actual == expected  # also rows whose lse is -inf
    difference = (actual.double() - expected.double()).abs().masked_fill(same, 0.0)
    return float("inf") if difference.isnan().any() else float(difference.max())


# One measured call, on one device (group None) or on a rank.
def call_of(group: dist.ProcessGroup | None, case: Case) -> Callable[[], Tensor]:
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    mine = inputs(case, rank, world)
    options: dict[str, Any] = {"is_causal": case.is_causal, "order": case.order}
    if group is not None:
        options["group"] = Sharding(group, bucket_size=case.bucket_size, transport=case.transport)
    return lambda: attention(*mine, case.pattern, **options)


def once(group: dist.ProcessGroup | None, case: Case, warm: bool) -> dict[str, Any]:
    """The seconds of a call, and of the processor; ``warm`` calls once before."""
    call = call_of(group, case)
    if warm:
        call()
    if group is not None:
        dist.barrier(group)
    start, cpu = time.perf_counter(), _processor_seconds()
    call()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": _processor_seconds() - cpu}


def memory_and_rows(group: dist.ProcessGroup | None, case: Case) -> dict[str, Any]:
    """A call's time and memory (q, k, v and what it allocates), whether it is finite, and its rows that are checked."""
    call = call_of(group, case)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    (mine,) = Shards.even(case.tokens, world, "contiguous").chunks[rank]
    kept: list[Tensor] = []
    start, cpu = time.perf_counter(), _processor_seconds()
    extra = peak_extra_bytes(lambda: kept.append(call()), torch.device("cpu"))
    times = {"seconds": time.perf_counter() - start, "cpu_seconds": _processor_seconds() - cpu}
    out = kept[0]
    held = sum(x.nbytes for x in inputs(case, rank, world))
    rows = checked_rows(case.tokens)
    places = rows if world == 1 or case.order is None else case.order.places[torch.tensor(rows)].tolist()
    own = {i: out[:, p - mine.start].clone() for i, p in zip(rows, places, strict=True) if mine.start <= p < mine.stop}
    finite = bool(out.isfinite().all())
    return {**times, "bytes": held + extra, "rows": own, "finite": finite, "shape": list(out.shape)}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Ranks.
class Ranks:
    """Processes with one thread each. A function runs on the group of the first ``world`` of them."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload(_PRELOAD)
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="seeds")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(max(WORLDS)):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, f"{self._folder.name}/store", there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()
        self._folder.cleanup()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(group, *arguments)`` returns on each rank. An error of a rank is raised."""
        for pipe in self._pipes[:world]:
            pipe.send_bytes(pickle.dumps((world, function, arguments)))
        answers = [pickle.loads(pipe.recv_bytes()) for pipe in self._pipes[:world]]
        errors = [text for text, _ in answers if text]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [result for _, result in answers]


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(WORLDS))
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    while True:
        try:
            world, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent has finished
            return
        try:
            answer = "", function(groups[world], *arguments)
        except BaseException:  # noqa: BLE001  the parent raises it
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))


def on_ranks(ranks: Ranks, world: int, case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The error of a call on ranks at the checked rows, and what each rank reports."""
    reports = ranks.run(world, memory_and_rows, case)
    return errors_of(case, reports), reports


def on_one(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = memory_and_rows(None, case)
    return errors_of(case, [report]), [report]


def errors_of(case: Case, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest error of the checked rows of all ranks, and whether every result is finite."""
    found: dict[int, Tensor] = {}
    for report in reports:
        found |= report["rows"]
    rows = checked_rows(case.tokens)
    expected, _ = definition(case)
    complete = sorted(found) == rows
    actual = torch.stack([found[i] for i in rows], 1) if complete else torch.empty(0)
    finite = all(report["finite"] for report in reports)
    return {"error": largest_difference(actual, expected), "finite": finite, "rows_checked": len(rows)}
