"""The wire: messages between the processes of a group.

Tensors are sent from where they are, with one exception. A group that has only gloo for CUDA tensors sends them through
pinned host memory. The copies have streams of their own, so that they run while tiles are computed.

Messages of gloo have tags that follow from the call, its arguments and the direction. A message of another call never takes
the place of an expected one, and neither does a message that the user sends. NCCL has no tags. If the group also has gloo,
ranks first send each other an empty message with the tag, so that both ends of a link are in the same call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.distributed.agreement import Arguments
from dilated_attention_pytorch.distributed.groups import backend_for
from dilated_attention_pytorch.distributed.messages import Message
from dilated_attention_pytorch.distributed.watch import TurnContext, watch_of

# Gloo moves bytes by one thread for each interface that GLOO_SOCKET_IFNAME names, and takes the tag of a message modulo
# their number. A large message is therefore sent with several tags. "lo,lo,lo,lo" names one interface four times.
LANES = 4
_SMALL_MESSAGE = 2**20  # bytes; up to this size a message has one tag


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message as a flat tensor, for or from another rank of the group."""

    message: Message
    content: str  # for errors
    peer: int
    rows: Tensor
    pack: Callable[[], None] | None = None  # fills ``rows`` before they are sent


class Transport(Protocol):
    """Moves parcels: ``Wire`` between processes, ``simulate.SimulatedWire`` within one."""

    lag: int  # ticks by which a gradient is sent later than it is computed

    def turn(self, direction: str) -> contextlib.AbstractContextManager[Any]:
        """A context for the messages of a forward or a backward."""

    def now(self) -> Any:
        """A mark of what has been computed so far."""

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Start sending and receiving once ``after`` has been computed; the returned function waits for the end."""


class Wire:
    """The processes of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        backend = backend_for(device.type, group)
        if backend is None:
            has = f"{dist.get_backend_config(group)}); use init_process_group('cpu:gloo,cuda:nccl')"
            raise ValueError(f"the group has no backend for {device.type} tensors ({has}")
        self.watch = watch_of(group)
        self.group, self.rank, self.device = group, self.watch.rank, device
        self.global_ranks = self.watch.global_ranks
        self.gloo = backend == "gloo"
        self.staged = device.type == "cuda" and self.gloo
        # The host waits for the copy of a gradient while the next gradient is computed.
        self.lag = 1 if self.staged else 0
        if self.staged:
            self.outward, self.inward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._acknowledges = not self.gloo and backend_for("cpu", group) == "gloo"
        self._call, self._arguments, self._tag = 0, Arguments("", ()), 0
        self._links: dict[tuple[bool, int], Any] = {}  # of this turn, by sending and peer: the empty message

    def begin_call(self, arguments: Arguments) -> None:
        """Number the call, whose arguments all ranks have in common. The first call of a group connects its ranks."""
        self.watch.calls += 1
        self._call, self._arguments = self.watch.calls, arguments
        if self.gloo or self.device.type in self.watch.connected:
            return
        # NCCL makes a communicator in the first operation, which all ranks must take part in. Messages need not.
        with self.watch.turn("the connection of the ranks"), self.watch.waiting("connect to the other ranks"):
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.watch.connected.add(self.device.type)

    def turn(self, direction: str) -> TurnContext:
        """A context for the messages of a forward or a backward, which have a tag of their own."""
        identity = f"{self._call} {direction} {self._arguments.hash}"
        self._tag = 2**30 + LANES * (int.from_bytes(sha256(identity.encode()).digest()[:4], "big") % (2**30 // LANES))
        self._links.clear()
        label = f"the {direction} of call {self._call}"
        return self.watch.turn(label, self._arguments.hash, self._arguments.texts)

    def now(self) -> Any:
        """An event in the stream of the caller, if copies to the host have to wait for it."""
        return torch.cuda.current_stream(self.device).record_event() if self.staged else None

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Start sending and receiving once ``after`` has been computed; the returned function waits for the end."""
        # Both ends know which parcels have no rows.
        sends, receives = ([parcel for parcel in parcels if parcel.rows.numel()] for parcels in (sends, receives))
        if not sends and not receives:
            return lambda: None
        free = self.now()  # the tiles that read the previous content of these buffers
        with self._copying_out(after):
            for parcel in sends:
                if parcel.pack is not None:
                    parcel.pack()
            outgoing = [self._on_host(parcel.rows, copy=True) for parcel in sends]
        incoming = [self._on_host(parcel.rows, copy=False) for parcel in receives]
        tasks: list[tuple[str, tuple[int, ...]]] = []  # with the peer
        operations = []
        for sending, parcels, tensors in ((True, sends, outgoing), (False, receives, incoming)):
            for parcel, x in zip(parcels, tensors, strict=True):
                verb = f"send {parcel.content} to" if sending else f"receive {parcel.content} from"
                task = f"{verb} rank {parcel.peer}, {parcel.message.name}"
                peer, operation = self.global_ranks[parcel.peer], dist.isend if sending else dist.irecv
                for number, lane in enumerate(self._lanes(x)):
                    tasks.append((task, (parcel.peer,)))
                    operations.append(dist.P2POp(operation, lane, peer, self.group, self._tag + number))
        together = " and ".join(dict(tasks)), tuple(sorted({peer for _, peers in tasks for peer in peers}))
        if self._acknowledges:
            self._acknowledge([parcel.peer for parcel in sends], [parcel.peer for parcel in receives])
        with self.watch.waiting(together[0], *together[1]):
            handles = dist.batch_isend_irecv(operations)

        def wait() -> None:
            # NCCL has one handle for all operations, gloo has one for each.
            every = tasks if len(handles) == len(tasks) else [together]
            for handle, (task, peers) in zip(handles, every, strict=True):
                with self.watch.waiting(task, *peers):
                    handle.wait()
            if self.staged:
                with torch.cuda.stream(self.inward):
                    self.inward.wait_event(free)
                    for parcel, x in zip(receives, incoming, strict=True):
                        parcel.rows.copy_(x, non_blocking=True)
                torch.cuda.current_stream(self.device).wait_stream(self.inward)
            outgoing.clear()  # the tensors must exist until they have been sent

        return wait

    def _acknowledge(self, targets: list[int], sources: list[int]) -> None:
        """Make sure that the ranks from which this one receives are in the same turn, over gloo, once for each link."""
        for target in targets:
            if (True, target) not in self._links:
                empty, last = torch.zeros(1, dtype=torch.uint8, device="cpu"), self.watch.acknowledged.get(target)
                with self.watch.waiting(f"acknowledge the turn to rank {target}", target):
                    if last is not None:  # gloo drops a message whose handle is deleted before it has arrived
                        last.wait()
                    sent = dist.isend(empty, self.global_ranks[target], self.group, self._tag)
                self.watch.acknowledged[target], self._links[True, target] = sent, None
        for source in sources:
            if (False, source) not in self._links:
                empty = torch.zeros(1, dtype=torch.uint8, device="cpu")
                with self.watch.waiting(f"receive the acknowledgement of the turn from rank {source}", source):
                    arrival = dist.irecv(empty, self.global_ranks[source], self.group, self._tag)
                    assert arrival is not None
                    arrival.wait()
                self._links[False, source] = None

    def _lanes(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A message in the chunks that have tags of their own, the same at both ends."""
        small = rows.numel() * rows.element_size() <= _SMALL_MESSAGE
        return (rows,) if small or not self.gloo else rows.chunk(LANES)

    def _on_host(self, rows: Tensor, *, copy: bool) -> Tensor:
        """What travels for a message: its rows, or as many rows in pinned host memory."""
        if not self.staged:
            return rows
        pinned = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(rows, non_blocking=True) if copy else pinned

    @contextlib.contextmanager
    def _copying_out(self, after: Any) -> Iterator[None]:
        """Pack, and copy to the host, beside the computation. The host waits for the copy, because it sends."""
        if not self.staged:
            yield
            return
        with torch.cuda.stream(self.outward):
            self.outward.wait_event(after)
            yield
            copied = self.outward.record_event()
        copied.synchronize()
