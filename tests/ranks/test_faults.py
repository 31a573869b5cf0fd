"""What goes wrong across ranks is a sentence on every rank: mistakes before anything is sent, dead and stalled ranks within
the group's timeout, and a new group works in the same processes."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingDistributedDilatedAttention,
    Dilated,
    Hilbert,
    MultiheadDilatedAttention,
    Sharding,
    attention,
    dilated_attention,
)
from dilated_attention_pytorch.distributed import Shards, agreement, gather_sequence, local_device, shard_sequence
from dilated_attention_pytorch.distributed.agreement import Arguments, differences
from dilated_attention_pytorch.distributed.failures import GroupError
from dilated_attention_pytorch.distributed.watch import Watch, watch_of
from dilated_attention_pytorch.distributed.wire import Wire
from rank_faults import LONG_S, TIMEOUT_S, WORLD, answer_and_die, die, stall
from ring_cases import sharded

PATTERN = Dilated([8, 64], [1, 2])


def whole() -> torch.Tensor:
    return torch.randn(3, 1, 24, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_call(group) -> None:
    """A call of all ranks, forward and backward, gives what one device does."""
    local = [shard_sequence(x, group).requires_grad_() for x in whole()]
    out = attention(*local, PATTERN, group=Sharding(group, bucket_size=2, transport="ring"))
    grads = torch.autograd.grad(out.square().sum(), local)
    inputs = [x.requires_grad_() for x in whole()]
    expected = attention(*inputs, PATTERN)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, shard_sequence(e, group), rtol=1e-10, atol=1e-10)


def check_mistakes(group) -> None:
    rank, x = dist.get_rank(), torch.randn(1, 4, 2, 8, requires_grad=True)

    def refused(match: str, *args, error=ValueError, **options) -> None:
        with pytest.raises(error, match=match):
            attention(*(args or (x, x, x)), **sharded(group, **{"pattern": PATTERN, **options}))

    # The same mistake is the same error on every rank; what differs is named, and nothing else.
    only = "these differ:\n  {}$"
    refused(
        only.format(r"pattern: 'dilated\|4\|1\|.*' on rank 0, 'dilated\|5\|.*' on rank 1, '.*' on rank 2"),
        pattern=Dilated([4 + rank], [1]),
    )
    refused(only.format("is_causal: False on ranks 0, 2, True on rank 1"), is_causal=rank == 1)
    refused(only.format("bucket_size: 7 on ranks 0, 1, None on rank 2"), bucket_size=None if rank == 2 else 7)
    refused(only.format("seed: 0 on rank 0, 1 on rank 1, 2 on rank 2"), dropout_p=0.1, seed=rank)
    refused(only.format("dtype: .*float64.*"), *[x.double() if rank == 0 else x] * 3)
    refused(only.format("requires_grad: True on ranks 0, 1, False on rank 2"), *[x.detach() if rank == 2 else x] * 3)
    refused("lengths: .* on ranks 0, 1, .* on rank 2", lengths=torch.tensor([12 - rank // 2]))
    # A mistake that one rank alone can see is its own error, and the others are told.
    mine = [x, x[:, :2], x[:, :2]] if rank == 1 else [x, x, x]
    refused("at most as many as keys" if rank == 1 else "^rank 1 refused its arguments: .*at most as many as keys", *mine)
    bad = "query" if rank == 2 else x
    told = "query must be a torch.Tensor, got str"
    refused(
        told if rank == 2 else f"rank 2 refused its arguments: {told}",
        bad,
        x,
        x,
        error=TypeError if rank == 2 else ValueError,
    )
    with pytest.raises(ValueError, match="need the same number" if rank == 1 else "^rank 1 refused .*need the same number"):
        dilated_attention(x, x, x, [8, 64], [1] if rank == 1 else [1, 2], group=group)
    refused("has no torchscale_padding", pattern=Dilated([4], [1], torchscale_padding=True))
    refused("backend 'hopper' cannot serve this call", backend="hopper")
    refused("backend 'reference' needs whole sequences", backend="reference")
    refused("sdpa' cannot serve this call:\n.*dropout", backend="sdpa", dropout_p=0.5)
    # Whole sequences instead of shards.
    look = "these look like whole sequences, not shards"
    refused(
        f"{look}: each of 3 ranks has 4 rows, together 12, but lengths ends at 4; use shard_sequence",
        lengths=torch.tensor([4]),
    )
    # A batch of short samples looks the same; the error says how to call with it.
    short: dict = {"lengths": torch.tensor([3])}
    refused(r"If the rest is padding, .*: layout=Shards.of\(\[4\] \* 3, ...\)$", **short)
    out = attention(x, x, x, PATTERN, group=group, layout=Shards.of([4] * 3, "contiguous"), **short)
    expected = attention(x, x, x, PATTERN, **short) if rank == 0 else torch.zeros_like(x)
    torch.testing.assert_close(out, expected)
    refused(f"{look}.*cu_seqlens ends at 4", cu_seqlens=torch.tensor([0, 1, 4]))
    shards = Shards.of([1, 2, 1], "contiguous")
    refused(f"a shard of [12] rows, its tensors have 4; {look}: use shard_sequence", layout=shards)
    refused("lengths must lie between 0 and the 12 positions", lengths=torch.tensor([13]))
    # Heads are exchanged where that is possible.
    refused("the pattern must be one dense segment", transport="ulysses")
    refused("2 key heads for 3 ranks", pattern=Dilated([12], [1]), transport="ulysses")
    refused(
        "bucket_size and comm_dtype are for transports that send rows",
        pattern=Dilated([12], [1]),
        transport="ulysses",
        bucket_size=1,
    )
    check_call(group)  # the group works on after mistakes


def test_mistakes(on_ranks):
    on_ranks(WORLD, check_mistakes)


def check_modules(group) -> None:
    rank, x = dist.get_rank(group), torch.randn(2, 4, 16)
    dilated = MultiheadDilatedAttention(16, 2, [8, 64], [1, 2], group=group)
    tiered = BlockSparseRingDistributedDilatedAttention(16, 2, group=group)
    compiled = torch.compile(dilated, backend="eager")
    mask = torch.zeros(2, 4, dtype=torch.bool)
    for module in (dilated, tiered, compiled)[: dist.get_world_size(group)]:
        for error, message, wrong, more in (
            (ValueError, r"query must be \(batch, sequence, 16\), .* got \(2, 4, 15\)", x[..., 1:], {}),
            (ValueError, r"query must be .* got \(1, 2, 4, 16\)", x[None], {}),
            (TypeError, "query must be a torch.Tensor, got list", [1.0], {}),
            (TypeError, "query must have the dtype of the module's weights, got torch.float64 and", x.double(), {}),
            (ValueError, "attn_mask needs the whole sequence", x, {"attn_mask": mask}),
            (ValueError, "key_padding_mask needs the whole sequence", x, {"key_padding_mask": mask}),
            (ValueError, "need_weights=True needs the whole sequence", x, {"need_weights": True}),
        ):
            if rank == 1:
                with pytest.raises(error, match=message):
                    module(wrong, wrong, wrong, **more)
            else:
                with pytest.raises(ValueError, match=f"(?s)^rank 1 refused its arguments: .*{message}"):
                    module(x, x, x)
        # What only a comparison shows is the same error on every rank; and the group works on.
        with pytest.raises(ValueError, match="these differ:\n  batch: 2 on rank"):
            module(*[x[:1] if rank == 1 else x] * 3)
        assert module(x, x, x)[0].shape == x.shape
    sparse = BlockSparseRingDilatedAttention([8, 64], [1, 2], group=group)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="value without key"):
        sparse(q, None, q if rank == 1 else None)
    # Ranks that make different calls.
    with pytest.raises(ValueError, match="must make the same call, got a pattern by rank on rank 0, attention on rank"):
        (tiered if rank == 0 else dilated)(x, x, x)


@pytest.mark.parametrize("world", [2, 3])
def test_modules(on_ranks, world):
    """What a module refuses, or cannot project, before it attends: the others are told, by whichever module."""
    on_ranks(world, check_modules, spare=3 - world)


def check_gathering(group) -> None:
    rank, x = dist.get_rank(group), torch.randn(2, 4, 6)
    for message, wrong, options in (
        (r"other_dims: \(2, 6\) on rank.*, \(2, 5\) on rank 1", x[..., 1:], {}),
        ("dtype: 'torch.float32' on .*, 'torch.float64' on rank 1", x.double(), {}),
        ("requires_grad: False on .*, True on rank 1", x.clone().requires_grad_(), {}),
        ("layout: 'contiguous' on .*, 'zigzag' on rank 1", x, {"layout": "zigzag"}),
        ("order: None on .*, '12 positions, .*' on rank 1", x, {"order": Hilbert.line(12)}),
    ):
        with pytest.raises(ValueError, match=f"these differ:\n  {message}"):
            gather_sequence(*(wrong, group) if rank == 1 else (x, group), **options if rank == 1 else {})
    with pytest.raises(ValueError, match="dim must be one of the 3 dimensions"):
        gather_sequence(x, group, dim=3 if rank == 1 else 1)
    assert gather_sequence(x, group).shape == (2, 4 * dist.get_world_size(group), 6)


@pytest.mark.parametrize("world", [2, 3])
def test_gathering(on_ranks, world):
    """Tensors that do not go together are named; collectives would end the process."""
    on_ranks(world, check_gathering, spare=3 - world)


def check_known_shards(group) -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([p]) for p in range(WORLD)][rank]
    x = torch.randn(1, 2 + rank, 2, 8)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        plain = agreement._gather
        patch.setattr(agreement, "_gather", lambda *a: (calls.append(1), plain(*a))[1])
        shards = Shards.of([2, 3, 4], "contiguous")
        results = [attention(x, x, x, PATTERN, group=dist.group.WORLD, layout=shards) for _ in range(3)]
        assert len(calls) == 1
        assert torch.equal(results[0], results[2])
        assert torch.equal(attention(x, x, x, PATTERN, group=dist.group.WORLD), results[0])
        assert len(calls) == 2
        for name in ("all_gather", "all_gather_object", "batch_isend_irecv", "isend", "irecv"):
            patch.setattr(dist, name, lambda *a, **b: pytest.fail("one rank communicates with nobody"))
        for transport in ("auto", "ring", "allgather"):
            out = attention(x, x, x, PATTERN, group=Sharding(alone, transport=transport))
            assert torch.equal(out, attention(x, x, x, PATTERN))
    with pytest.raises(ValueError, match="these differ:\n  seed"):  # a new combination is compared again
        attention(x, x, x, PATTERN, group=dist.group.WORLD, layout=shards, dropout_p=0.1, seed=rank)


def test_known_shards(on_ranks):
    """Ranks that know all lengths compare their arguments once; a group of one never does."""
    on_ranks(WORLD, check_known_shards)


def check_numbers(group) -> None:
    rank, world, sent = dist.get_rank(group), dist.get_world_size(group), []
    with pytest.MonkeyPatch.context() as patch:
        plain = dist.isend
        patch.setattr(dist, "isend", lambda *a: (sent.append(a[1]), plain(*a))[1])
        for number in range(3):
            every = agreement._gather(group, [-number, 2**62 + rank, rank])
            assert every == [[-number, 2**62 + p, p] for p in range(world)]
    rounds = math.ceil(math.log2(world))
    assert len(set(sent)) == rounds
    assert len(sent) == 3 * rounds


@pytest.mark.parametrize(("world", "spare"), [(2, 1), (3, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 0)])
def test_every_rank_gets_the_numbers_of_all(on_ranks, world, spare):
    """In as many rounds as the logarithm of the ranks, also in a group that is not the default group."""
    on_ranks(world, check_numbers, spare=spare)


def check_stalled_gathering(group, backward: bool) -> None:
    rank, plain = dist.get_rank(), Watch.begin
    x = torch.randn(1, 4, 2, requires_grad=backward)

    def late(self, label, *args):
        if rank == 2 and label == ("the backward of gather_sequence" if backward else "gather_sequence"):
            stall()
        return plain(self, label, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "begin", late)
        task = "add up the gradients of all" if backward else "gather the rows of the others"
        blamed = "rank 2 did not take part within the timeout of the group"  # rank 2 also learns that the others gave up
        with pytest.raises(GroupError, match=rf"^rank {rank} could not {task}: {blamed}.*the call can be repeated"):
            gather_sequence(x, dist.group.WORLD).sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_stalls_in_a_gathering(own_ranks, backward):
    """A rank that stalls once the ranks have compared their arguments, or on the way back."""
    own_ranks.run(WORLD, check_stalled_gathering, backward, timeout_s=TIMEOUT_S)
    own_ranks.run(WORLD, check_call)


def check_never_there(group, act) -> None:
    rank, local = dist.get_rank(), [shard_sequence(x, group) for x in whole()]
    attention(*local, PATTERN, group=group)  # starts the threads that answer the questions of other ranks
    # A rank is through init_process_group while others may still connect to it.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected {rank}", "yes")
    if rank == 2:
        store.wait([f"connected {other}" for other in range(WORLD)])
        act()
    others = "" if rank == 2 else "rank 2 did not take part"
    with pytest.raises(GroupError, match=rf"^rank {rank} could not compare its arguments with the others: {others}"):
        attention(*local, PATTERN, group=group)


def test_a_rank_that_comes_late(own_ranks):
    """Rank 2 comes to the call when the others have given up."""
    own_ranks.run(WORLD, check_never_there, stall, timeout_s=TIMEOUT_S)
    own_ranks.run(WORLD, check_call)


@pytest.mark.parametrize("act", [die, answer_and_die])
def test_a_rank_that_dies_before_a_call(own_ranks, act):
    own_ranks.run(WORLD, check_never_there, act, leaving=[2], timeout_s=LONG_S)
    own_ranks.run(2, check_call)


MESSAGE = r"^rank \d could not (send|receive) keys and values (to|from) rank \d, round \d, message \d"


def check_failure(group, act, message: str) -> None:
    """Rank 2 acts at its third exchange of the forward; the others raise and say who failed whom, and where."""
    local = [shard_sequence(x, group) for x in whole()]
    count = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            plain = Wire.start

            def start(*args):
                count.append(1)
                if len(count) == 3:
                    act()
                return plain(*args)

            patch.setattr(Wire, "start", start)
        with pytest.raises(GroupError, match=message) as raised:
            attention(*local, PATTERN, group=Sharding(group, bucket_size=1, transport="ring"))
        if dist.get_rank() != 2:
            assert re.search(r": rank 2 (did not take part|has ended)", str(raised.value)), raised.value
        assert raised.value.__cause__ is not None
        assert "the call can be repeated" in str(raised.value)
    dist.destroy_process_group()  # as the error asks; a rank that waits for this one notices it


def test_a_rank_that_stalls(own_ranks):
    own_ranks.run(WORLD, check_failure, stall, MESSAGE, timeout_s=TIMEOUT_S)
    own_ranks.run(WORLD, check_call)


def test_a_rank_that_dies(own_ranks):
    message = r"^rank \d could not .* rank \d, round \d, message \d"
    own_ranks.run(WORLD, check_failure, die, message, leaving=[2], timeout_s=LONG_S)
    own_ranks.run(2, check_call)


def check_backward(group) -> None:
    """Rank 2 dies between forward and backward."""
    local = [shard_sequence(x, group).requires_grad_() for x in whole()]
    out = attention(*local, PATTERN, group=group)
    if dist.get_rank() == 2:
        die()
    with pytest.raises(
        RuntimeError, match=r"rank \d could not (send|receive) (gradients|keys and values) (to|from) rank \d"
    ):
        torch.autograd.grad(out.sum(), local)
    dist.destroy_process_group()


def test_a_rank_that_dies_before_the_backward(own_ranks):
    own_ranks.run(WORLD, check_backward, leaving=[2], timeout_s=2 * TIMEOUT_S)
    own_ranks.run(2, check_call)


def test_differences_are_short():
    def arguments(**values) -> Arguments:
        return Arguments("attention", tuple(({"batch": 1, "lengths": None, "scale": 1.0} | values).items()))

    text = differences([arguments(lengths=tuple(range(a, 9999))) for a in (0, 0, 1)])
    assert len(text) < 700
    assert "lengths: (0, 1, 2" in text
    assert "on ranks 0, 1, (1, 2, 3" in text
    assert "batch" not in text
    one, other = (arguments(scale=scale) for scale in (0.5, 0.25))
    assert one.hash != other.hash
    assert 0 <= one.hash < 2**63


def check_duplicate_gpu(group) -> None:
    nccl = RuntimeError("NCCL error ... Duplicate GPU detected : rank 1 and rank 0")
    advice = r"init_process_group\('gloo'\), which sends through host memory .*\(rank 0 could not compare\)"
    with pytest.raises(GroupError, match=advice), watch_of(group).waiting("compare"):
        raise nccl


def test_two_ranks_on_one_gpu(on_ranks):
    on_ranks(1, check_duplicate_gpu)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    for gpus, expected in ((0, "cpu"), (4, "cuda:3"), (8, "cuda:3")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert local_device() == torch.device(expected)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"4 ranks on a machine with 2 GPU\(s\)\. NCCL wants a GPU for every rank"):
        local_device()
