"""Mistakes between ranks are errors on all ranks within a second or two, and never wrong numbers.

Every case here gave wrong results, or a wait for the timeout of the group, when messages had no identity.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import GroupError, Shards, gather_sequence, shard_sequence
from dilated_attention_pytorch.distributed import executor as executor_module
from dilated_attention_pytorch.distributed.watch import watch_of
from dilated_attention_pytorch.distributed.wire import Wire
from rank_faults import LONG_S, die

N, WORLD = 24, 3
PATTERN = Dilated([8, 64], [1, 2])
SOON_S = 20.0  # on a machine with other tests; the timeout of the group is much longer


def whole(seed: int = 1) -> torch.Tensor:
    return torch.randn(3, 1, N, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(group, seed: int = 1) -> list[torch.Tensor]:
    return [shard_sequence(x, group).requires_grad_() for x in whole(seed)]


def check_right(group, **options) -> None:
    """A call of all ranks gives what one device does."""
    local, inputs = rows(group), [x.requires_grad_() for x in whole()]
    out, expected = attention(*local, PATTERN, group=group, **options), attention(*inputs, PATTERN, **options)
    grads, expected_grads = (torch.autograd.grad(y.square().sum(), x) for y, x in ((out, local), (expected, inputs)))
    for a, e in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, shard_sequence(e, group), rtol=1e-10, atol=1e-10)


class Soon:
    """The block ends long before the timeout of the group."""

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self.start < SOON_S


def check_swapped_backwards(group, transport: str) -> None:
    sharding = Sharding(group, transport=transport)
    pattern = Dilated([64], [1]) if transport == "ulysses" else PATTERN
    calls = [(x := rows(group, seed), attention(*x, pattern, group=sharding)) for seed in (1, 2)]
    if dist.get_rank(group) == 1:
        calls.reverse()

    def backwards() -> None:
        for local, out in calls:
            torch.autograd.grad(out.sum(), local)

    with Soon(), pytest.raises(GroupError, match="run their backwards, in the same order"):
        backwards()
    with Soon(), pytest.raises(GroupError, match=r"the group cannot be used any more: .*init_process_group"):
        attention(*rows(group), PATTERN, group=group)


@pytest.mark.parametrize("transport", ["ring", "allgather", "ulysses"])
def test_swapped_backwards(own_ranks, transport):
    """Rank 1 runs the backwards of two calls in the other order. Gradients were wrong on all ranks."""
    own_ranks.run(2, check_swapped_backwards, transport, timeout_s=LONG_S)


def check_swapped_gatherings(group) -> None:
    x = [torch.randn(1, 2, 3, requires_grad=True) for _ in range(2)]
    sums = [gather_sequence(one, group).sum() for one in x]
    if dist.get_rank(group) == 1:
        x.reverse(), sums.reverse()
    with Soon(), pytest.raises(ValueError, match="these differ:\n  call: 1 on rank 0, 2 on rank 1"):
        torch.autograd.grad(sums[0], x[0])


def test_swapped_gatherings(on_ranks):
    on_ranks(2, check_swapped_gatherings)


OTHER = {
    "offsets": ({"pattern": PATTERN}, {"pattern": Dilated([8, 64], [1, 2], offsets=(1, 0))}, "pattern"),
    "scale": ({"scale": 0.5}, {"scale": 0.25}, "scale"),
    "seed": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": 0.5, "seed": 2}, "seed"),
    "lengths": ({"lengths": (N,)}, {"lengths": (N - 5,)}, "lengths"),
    "shards": ({"rows": [8, 8, 8]}, {"rows": [8, 7, 9]}, "layout"),
}


def check_known_shards(group, name: str, is_causal: bool) -> None:
    """Two sets of arguments that the ranks have agreed on; then rank 0 takes the other one."""
    first, second, argument = OTHER[name]

    def call(options: dict) -> torch.Tensor:
        options = {"pattern": PATTERN, "rows": [8, 8, 8], "is_causal": is_causal, **options}
        layout = Shards.of(options.pop("rows"), "contiguous")
        chunk = layout.chunks[dist.get_rank(group)][0]
        local = [x[:, chunk.start : chunk.stop] for x in whole()]
        return attention(*local, group=Sharding(group, layout, transport="ring"), **options)

    def differently() -> None:
        call(second if dist.get_rank(group) == 0 else first)
        gather_sequence(torch.zeros(1, 1, 1), group)  # rank 0 only sends if causal, and learns it here

    call(first), call(second)
    message = rf"have different arguments in the forward of call 3:\n  {argument}: .* rank 0"
    with Soon(), pytest.raises(GroupError, match=message):
        differently()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", OTHER)
def test_known_shards(own_ranks, name, is_causal):
    """With known shards, arguments are compared once. Those that differ later made results of other ranks wrong."""
    own_ranks.run(WORLD, check_known_shards, name, is_causal, timeout_s=LONG_S)


def check_new_arguments(group) -> None:
    """Rank 1 calls with arguments that have not been compared, the others with arguments that have."""
    layout = Shards.of([8] * WORLD, "contiguous")
    local = [x.detach() for x in rows(group)]
    attention(*local, PATTERN, group=group, layout=layout)
    message = "rank [012] is in (a comparison|the forward of call 2) and rank [012] in (a comparison|the forward of call 2)"
    with Soon(), pytest.raises(GroupError, match=message):
        attention(*local, PATTERN, group=group, layout=layout, scale=0.25 if dist.get_rank(group) == 1 else None)


def test_arguments_that_one_rank_compares(own_ranks):
    own_ranks.run(WORLD, check_new_arguments, timeout_s=LONG_S)


def check_refused_with_known_shards(group) -> None:
    layout, rank = Shards.of([8] * WORLD, "contiguous"), dist.get_rank(group)
    local = [x.detach() for x in rows(group)]
    attention(*local, PATTERN, group=group, layout=layout)
    error, message = (
        (ValueError, "scale must be") if rank == 1 else (GroupError, "rank 1 refused its arguments: scale must be")
    )
    with Soon(), pytest.raises(error, match=message):
        attention(*local, PATTERN, group=group, layout=layout, scale=float("nan") if rank == 1 else None)


def test_a_refusal_with_known_shards(own_ranks):
    own_ranks.run(WORLD, check_refused_with_known_shards, timeout_s=LONG_S)


def check_messages_of_the_user(group) -> None:
    """A receive of the user that is under way, on the same group with the default tag."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.full((1000,), -1.0, dtype=torch.float64)
    receive = dist.irecv(mine, (rank - 1) % world, group)
    check_right(group)
    dist.send(torch.full((1000,), float(rank), dtype=torch.float64), (rank + 1) % world, group)
    receive.wait()
    assert torch.equal(mine, torch.full_like(mine, (rank - 1) % world))


