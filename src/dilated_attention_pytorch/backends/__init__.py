"""The choice of a backend: each one says why it cannot serve a request, ``auto`` takes the first that has no reason.

Where ``auto`` finds a Hopper GPU, the length decides as well: then the choice is made when the operator runs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch import fused
from dilated_attention_pytorch.backends import eager, hopper, reference, sdpa, triton
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.problem import Problem

# In the order in which "auto" asks them: the measurements are in docs/kernels.md.
_BACKENDS = {
    "hopper": hopper.why_not,
    "triton": triton.why_not,
    "sdpa": sdpa.why_not,
    "eager": eager.why_not,
    "reference": reference.why_not,
}
NAMES = ("auto", *_BACKENDS)

# By (is_causal, backward): the fewest query-key pairs of a kernel call, on average, from which stock operators with one
# merge (fused.py) are faster than the Hopper kernels. Infinity: never. Milliseconds, hopper / sdpa, one H200
# (benchmarks/gpu.py; hopper: results/h200_version13.json, sdpa: h200_backward_choice.json, h200_wide_rows.json,
# h200_sdpa.json), with 2**32.1 pairs (paper) and 2**31.4 (wide):
_SDPA_FROM_PAIRS = {
    (False, False): math.inf,  # paper 31.9 / 36.3, wide 19.9 / 24.2
    (False, True): math.inf,  # paper 75.3 / 95.3, wide 66.4 / 68.7
    (True, False): math.inf,  # paper 19.6 / 21.2, wide 12.7 / 16.4
    (True, True): math.inf,  # paper 47.0 / 60.1, wide 41.1 / 45.2
}
_SDPA_UP_TO_HEAD_DIM = 64  # paper has 64, wide 128


def check_name(backend: str) -> None:
    """Raise if there is no backend of this name."""
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {backend!r}")


def candidates(backend: str, request: Request) -> list[str]:
    """The backends to ask, in order."""
    check_name(backend)
    if backend != "auto":
        return [backend]
    # Triton's interpreter serves tests on a CPU that ask for it by name.
    return [name for name in _BACKENDS if name not in ("hopper", "triton") or request.device == "cuda"]


def why_not(name: str, request: Request) -> list[str]:
    """The reasons why a backend cannot serve a request."""
    return _BACKENDS[name](request)


def choose(backend: str, request: Request) -> str:
    """The name of the backend to use; a ValueError with every reason if the wanted one cannot serve the request."""
    refusals = []
    for name in candidates(backend, request):
        reasons = why_not(name, request)
        if not reasons:
            return name
        refusals += [f"  {name}: {reason}" for reason in reasons]
    raise ValueError("no backend can serve this call:\n" + "\n".join(refusals))


def for_operator(backend: str, chosen: str) -> str:
    """What the operator is told: the chosen backend, or "auto" where the length decides."""
    return "auto" if backend == "auto" and chosen == "hopper" else chosen


def fastest(problem: Problem, query: Tensor, *, backward: bool) -> str:
    """What "auto" runs on a Hopper GPU, forward and backward apart: both know only ``out`` and ``lse`` of one another."""
    least = _SDPA_FROM_PAIRS[problem.is_causal, backward]
    head_dim = query.shape[-1]
    if least == math.inf or head_dim > _SDPA_UP_TO_HEAD_DIM or not fused.serves(query):
        return "hopper"
    if not _large_pieces(problem, head_dim, least):
        return "hopper"
    if backward and torch.are_deterministic_algorithms_enabled():  # cuDNN adds up dq in any order
        return "hopper"
    return "hopper" if sdpa.why_not(Request.of(query, dropout_p=0.0)) else "sdpa"


@lru_cache(maxsize=256)
def _large_pieces(problem: Problem, head_dim: int, least: float) -> bool:
    return fused.few_pieces(problem, head_dim) and fused.pairs_per_piece(problem, head_dim) >= least
