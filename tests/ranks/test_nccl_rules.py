"""The rules of NCCL over gloo (``support/nccl_rules.py``): what breaks them is caught, and sharded calls keep them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from block_cases import config
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, attention
from dilated_attention_pytorch.distributed import Shards, gather_sequence
from dilated_attention_pytorch.distributed.failures import GroupError
from nccl_rules import RuleError, nccl_rules
from rank_faults import LONG_S, die

PATTERN = Dilated([8, 24], [1, 2])
WAIT_S = 2.0  # of operations that never end


def swap(group) -> tuple[list[dist.P2POp], torch.Tensor, torch.Tensor]:
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


def run_under_rules(group, steps) -> None:
    """Make the communicator, then post operations."""
    with nccl_rules(group, timeout_s=WAIT_S):
        connect(group)
        for step in steps:
            step()


def check_order(group, wrong: str) -> None:
    """Both ranks send, then receive; or one begins with a collective, the other with a message."""
    rank = dist.get_rank(group)
    (send, receive), _, received = swap(group)
    if wrong == "two batches":
        steps = [lambda: dist.batch_isend_irecv([send]), lambda: dist.batch_isend_irecv([receive])]
        here = ("a batch: send 2 x float32 to rank 1", "a batch: send 2 x float32 to rank 0")
    else:
        steps = [lambda: dist.batch_isend_irecv([send, receive]), lambda: dist.all_reduce(torch.zeros(3), group=group)]
        steps = steps if rank == 0 else steps[::-1]
        here = ("a batch: send 2 x float32 to rank 1, receive 2 x float32 from rank 1", "all_reduce of 3 x float32")
    stand = rf"\n  rank 0: operation 2, {here[0]}\n  rank 1: operation 2, {here[1]}"
    with pytest.raises(RuleError, match=rf"(?s)orders that fit .* within {WAIT_S} s:{stand}"):
        run_under_rules(group, steps)
    assert wrong == "a collective" or received.isnan().all()


@pytest.mark.parametrize("wrong", ["two batches", "a collective"])
def test_orders_that_do_not_fit(on_ranks, wrong):
    """The second operation of a rank does not start before the first has ended, on any rank."""
    on_ranks(2, check_order, wrong)


def check_sizes(group, here: torch.Tensor, there: torch.Tensor, message: str) -> None:
    rank = dist.get_rank(group)
    operation, x = (dist.isend, here) if rank == 0 else (dist.irecv, there)
    with pytest.raises(RuleError, match=message):
        run_under_rules(group, [lambda: dist.batch_isend_irecv([dist.P2POp(operation, x, 1 - rank, group)])])


@pytest.mark.parametrize(
    ("here", "there"),
    [(torch.zeros(4), torch.zeros(5)), (torch.zeros(4), torch.zeros(4, dtype=torch.float64))],
    ids=["count", "type"],
)
def test_sizes_of_both_ends(on_ranks, here, there):
    on_ranks(2, check_sizes, here, there, r"as many elements of one type, got: rank \d (sends|receives) \d x torch.float")


def check_swapped_sizes(group) -> None:
    """Two messages whose tags fit and whose order does not: NCCL has no tags."""
    rank, sizes = dist.get_rank(group), {7: 3, 8: 4}

    def post(tag: int) -> None:
        operation = dist.isend if rank == 0 else dist.irecv
        dist.batch_isend_irecv([dist.P2POp(operation, torch.zeros(sizes[tag]), 1 - rank, group, tag)])

    tags = (7, 8) if rank == 0 else (8, 7)
    with pytest.raises(RuleError, match="as many elements"):
        run_under_rules(group, [lambda tag=tag: post(tag) for tag in tags])


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
        pairs = zip(tensors, tags, strict=True)
        works = [dist.batch_isend_irecv([dist.P2POp(operation, x, 1 - rank, group, tag)]) for x, tag in pairs]
        if rank == 0:
            tensors[2].fill_(30.0)
            dist.barrier(group=dist.group.WORLD)
        for (work,) in works:
            work.wait()
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

    def gather() -> None:
        dist.all_gather(every, torch.zeros(1), group=group)

    def add() -> None:
        dist.all_reduce(torch.zeros(1), group=group)

    with pytest.raises(RuleError, match=r"must make the same collective, got all_reduce of 1 el.*all_gather of 4"):
        run_under_rules(group, [gather if rank == 1 else add])


def test_collectives(on_ranks):
    on_ranks(3, check_collectives)


def check_first_call(group, only_nccl: bool) -> None:
    """Ranks 0 and 1 share a document, and rank 2 exchanges nothing; then a call without any message."""
    rank = dist.get_rank(group)
    x = torch.randn(1, 24, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = slice(8 * rank, 8 * rank + 8)
    for number, cuts in enumerate(([0, 12, 16, 24], [0, 8, 16, 24])):
        own = x[:, mine].clone().requires_grad_()
        # A group without a communicator for each, with ranks that have other numbers in the default group.
        fresh = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        with nccl_rules(fresh, number, only_nccl=only_nccl):
            out = attention(own, own, own, PATTERN, cu_seqlens=torch.tensor(cuts), group=fresh)
            (grad,) = torch.autograd.grad(out.square().sum(), own)
            whole = gather_sequence(out.detach(), fresh)
        one = x.clone().requires_grad_()
        expected = attention(one, one, one, PATTERN, cu_seqlens=torch.tensor(cuts), backend="reference")
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), one)
        torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grad, expected_grad[:, mine], rtol=0, atol=1e-10)


@pytest.mark.parametrize("only_nccl", [False, True])
def test_first_call_without_messages(on_ranks, only_nccl):
    """The communicator is made by all ranks, also by those that have nothing to send, with and without gloo."""
    on_ranks(3, check_first_call, only_nccl, spare=1)


def check_backwards(group) -> None:
    """Two calls of the same sizes, whose backwards rank 1 runs in the other order."""
    rank = dist.get_rank(group)
    inputs = [own.clone().requires_grad_() for own in torch.randn(2, 1, 8, 2, 4)]

    def train() -> None:
        with nccl_rules(group):
            outs = [attention(own, own, own, PATTERN, group=group) for own in inputs]
            for number in (0, 1) if rank == 1 else (1, 0):
                torch.autograd.grad(outs[number].sum(), inputs[number])

    with pytest.raises(GroupError, match=r"in the backward of call \d and rank \d in the backward of call \d; all ranks"):
        train()


def test_backwards_in_another_order(own_ranks):
    """NCCL has no tags, but the ranks send acknowledgements over gloo."""
    own_ranks.run(3, in_a_group_of_its_own, check_backwards)


def check_death(group) -> None:
    """The last rank dies between two calls that compare nothing."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    x, shards = torch.randn(1, 8, 2, 4), Shards.of([8] * world, "contiguous")

    def call_twice() -> None:
        with nccl_rules(group):
            for number in range(2):
                if number == 1 and rank == world - 1:
                    die()
                attention(x, x, x, Dilated([64], [1]), group=Sharding(group, shards, transport="ring"))

    start = time.monotonic()
    with pytest.raises(GroupError, match=rf"\brank {world - 1} has ended or left the group"):
        call_twice()
    assert time.monotonic() - start < 10.0


