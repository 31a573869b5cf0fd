"""The choice of a backend: each one says why it cannot serve a request, and ``auto`` takes the first without a reason."""

from __future__ import annotations

from dilated_attention_pytorch.backends.eager import EAGER
from dilated_attention_pytorch.backends.hopper.backend import HOPPER
from dilated_attention_pytorch.backends.reference import REFERENCE
from dilated_attention_pytorch.backends.request import Backend, Request
from dilated_attention_pytorch.backends.sdpa import SDPA
from dilated_attention_pytorch.backends.triton.backend import TRITON
from dilated_attention_pytorch.execute.loop import TileKernel

# In the order in which "auto" asks them; docs/performance.md has the measurements.
BACKENDS: tuple[Backend, ...] = (HOPPER, TRITON, SDPA, EAGER, REFERENCE)
_BY_NAME = {backend.name: backend for backend in BACKENDS}


def find(name: str) -> Backend:
    """The backend of a name."""
    return _BY_NAME[name]


def candidates(name: str, request: Request) -> tuple[Backend, ...]:
    """The backends to ask, in order."""
    if name != "auto":
        return (find(name),)
    # The Triton kernels for float32 heads above 128 have no tuned gradients: PyTorch's operators are up to 8 times faster.
    wide = request.dtype.itemsize == 4 and request.head_dim > 128
    order = (SDPA, HOPPER, TRITON, EAGER, REFERENCE) if wide else BACKENDS
    # Triton's interpreter serves tests on a CPU, which ask for it by name.
    return tuple(x for x in order if x not in (HOPPER, TRITON) or request.device == "cuda")


def choose(name: str, request: Request) -> Backend:
    """The backend to use; a ValueError with every reason if none can serve the request."""
    refusals = []
    for backend in candidates(name, request):
        reasons = backend.why_not(request)
        if not reasons:
            return backend
        refusals += [f"  {backend.name}: {reason}" for reason in reasons]
    raise ValueError("no backend can serve this call:\n" + "\n".join(refusals))


def stock_kernel(name: str, request: Request) -> TileKernel:
    """The tile kernel of a backend of stock kernels."""
    return {"sdpa": SDPA, "eager": EAGER}[name].kernel(request)