def test_messages_of_the_user(on_ranks):
    """They took the place of ours: the output was wrong, or the process ended."""
    on_ranks(WORLD, check_messages_of_the_user)


def check_before_the_comparison(group) -> None:
    rank, local = dist.get_rank(group), [x.detach() for x in rows(group)]
    sparse = local[0][0, :, :, 0].to_sparse() if rank == 1 else local[0]
    error, message = (TypeError, "sparse") if rank == 1 else (ValueError, "^rank 1 refused its arguments: .*sparse")
    with Soon(), pytest.raises(error, match=message):
        attention(sparse, *local[1:], PATTERN, group=group)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            missing = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            patch.setattr(Wire, "__init__", lambda *_: (_ for _ in ()).throw(missing))
        error = torch.OutOfMemoryError if rank == 1 else ValueError
        with (
            Soon(),
            pytest.raises(error, match="" if rank == 1 else "^rank 1 refused its arguments: OutOfMemoryError: CUDA out"),
        ):
            attention(*local, PATTERN, group=group)
    check_right(group)


def test_errors_before_the_comparison(on_ranks):
    on_ranks(WORLD, check_before_the_comparison)


def check_error_in_a_tile(group, everywhere: bool, backward: bool) -> None:
    """A tile needs too much memory, on rank 1 or on every rank."""
    rank, local = dist.get_rank(group), rows(group)
    name = "add_gradients_" if backward else "attend_"
    plain, count = getattr(executor_module.loop, name), []

    def attend_(*args):
        count.append(1)
        if len(count) == 2 and (everywhere or rank == 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return plain(*args)

    def run() -> None:
        out = attention(*local, PATTERN, group=Sharding(group, bucket_size=2, transport="ring"))
        if backward:
            torch.autograd.grad(out.sum(), local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module.loop, name, attend_)
        if everywhere or rank == 1:
            with Soon(), pytest.raises(torch.OutOfMemoryError) as raised:
                run()
            notes = "".join(getattr(raised.value, "__notes__", []))
            assert ("Messages of the backward of call 1 were under way" in notes) == backward
        elif backward:
            with (
                Soon(),
                pytest.raises(GroupError, match="rank 1 raised OutOfMemoryError in the backward of call 1: CUDA out"),
            ):
                run()
        else:
            run()
    if not backward:
        check_right(group)
        return
    with Soon(), pytest.raises(GroupError, match=r"cannot be used any more: rank [012] raised .* init_process_group"):
        attention(*local, PATTERN, group=group)


@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "every rank"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_error_in_a_tile(own_ranks, everywhere, backward):
    """A forward exchanges its messages all the same. A backward has none to send, and the group is given up."""
    own_ranks.run(WORLD, check_error_in_a_tile, everywhere, backward, timeout_s=LONG_S)


def check_death(group, backward: bool) -> None:
    """The last rank ends in the middle of a call; all others name it, also those that wait for a rank that is there."""
    rank, last, local = dist.get_rank(group), dist.get_world_size(group) - 1, rows(group)
    pattern, plain, count = Dilated([7], [1]), Wire.start, []

    def start(self, *args):
        count.append(1)
        if len(count) == 2:
            die()
        return plain(self, *args)

    out = attention(*local, pattern, group=Sharding(group, bucket_size=1, transport="ring")) if backward else None

    def run() -> None:
        if out is not None:
            torch.autograd.grad(out.sum(), local)
        else:
            attention(*local, pattern, group=Sharding(group, bucket_size=1, transport="ring"))
        gather_sequence(torch.zeros(1, 1, 1), group)  # ranks that need nothing of the others learn it here

    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(Wire, "start", start)
        with Soon(), pytest.raises(GroupError, match=f": rank {last} (has ended|did not take part and did not answer)"):
            run()
    dist.destroy_process_group()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_all_ranks_name_the_one_that_died(own_ranks, backward):
    own_ranks.run(5, check_death, backward, leaving=[4], timeout_s=LONG_S)


def check_stopped(group) -> None:
    """The last rank is stopped, as by SIGSTOP; the others name it when the timeout is over, and not later."""
    rank, last, local = dist.get_rank(group), dist.get_world_size(group) - 1, rows(group)
    check_right(group)
    if rank == last:
        time.sleep(0.5)
        if os.fork() == 0:  # wakes it up again
            time.sleep(8)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    start = time.monotonic()
    with pytest.raises(
        GroupError, match=f": rank {last} did not take part and did not answer, so it has ended or was stopped"
    ):
        attention(*local, PATTERN, group=group)
    assert time.monotonic() - start < 4 + 1.5


def test_a_stopped_rank(own_ranks):
    own_ranks.run(WORLD, check_stopped, timeout_s=4)


def check_death_after_a_long_wait(group) -> None:
    """Answers to questions of an earlier wait do not show that a rank is there."""
    rank, local = dist.get_rank(group), [x.detach() for x in rows(group)]
    if rank == 1:
        time.sleep(2.5)  # the others ask what it does
    attention(*local, PATTERN, group=group)
    if rank == 2:
        die()
    with Soon(), pytest.raises(GroupError, match=": rank 2 did not take part and did not answer"):
        attention(*local, PATTERN, group=group)
    dist.destroy_process_group()


def test_a_rank_that_dies_after_a_long_wait(own_ranks):
    own_ranks.run(WORLD, check_death_after_a_long_wait, leaving=[2], timeout_s=LONG_S)


def hold_the_store(rank: int, port: int, results: list, act: str) -> None:
    """A rank of a group whose store is in the process of rank 0, which dies, or ends before the others are done."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=LONG_S)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4, timeout=timeout
    )  # fmt: skip
    group, local = dist.group.WORLD, [x.detach() for x in rows(dist.group.WORLD)]
    attention(*local, Dilated([7], [1]), group=group)
    if rank == 0 and act == "die":
        os._exit(0)
    start = time.monotonic()
    try:
        if act == "die":
            attention(*local, Dilated([7], [1]), group=group)
            results.append((rank, "no error", 0.0))
        else:  # rank 1 is slow, and rank 0 has ended with nothing left to do
            if rank == 0:
                os._exit(0)
            watch = watch_of(group)
            with watch.turn("a transfer"), watch.waiting("send or receive", 3 - rank):
                if rank == 1:
                    time.sleep(3.0)
                    dist.send(torch.ones(1), 2)
                elif rank == 2:
                    dist.recv(torch.zeros(1), 1)
            results.append((rank, "right", 0.0))
    except GroupError as error:
        results.append((rank, str(error), time.monotonic() - start))
    os._exit(0)


@pytest.mark.parametrize("act", ["die", "end"])
def test_the_process_that_holds_the_store(act):
    """If it dies, all others raise soon. If it has only ended early, a call that does not need it is not disturbed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    with context.Manager() as manager:
        results = manager.list()
        processes = [context.Process(target=hold_the_store, args=(rank, port, results, act)) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        found = sorted(results)
    assert [rank for rank, _, _ in found] == [1, 2, 3]
    if act == "end":
        assert {text for _, text, _ in found} == {"right"}
    else:
        assert all("could not" in text and seconds < SOON_S for _, text, seconds in found), found