def test_a_rank_that_dies(own_ranks):
    own_ranks.run(4, in_a_group_of_its_own, check_death, leaving=[3], timeout_s=LONG_S)


class HostSteps(TorchDispatchMode):
    """What a graph cannot capture: comparisons, values of tensors that the host reads, tensors that it makes from values.

    Every tensor is on the CPU here, so a tensor of the host is counted as one of the device.
    """

    METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.thread = threading.current_thread()  # not that of the rules
        collectives = ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")
        for of, names in (
            (torch.Tensor, self.METHODS),
            (dist, collectives),
            (torch, ("tensor", "as_tensor", "from_numpy")),
        ):
            for name in names:
                patch.setattr(of, name, self._counted(name, getattr(of, name)))
        plain_to = torch.Tensor.to

        def to(x, *args, **options):
            moved = options.get("device", args[0] if args else None)
            if isinstance(moved, torch.device | str):  # a copy between host and device
                self._found("to")
            return plain_to(x, *args, **options)

        patch.setattr(torch.Tensor, "to", to)

    def _found(self, name: str) -> None:
        if threading.current_thread() is self.thread:
            self.found.append(name)

    def _counted(self, name: str, plain):
        def call(*args, **options):
            self._found(name)
            return plain(*args, **options)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.OPERATORS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def check_capture(group, pattern, options: dict, is_captured: bool) -> None:
    """Two calls, forward and backward, and the steps of the host in the second one."""
    shards = Shards.of([16] * dist.get_world_size(group), "contiguous")
    x = torch.randn(3, 1, 16, 2, 4).unbind(0)
    with nccl_rules(group):
        for number in range(2):
            inputs = [own.clone().requires_grad_() for own in x]
            dout = torch.ones_like(inputs[0])
            with pytest.MonkeyPatch.context() as patch, HostSteps(patch) as host:
                out = attention(*inputs, pattern, group=Sharding(group, shards, transport="ring"), **options)
                torch.autograd.grad(out, inputs, dout)
            assert number == 0 or is_captured != bool(host.found), set(host.found)


WINDOW, ADAPTIVE = (BlockSparse.from_config(config(kind)) for kind in ("local_window", "adaptive"))


@pytest.mark.parametrize(
    ("pattern", "options", "is_captured"),
    [
        (PATTERN, {"is_causal": True}, True),
        (PATTERN, {"dropout_p": 0.2, "seed": 3}, True),
        (PATTERN, {"dropout_p": 0.2}, False),
        (WINDOW, {}, False),
        (ADAPTIVE, {}, False),
    ],
    ids=["dilated", "seed", "no seed", "blocks", "adaptive"],
)
def test_what_a_graph_can_capture(on_ranks, pattern, options, is_captured):
    """With known shards, an integer seed and a dilated pattern, the second call compares nothing and reads nothing.

    Block-sparse tiles are index tensors that the host makes in every call.
    """
    on_ranks(3, check_capture, pattern, options, is_captured)
