"""Plans against tensors that are allocated, against explain() and simulate_ring(), and against committed measurements."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, SparsePatternConfig, attention
from dilated_attention_pytorch.distributed import simulate_ring
from dilated_attention_pytorch.hardware import find_gpu
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.workbench.plan import (
    backend_of,
    fits,
    longest_tokens,
    make_report,
    memory_of,
    powers,
    scale,
    seconds_of,
)  # fmt: skip
from dilated_attention_pytorch.workbench.plan_memory import attention_memory, model_memory, parameters
from dilated_attention_pytorch.workbench.plan_ranks import explained, rank_bounds, rank_work
from dilated_attention_pytorch.workbench.plan_settings import Machine, PlanSettings
from dilated_attention_pytorch.workbench.suggest import LOCAL, pattern_warnings, suggest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from plan_check import MEMORY_BAR, TIME_BAR, checked

LONGNET = Dilated([2048, 8192, 32768, 131072], [1, 4, 16, 64])
H200, CPU = Machine(find_gpu("h200")), torch.device("cpu")
# Its backend is that of stock kernels, as on a CPU. Buckets are those of a GPU.
STOCK = Machine(replace(find_gpu("gtx1080"), capability=(0, 0)))


def settings(**changes) -> PlanSettings:
    values = {"tokens": 65536, "pattern": LONGNET, "heads": 8, "head_dim": 64, "machine": H200}
    return PlanSettings(**values | changes)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_bytes_are_those_of_explain(gpus, causal, layout):
    own = settings(gpus=gpus, is_causal=causal, layout=layout, tokens=60_001, kv_heads=4)
    work, traffic = rank_work(own), explained(own, sharded=True).sharding
    assert (work.received, work.backward_received) == (traffic.bytes, traffic.backward_bytes)
    assert (work.transport, work.messages) == (traffic.transport, traffic.waits)


def test_pairs_are_those_of_the_whole_sequence():
    """All ranks together compute every pair once. Pairs of messages are averages over heads."""
    own = settings(gpus=4, tokens=65536)
    work, whole = rank_work(own), rank_work(own.on(1))
    assert 4 * sum(x.pairs for x in (*work.own, *work.remote)) == pytest.approx(sum(x.pairs for x in whole.own))
    assert sum(x.pairs for x in whole.own) == explained(own.on(1)).pairs


def test_exchange_of_heads():
    own = settings(pattern=Dilated([65536], [1]), gpus=4)
    work, traffic = rank_work(own), explained(own, sharded=True).sharding
    assert work.transport == traffic.transport == "ulysses"
    assert (work.received, work.backward_received, work.messages) == (traffic.bytes, traffic.backward_bytes, traffic.waits)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_call_on_a_cpu(backward):
    """Counted by the allocator, for a call that fills more than the smallest partial results."""
    q, k, v = (torch.randn(1, 8192, heads, 64).requires_grad_() for heads in (8, 4, 4))
    pattern, dout = Dilated([512, 8192], [1, 16]), torch.ones_like(q)

    def call():
        out = attention(q, k, v, pattern)
        return torch.autograd.grad(out, (q, k, v), dout) if backward else out

    own = settings(
        tokens=8192, pattern=pattern, kv_heads=4, dtype="float32", machine=STOCK, train=backward
    )  # fmt: skip
    parts = attention_memory(own, rank_work(own), "sdpa", backward=backward)
    extra = parts.extra - (parts.query if backward else 0)  # the gradient of the output is given
    measured = peak_extra_bytes(call, CPU)
    if not backward:
        with torch.no_grad():
            measured = peak_extra_bytes(call, CPU)
    assert extra + parts.query == pytest.approx(measured + parts.query, rel=0.1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_of_simulated_ranks(ranks):
    """The forward of fused kernels on ranks, from tensors without values."""
    x = torch.empty(1, 2**19, 8, 64, dtype=torch.bfloat16, device="meta")
    own = settings(tokens=2**19, gpus=ranks, transport="ring")
    _, _, memory = simulate_ring(x, x, x, LONGNET, ranks, device="cuda:h200")
    most = max(m.query + m.key_value + m.buffers + m.partials for m in memory)
    parts = attention_memory(own, rank_work(own), "hopper", backward=False)
    assert parts.total == pytest.approx(most, rel=0.1)
    assert parts.buffers == max(m.buffers for m in memory)


def test_memory_of_a_training_step_on_a_cpu():
    """Weights, their gradients and everything that a forward and a backward of all layers keep, in float32."""
    config = LongNetConfig.preset("tiny", vocab_size=64, embed_dim=128, ffn_dim=512, num_layers=3)
    model = LongNetDecoder(config)
    tokens = torch.randint(64, (1, 4097))
    measured = peak_extra_bytes(lambda: model.loss(tokens[:, :-1], tokens[:, 1:]).backward(), CPU)
    own = settings(
        tokens=4096, pattern=config.pattern, heads=4, head_dim=32, dtype="float32", is_causal=True, train=True,
        model=config, machine=STOCK,
    )  # fmt: skip
    parts = model_memory(own, rank_work(own), "sdpa")
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    assert parts.total - parts.weights - parts.optimizer == pytest.approx(measured, rel=0.25)


def test_the_check_table_is_within_its_bars():
    rows = checked()
    assert len(rows) > 90
    for row in rows:
        assert abs(row.error) <= (TIME_BAR if row.unit == "ms" else MEMORY_BAR), row
    assert 0 < sum(row.fitted for row in rows) < len(rows) / 5


def test_time_grows_with_everything():
    base = settings(train=True, is_causal=True)
    for changes in (
        {"tokens": 131072}, {"heads": 16}, {"batch": 2}, {"head_dim": 128}, {"is_causal": False},
        {"machine": Machine(find_gpu("h100-pcie"))}, {"machine": Machine(find_gpu("a100"))}, {"dtype": "float32"},
    ):  # fmt: skip
        longer = replace(base, **changes)
        times = [seconds_of(x, rank_work(x), backend_of(x)) for x in (base, longer)]
        assert times[1] > times[0], changes
    tokens = [2**i for i in range(8, 24)]
    times = [seconds_of(x, rank_work(x), "hopper") for x in (settings(tokens=n, train=True) for n in tokens)]
    assert all(a <= b for a, b in pairwise(times))
    assert times[0] == 810e-6 < times[-5] < times[-1]  # the host needs a time for any call


def test_slower_links_take_longer():
    fast = settings(gpus=16, tokens=2**20, pattern=Dilated([2048, 2**20], [1, 16]))
    slow = replace(fast, machine=Machine(find_gpu("h200"), gpus_per_node=2))
    assert rank_work(slow).received == rank_work(fast).received
    assert rank_work(slow).received_near < rank_work(fast).received_near
    assert seconds_of(slow, rank_work(slow), "hopper") >= seconds_of(fast, rank_work(fast), "hopper")


@pytest.mark.parametrize("gpus", [1, 4, 64])
@pytest.mark.parametrize("train", [False, True])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(gpus, train):
    own = settings(gpus=gpus, train=train, tokens=10**6)
    longest = longest_tokens(own)
    assert fits(own.on(gpus, longest))
    assert not fits(own.on(gpus, int(1.01 * longest)))
    exact, bounds = (memory_of(own, f(own), "hopper").total for f in (rank_work, rank_bounds))
    assert exact * 0.99 <= bounds <= exact * 1.05


def test_a_model_that_is_too_large_fits_with_no_length():
    config = LongNetConfig.preset("longnet-base", num_layers=2000, embed_dim=1536, ffn_dim=6144)
    own = settings(model=config, train=True, heads=12, head_dim=128)
    assert longest_tokens(own) == 0
    assert not make_report(own).fits


def test_scaling_divides_work_and_memory():
    points = list(scale(settings(tokens=2**20, train=True), powers(16)))
    assert [x.gpus for x in points] == [1, 2, 4, 8, 16]
    assert all(b.seconds < a.seconds and b.memory < a.memory and b.longest > a.longest for a, b in pairwise(points))
    assert points[0].transport is None
    assert points[0].received == 0


def test_a_billion_tokens_on_4096_gpus():
    own = settings(tokens=10**9, pattern=suggest(10**9, 8).pattern, gpus=4096, is_causal=True)
    report = make_report(own)
    assert report.fits
    assert 0 < report.seconds < 1
    assert report.longest > 10**9


def test_block_sparse_patterns():
    own = settings(pattern=BlockSparse.from_config(SparsePatternConfig("local_window", 0.1)), gpus=4)
    work, found = rank_work(own), explained(own, sharded=True)
    assert 4 * sum(x.pairs for x in work.own) == pytest.approx(found.pairs)
    assert (work.received, work.messages) == (found.sharding.bytes, found.sharding.waits)
    assert make_report(own.on(1)).longest > 65536


def test_settings_that_are_refused():
    for changes, reason in (
        ({"tokens": 0}, "tokens must be an integer from 1"), ({"gpus": 5000}, "gpus must be"), ({"batch": -1}, "batch"),
        ({"heads": 8, "kv_heads": 3}, "heads must be a multiple"), ({"dtype": "int8"}, "dtype must be one of"),
        ({"gpus": 8, "tokens": 4}, "every GPU needs a token"), ({"layout": "spiral"}, "layout must be"),
        ({"pattern": BlockSparse.from_config(SparsePatternConfig("adaptive", 0.1)), "gpus": 2}, "adaptive"),
        ({"pattern": BlockSparse.from_config(SparsePatternConfig("local_window", 0.5)), "tokens": 10**8}, "at most"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            settings(**changes)


def test_suggestions_follow_their_rules():
    """For lengths around every boundary: dense first, multiples, one segment over all, rates no larger than needed."""
    lengths = {1, 2, 100, 2047, 5000, 20_000, 300_000, 10**6, 10**9} | {
        LOCAL * 2**i + d for i in range(20) for d in (-1, 0, 1)
    }
    for tokens in sorted(lengths):
        found = suggest(tokens, 16)
        (first, *_), rates = found.pattern.branches, found.pattern.dilation_rates
        assert first == (min(LOCAL, tokens), 1)
        assert all(b % a == 0 and 2 <= b // a <= 4 for a, b in pairwise(rates))
        assert found.pattern.segment_lengths[-1] >= tokens
        assert len(rates) == 1 or LOCAL * rates[-2] < tokens
        assert all(w == LOCAL * r for w, r in found.pattern.branches) or len(rates) == 1
        assert sum(x.cost for x in found.branches) == pytest.approx(1)
        assert all((x.coverage == 1) == (x.dilation_rate <= 16) for x in found.branches)
        warned = pattern_warnings(found.pattern, tokens, max(rates))
        assert not [text for text in warned if "below" not in text], warned


def test_figures_of_a_suggestion_by_hand():
    found = suggest(8192, 4)
    assert found.pattern.branches == ((2048, 1), (8192, 4))
    assert [(x.tile_rows, x.pairs_per_row, x.reach) for x in found.branches] == [(2048, 2048, 2047), (2048, 512, 8188)]
    assert found.dense_share == (2048 + 512) / 8192
