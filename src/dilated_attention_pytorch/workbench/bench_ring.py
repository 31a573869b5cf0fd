"""The suite ``ring``: processes that share a sequence, beside one process with the whole of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.distributed.sequence import gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed.simulate import simulate_ring
from dilated_attention_pytorch.measure import Spread, peak_extra_bytes
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.bench_values import BOTH, FORWARD, BenchProblem, BenchRow, BenchSettings
from dilated_attention_pytorch.workbench.exactness import Errors, errors_of, large_tolerance, row_error
from dilated_attention_pytorch.workbench.processes import ProcessError, Send, run_ranks

WORLDS = (1, 2, 4)
_PROBLEMS = {
    "cpu": (Dilated([1024, 4096, 8192], [1, 4, 8]), (8192, 8, 64)),
    "cuda": (Dilated([2048, 8192, 32768, 131072], [1, 4, 16, 64]), (2**18, 16, 64)),
}


def _method(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


class RingGroup:
    """All numbers of ranks, which take turns in one set of processes."""

    def __init__(self, settings: BenchSettings, problem: BenchProblem, worlds: tuple[int, ...]) -> None:
        self.settings, self.problem, self.worlds = settings, problem, worlds
        self._refused: list[BenchRow] = []
        self._measured: list[BenchRow] = []
        self._times: dict[int, list[float]] = {}

    @staticmethod
    def all_of(settings: BenchSettings) -> list[RingGroup]:
        """The group of the suite. Raise a ValueError if ``only`` names nothing."""
        pattern, sizes = _PROBLEMS[settings.device.type]
        problem = settings.problem("ring", pattern, sizes)
        names = {_method(world): world for world in WORLDS}
        worlds = tuple(x for name, x in names.items() if not settings.only or {name, "ring"} & set(settings.only))
        if not worlds:
            raise ValueError(f"--only takes ring, {', '.join(names)} in this suite, got {', '.join(settings.only)}")
        if problem.tokens < max(worlds):
            raise ValueError(f"--tokens must be at least the number of ranks, {max(worlds)}, got {problem.tokens}")
        return [RingGroup(settings, problem, worlds)]

    @property
    def steps(self) -> int:
        """How many steps ``run`` has, at most."""
        return 1 + len(self.worlds) * (1 + 2 * self.settings.turns)

    def run(self) -> Iterator[str]:
        """Measure. Yield what comes next, before each step."""
        yield f"ring: start of {max(self.worlds)} processes"
        task = _RingTask(self.problem, self.worlds, self.settings.turns, self.settings.seconds)
        try:
            for kind, content in run_ranks(max(self.worlds), self.settings.device, _worker, task):
                if kind == "step":
                    yield content
                elif kind == "refused":
                    self._refused.append(content)
                elif kind == "measured":
                    self._measured.append(content)
                else:
                    number, seconds = content
                    self._times.setdefault(number, []).append(seconds)
        except ProcessError as error:
            self._measured = [x for i, x in enumerate(self._measured) if i in self._times]
            row = BenchRow("ring", "ring", _method(max(self.worlds)), BOTH, _computes(self.problem), "failed")
            self._refused.append(replace(row, reason=str(error)))

    def rows(self) -> list[BenchRow]:
        """The rows that are finished, or have had at least one turn."""
        timed = [replace(row, time=Spread.of(self._times[i])) for i, row in enumerate(self._measured) if i in self._times]
        return sorted([*timed, *self._refused], key=lambda row: (row.ranks, len(row.direction)))

    def release(self) -> None:
        """Nothing is held in this process."""


def _computes(problem: BenchProblem) -> str:
    where = "one thread" if problem.device.type == "cpu" else "one GPU, or a share of it,"
    return f"dilated attention, {where} per rank"


@dataclass(frozen=True, slots=True)
class _RingTask:
    """What each process gets."""

    problem: BenchProblem
    worlds: tuple[int, ...]
    turns: int
    seconds: float


@dataclass(slots=True)
class _RankTurns:
    """The calls of this rank by number, and how often each is made in a turn."""

    calls: list[Callable[[], Any] | None] = field(default_factory=list)  # None if the rank has no part
    counts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def _worker(rank: int, device: torch.device, send: Send, task: _RingTask) -> None:
    """One rank. All ranks go through the same steps; the first one reports."""
    report = send if rank == 0 else _silent
    whole = dist.group.WORLD
    groups = {world: whole if world == max(task.worlds) else dist.new_group(list(range(world))) for world in task.worlds}
    problem, turns = replace(task.problem, device=device), _RankTurns()
    for world in task.worlds:
        report(("step", f"{_method(world)}: exactness and memory"))
        group = groups[world]
        assert group is not None
        member = RingMember(problem, world, group) if rank < world else None
        errors = None if member is None else member.errors()
        agreed: list[Any] = [errors]  # that of the first rank, which is a member of every group
        dist.broadcast_object_list(agreed, 0)
        _prepare(task, member, agreed[0], report, turns, device)
    for turn in range(task.turns):
        for number, call in enumerate(turns.calls):
            report(("step", f"{turns.texts[number]}: turn {turn + 1} of {task.turns}"))
            seconds = _timed(call, turns.counts[number], device)
            report(("time", (number, seconds)))


def _silent(content: Any) -> None:
    """Other ranks report nothing."""


def _prepare(
    task: _RingTask, member: RingMember | None, errors: Errors, report: Send, turns: _RankTurns, device: torch.device
) -> None:
    """Add the calls of a number of ranks, or report that it is wrong."""
    calls = {} if member is None else member.calls()
    for direction in (FORWARD, BOTH):
        call = calls.get(direction)
        wrong = errors.forward_wrong if direction == FORWARD else errors.backward_wrong
        bytes_ = _most(0 if call is None or wrong else _measured_bytes(call, device))
        seconds = 0.0 if wrong else _timed(call, 1, device)
        if not wrong:
            turns.calls.append(call)
            turns.counts.append(max(1, math.ceil(task.seconds / max(seconds, 1e-6))))
            turns.texts.append("" if member is None else f"{_method(member.world)}, {direction}")
        if member is not None:
            row = member.row(direction, errors, None if wrong else int(bytes_))
            report(("refused" if wrong else "measured", row))


def _measured_bytes(call: Callable[[], Any], device: torch.device) -> int:
    call()
    return peak_extra_bytes(call, device)


def _most(value: float) -> float:
    """The largest value of all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _timed(call: Callable[[], Any] | None, count: int, device: torch.device) -> float:
    """The mean time of some calls, on the slowest rank. On a GPU as many are made before."""
    for counted in (False, True) if device.type == "cuda" else (True,):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count if call is not None else 0):
            assert call is not None
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start if counted else 0.0
    return _most(seconds / count)


