"""Measurements of a suite: methods are checked, and then take turns. A method that is wrong gets no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.measure import Spread, lacks_memory, peak_extra_bytes, turn_seconds
from dilated_attention_pytorch.workbench.bench_values import (
    BOTH,
    FORWARD,
    BenchMethod,
    BenchProblem,
    BenchRow,
    BenchSettings,
)
from dilated_attention_pytorch.workbench.exactness import Errors, large_tolerance, row_error, small_errors

DENSE_SECONDS = {"cpu": 2.0, "cuda": 1.0}  # a longer call of dense attention is predicted


@dataclass(frozen=True, slots=True)
class BenchPrediction:
    """Dense attention of a whole sequence, whose time follows from the rate of a method if it would take too long."""

    method: BenchMethod
    rate_of: str  # the method


@dataclass(slots=True)
class _Measured:
    """A call that takes turns, and what is known of its row."""

    row: BenchRow
    call: Callable[[], Any]
    times: list[float] = field(default_factory=list)

    def finished(self) -> BenchRow:
        return replace(self.row, time=Spread.of(self.times))


class BenchGroup:
    """Methods that take turns."""

    def __init__(
        self, suite: str, settings: BenchSettings, methods: Sequence[BenchMethod], dense: BenchPrediction | None = None
    ) -> None:
        self.suite, self.settings, self.methods, self.dense = suite, settings, list(methods), dense
        self.refused: list[BenchRow] = []  # rows without a time
        self.measured: list[_Measured] = []
        self.predicted: list[BenchRow] = []
        self._inputs: dict[tuple[Any, ...], list[Tensor]] = {}

    @property
    def steps(self) -> int:
        """How many steps ``run`` has, at most."""
        methods = [*self.methods, *([] if self.dense is None else [self.dense.method])]
        return sum(1 + len(x.directions) * self.settings.turns for x in methods)

    def run(self) -> Iterator[str]:
        """Measure. Yield what comes next, before each step."""
        for method in self.methods:
            yield f"{method.problem.name}, {method.name}: exactness and memory"
            self._prepare(method)
        if self.dense is not None:
            yield f"{self.dense.method.problem.name}: dense attention of the whole sequence"
            self._prepare_dense(self.dense)
        for turn in range(self.settings.turns):
            for measured in list(self.measured):
                row = measured.row
                yield f"{row.setting}, {row.method}, {row.direction}: turn {turn + 1} of {self.settings.turns}"
                try:
                    measured.times.append(turn_seconds(measured.call, self.settings.device, self.settings.seconds))
                except RuntimeError as error:
                    if not lacks_memory(error):
                        raise
                    # The first call of a method may fit, and a later one not, because other calls have divided the memory.
                    self.measured = [x for x in self.measured if x is not measured]
                    self.refused.append(replace(row, status="not run", reason=_one_line(f"out of memory: {error}")))
        self._predict()

    def rows(self) -> list[BenchRow]:
        """The rows that are finished, or have had at least one turn, in the order of the methods."""
        found = [*self.refused, *(x.finished() for x in self.measured if x.times), *self.predicted]
        order = {x.name: i for i, x in enumerate(self.methods)}
        settings = {x.problem.name: i for i, x in enumerate(self.methods)}
        last = len(self.methods)
        return sorted(found, key=lambda x: (settings.get(x.setting, last), order.get(x.method, last), len(x.direction)))

    def release(self) -> None:
        """Forget the tensors."""
        for measured in self.measured:
            measured.call = lambda: None
        self._inputs.clear()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tensors(self, problem: BenchProblem) -> list[Tensor]:
        key = (problem.shape, problem.dtype)
        if key not in self._inputs:
            self._inputs[key] = problem.tensors()
        return self._inputs[key]

    def _row(self, method: BenchMethod, direction: str, status: str) -> BenchRow:
        problem = method.problem
        tokens = problem.batch * problem.tokens if method.call_tokens is None else method.call_tokens
        row = BenchRow(self.suite, problem.name, method.name, direction, method.computes, status, tokens=tokens)
        if method.prepare is not None and method.call_tokens is not None:
            return row
        flops = problem.flops()
        return replace(row, flops=flops if direction == FORWARD else flops * 7 // 2)

    def _refuse(self, method: BenchMethod, status: str, reason: str) -> None:
        self.refused += [replace(self._row(method, x, status), reason=_one_line(reason)) for x in method.directions]

    def _prepare(self, method: BenchMethod) -> None:
        if method.refused:
            self._refuse(method, "not run", method.refused)
            return
        try:
            self._check(method)
        except (RuntimeError, ImportError, ValueError, TypeError) as error:
            if lacks_memory(error):
                self._refuse(method, "not run", f"out of memory: {error}")
                return
            # Other libraries raise all of these for sizes and devices that they do not have.
            if not method.peer and not isinstance(error, RuntimeError):
                raise
            self._refuse(method, "not run" if method.peer else "failed", f"{type(error).__name__}: {error}")

    def _check(self, method: BenchMethod) -> None:
        small = small_errors(method)
        if small.forward_wrong:  # a problem of the full size may take long, and would not be timed
            self._add(method, small, {})
            return
        *inputs, dout = self._tensors(method.problem)
        run = partial(method.run, method.problem, *inputs)
        with torch.no_grad():
            error = row_error(run(), method.problem, inputs)
        errors = replace(small, forward=error, forward_tolerance=large_tolerance(method.problem))
        timed = run if method.prepare is None else method.prepare(inputs, method.problem)
        calls = {FORWARD: torch.no_grad()(timed)}
        if method.backward:
            calls[BOTH] = lambda: torch.autograd.grad(run(), inputs, dout)
        self._add(method, errors, calls)

    def _add(self, method: BenchMethod, errors: Errors, calls: dict[str, Callable[[], Any]]) -> None:
        for direction in method.directions:
            wrong = errors.forward_wrong if direction == FORWARD else errors.backward_wrong
            row = self._row(method, direction, "wrong" if wrong else "measured")
            both = direction == BOTH and not errors.forward_wrong
            error, limit = (
                (errors.backward, errors.backward_tolerance) if both else (errors.forward, errors.forward_tolerance)
            )
            row = replace(row, error=_finite(error), tolerance=limit)
            if wrong:
                what = "gradients" if both else "results"
                self.refused.append(replace(row, reason=f"the {what} are not those of the definition"))
                continue
            call = calls[direction]
            call()
            row = replace(row, extra_bytes=peak_extra_bytes(call, self.settings.device))
            self.measured.append(_Measured(row, call))

    def _prepare_dense(self, prediction: BenchPrediction) -> None:
        """Let dense attention take turns, if its call is short enough. The rate is that of one call of the other method."""
        method = prediction.method
        like = [x for x in self.measured if x.row.method == prediction.rate_of]
        if method.refused or not like:
            self._prepare(method)
            return
        forward = next(x for x in like if x.row.direction == FORWARD)
        seconds = turn_seconds(forward.call, self.settings.device, 0.0)
        flops = method.problem.flops()
        if forward.row.flops and seconds * flops / forward.row.flops <= DENSE_SECONDS[self.settings.device.type]:
            self._prepare(method)

    def _predict(self) -> None:
        if self.dense is None or self.dense.method.refused:
            return
        known = {x.row.method for x in self.measured} | {x.method for x in self.refused}
        if self.dense.method.name in known:
            return
        for direction in self.dense.method.directions:
            row = self._row(self.dense.method, direction, "predicted")
            like = [x for x in self.measured if x.row.method == self.dense.rate_of and x.row.direction == direction]
            if like and row.flops and like[0].row.flops:
                factor = row.flops / like[0].row.flops
                reason = f"from the rate of {self.dense.rate_of}"
                spread = Spread.of([factor * x for x in like[0].times])
                self.predicted.append(replace(row, time=spread, reason=reason))


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:300]


def _finite(error: float | None) -> float | None:
    """JSON has no NaN."""
    return error if error is not None and abs(error) < float("inf") else None
