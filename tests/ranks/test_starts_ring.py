"""Samples with padding in front over a sharded sequence: the rows of each rank are those of each sample by itself."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

import block_oracle
import oracle
from block_cases import SIZE, config, table_of
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, attention, explain
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.sequence import rows_of
from ring_cases import sharded
from starts_cases import by_itself, poisoned

MIXED = Dilated([16, 64, 400], [1, 2, 4])
TWO = Dilated([16, 64], [1, 2])  # for interpreted kernels
# Of 71 rows on two ranks, or 73 on three: samples on one rank, on several, on none, with the same rows twice.
SAMPLES = {"starts": [0, 30, 30, 5, 60, 71], "lengths": [71, 41, 41, 20, 3, 0]}
TO_THE_END = {"starts": [0, 40, 71, 13]}

# Pattern or kind, rows of the ranks, layout, causal, transport, heads, key heads, and further options.
CASES = {
    "uneven": (MIXED, (30, 41), "contiguous", True, "ring", 4, 2, SAMPLES),
    "zigzag": (MIXED, (30, 41), "zigzag", True, "ring", 2, 2, TO_THE_END | {"bucket_size": 5}),
    "detached": (MIXED, (30, 41), "zigzag", False, "ring", 2, 2, SAMPLES | {"mixing_gradient": "detached"}),
    "dropout": (MIXED, (30, 41), "zigzag", True, "ring", 4, 2, SAMPLES | {"dropout_p": 0.3, "seed": 2**40 + 7}),
    "heads": (Dilated([100], [1]), (30, 41), "zigzag", True, "ulysses", 4, 2, SAMPLES),
    "blocks": ("local_window", (30, 41), "zigzag", True, "ring", 2, 1, SAMPLES),
    "block dropout": ("local_window", (30, 41), "contiguous", True, "ring", 2, 1, SAMPLES | {"dropout_p": 0.3, "seed": 7}),
    "fused": (TWO, (30, 41), "contiguous", True, "ring", 2, 1, {"starts": [0, 20], "lengths": [50, 51]}),
    "fused, zigzag": (TWO, (30, 41), "zigzag", False, "ring", 2, 1, {"starts": [7, 40], "lengths": [64, 28]}),
    "three": (MIXED, (30, 0, 43), "contiguous", False, "allgather", 2, 1, SAMPLES | {"bucket_size": 3}),
    "three, zigzag": (MIXED, (30, 14, 29), "zigzag", True, "auto", 2, 2, TO_THE_END),
    "three, one sequence": ("hierarchical", (30, 14, 29), "contiguous", False, "ring", 2, 2, {"starts": [20, 20]}),
    "three, adaptive": ("adaptive", (33, 20, 20), "zigzag", True, "ring", 4, 2, SAMPLES),
    "three, adaptive, to the end": ("adaptive", (33, 20, 20), "contiguous", False, "ring", 2, 1, TO_THE_END),
}


def pattern_of(kind):
    return BlockSparse.from_config(config(kind)) if isinstance(kind, str) else kind


def attend_by_itself(kind, causal, options):
    """The attention of one sample from loops over positions; that with dropout, from one device."""
    more = {name: options[name] for name in ("dropout_p", "seed", "mixing_gradient") if name in options}

    def attend(b, q, k, v):
        if more:  # dropout counts samples: the others have no rows
            batch = [torch.cat([torch.zeros_like(x)] * b + [x]) for x in (q, k, v)]
            lengths = [0] * b + [k.shape[1]]
            out, lse = attention(
                *batch, pattern_of(kind), is_causal=causal, lengths=lengths, backend="reference", return_lse=True, **more
            )
            return out[-1:], lse[-1:]
        if isinstance(kind, Dilated):
            return oracle.attention(q, k, v, kind, is_causal=causal)
        if kind == "adaptive":
            table = block_oracle.adaptive(q.detach(), k.detach(), "0.4", SIZE, q.shape[-1] ** -0.5, causal)
        else:
            table = table_of(kind, "0.4", 0, -(-k.shape[1] // SIZE), causal)
        return block_oracle.attention(q, k, v, table, SIZE, causal=causal)

    return attend


def check(group, name, backend="auto", dtype=torch.float64) -> None:
    kind, rows, layout, causal, transport, heads, key_heads, options = CASES[name]
    shards, options = Shards.of(rows, layout), dict(options)
    n, starts, batch = sum(rows), options["starts"], len(options["starts"])
    lengths = options.get("lengths", [n - start for start in starts])
    torch.manual_seed(3)
    inputs = oracle.random_inputs(batch, n, n, heads, key_heads, 8 if dtype == torch.float64 else 16)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(batch, heads, n, dtype=torch.float64)
    expected = oracle.with_grads(by_itself(attend_by_itself(kind, causal, options), starts, lengths), inputs, dout, dlse)
    mine = rows_of(shards, dist.get_rank(group), torch.device("cpu"))
    local = [x.detach().to(dtype)[:, mine].requires_grad_() for x in poisoned(inputs, starts, lengths)]
    given = sharded(group, layout=layout, transport=transport, backend=backend, **options)
    call = lambda *x: attention(*x, pattern_of(kind), is_causal=causal, return_lse=True, **given)  # noqa: E731
    found = oracle.with_grads(call, local, dout[:, mine], dlse[:, :, mine])
    expected = [x[:, :, mine] if i == 1 else x[:, mine] for i, x in enumerate(expected)]
    oracle.assert_same(found, expected, 1e-10 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x == "uneven")) for x in CASES])
def test_rows_are_those_of_each_sample(on_ranks, name):
    on_ranks(len(CASES[name][1]), check, name)


def check_fused(group, name) -> None:
    import fast_interpreter

    fast_interpreter.install()  # in each rank
    check(group, name, "triton", torch.float32)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
@pytest.mark.parametrize("name", ["fused", "fused, zigzag", "blocks"])
def test_fused_kernels(on_ranks, name):
    on_ranks(len(CASES[name][1]), check_fused, name)


def check_refusals(group) -> None:
    rank, x = dist.get_rank(group), torch.randn(2, 4, 2, 8)
    for options, message in (
        ({"starts": [0, rank]}, r"these differ:\n  starts: \(0, 0\) on rank 0, \(0, 1\) on rank 1$"),
        ({"starts": [0, 9]}, r"starts must lie between 0 and the 8 positions of the sequence, got \[0, 9\]"),
        ({"starts": [1, 2], "lengths": [2, 2]}, "not shards: .* but lengths ends at 4; use shard_sequence"),
        ({"starts": [3, 0], "lengths": [6, 8]}, r"at most the 8 keys: got starts \[3, 0\] and lengths \[6, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(x, x, x, MIXED, group=Sharding(group), **options)


def test_refusals(on_ranks):
    on_ranks(2, check_refusals)


def test_explained():
    """Samples that one rank holds send nothing; the others send what their rows take by themselves."""
    x = torch.empty(3, 64, 2, 8)
    pattern = Dilated([64], [1])
    alone = explain(x[:1, :48], x[:1, :48], x[:1, :48], pattern, world_size=3).sharding
    told = explain(x, x, x, pattern, starts=[16, 48, 64], world_size=4).sharding
    assert alone is not None
    assert told is not None
    assert told.bytes == alone.bytes  # three ranks have 16 rows each of the first sample
    adaptive = BlockSparse.from_config(config("adaptive"))
    with pytest.raises(ValueError, match="without lengths, starts and cu_seqlens"):
        explain(x, x, x, adaptive, starts=[0, 0, 0], world_size=2)
