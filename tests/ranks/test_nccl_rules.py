"""The rules of NCCL over gloo (``support/nccl_rules.py``): what breaks them is caught, and sharded calls keep them."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from nccl_rules import RuleError, nccl_rules

WAIT_S = 2.0  # of operations that never end


def swap(group, *tags: int) -> tuple[list[dist.P2POp], torch.Tensor, torch.Tensor]:
    """Operations that exchange two numbers between ranks 0 and 1: the operations, what is sent and what is received."""
    rank = dist.get_rank(group)
    peer, sent, received = dist.get_process_group_ranks(group)[1 - rank], torch.full((2,), 1.0 + rank), torch.zeros(2)
    operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    return operations, sent, received


def connect(group) -> None:
    dist.all_reduce(torch.zeros(1), group=group)


def check_first(group) -> None:
    rank = dist.get_rank(group)
    operations, _, received = swap(group)
    with nccl_rules(group):
        with pytest.raises(RuleError, match=rf"first operation .* must be a collective of all ranks, got on rank {rank} a"):
            dist.batch_isend_irecv(operations)
        connect(group)
        (handle,) = dist.batch_isend_irecv(operations)
        assert received.isnan().all()  # undefined until it has arrived
        handle.wait()
    assert received.tolist() == [2.0 - rank] * 2


def test_the_first_operation_is_a_collective(on_ranks):
    on_ranks(2, check_first, spare=1)


def check_order(group, wrong: str) -> None:
    """Both ranks send, then receive; or one begins with a collective, the other with a message."""
    rank = dist.get_rank(group)
    (send, receive), _, received = swap(group)
    if wrong == "two batches":
        steps = [lambda: dist.batch_isend_irecv([send]), lambda: dist.batch_isend_irecv([receive])]
    else:
        first = [lambda: dist.batch_isend_irecv([send, receive]), lambda: dist.all_reduce(torch.zeros(3), group=group)]
        steps = first if rank == 0 else first[::-1]
    here = ("a batch: send 2 x float32 to rank 1", "a batch: send 2 x float32 to rank 0")
    if wrong != "two batches":
        here = ("a batch: send 2 x float32 to rank 1, receive 2 x float32 from rank 1", "all_reduce of 3 x float32")
    stand = rf"(?s)orders that fit .* within {WAIT_S} s:\n  rank 0: operation 2, {here[0]}\n  rank 1: operation 2, {here[1]}"
    with pytest.raises(RuleError, match=stand), nccl_rules(group, timeout_s=WAIT_S):
        connect(group)
        for step in steps:
            step()
    assert wrong == "a collective" or received.isnan().all()


@pytest.mark.parametrize("wrong", ["two batches", "a collective"])
def test_orders_that_do_not_fit(on_ranks, wrong):
    """The second operation of a rank does not start before the first has ended, on any rank."""
    on_ranks(2, check_order, wrong)


def check_sizes(group, here: torch.Tensor, there: torch.Tensor, message: str) -> None:
    rank = dist.get_rank(group)
    with pytest.raises(RuleError, match=message), nccl_rules(group, timeout_s=WAIT_S):
        connect(group)
        operation = dist.isend if rank == 0 else dist.irecv
        (handle,) = dist.batch_isend_irecv([dist.P2POp(operation, here if rank == 0 else there, 1 - rank, group)])
        handle.wait()


@pytest.mark.parametrize(
    ("here", "there"),
    [(torch.zeros(4), torch.zeros(5)), (torch.zeros(4), torch.zeros(4, dtype=torch.float64))],
    ids=["count", "type"],
)
def test_sizes_of_both_ends(on_ranks, here, there):
    on_ranks(2, check_sizes, here, there, r"as many elements of one type, got: rank \d (sends|receives) \d x torch.float")


def check_swapped_sizes(group) -> None:
    """Two messages whose tags fit and whose order does not: NCCL has no tags."""
    rank = dist.get_rank(group)
    sizes = {7: 3, 8: 4}
    with pytest.raises(RuleError, match="as many elements"), nccl_rules(group, timeout_s=WAIT_S):
        connect(group)
        for tag in (7, 8) if rank == 0 else (8, 7):
            operation = dist.isend if rank == 0 else dist.irecv
            dist.batch_isend_irecv([dist.P2POp(operation, torch.zeros(sizes[tag]), 1 - rank, group, tag)])


def test_messages_in_another_order(on_ranks):
    on_ranks(2, check_swapped_sizes)


def check_no_tags(group) -> None:
    """Messages of equal size meet in the order of posting, whatever their tags are; sends are read when executed."""
    rank = dist.get_rank(group)
    tensors = [torch.zeros(2) + i + 1 for i in range(3)]
    with nccl_rules(group):
        connect(group)
        operation = dist.isend if rank == 0 else dist.irecv
        tags = (7, 8, 9) if rank == 0 else (9, 8, 7)
        if rank == 1:
            dist.barrier(group=dist.group.WORLD)  # of the host: rank 0 has posted and overwritten
        works = [dist.batch_isend_irecv([dist.P2POp(operation, x, 1 - rank, group, t)]) for x, t in zip(tensors, tags)]
        if rank == 0:
            tensors[2].fill_(30.0)
            dist.barrier(group=dist.group.WORLD)
        for (work,) in works:
            work.wait()
            assert work.is_completed()
    assert [x[0].item() for x in tensors] == [1.0, 2.0, 30.0]


def test_messages_meet_in_the_order_of_posting(on_ranks):
    on_ranks(2, in_a_group_of_its_own, check_no_tags)


def in_a_group_of_its_own(group, check, *arguments) -> None:
    """The check in a group beside the default group, which stays without rules."""
    check(dist.new_group(), *arguments)


def check_collectives(group) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with nccl_rules(group):
        x = torch.full((2,), float(rank))
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        every = [torch.empty(1) for _ in range(world)]
        dist.all_gather(every, torch.tensor([float(rank)]), group=group)
        flat = torch.empty(world)
        dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]), group=group)
        turned = torch.empty(world)
        dist.all_to_all_single(turned, torch.arange(world) + 10.0 * rank, group=group)
        with pytest.raises(RuleError, match=r"contiguous, got strides \(1, 2\)"):
            dist.all_reduce(torch.zeros(2, 2).t(), group=group)
    assert x.tolist() == [world * (world - 1) / 2] * 2
    assert torch.cat(every).tolist() == flat.tolist() == list(range(world))
    assert turned.tolist() == [10.0 * p + rank for p in range(world)]
    with pytest.raises(RuleError, match="all ranks must make the same collective, got all_reduce of 1 el.*all_gather of 4"):
        with nccl_rules(group, timeout_s=WAIT_S):
            if rank == 1:
                dist.all_gather(every, torch.zeros(1), group=group)
            else:
                dist.all_reduce(torch.zeros(1), group=group)


def test_collectives(on_ranks):
    on_ranks(3, check_collectives)
