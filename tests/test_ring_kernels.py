"""Own rows of a rank through the fused kernels (interpreted), rows of others through stock operators: as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dilated_attention_pytorch import Dilated, attention

pytest.importorskip("triton", reason="Triton has no build for this platform")

# Pattern, rows of the three ranks, heads, key heads, causal, and sequences of their own.
CASES = [
    (Dilated([16, 64, 128], [1, 2, 4]), (40, 50, 38), 4, 4, False, {}),
    (Dilated([16, 64, 128], [1, 2, 4]), (48, 48, 21), 4, 2, True, {}),
    (Dilated([32, 100], [1, 3]), (37, 0, 74), 3, 3, False, {}),  # no launch for an empty shard, segments cut anywhere
    (Dilated([64], [2]), (33, 33, 34), 2, 2, True, {}),  # rows without a tile
    (Dilated([16, 64], [1, 4]), (30, 31, 29), 2, 1, True, {"cu_seqlens": [0, 30, 31, 90]}),
    (Dilated([16, 64], [1, 4]), (30, 31, 29), 2, 1, False, {"lengths": [90, 50]}),
]


def check(case, rank: int) -> None:
    pattern, rows, heads, key_heads, causal, options = case
    n, own = sum(rows), slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    options = {name: torch.tensor(x) for name, x in options.items()} | {"is_causal": causal, "return_lse": True}
    torch.manual_seed(0)
    shapes = [(2, n, h, 16) for h in (heads, key_heads, key_heads)]
    whole = [torch.randn(shape).requires_grad_() for shape in shapes]
    dout = torch.randn(2, n, heads, 16)
    weights = torch.linspace(-1, 1, n * heads).view(heads, n)

    def run(call, inputs, dout, weights):
        out, lse = call(*inputs)
        seen = torch.where(lse.isinf(), 0.0, lse)
        grads = torch.autograd.grad([out, seen], inputs, [dout, weights.to(lse.dtype).expand_as(lse)])
        return [out, seen, *grads]

    doubles = [x.detach().double().requires_grad_() for x in whole]
    expected = run(lambda *x: attention(*x, pattern, backend="reference", **options), doubles, dout.double(), weights)
    local = [x.detach()[:, own].clone().requires_grad_() for x in whole]
    sharded = {"group": dist.group.WORLD, "backend": "triton", "transport": "ring", "bucket_size": 16}
    actual = run(lambda *x: attention(*x, pattern, **options, **sharded), local, dout[:, own], weights[:, own])
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        part = e[..., own] if name == "lse" else e[:, own]
        torch.testing.assert_close(a.double(), part, rtol=2e-5, atol=5e-6, msg=lambda m, name=name: f"{case} {name}: {m}")


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    for case in CASES:
        check(case, rank)
    x = torch.randn(1, 4, 2, 16)
    for message, bad in (("contiguous shards", {"layout": "zigzag"}), ("dropout", {"dropout_p": 0.1, "seed": 1})):
        with pytest.raises(ValueError, match=message):
            attention(x, x, x, Dilated([4], [1]), group=dist.group.WORLD, backend="triton", **bad)
    dist.destroy_process_group()


def test_the_same_as_on_one_device(tmp_path):
    mp.spawn(work, (str(tmp_path / "store"),), nprocs=3)
