"""When a call waits for the GPU: never, unless its lengths are on it, and then once."""

from __future__ import annotations

import warnings

import pytest
import torch

from dilated_attention_pytorch import Dilated, attention
from gpu_cases import over_tables

pytestmark = pytest.mark.gpu


def waits(call) -> int:
    """The device synchronisations of a call, as PyTorch counts them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(x.message) for x in caught)


def test_synchronisations_are_counted():
    assert waits(lambda: torch.zeros((), device="cuda").item()) == 1


@pytest.mark.parametrize("kind", ["none", "lengths", "cu_seqlens"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_call_waits_only_for_lengths_on_the_gpu(kind, place):
    q, k, v = (torch.randn(2, 700, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for backend in ("sdpa", *over_tables(torch.bfloat16, 64)):
        counts = []
        for length in (500, 600, 600):  # the first compiles; the second has new tables; the third finds them
            values = {"none": None, "lengths": [700, length], "cu_seqlens": [0, length, 700]}[kind]
            options = {} if values is None else {kind: torch.tensor(values, device=place)}

            def both(options=options, backend=backend):
                out = attention(q, k, v, Dilated([128, 512], [1, 4]), is_causal=True, backend=backend, **options)
                out.sum().backward()

            counts.append(waits(both))
        assert counts[1:] == [int(options != {} and place == "cuda")] * 2, (backend, counts)
