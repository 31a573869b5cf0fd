"""The choice of a backend: each one says why it cannot serve a request, ``auto`` takes the first that has no reason.

On a Hopper GPU, for some types and head sizes, the length decides as well: that choice is made when the operator runs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from dilated_attention_pytorch import fused
from dilated_attention_pytorch.backends import eager, hopper, reference, sdpa, triton
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.plan.problem import Problem

# In the order in which "auto" asks them: the measurements are in docs/kernels.md.
_BACKENDS = {
    "hopper": hopper.why_not,
    "triton": triton.why_not,
    "sdpa": sdpa.why_not,
    "eager": eager.why_not,
    "reference": reference.why_not,
}
NAMES = ("auto", *_BACKENDS)

# By bytes of an element and largest head size: the fewest query-key pairs of a piece (pieces.py), on average, from which
# stock operators are faster than our kernels, forward and backward; infinity: never. Without a gradient of lse, for which
# stock operators run twice. One H200, milliseconds, ours / sdpa, of benchmarks/choice_gpu.py (float32:
# results/h200_choice.json, h200_choice_more.json; half precision: h200_choice_256.json, h200_choice_256_long.json); of half
# precision up to 128, benchmarks/gpu.py (h200_version13.json, h200_backward_choice.json, h200_wide_rows.json).
_SDPA_FROM_PAIRS = {
    # 64: paper 31.9 / 36.3 and 75.3 / 95.3; 128: wide 19.9 / 24.2 and 66.4 / 68.7
    (2, 128): (math.inf, math.inf),
    # 2**29.5 pairs 13.7 / 12.6 and 64.1 / 38.5; 2**25.4 1.06 / 1.04 and 5 / 3.2; causal 2**24.4 0.88 / 0.84 and 3.1 / 2.4;
    # 2**24.1 0.62 / 0.74 and 2.7 / 3.0
    (2, 192): (5 * 2**22, 5 * 2**22),
    # 2**29.1 pairs 10.8 / 12.2 and 47.5 / 38.3; 2**25.0 0.92 / 0.99 and 3.6 / 3.1; 2**23.7 0.65 / 0.94 and 2.3 / 2.5
    (2, 256): (math.inf, 2**24),
    # 2**27.1 pairs 9.2 / 15.5 and 33.8 / 36.5
    (4, 64): (math.inf, math.inf),
    # 2**26.6 pairs 11.5 / 11.5 and 42.6 / 33.4, 2**25.6 7.3 / 8.5 and 23.6 / 23.8: not worth sums in any order
    (4, 128): (math.inf, math.inf),
    # 2**26.1 pairs 28.3 / 11.4 and 345 / 40.6; 2**22.8 3.3 / 2.3 and 40.9 / 8.1, causal 2**22.7 4.3 / 4.5 and 56.7 / 15.9,
    # 2**21.8 2.1 / 2.3 and 32.5 / 8.2
    (4, 256): (3 * 2**21, 2**21),
}


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


def _sdpa_from_pairs(dtype: torch.dtype, head_dim: int) -> tuple[float, float]:
    """The entry of the table for this type and head size."""
    sizes = [most for itemsize, most in _SDPA_FROM_PAIRS if itemsize == dtype.itemsize and head_dim <= most]
    return _SDPA_FROM_PAIRS[dtype.itemsize, min(sizes)]


def for_operator(backend: str, chosen: str, request: Request) -> str:
    """What the operator is told: the chosen backend, or, where the length decides, both: ``"triton or sdpa"``."""
    if backend != "auto" or chosen not in ("hopper", "triton") or request.capability[0] != 9:
        return chosen
    decides = min(_sdpa_from_pairs(request.dtype, request.head_dim)) < math.inf and not sdpa.why_not(request)
    return f"{chosen} or sdpa" if decides else chosen


def fastest(backend: str, problem: Problem, query: Tensor, *, backward: bool) -> str:
    """What the operator runs, forward and backward apart: both know only ``out`` and ``lse`` of one another."""
    ours, _, stock = backend.partition(" or ")
    return ours if not stock or why_not_stock(problem, query, backward=backward) else stock


def why_not_stock(problem: Problem, query: Tensor, *, backward: bool) -> str:
    """Why our kernels run where stock operators could; empty where those are faster."""
    if backward and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and PyTorch's operators may add up dq in any order"
    if query.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "float32 products may be TF32 here, which ours then are"
    if _pairs_per_piece(problem, query.shape[-1]) < _sdpa_from_pairs(query.dtype, query.shape[-1])[backward]:
        return length_rule(problem, query, backward=backward)
    if fused.serves(query) and not _few_pieces(problem, query.shape[-1]):  # half precision was measured with one merge
        return "PyTorch's operators would need more calls than one merge takes"
    return ""


def length_rule(problem: Problem, query: Tensor, *, backward: bool) -> str:
    """What decides between our kernels and stock operators, with the numbers of this problem."""
    pairs = _pairs_per_piece(problem, query.shape[-1])
    least = _sdpa_from_pairs(query.dtype, query.shape[-1])[backward]
    rule = f"from {least:,} query-key pairs a call on" if least < math.inf else "never"
    return f"for this type and head size PyTorch's operators are faster {rule}, here they have {pairs:,.0f}"


# They walk over all pieces of a problem, of which there are many with many documents.
_pairs_per_piece = lru_cache(maxsize=256)(fused.pairs_per_piece)
_few_pieces = lru_cache(maxsize=256)(fused.few_pieces)