class RingMember:
    """A rank of a group, with its rows of a problem."""

    def __init__(self, problem: BenchProblem, world: int, group: dist.ProcessGroup) -> None:
        self.problem, self.world, self.group = problem, world, group
        self.layout = "zigzag" if problem.is_causal else "contiguous"

    def attend(self, problem: BenchProblem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of this rank's rows."""
        assert isinstance(problem.pattern, Dilated)
        sharding = None if self.world == 1 else Sharding(self.group, self.layout, transport="ring")
        return attention(q, k, v, problem.pattern, is_causal=problem.is_causal, group=sharding)

    def shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's rows of tensors."""
        if self.world == 1:
            return [x.detach() for x in tensors]
        return [shard_sequence(x.detach(), self.group, layout=self.layout) for x in tensors]

    def gathered(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        return x if self.world == 1 else gather_sequence(x, self.group, layout=self.layout)

    def errors(self) -> Errors:
        """The errors of gradients of a small problem, and of rows of the large one."""
        small = self.problem.small()
        *inputs, dout = self.shards(small.tensors())
        leaves = [x.requires_grad_() for x in inputs]
        out = self.attend(small, *leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        errors = errors_of([self.gathered(x) for x in found], small)
        if errors.forward_wrong:
            return errors
        *whole, _ = self.problem.tensors()
        with torch.no_grad():
            out = self.gathered(self.attend(self.problem, *self.shards(whole)))
        error = row_error(out, self.problem, whole)
        return replace(errors, forward=error, forward_tolerance=large_tolerance(self.problem))

    def calls(self) -> dict[str, Callable[[], Any]]:
        """The calls to measure."""
        *inputs, dout = self.shards(self.problem.tensors())
        leaves = [x.requires_grad_() for x in inputs]
        run = partial(self.attend, self.problem, *leaves)
        return {FORWARD: torch.no_grad()(run), BOTH: lambda: torch.autograd.grad(run(), leaves, dout)}

    def row(self, direction: str, errors: Errors, extra_bytes: int | None) -> BenchRow:
        """What is known before the turns; no bytes if the results are wrong."""
        problem, wrong = self.problem, extra_bytes is None
        flops = problem.flops()
        both = direction == BOTH and not errors.forward_wrong
        error, limit = (errors.backward, errors.backward_tolerance) if both else (errors.forward, errors.forward_tolerance)
        row = BenchRow(
            "ring", problem.name, _method(self.world), direction, _computes(problem), "wrong" if wrong else "measured",
            tokens=problem.batch * problem.tokens, flops=flops if direction == FORWARD else flops * 7 // 2,
            extra_bytes=extra_bytes, error=error if error is not None and math.isfinite(error) else None,
            tolerance=limit, ranks=self.world,
        )  # fmt: skip
        if wrong:
            what = "gradients" if both else "results"
            return replace(row, reason=f"the {what} are not those of the definition")
        return row if self.world == 1 else self._simulated(row)

    def _simulated(self, row: BenchRow) -> BenchRow:
        """The row with the bytes that a rank receives and allocates by the simulation."""
        problem = self.problem
        like = torch.empty(problem.shape, dtype=problem.dtype, device="meta")
        assert isinstance(problem.pattern, Dilated)
        *_, ranks = simulate_ring(
            like, like, like, problem.pattern, self.world, is_causal=problem.is_causal, layout=self.layout,
            device=problem.device, backward=row.direction == BOTH,
        )  # fmt: skip
        received = max(x.received + (x.grad_received or 0) for x in ranks)
        planned = None if row.direction == BOTH else max(x.buffers + x.partials for x in ranks)
        return replace(row, received_bytes=received, planned_bytes=planned)
