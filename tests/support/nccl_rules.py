"""A test transport: messages and collectives of the device travel over gloo, under the rules of NCCL.

    with nccl_rules(group, seed=3):
        attention(..., group=group)         the CPU is a device whose backend is called "nccl"

The rules, as torch.distributed and NCCL document them:

* The first operation of a group is a collective of all ranks, which makes the communicator. A batch of messages before it
  is an error.
* Batches and collectives of a rank are executed in the order of posting, one at a time, by a thread in place of the
  stream. An operation starts when the previous one has ended. Ranks that post in conflicting orders never end. After
  ``timeout_s`` every such rank raises, and the error names the operation that each rank stands at.
* The messages of a batch progress independently of one another. The batch ends with the last of them and has one handle.
* There are no tags: the i-th send from p to q meets the i-th receive of q from p. Both ends have the same number of
  elements of the same type.
* Tensors are contiguous. What is sent is read when the operation is executed, not when it is posted. What is received is
  undefined until the handle has been waited for; here it is NaN.
* ``wait`` lets the stream of the caller wait, not the host. The host of a rank that only sends is therefore far ahead of
  the ranks that receive. What it overwrites after ``wait`` does not change what is sent. A host that receives waits here,
  because it computes; it goes on if its watch knows of a failure, as it would with NCCL.

Before every operation, the thread sleeps for a random time, drawn from the seed and the rank.

The ranks compare arguments over the group itself, as in a group ``"cpu:gloo,cuda:nccl"``. With ``only_nccl=True`` the
comparison is an operation of the device, as in a group ``"nccl"``.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.distributed import agreement, watch, wire

HOST_MODULES = (agreement.__name__,)  # their collectives are those of the host
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast", "barrier")
REFUSED = ("all_to_all", "reduce_scatter", "reduce_scatter_tensor", "send", "recv")  # the library does not use them
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
DELAY_S = 0.002  # the longest sleep before an operation
SETTLE_S = 1.0  # after a failure, for the other ranks to say where they stand
# What torch.distributed has when this module is imported. Patches of tests around it are not seen by the thread.
PLAIN = {name: getattr(dist, name) for name in (*COLLECTIVES, "isend", "irecv")}


class RuleError(AssertionError):
    """An operation that NCCL would not execute, or would execute wrongly."""


class Outgoing:
    """A tensor that is sent. It is read when the other end is there."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._lock, self._is_read, self.sent = tensor, Lock(), False, Event()

    def read(self) -> Tensor:
        """What is sent."""
        with self._lock:
            self._is_read = True
            return self._tensor

    def release(self) -> None:
        """Permit the caller to overwrite the tensor, as a stream does that waits for the message."""
        with self._lock:
            if not self._is_read:
                self._tensor = self._tensor.clone()
                return
        self.sent.wait()


