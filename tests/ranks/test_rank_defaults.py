"""PyTorch's default device and default dtype change nothing on ranks."""

from __future__ import annotations

import contextlib

import torch

from block_cases import SIZE, config
from dilated_attention_pytorch import BlockSparse, Dilated, Order, attention, clear_caches
from dilated_attention_pytorch.distributed import gather_sequence, shard_sequence, simulate_ring

N = 75


def _sample(group):
    generator = torch.Generator("cpu").manual_seed(3)
    whole = [torch.randn((2, N, 2, 8), generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)]
    mask = torch.rand((5, 5), generator=generator, dtype=torch.float32, device="cpu") < 0.5
    order = Order.from_permutation(torch.randperm(N, generator=generator, device="cpu"), device="cpu")
    calls = [
        (Dilated([16, 40, 128], [1, 2, 3]), {"is_causal": True}),
        (Dilated([16, 40, 128], [1, 2, 3]), {"is_causal": True, "order": order}),
        (Dilated([128], [1]), {"dropout_p": 0.3, "seed": 4}),
        (BlockSparse.custom(mask, block_size=SIZE), {}),
        (BlockSparse.from_config(config("hierarchical")), {"is_causal": True}),
        (BlockSparse.from_config(config("adaptive")), {"lengths": torch.tensor([33, 75], dtype=torch.int64, device="cpu")}),
    ]
    found = []
    for pattern, options in calls:
        own = [shard_sequence(x, group, order=options.get("order")).requires_grad_() for x in whole]
        out = attention(*own, pattern, group=group, **options)
        found += [out, *torch.autograd.grad(out.square().sum(), own), gather_sequence(out, group)]
    for pattern, _ in calls[3:]:
        out, lse, memory = simulate_ring(*whole, pattern, 3)
        found += [out, lse, torch.tensor([one.received for one in memory], device="cpu")]
    return found


def _check(group):
    expected = _sample(group)
    before = torch.get_default_dtype()
    for default in ("device", "dtype"):
        clear_caches()
        with torch.device("meta") if default == "device" else contextlib.nullcontext():
            torch.set_default_dtype(before if default == "device" else torch.float64)
            found = _sample(group)
        torch.set_default_dtype(before)
        for a, b in zip(found, expected, strict=True):
            assert a.device.type == "cpu", default
            assert a.dtype == b.dtype, default
            assert torch.equal(a, b), default
    clear_caches()


def test_default_device_and_default_dtype(on_ranks):
    on_ranks(2, _check)
