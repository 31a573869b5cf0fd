"""Block-sparse attention when a rank dies or stalls: a sentence on every other rank, and a new group works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from block_cases import config
from dilated_attention_pytorch import BlockSparse, Sharding, attention
from dilated_attention_pytorch.distributed import shard_sequence
from dilated_attention_pytorch.distributed.wire import Wire
from rank_faults import LONG_S, TIMEOUT_S, WORLD, die, stall

# With the number of the exchange at which rank 2 fails: of keys and values, of means (two rounds), of requests.
CASES = {"hierarchical": (2, "keys and values"), "adaptive": (1, "means of blocks"), "adaptive, later": (3, "requests")}


def whole() -> torch.Tensor:
    return torch.randn(3, 1, 96, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_call(group, pattern: BlockSparse) -> None:
    """A call of all ranks, forward and backward, gives what one device does."""
    local = [shard_sequence(x, group).requires_grad_() for x in whole()]
    out = attention(*local, pattern, group=group)
    grads = torch.autograd.grad(out.square().sum(), local)
    inputs = [x.requires_grad_() for x in whole()]
    expected = attention(*inputs, pattern, backend="reference")
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, shard_sequence(e, group), rtol=1e-10, atol=1e-10)


def check_failure(group, pattern: BlockSparse, act, exchange: int, what: str) -> None:
    local, count = [shard_sequence(x, group) for x in whole()], []
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
            attention(*local, pattern, group=Sharding(group, transport="ring"))
        assert "the call can be repeated" in str(raised.value)
    dist.destroy_process_group()  # as the error asks; a rank that waits for this one notices it


@pytest.mark.parametrize("kind", CASES)
def test_a_rank_that_stalls(own_ranks, kind):
    pattern = BlockSparse.from_config(config(kind.partition(",")[0], 0.9))
    own_ranks.run(WORLD, check_failure, pattern, stall, *CASES[kind], timeout_s=TIMEOUT_S)
    own_ranks.run(WORLD, check_call, pattern)


def test_a_rank_that_dies(own_ranks):
    pattern = BlockSparse.from_config(config("hierarchical", 0.9))
    own_ranks.run(WORLD, check_failure, pattern, die, *CASES["hierarchical"], leaving=[2], timeout_s=LONG_S)
    own_ranks.run(2, check_call, pattern)
