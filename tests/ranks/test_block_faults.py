"""Block-sparse attention when a rank dies or stalls: a sentence on every other rank, and a new group works."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import ranks
from block_cases import config
from dilated_attention_pytorch import BlockSparse, attention
from dilated_attention_pytorch.distributed import shard_sequence
from dilated_attention_pytorch.distributed.transport import Wire
from test_faults import TIMEOUT_S, WORLD, init

# With the number of the exchange at which rank 2 fails: of keys and values, of requests.
CASES = {"hierarchical": (2, "keys and values"), "adaptive": (1, "requests")}


def whole() -> torch.Tensor:
    return torch.randn(3, 1, 96, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_call(pattern: BlockSparse) -> None:
    """A call of all ranks, forward and backward, gives what one device does."""
    group = dist.group.WORLD
    local = [shard_sequence(x, group).requires_grad_() for x in whole()]
    out = attention(*local, pattern, group=group)
    grads = torch.autograd.grad(out.square().sum(), local)
    inputs = [x.requires_grad_() for x in whole()]
    expected = attention(*inputs, pattern, backend="reference")
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, shard_sequence(e, group), rtol=1e-10, atol=1e-10)


def check_failure(pattern: BlockSparse, act, exchange: int, what: str) -> None:
    local, count = [shard_sequence(x, dist.group.WORLD) for x in whole()], []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            plain = Wire.start

            def start(*args):
                count.append(1)
                if len(count) == exchange:
                    act()
                return plain(*args)

            patch.setattr(Wire, "start", start)
        message = rf"^rank \d could not (send|receive) {what} (to|from) rank \d, "
        with pytest.raises(RuntimeError, match=message) as raised:
            attention(*local, pattern, group=dist.group.WORLD, transport="ring")
        assert "the call can be repeated" in str(raised.value)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for kind, (exchange, what) in CASES.items():
        pattern = BlockSparse.from_config(config(kind, 0.9))
        init(f"{folder}/stalled {kind}", rank, WORLD, TIMEOUT_S)
        check_failure(pattern, lambda: time.sleep(TIMEOUT_S + 3), exchange, what)
        dist.destroy_process_group()
        init(f"{folder}/again {kind}", rank, WORLD, 60)
        check_call(pattern)
        dist.destroy_process_group()
    init(f"{folder}/dying", rank, WORLD, 60)
    pattern = BlockSparse.from_config(config("hierarchical", 0.9))
    check_failure(pattern, lambda: os._exit(0), 2, "keys and values")
    dist.destroy_process_group()
    init(f"{folder}/survivors", rank, 2, 60)
    check_call(pattern)
    dist.destroy_process_group()


def test_ranks_that_stall_and_die(tmp_path):
    ranks.start(work, (str(tmp_path),), WORLD)