class Handle:
    """The one handle of an operation."""

    def __init__(self, result: Future[None], outgoing: list[Outgoing], has_failed: Callable[[], bool]) -> None:
        self._result, self._outgoing, self._has_failed = result, outgoing, has_failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation has ended; if it only sends, when its tensors may be overwritten."""
        while not self._outgoing and not self._has_failed():
            with contextlib.suppress(TimeoutError):
                self._result.result(0.1)
                break
        for outgoing in self._outgoing:
            outgoing.release()
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        return self._result.done()


class Communicator:
    """The operations of one rank in one group: a thread in place of the stream, and gloo under it."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        # A group of its own, so that no message of the caller can meet one of these.
        self.gloo = dist.new_group(ranks, timedelta(seconds=timeout_s), "gloo", use_local_synchronization=True)
        self.rank, self.ranks, self.timeout_s = dist.get_rank(group), ranks, timeout_s
        self.random = random.Random()  # each context seeds it
        self.watch = watch.watch_of(group)
        self.made = False  # by the first collective
        self.posted = 0
        self.messages: Counter[tuple[str, int]] = Counter()  # by direction and peer
        self.failure: BaseException | None = None
        self.operations: queue.SimpleQueue[tuple[str, Callable[[], None], Future[None]] | None] = queue.SimpleQueue()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Execute what is posted. At the end, wait for all of it and raise if an operation failed."""
        thread = Thread(target=self._execute_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.operations.put(None)  # ends the thread, also if the caller raises
        thread.join()
        if self.failure is not None:
            raise self.failure

    def post(self, name: str, execute: Callable[[], None], outgoing: list[Outgoing]) -> Handle:
        """Execute this after all that was posted before. ``outgoing`` has the tensors of an operation that only sends."""
        if self.failure is not None:
            raise self.failure
        result: Future[None] = Future()
        self.posted += 1
        self.operations.put((f"operation {self.posted}, {name}", execute, result))
        return Handle(result, outgoing, lambda: self.watch._found is not None)

    def post_batch(self, operations: list[dist.P2POp]) -> list[Handle]:
        """The messages of ``batch_isend_irecv``."""
        described = [self._described(operation) for operation in operations]
        name = f"a batch: {', '.join(described)}"
        if not self.made:
            raise RuleError(
                f"the first operation of a group must be a collective of all ranks, got on rank {self.rank} {name}"
            )
        for operation in operations:
            _check_contiguous(name, operation.tensor)
            if operation.op is dist.irecv:
                _poison(operation.tensor)

        sent = {id(x): Outgoing(x.tensor) for x in operations if x.op is dist.isend}

        def message(operation: dist.P2POp) -> Callable[[], None]:
            outgoing, peer = sent.get(id(operation)), operation.group_peer
            direction = "from" if outgoing is None else "to", peer
            self.messages[direction] += 1
            number = self.messages[direction]
            return lambda: self._message(peer, number, operation.tensor, outgoing)

        def execute() -> None:
            messages = [message(operation) for operation in operations]
            try:
                with ThreadPoolExecutor(len(messages)) as threads:
                    for done in [threads.submit(each) for each in messages]:
                        done.result()
            finally:
                for outgoing in sent.values():
                    outgoing.sent.set()

        return [self.post(name, execute, list(sent.values()) if len(sent) == len(operations) else [])]

    def post_collective(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Handle | None:
        """A collective; the handle, or None if the caller waits for it here."""
        asynchronous = options.pop("async_op", False)
        options["group"] = self.gloo
        tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
        text = f"{name} of {', '.join(_shown(x) for x in tensors[:1])}{' ...' if len(tensors) > 1 else ''}"
        for x in tensors:
            _check_contiguous(text, x)
        sizes = [sum(x.numel() for x in tensors), DTYPES.index(tensors[0].dtype) if tensors else -1]

        def execute() -> None:
            own = torch.tensor([COLLECTIVES.index(name), *sizes])
            every = [torch.empty_like(own) for _ in self.ranks]
            PLAIN["all_gather"](every, own, group=self.gloo)
            if any(not torch.equal(other, own) for other in every):
                got = ", ".join(f"{COLLECTIVES[x[0]]} of {x[1]} elements" for x in torch.stack(every).tolist())
                raise RuleError(f"all ranks must make the same collective, got {got}")
            PLAIN[name](*args, **options)

        self.made = True
        handle = self.post(text, execute, [])
        if asynchronous:
            return handle
        handle.wait()
        return None

    def _described(self, operation: dist.P2POp) -> str:
        verb = "send" if operation.op is dist.isend else "receive"
        preposition = "to" if operation.op is dist.isend else "from"
        return f"{verb} {_shown(operation.tensor)} {preposition} rank {operation.group_peer}"

    def _message(self, peer: int, number: int, x: Tensor, outgoing: Outgoing | None) -> None:
        """Compare sizes with the other end, then transfer."""
        sending = outgoing is not None
        tag, here = 3 * number, torch.tensor([x.numel(), DTYPES.index(x.dtype)])
        there = torch.empty_like(here)
        to, origin = {"group": self.gloo, "group_dst": peer}, {"group": self.gloo, "group_src": peer}
        sent = PLAIN["isend"](here, **to, tag=tag if sending else tag + 1)
        PLAIN["irecv"](there, **origin, tag=tag + 1 if sending else tag).wait()
        sent.wait()
        if not torch.equal(here, there):
            ends = [f"{count} x {DTYPES[dtype]}" for count, dtype in (here.tolist(), there.tolist())]
            verb = "sends {} and rank {} receives {}" if sending else "receives {} and rank {} sends {}"
            text = f"rank {self.rank} " + verb.format(ends[0], peer, ends[1])
            raise RuleError(f"both ends of a message must have as many elements of one type, got: {text}, message {number}")
        if outgoing is None:
            PLAIN["irecv"](x, **origin, tag=tag + 2).wait()
        else:
            PLAIN["isend"](outgoing.read(), **to, tag=tag + 2).wait()
            outgoing.sent.set()

    def _execute_all(self) -> None:
        torch.set_num_threads(1)
        while (operation := self.operations.get()) is not None:
            name, execute, result = operation
            try:
                if self.failure is not None:
                    raise RuleError(f"an earlier operation of this rank failed: {self.failure}")
                if self.random.random() < 0.5:
                    time.sleep(self.random.random() * DELAY_S)
                execute()
                result.set_result(None)
            except BaseException as error:  # noqa: BLE001  whatever it is, the caller gets it
                if isinstance(error, RuntimeError):  # of gloo, which waited for too long or lost a rank that did
                    error = RuleError(self._deadlock(name, error))
                self.failure = self.failure or error
                result.set_exception(error)

    def _deadlock(self, name: str, error: BaseException) -> str:
        """Who stands where, as far as the ranks have said so in the store."""
        store, stands = self.gloo.get_group_store(), {self.rank: name}
        store.set(f"stands {self.rank}", name)
        stop = time.monotonic() + SETTLE_S
        while len(stands) < len(self.ranks) and time.monotonic() < stop:
            time.sleep(0.05)
            for rank in range(len(self.ranks)):
                if rank not in stands and store.check([f"stands {rank}"]):
                    stands[rank] = store.get(f"stands {rank}").decode()
        lines = [f"  rank {rank}: {stands.get(rank, 'in no operation')}" for rank in range(len(self.ranks))]
        waited = f"these operations did not end within {self.timeout_s} s"
        return "\n".join([f"operations must be posted in orders that fit on all ranks; {waited}:", *lines, str(error)])


def _shown(x: Tensor) -> str:
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise RuleError(f"tensors must be contiguous, got strides {x.stride()} of sizes {tuple(x.shape)} in {name}")


def _poison(x: Tensor) -> None:
    if x.dtype != torch.bool:
        x.detach().fill_(torch.nan if x.is_floating_point() else 99)


_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


@contextlib.contextmanager
def nccl_rules(
    group: dist.ProcessGroup, seed: int = 0, *, timeout_s: float = 60.0, only_nccl: bool = False
) -> Iterator[Communicator]:
    """The rules for all calls over this group, which keeps its communicator, and with it the timeout of the first time."""
    if group not in _communicators:
        _communicators[group] = Communicator(group, timeout_s)
    communicator = _communicators[group]
    communicator.random.seed(f"{seed} {communicator.rank}")
    plain_backend = wire.backend_for

    def backend_for(device: str, of: dist.ProcessGroup) -> str | None:
        return "nccl" if of is group and device == "cpu" else plain_backend(device, of)

    def backend_of_host(device: str, of: dist.ProcessGroup) -> str | None:
        return None if of is group and device == "cpu" and only_nccl else plain_backend(device, of)

    def init(self: wire.Wire, of: dist.ProcessGroup, device: torch.device) -> None:
        plain_init(self, of, device)
        if of is group:
            self._acknowledges = not only_nccl  # the group has gloo for the tensors of the host

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        of = operations[0].group or dist.group.WORLD
        return communicator.post_batch(operations) if of is group else plain_batch(operations)

    def collective(name: str) -> Callable[..., Any]:
        plain = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            of_host = sys._getframe(1).f_globals["__name__"] in HOST_MODULES and not only_nccl
            if of_host or (options.get("group") or dist.group.WORLD) is not group:
                return plain(*args, **options)
            return communicator.post_collective(name, args, options)

        return call

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            raise NotImplementedError(f"the rules of NCCL do not have {name} yet")

        return call

    with pytest.MonkeyPatch.context() as patch, communicator.running():
        plain_batch, plain_init = dist.batch_isend_irecv, wire.Wire.__init__
        patch.setattr(wire, "backend_for", backend_for)
        patch.setattr(wire.Wire, "__init__", init)
        for module in (agreement, watch):
            patch.setattr(module, "backend_for", backend_of_host)
        patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        for name in COLLECTIVES:
            patch.setattr(dist, name, collective(name))
        for name in REFUSED:
            patch.setattr(dist, name, refused(name))
        yield communicator
