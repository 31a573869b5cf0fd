"""The choice of a backend: each one says why it cannot serve a request, ``auto`` takes the first that has no reason."""

from __future__ import annotations

from dilated_attention_pytorch.backends import eager, hopper, reference, sdpa, triton
from dilated_attention_pytorch.backends.request import Request

# In the order in which "auto" asks them: the measurements are in docs/kernels.md.
_BACKENDS = {
    "hopper": hopper.why_not,
    "triton": triton.why_not,
    "sdpa": sdpa.why_not,
    "eager": eager.why_not,
    "reference": reference.why_not,
}
NAMES = ("auto", *_BACKENDS)


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
