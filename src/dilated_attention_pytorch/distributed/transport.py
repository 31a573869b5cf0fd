"""Messages between ranks: posting them, waiting for them, and saying which one failed.

Tensors are sent from where they lie, with one exception: a group that has only gloo for CUDA tensors (several ranks on one
GPU, or no fast interconnect) gets them through pinned host memory. The copies have streams of their own, so that they run
while tiles are computed. Ranks of one machine share that memory (``host_memory``), and gloo carries notices: rows are in a
slot, rows have been copied out of it. So ranks that die or stall are noticed as everywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.distributed.host_memory import NOTICE, Arrival, HostMemory, Slot, host_memory
from dilated_attention_pytorch.distributed.route import Message

# Gloo moves bytes by one thread for each interface that GLOO_SOCKET_IFNAME names, and takes the tag of a message modulo
# their number: a large message goes in so many parts of different tags. "lo,lo,lo,lo" names one interface four times.
LANES = 4
_SMALL_MESSAGE = 2**20  # bytes, which go in one


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message as a flat tensor, on its way to or from another rank of the group."""

    message: Message
    what: str  # for errors
    peer: int
    rows: Tensor
    pack: Callable[[], None] | None = None  # fills ``rows`` before they are sent


def _sending(parcel: Parcel) -> str:
    return f"send {parcel.what} to rank {parcel.peer}, {parcel.message.name}"


def _receiving(parcel: Parcel) -> str:
    return f"receive {parcel.what} from rank {parcel.peer}, {parcel.message.name}"


class Transport(Protocol):
    """Moves parcels; ``Wire`` between processes, ``simulation.Shelf`` within one."""

    lag: int  # ticks by which a gradient is sent later than it is computed

    def now(self) -> Any:
        """What has been computed so far."""

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Start sending and receiving once ``after`` has been computed; the function returned waits for the end."""


def resolve_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group over whose ranks a sequence is sharded."""
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim == 1:
            return group.get_group()
        if "cp" in names:
            return group.get_group("cp")
        raise ValueError(
            f"a device mesh must have one dimension or one named 'cp' (context parallel), got {group.ndim} dimensions "
            f"named {names}; pass mesh['name']"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh, got {group!r}; call init_process_group() first, on "
            "a rank that is a member"
        )
    return group


def backend_for(device: str, group: dist.ProcessGroup) -> str | None:
    """The backend of a group for tensors of a device, ``"nccl"`` for example, or None."""
    pairs = (entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device)


_TOO_FEW_GPUS = (
    "NCCL wants a GPU for every rank. Start as many ranks as there are GPUs (torchrun --nproc-per-node) and give each "
    "its own (torch.cuda.set_device(local_device())), or call init_process_group('gloo'), which sends through host memory"
)


def local_device() -> torch.device:
    """The device of this rank, started by torchrun: a GPU of its own, or the CPU on a machine without GPUs.

    With more ranks than GPUs it raises and says what to do. Ranks may share a GPU over gloo: pass ``cuda:0`` yourself.

    Rank 3 of 8 on a machine with 8 GPUs gets ``cuda:3``.
    """
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and ranks > gpus:
        raise RuntimeError(f"{ranks} ranks on a machine with {gpus} GPU(s). {_TOO_FEW_GPUS}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")


def failure(what: str, error: RuntimeError) -> RuntimeError:
    """The error to raise for one of PyTorch's; what to do depends on what it says."""
    if "Duplicate GPU" in str(error):
        return RuntimeError(f"two ranks share a GPU. {_TOO_FEW_GPUS} ({what})")
    return RuntimeError(
        f"{what}: {error}. A rank may have died or stalled longer than the group's timeout. No result was returned; once "
        "all ranks have called destroy_process_group() and init_process_group() again, the call can be repeated"
    )


