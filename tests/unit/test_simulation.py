"""The ring in one process: the result of one device, and the memory of every rank."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.distributed import Shards, simulate_ring
from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.schedules import DilatedSchedule, default_bucket_size
from dilated_attention_pytorch.distributed.simulate import SimulatedWire

CASES = [
    (Dilated([64, 512, 8192], [1, 4, 16]), Shards.even(1023, 5, "zigzag"), True),
    (Dilated([16, 64, 400], [1, 2, 4]), Shards.of([30, 41, 29, 1, 17], "contiguous"), False),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bucket_size", [7, None])
def test_simulation(case, bucket_size):
    pattern, shards, is_causal = case
    q = torch.randn(2, shards.length, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, shards.length, 2, 8, dtype=torch.float64).unbind(0)
    out, lse, memory = simulate_ring(q, k, v, pattern, 5, is_causal=is_causal, layout=shards, bucket_size=bucket_size)
    expected = attention(q, k, v, pattern, is_causal=is_causal, return_lse=True)
    torch.testing.assert_close((out, lse), expected, rtol=1e-10, atol=1e-10)
    schedule = DilatedSchedule(pattern, shards, 2, is_causal=is_causal)
    for used in memory:
        rows = shards.rows(used.rank)
        assert used.rows == rows
        assert used.query == 2 * rows * 4 * 8 * 8
        assert used.key_value == 2 * 2 * rows * 2 * 8 * 8
        bucket = 2 * 2 * (bucket_size or default_bucket_size(shards)) * 2 * 8 * 8
        assert used.buffers <= 4 * bucket
        assert bucket_size is None or rows < 17 or used.buffers == 4 * bucket
        assert used.partials >= 2 * rows * 4 * 9 * 8  # output and lse
        assert used.received == schedule.received_rows(used.rank) * 2 * 2 * 2 * 8 * 8


def test_memory_per_rank_shrinks_with_the_ranks():
    """The tensors of the rank, its partial result, two messages, and at most a tenth."""
    q, k, v = torch.randn(3, 1, 32768, 4, 16).unbind(0)
    for world in (1, 2, 4, 8):
        _, _, memory = simulate_ring(q, k, v, Dilated([256, 4096, 32768], [1, 8, 64]), world)
        shard = 32768 // world * 4 * 16 * 4
        bucket = 2 * max(512, 32768 // world // 16) * 4 * 16 * 4 if world > 1 else 0
        part = 2**18 * 4  # the least that a kernel call may return
        for used in memory:
            total = used.query + used.key_value + used.buffers + used.partials
            assert total <= 1.1 * (4 * shard + 2 * bucket) + part


def test_the_next_message_is_under_way_while_one_is_computed_with(monkeypatch):
    events = []
    start, steps = SimulatedWire.start, Message.steps

    def started(self, sends, receives, after):
        events.append(("start", sends[0].message.tick))
        return start(self, sends, receives, after)

    def computed(self, *args):
        events.append(("compute", self.tick))
        return steps(self, *args)

    monkeypatch.setattr(SimulatedWire, "start", started)
    monkeypatch.setattr(Message, "steps", computed)
    x = torch.randn(1, 96, 2, 8)
    simulate_ring(x, x, x, Dilated([96], [1]), 3, bucket_size=8)  # 2 rounds of 4 messages
    of_a_rank = [("start", 0), *(step for tick in range(7) for step in (("start", tick + 1), ("compute", tick)))]
    assert events == 3 * [*of_a_rank, ("compute", 7)]


def test_bad_arguments():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="as many queries as keys as rows of shards"):
        simulate_ring(x, x, x, Dilated([4], [1]), 2, layout=Shards.of([1, 2], "contiguous"))
    with pytest.raises(ValueError, match="bucket_size is a number of rows, at least 1, or None, got 0"):
        simulate_ring(x, x, x, Dilated([4], [1]), 2, bucket_size=0)
