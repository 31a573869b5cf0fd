"""Process groups, the device of a rank, and the wire: messages between the processes of a group.

Tensors are sent from where they are, with one exception. A group that has only gloo for CUDA tensors sends them through
pinned host memory. The copies have streams of their own, so that they run while tiles are computed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.call import check_group
from dilated_attention_pytorch.distributed.messages import Message

Group = dist.ProcessGroup | DeviceMesh
_TOO_FEW_GPUS = (
    "NCCL wants a GPU for every rank. Start as many ranks as there are GPUs (torchrun --nproc-per-node) and give each "
    "its own (torch.cuda.set_device(local_device())), or call init_process_group('gloo'), which sends through host memory"
)
# Gloo moves bytes by one thread for each interface that GLOO_SOCKET_IFNAME names, and takes the tag of a message modulo
# their number. A large message is therefore sent with several tags. "lo,lo,lo,lo" names one interface four times.
LANES = 4
_SMALL_MESSAGE = 2**20  # bytes; up to this size a message has one tag


def resolve_group(group: Group | None) -> dist.ProcessGroup:
    """The process group over whose ranks a sequence is sharded."""
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim == 1:
            return group.get_group()
        if "cp" in names:
            return group.get_group("cp")
        got = f"got {group.ndim} dimensions named {names}; pass mesh['name']"
        raise ValueError(f"a device mesh must have one dimension or one named 'cp' (context parallel), {got}")
    check_group(group)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_for(device: str, group: dist.ProcessGroup) -> str | None:
    """The backend of a group for tensors of a device, ``"nccl"`` for example, or None."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",")).get(device)


def local_device() -> torch.device:
    """The device of this rank, started by torchrun: a GPU of its own, or the CPU on a machine without GPUs.

    With more ranks than GPUs it raises an error. Ranks may share a GPU over gloo: pass ``cuda:0`` yourself.

    Rank 3 of 8 on a machine with 8 GPUs gets ``cuda:3``.
    """
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and ranks > gpus:
        raise RuntimeError(f"{ranks} ranks on a machine with {gpus} GPU(s). {_TOO_FEW_GPUS}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")


def failure(what: str, error: RuntimeError) -> RuntimeError:
    """The error to raise in place of one of PyTorch's, with what failed and what to do."""
    if "Duplicate GPU" in str(error):
        return RuntimeError(f"two ranks share a GPU. {_TOO_FEW_GPUS} ({what})")
    return RuntimeError(
        f"{what}: {error}. A rank may have died or stalled longer than the group's timeout. No result was returned; once "
        "all ranks have called destroy_process_group() and init_process_group() again, the call can be repeated"
    )


@contextlib.contextmanager
def naming(task: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Give an error of PyTorch's communication the name of the task that failed."""
    try:
        yield
    except RuntimeError as error:
        raise failure(f"rank {dist.get_rank(group)} could not {task}", error) from error


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
        self.group, self.rank, self.device = group, dist.get_rank(group), device
        self.global_ranks = dist.get_process_group_ranks(group)
        self.gloo = backend == "gloo"
        self.staged = device.type == "cuda" and self.gloo
        # The host waits for the copy of a gradient while the next gradient is computed.
        self.lag = 1 if self.staged else 0
        if self.staged:
            self.outward, self.inward = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

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
        tasks, operations = [], []
        for sending, parcels, tensors in ((True, sends, outgoing), (False, receives, incoming)):
            for parcel, x in zip(parcels, tensors, strict=True):
                for tag, lane in enumerate(self._lanes(x)):
                    verb = f"send {parcel.content} to" if sending else f"receive {parcel.content} from"
                    tasks.append(f"{verb} rank {parcel.peer}, {parcel.message.name}")
                    peer, operation = self.global_ranks[parcel.peer], dist.isend if sending else dist.irecv
                    operations.append(dist.P2POp(operation, lane, peer, self.group, tag))
        with naming(" and ".join(tasks), self.group):
            handles = dist.batch_isend_irecv(operations)

        def wait() -> None:
            # NCCL has one handle for all operations, gloo has one for each.
            every = tasks if len(handles) == len(tasks) else [" and ".join(tasks)]
            for handle, task in zip(handles, every, strict=True):
                with naming(task, self.group):
                    handle.wait()
            if self.staged:
                with torch.cuda.stream(self.inward):
                    self.inward.wait_event(free)
                    for parcel, x in zip(receives, incoming, strict=True):
                        parcel.rows.copy_(x, non_blocking=True)
                torch.cuda.current_stream(self.device).wait_stream(self.inward)
            outgoing.clear()  # the tensors must exist until they have been sent

        return wait

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
