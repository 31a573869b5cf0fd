"""Pinned host memory that two processes of one machine map, so that rows need not go through a socket.

A message has a slot of the rank that sends it: an anonymous file, which the receiver opens through ``/proc``. Both map and
pin it, which takes longer than a message, so slots stay as long as the group does. ``Wire`` sends a notice of where the
rows are and, back, the word that they have been copied, before which nothing else is written there. The first time it also
says that it has mapped the file, before which that must not be closed.

Slots are taken in turn: if one message is under way while the next is started, 0, 1, 2, 0, 1, 2, ...
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.distributed.neighbours import find_neighbours, open_file

# Free slots beyond the one that is taken: the word that a slot can be used again has the time of one more message to come.
_SPARE = 1
NOTICE = 4  # integers: the slot, its file as its process knows it, as the system knows it, and the size of that


class Pages:
    """An open file, mapped and pinned for as long as somebody refers to this object, and closed with it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size, self.inode = fd, size, os.fstat(fd).st_ino
        self.reads: list[Any] = []  # events: copies to the device that may still be under way
        try:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
            code = int(cudart.cudaHostRegister(self._flat.data_ptr(), size, 0))
            if code != 0:
                raise RuntimeError(
                    f"CUDA could not pin {size} bytes of host memory (cudaHostRegister: error {code}); let more memory be "
                    "locked (ulimit -l, the limits of the container), or send less at a time (bucket_size)"
                )
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(self, _release, cudart, self._flat, self.reads, fd, os.getpid())

    def rows(self, like: Tensor) -> Tensor:
        """The beginning, as a tensor of the shape and type of another."""
        return self._flat[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _release(cudart: Any, flat: Tensor, reads: list[Any], fd: int, process: int) -> None:
    """Unpin; ``flat`` is unmapped when this has returned, not before."""
    if os.getpid() == process:  # a fork has the mapping, but not the pin
        for copy in reads:
            copy.synchronize()
        cudart.cudaHostUnregister(flat.data_ptr())
    os.close(fd)


def _new_file(size: int) -> int:
    fd = os.memfd_create("dilated-attention")
    try:
        os.posix_fallocate(fd, 0, size)  # now, because a write that finds no memory would end the process
    except OSError as error:
        os.close(fd)
        raise RuntimeError(
            f"no {size} bytes of host memory to share ({error}); send less at a time (bucket_size)"
        ) from error
    return fd


def _their_file(process: int, fd: int, inode: int) -> int:
    try:
        ours = open_file(process, fd)
    except FileNotFoundError as error:
        raise RuntimeError(f"its process {process} is gone, or has closed its memory") from error
    if os.fstat(ours).st_ino != inode:
        os.close(ours)
        raise RuntimeError(f"its process {process} has closed its memory")
    return ours


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one message of this rank at a time."""

    index: int
    pages: Pages | None = None
    known: set[int] = field(default_factory=set)  # the ranks that have mapped them
    task: str = ""  # for errors: what it was used for last
    mapped: dist.Work | None = None  # the receiver's word that it has the file, the first time
    copied: dist.Work | None = None  # the receiver's word that it has copied the rows

    def fit(self, size: int) -> None:
        """A new file, if the old one is too small; nobody may be reading it."""
        if self.pages is None or self.pages.size < size:
            self.pages = None  # first of all, which makes room
            self.pages = Pages(_new_file(size), size)
            self.known.clear()

    def rows(self, like: Tensor) -> Tensor:
        """Room for a message."""
        assert self.pages is not None
        return self.pages.rows(like)

    @property
    def notice(self) -> Tensor:
        """What the receiver has to know."""
        assert self.pages is not None
        return torch.tensor([self.index, self.pages.fd, self.pages.inode, self.pages.size])


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message in another rank's slot, which is being copied."""

    peer: int
    slot: int
    pages: Pages
    first: bool  # in this file


@dataclass(slots=True, eq=False)
class HostMemory:
    """What a rank shares with others of its group."""

    processes: dict[int, int]  # by rank: those that share memory with this one
    _arrivals: list[Arrival] = field(default_factory=list)  # not acknowledged
    _slots: list[Slot] = field(default_factory=list)
    _free: list[Slot] = field(default_factory=list)
    _theirs: dict[tuple[int, int], Pages] = field(default_factory=dict)

    def take(self) -> Slot:
        """A slot whose message has been sent, but perhaps not acknowledged, or a new one."""
        if len(self._free) == len(self._slots):
            # A call that is repeated sends the same message from the same slot, which its receiver has mapped.
            self._free.sort(key=lambda slot: slot.index)
        if len(self._free) > _SPARE:
            return self._free.pop(0)
        self._slots.append(Slot(len(self._slots)))
        return self._slots[-1]

    def give_back(self, slot: Slot) -> None:
        """The notice has been sent."""
        self._free.append(slot)

    def arrived(self, peer: int, notice: Tensor) -> Arrival:
        """A message of which a notice came."""
        index, fd, inode, size = notice.tolist()
        known = self._theirs.get((peer, index))
        first = known is None or known.inode != inode
        if first:
            self._theirs[peer, index] = Pages(_their_file(self.processes[peer], fd, inode), size)
        self._arrivals.append(Arrival(peer, index, self._theirs[peer, index], first))
        return self._arrivals[-1]

    def copied(self) -> list[Arrival]:
        """The messages that have arrived since the last time, when they have been copied to the device."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            for copy in arrival.pages.reads:
                copy.synchronize()
            arrival.pages.reads.clear()
        return arrivals


_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, HostMemory] = weakref.WeakKeyDictionary()


def host_memory(group: dist.ProcessGroup) -> HostMemory:
    """What this rank shares with others of the group; all ranks ask for it together the first time."""
    if group not in _by_group:
        _by_group[group] = HostMemory(find_neighbours(group))
    return _by_group[group]
