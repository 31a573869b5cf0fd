"""Memory that ranks of one machine share: who shares it, how it grows, what happens to it when ranks fail or groups end."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

import ranks
from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.distributed import Shards, host_memory, shard_sequence
from dilated_attention_pytorch.distributed.host_memory import HostMemory, Pages
from dilated_attention_pytorch.distributed.route import make_route
from staged import Cudart, machines, mapped, open_files, staged
from test_faults import TIMEOUT_S, WORLD, check_call, check_failure, init

PATTERN = Dilated([8, 4096], [1, 2])


def call(group, n: int, **options) -> list[torch.Tensor]:
    """The output and the gradients of n tokens, the same on every call."""
    whole = torch.randn(3, 1, n, 2, 8, generator=torch.Generator().manual_seed(n))
    local = [shard_sequence(x, group).requires_grad_() for x in whole]
    out = attention(*local, PATTERN, group=group, transport="ring", **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), local)]


def check_equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def destroy(group=None) -> None:
    dist.destroy_process_group(group)
    gc.collect()  # errors hold their frames, and those the group


def check_growth(cudart: Cudart) -> None:
    """Larger messages get larger slots, smaller ones keep them, and a repeated call maps nothing new."""
    lengths, new = (60, 600, 90, 601), lambda: dist.new_group(list(range(WORLD)))
    with machines(None):
        group = new()
        expected = [call(group, n, bucket_size=20) for n in lengths]
        assert cudart.calls == 0
        destroy(group)
    files, group = open_files(), new()
    sizes = []
    for n, results in zip(lengths, expected, strict=True):
        check_equal(call(group, n, bucket_size=n // 3), call(group, n, bucket_size=n // 3))
        check_equal(call(group, n, bucket_size=20), results)
        sizes.append(sum(cudart.pinned.values()))
        calls = cudart.calls
        check_equal(call(group, n, bucket_size=20), results)
        assert cudart.calls == calls
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3]
    # Under way at once: keys and values of one message, gradients of two; one more is started, and one spare.
    slots = host_memory.host_memory(group)._slots
    assert len(slots) <= 5
    assert len(mapped()) == len(cudart.pinned) <= len(slots) * WORLD
    # Every message at once: each has a slot.
    attention(*torch.randn(3, 1, 50, 2, 8), PATTERN, group=group, transport="allgather", bucket_size=5)
    shards, rank = Shards.even(150, WORLD, "contiguous"), dist.get_rank()
    ticks = make_route(PATTERN, shards, rank, 1, 2, is_causal=False, bucket_size=5).ticks
    sent = [message for message, _ in ticks if message is not None]
    assert len(slots) == len(sent) + 1 > 5
    del slots
    destroy(group)
    del group
    assert not cudart.pinned
    assert not mapped()
    assert open_files() <= files


def check_two_groups(rank: int, cudart: Cudart) -> None:
    """Groups share nothing; backward runs in the other order than forward."""
    groups = [dist.new_group(list(range(WORLD))) for _ in range(2)]
    expected = [call(group, 300, bucket_size=11) for group in groups]
    check_equal(*expected)
    whole = torch.randn(3, 1, 300, 2, 8, generator=torch.Generator().manual_seed(300))
    local = [shard_sequence(x, groups[0]).requires_grad_() for x in whole]
    outs = [attention(*local, PATTERN, group=group, transport="ring", bucket_size=11) for group in groups]
    for out in reversed(outs):
        check_equal([out, *torch.autograd.grad(out.square().sum(), local)], expected[0])
    memories = [host_memory.host_memory(group) for group in groups]
    assert all(memory.processes.keys() == {0, 1, 2} - {rank} for memory in memories)
    files = [{slot.pages.fd for slot in memory._slots} for memory in memories]
    assert not files[0] & files[1]
    del out, outs, memories  # the graph has the group
    for group in groups:
        destroy(group)
    del group, groups
    assert not cudart.pinned


def check_apart(rank: int) -> None:
    """Both ends of a pair decide alike: by machine, and by whether the other's file can be read at all."""
    group = dist.new_group(list(range(WORLD)))
    expected = call(group, 100, bucket_size=7)
    destroy(group)
    group = dist.new_group(list(range(WORLD)))
    with machines("another" if rank == 1 else "one"):
        check_equal(call(group, 100, bucket_size=7), expected)
    assert host_memory.host_memory(group).processes.keys() == [{2}, set(), {0}][rank]
    destroy(group)
    group, plain = dist.new_group(list(range(WORLD))), os.open
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:

            def refusing(path, *args, **kwargs):
                if str(path).startswith("/proc"):
                    raise PermissionError(path)
                return plain(path, *args, **kwargs)

            patch.setattr(os, "open", refusing)
        check_equal(call(group, 100, bucket_size=7), expected)
    assert host_memory.host_memory(group).processes.keys() == [{1}, {0}, set()][rank]
    destroy(group)


def check_late(rank: int) -> None:
    """A rank that copies late: the others wait for its word before they write again (``staged`` compares)."""
    group = dist.new_group(list(range(WORLD)))
    expected = call(group, 100, bucket_size=3)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            plain = HostMemory.copied
            patch.setattr(HostMemory, "copied", lambda self: (time.sleep(0.02), plain(self))[1])
        check_equal(call(group, 100, bucket_size=3), expected)
    destroy(group)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with staged() as cudart:
        init(f"{folder}/first", rank, WORLD, 60)
        check_growth(cudart)
        check_two_groups(rank, cudart)
        check_apart(rank)
        check_late(rank)
        check_call(WORLD)
        destroy()

        message = r"^rank \d could not (send|receive) keys and values (to|from) rank \d, round \d, "
        init(f"{folder}/stalled", rank, WORLD, TIMEOUT_S)
        check_failure(lambda: time.sleep(TIMEOUT_S + 3), message, 3 * TIMEOUT_S)
        destroy()
        assert not cudart.pinned

        # Memory that cannot be pinned.
        init(f"{folder}/pinned", rank, WORLD, TIMEOUT_S * 5)
        cudart.error = 2 if rank == 1 else 0
        unpinned = r"message \d: CUDA could not pin \d+ bytes of host memory \(cudaHostRegister: error 2\); let more"
        with pytest.raises(RuntimeError, match=message + (unpinned if rank == 1 else "")):
            check_call(WORLD)
        cudart.error = 0
        destroy()

        init(f"{folder}/again", rank, WORLD, TIMEOUT_S * 5)
        check_call(WORLD)
        check_failure(lambda: os._exit(0), message, TIMEOUT_S * 5)
        destroy()
        init(f"{folder}/survivors", rank, 2, TIMEOUT_S * 5)
        check_call(2)
        destroy()
        assert not cudart.pinned
        assert not mapped()


def test_shared_memory(tmp_path):
    ranks.start(work, (str(tmp_path),), WORLD)


def test_a_fork_does_not_unpin(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pages = Pages(host_memory._new_file(100), 100)
    pages.rows(torch.empty(25)).fill_(7.0)
    child = os.fork()
    if child == 0:
        seen = bool((pages.rows(torch.empty(25)) == 7.0).all())
        del pages
        os._exit(0 if seen and cudart.pinned else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(cudart.pinned) == len(mapped()) == 1
    del pages
    assert not cudart.pinned
    assert not mapped()
