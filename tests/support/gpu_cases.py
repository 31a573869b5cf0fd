"""What the tests of GPU kernels share: one call with all its gradients, and that against float64."""

from __future__ import annotations

import torch

import oracle
from dilated_attention_pytorch import attention
from dilated_attention_pytorch.backends.hopper.backend import HOPPER
from dilated_attention_pytorch.backends.request import Request


def request(dtype, head_dim):
    return Request("cuda", torch.cuda.get_device_capability(), dtype, head_dim)


def over_tables(dtype, head_dim):
    """The backends over launch tables that this GPU has."""
    return ["triton"] if HOPPER.why_not(request(dtype, head_dim)) else ["triton", "hopper"]


def run(call, q, k, v, dout, dlse):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*inputs)
    return [x.detach() for x in (out, lse, *oracle.grads((out, lse), inputs, (dout.to(out), dlse.to(lse))))]


def check(pattern, n, dtype, head_dim, *, causal, backend):
    """Grouped heads and a gradient of lse against float64; returns q, k and v."""
    q, dout = torch.randn(2, 1, n, 4, head_dim, device="cuda", dtype=dtype).unbind(0)
    k, v = torch.randn(2, 1, n, 2, head_dim, device="cuda", dtype=dtype).unbind(0)
    dlse = torch.randn(1, 4, n, device="cuda")
    dense = lambda *x: oracle.attention(*x, pattern, is_causal=causal)  # noqa: E731
    exact = run(dense, *(x.double().cpu() for x in (q, k, v, dout)), dlse.double().cpu())
    yardstick = run(oracle.plain(pattern, causal), q, k, v, dout, dlse)
    ours = lambda *x: attention(*x, pattern, is_causal=causal, backend=backend, return_lse=True)  # noqa: E731
    oracle.assert_rounding_only(run(ours, q, k, v, dout, dlse), yardstick, exact, dtype)
    return q, k, v