class Wire:
    """The processes of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        backend = backend_for(device.type, group)
        if backend is None:
            raise ValueError(
                f"the group has no backend for {device.type} tensors ({dist.get_backend_config(group)}); use "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        self.group, self.rank, self.device = group, dist.get_rank(group), device
        self.global_ranks = dist.get_process_group_ranks(group)
        self.gloo = backend == "gloo"
        self.staged = device.type == "cuda" and self.gloo
        # A gradient that is to be copied to the host is waited for while the next one is computed.
        self.lag = 1 if self.staged else 0
        if self.staged:
            self.outward, self.inward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def now(self) -> Any:
        """An event in the stream of the caller, where copies to the host have to wait for it."""
        return torch.cuda.current_stream(self.device).record_event() if self.staged else None

    def start(self, sends: list[Parcel], receives: list[Parcel], after: Any) -> Callable[[], None]:
        """Start sending and receiving once ``after`` has been computed; the function returned waits for the end."""
        self._acknowledge()
        # Both ends know which of them have no rows.
        sends, receives = ([parcel for parcel in some if parcel.rows.numel()] for some in (sends, receives))
        if not sends and not receives:
            return lambda: None
        free = self.now()  # the tiles that read what these buffers held before
        with self._copying_out(after):
            for parcel in sends:
                if parcel.pack is not None:
                    parcel.pack()
            slots = [self._slot(parcel) for parcel in sends]
            outgoing = [self._copy_out(parcel, slot) for parcel, slot in zip(sends, slots, strict=True)]
        incoming = [self._room(parcel) for parcel in receives]
        tasks, operations = [], []
        for operation, parcels, hosts in ((dist.isend, sends, outgoing), (dist.irecv, receives, incoming)):
            for parcel, x in zip(parcels, hosts, strict=True):
                for tag, part in enumerate(self._lanes(x)):
                    tasks.append(_sending(parcel) if operation is dist.isend else _receiving(parcel))
                    operations.append(dist.P2POp(operation, part, self.global_ranks[parcel.peer], self.group, tag))
        with self._naming(" and ".join(tasks)):
            works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            # NCCL has one piece of work for all, gloo one for each.
            every = tasks if len(works) == len(tasks) else [" and ".join(tasks)]
            for work, task in zip(works, every, strict=True):
                with self._naming(task):
                    work.wait()
            if self.staged:
                with torch.cuda.stream(self.inward):
                    self.inward.wait_event(free)
                    for parcel, x in zip(receives, incoming, strict=True):
                        self._copy_in(parcel, x)
                torch.cuda.current_stream(self.device).wait_stream(self.inward)
            outgoing.clear()  # held until now: they were being sent
            for slot in slots:
                if slot is not None:
                    self._sent(slot)

        return wait

    def _lanes(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A message in the parts in which it travels: the same at both ends."""
        small = rows.numel() * rows.element_size() <= _SMALL_MESSAGE
        return (rows,) if small or not self.gloo else rows.chunk(LANES)

    @contextlib.contextmanager
    def _copying_out(self, after: Any) -> Any:
        """Pack and copy to the host beside the computation, and wait for it on the host, which sends."""
        if not self.staged:
            yield
            return
        with torch.cuda.stream(self.outward):
            self.outward.wait_event(after)
            yield
            copied = self.outward.record_event()
        copied.synchronize()

    @contextlib.contextmanager
    def _naming(self, task: str) -> Any:
        """Say what failed."""
        try:
            yield
        except RuntimeError as error:
            raise failure(f"rank {self.rank} could not {task}", error) from error

    @property
    def _memory(self) -> HostMemory:
        with self._naming("compare its machine with those of the others"):
            return host_memory(self.group)

    def _shared(self, parcel: Parcel) -> bool:
        """Whether a message goes through memory that both ends map: they find the same."""
        if not self.staged or parcel.rows.numel() * parcel.rows.element_size() <= _SMALL_MESSAGE:
            return False
        return parcel.peer in self._memory.processes

    def _acknowledge(self) -> None:
        """Say which slots of others may be used again.

        Ranks start the same steps in the same order, and say this before they wait for anything in a step. A slot is taken
        again in a later step than that in which it was read, so the word has been said, or is when its reader comes there.
        """
        if not self.staged or len(self.global_ranks) == 1:
            return
        for arrival in self._memory.copied():
            # A rank that has all it needs may have left the group. One from which something is missing fails where it is.
            with contextlib.suppress(RuntimeError):
                self._say(arrival)

    def _say(self, arrival: Arrival) -> None:
        """A word about a slot to the rank that it belongs to, which listens: it takes no time."""
        dist.send(torch.zeros(1, dtype=torch.uint8), self.global_ranks[arrival.peer], self.group, LANES + arrival.slot)

    def _listen(self, slot: Slot, peer: int) -> dist.Work | None:
        """For such a word."""
        return dist.irecv(torch.zeros(1, dtype=torch.uint8), self.global_ranks[peer], self.group, LANES + slot.index)

    def _slot(self, parcel: Parcel) -> Slot | None:
        """Where shared memory is free for a message, once the receiver of what was there has copied it."""
        if not self._shared(parcel):
            return None
        slot = self._memory.take()
        if slot.copied is not None:
            with self._naming(slot.task):
                slot.copied.wait()
        slot.task = _sending(parcel)
        with self._naming(slot.task):
            slot.fit(parcel.rows.numel() * parcel.rows.element_size())
            slot.mapped = None if parcel.peer in slot.known else self._listen(slot, parcel.peer)
            slot.copied = self._listen(slot, parcel.peer)
        slot.known.add(parcel.peer)
        return slot

    def _sent(self, slot: Slot) -> None:
        """The end of a message: the slot can be taken again, or even closed."""
        if slot.mapped is not None:
            with self._naming(slot.task):
                slot.mapped.wait()
        self._memory.give_back(slot)

    def _copy_out(self, parcel: Parcel, slot: Slot | None) -> Tensor:
        """What travels for a message: itself, its copy in host memory, or a notice of where that is."""
        if not self.staged:
            return parcel.rows
        if slot is None:
            return _pinned(parcel.rows).copy_(parcel.rows, non_blocking=True)
        slot.rows(parcel.rows).copy_(parcel.rows, non_blocking=True)
        return slot.notice

    def _room(self, parcel: Parcel) -> Tensor:
        """Where that comes in."""
        if self._shared(parcel):
            return torch.empty(NOTICE, dtype=torch.int64)
        return _pinned(parcel.rows) if self.staged else parcel.rows

    def _copy_in(self, parcel: Parcel, came: Tensor) -> None:
        if not self._shared(parcel):
            parcel.rows.copy_(came, non_blocking=True)
            return
        with self._naming(_receiving(parcel)):
            arrival = self._memory.arrived(parcel.peer, came)
            if arrival.first:
                self._say(arrival)
        parcel.rows.copy_(arrival.pages.rows(parcel.rows), non_blocking=True)
        arrival.pages.reads.append(self.inward.record_event())


def _pinned(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
