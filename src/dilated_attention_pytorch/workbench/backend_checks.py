"""Checks of a backend against a float64 definition that uses nothing of the library's attention."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.patterns.dilated import Dilated

# Nothing divides anything: the length, segments, rates, and two query heads of each key head.
PATTERN = Dilated([48, 110, 256], [1, 3, 4])
SHAPES = ((2, 211, 4, 64), (2, 211, 2, 64), (2, 211, 2, 64))
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class ExactnessCheck:
    """The errors of a forward and its gradients."""

    errors: tuple[tuple[str, float], ...]  # by the names of the tensors; empty if the call failed
    tolerance: float
    seconds: float
    problem: str | None = None  # the error that a call raised

    @property
    def error(self) -> float | None:
        """The largest error; None if the call failed or a result is not a number."""
        known = [error for _, error in self.errors]
        return None if not known or any(x != x for x in known) else max(known)

    @property
    def passed(self) -> bool:
        """Whether all tensors are within the tolerance."""
        return self.problem is None and self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Example:
    """The inputs of a check, in one type, and the results of the definition for them."""

    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    dlse: Tensor
    expected: tuple[Tensor, ...]  # by NAMES, in float64 on the CPU

    @staticmethod
    def make(dtype: torch.dtype) -> Example:
        """The example of a type, on the CPU. Its inputs are exact in that type."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        (batch, n, heads, _), _, _ = SHAPES
        q, k, v = (draw(*shape) for shape in SHAPES)
        dout, dlse = draw(*SHAPES[0]), draw(batch, heads, n).float()
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = definition(exact, PATTERN.branches)
        grads = torch.autograd.grad((out, lse), exact, (dout.double(), dlse.double()))
        return Example((q, k, v), dout, dlse, (out.detach(), lse.detach(), *grads))


def definition(inputs: Sequence[Tensor], branches: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Causal dilated attention: dense scores plus log(multiplicity), for as many queries as keys.

    Some branch must have rate 1, so that every row meets itself.

    >>> x = torch.zeros(1, 5, 1, 8, dtype=torch.float64)
    >>> definition((x, x, x), [(2, 1), (4, 2)])[1].exp().round().int().tolist()
    [[[2, 2, 3, 2, 2]]]
    """
    query, key, value = inputs
    n, heads, d = query.shape[1:]
    heads_per_key = heads // key.shape[2]
    positions = torch.arange(n)
    i, j = positions[:, None], positions[None, :]
    count = torch.zeros(heads, n, n, dtype=query.dtype)
    for head in range(heads):
        for w, r in branches:
            offset = head // heads_per_key % r
            count[head] += (i // w == j // w) & (i % w % r == offset) & (j % w % r == offset) & (j <= i)
    key, value = (x.repeat_interleave(heads_per_key, 2) for x in (key, value))
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key) * d**-0.5 + count.log()
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), value), scores.logsumexp(-1)


def tolerance(dtype: torch.dtype) -> float:
    """The largest error of a check.

    In half precision it is 6 epsilons. That is more than twice the error of plain attention that rounds its weights and
    their gradients to this type before it multiplies with them. The first rows have the largest errors: their gradients
    are differences of numbers that almost cancel.

    In float32 it is 256 epsilons, because PyTorch's memory-efficient attention computes its weights less precisely than
    plain attention. The rounding of a number to TF32 is above that.
    """
    return (6 if dtype.itemsize == 2 else 256) * torch.finfo(dtype).eps


def compare(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[tuple[str, float], ...]:
    """The errors of the tensors of NAMES. An entry of lse is a row of its own."""
    rows = [[x.unsqueeze(-1) if x.dim() == 3 else x for x in tensors] for tensors in (actual, expected)]
    return tuple((name, _row_error(x, y)) for name, x, y in zip(NAMES, *rows, strict=True))


def _row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a row: the norm of the difference, over the norm of the row or the typical one, if larger."""
    difference = (actual.detach().to("cpu", torch.float64) - expected).norm(dim=-1)
    norm = expected.norm(dim=-1)
    error = (difference / norm.clamp(min=float(norm.square().mean().sqrt()))).flatten()
    return float("nan") if bool(error.isnan().any()) else float(error.max())


def check_backend(name: str, device: torch.device, example: Example) -> ExactnessCheck:
    """Run a backend forward and backward on a device. An error that it raises is part of the result."""
    start = time.perf_counter()
    allowed = tolerance(example.inputs[0].dtype)
    try:
        errors = _errors(name, device, example)
    except _errors_of_calls() as error:
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return ExactnessCheck((), allowed, time.perf_counter() - start, problem)
    return ExactnessCheck(errors, allowed, time.perf_counter() - start)


def _errors(name: str, device: torch.device, example: Example) -> tuple[tuple[str, float], ...]:
    query, key, value = inputs = [x.to(device).requires_grad_() for x in example.inputs]
    out, lse = attention(query, key, value, PATTERN, is_causal=True, backend=name, return_lse=True)
    grads = torch.autograd.grad((out, lse), inputs, (example.dout.to(device), example.dlse.to(lse)))
    return compare((out, lse, *grads), example.expected)


def _errors_of_calls() -> tuple[type[BaseException], ...]:
    """What a broken installation raises: imports, drivers, compilers that are missing, and Triton's own errors."""
    known = (
        ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, MemoryError,
        subprocess.SubprocessError,
    )  # fmt: skip
    triton = getattr(sys.modules.get("triton.errors"), "TritonError", None)
    return (*known, triton) if isinstance(triton, type) and issubclass(triton, BaseException) else known
