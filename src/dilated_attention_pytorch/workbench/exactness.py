"""Whether results are those of the definition: sampled rows of a large problem, and gradients of a small one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention, attention_weights
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming_check import tolerance
from dilated_attention_pytorch.workbench.bench_values import BenchMethod, BenchProblem, Neighborhood

_ROWS = 6
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of a method and the largest ones that are allowed."""

    forward: float
    forward_tolerance: float
    backward: float | None = None
    backward_tolerance: float | None = None

    @property
    def forward_wrong(self) -> bool:
        """Whether the results are wrong. An error that is not a number is wrong."""
        return not self.forward <= self.forward_tolerance

    @property
    def backward_wrong(self) -> bool:
        """Whether the results or their gradients are wrong."""
        if self.backward is None or self.backward_tolerance is None:
            return self.forward_wrong
        return self.forward_wrong or not self.backward <= self.backward_tolerance


def sampled_rows(tokens: int) -> tuple[int, ...]:
    """A few rows: the ends, and others in the middle.

    >>> sampled_rows(3), sampled_rows(1000)
    ((0, 1, 2), (0, 1, 333, 505, 750, 999))
    """
    chosen = (0, 1, tokens // 3, tokens // 2 + 5, 3 * tokens // 4, tokens - 1)
    return tuple(sorted({x for x in chosen if 0 <= x < tokens}))[:_ROWS]


def expected_rows(problem: BenchProblem, inputs: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The rows of the result by the definition in float64, (B, rows, H, D)."""
    pattern, found = problem.pattern, []
    widest = max(pattern.segment_lengths) if isinstance(pattern, Dilated) else problem.tokens
    # Whole segments are sequences of their own, if the shorter ones divide the longest.
    alone = isinstance(pattern, Dilated) and all(widest % w == 0 for w in pattern.segment_lengths)
    for row in rows:
        start = row // widest * widest if alone else 0
        q, k, v = (x.detach()[:, start : start + widest if alone else None].double() for x in inputs[:3])
        if isinstance(pattern, Neighborhood):
            seen = pattern.visible(torch.tensor([row], device=q.device), problem.tokens, problem.is_causal)
            scores = torch.einsum("bnhd,bmhd->bhnm", q[:, [row]] * problem.head_dim**-0.5, k)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        else:
            weights = attention_weights(q, k, pattern, [row - start], is_causal=problem.is_causal)
        found.append(torch.einsum("bhrm,bmhd->brhd", weights, v))
    return torch.cat(found, 1)


def row_error(out: Tensor, problem: BenchProblem, inputs: Sequence[Tensor]) -> float:
    """The largest relative error of a head's result in sampled rows, against the definition in float64."""
    rows = sampled_rows(problem.tokens)
    expected = expected_rows(problem, inputs, rows)
    return largest_relative(out.detach()[:, list(rows)].double(), expected)


def largest_relative(actual: Tensor, expected: Tensor) -> float:
    """The largest norm of a difference over the last dimension, relative to the expected norm; infinite for 0 expected.

    >>> largest_relative(torch.tensor([[0.0, 0.0], [6.0, 8.0]]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    1.0
    """
    norms, differences = expected.norm(dim=-1), (actual - expected).norm(dim=-1)
    # A row that meets no key is exactly 0.
    return float(torch.where(differences == 0, 0.0, differences / norms).max())


def with_gradients(function: Function, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """The result and the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def small_errors(method: BenchMethod) -> Errors:
    """The errors of a method on the small problem of its kind, gradients included."""
    problem = method.problem.small()
    *inputs, dout = problem.tensors()
    if not method.backward:
        with torch.no_grad():
            out = method.run(problem, *inputs)
        return errors_of([out], problem)
    return errors_of(with_gradients(partial(method.run, problem), inputs, dout), problem)


def errors_of(actual: Sequence[Tensor], problem: BenchProblem) -> Errors:
    """The errors of a result, and of its gradients if they follow, for the tensors of a small problem.

    An error is the norm of the difference from the definition in float64 over all elements, relative to the expected
    norm. Twice the error of plain attention in the same type, and one epsilon, are allowed.
    """
    *inputs, dout = problem.tensors()
    exact = with_gradients(_attention(problem, "reference"), [x.double() for x in inputs], dout)
    plain = with_gradients(_attention(problem, "eager"), inputs, dout)
    own, allowed = ([_relative(x, e) for x, e in zip(y, exact, strict=False)] for y in (actual, plain))
    allowed = [2 * x + torch.finfo(problem.dtype).eps for x in allowed]
    if len(own) == 1:
        return Errors(own[0], allowed[0])
    worst = max(range(1, 4), key=lambda i: _excess(own[i], allowed[i]))
    return Errors(own[0], allowed[0], own[worst], allowed[worst])


def large_tolerance(problem: BenchProblem) -> float:
    """The largest error of a sampled row, see ``streaming_check.tolerance``."""
    return tolerance(problem.dtype)


def _excess(error: float, allowed: float) -> float:
    return error / allowed if error == error else torch.inf


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def _attention(problem: BenchProblem, backend: str) -> Function:
    pattern = problem.pattern
    if isinstance(pattern, Neighborhood):
        rows = torch.arange(problem.tokens, device=problem.device)
        seen = pattern.visible(rows, problem.tokens, problem.is_causal)
        return lambda q, k, v: _masked(q, k, v, seen)
    return lambda q, k, v: attention(
        q, k, v, pattern, is_causal=problem.is_causal, backend=backend, mixing_gradient=problem.mixing_gradient
    )


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.einsum("bnhd,bmhd->bhnm", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhnm,bmhd->bnhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
