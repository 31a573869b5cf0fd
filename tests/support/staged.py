"""Messages through host memory without a GPU: streams that are always done, and memory that is pinned in name only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.distributed import neighbours, transport


class Still:
    """A stream or an event of a device that is always done."""

    def record_event(self):
        return self

    def wait_event(self, event) -> None:
        assert isinstance(event, Still)

    def wait_stream(self, stream) -> None:
        assert isinstance(stream, Still)

    def synchronize(self) -> None:
        pass


@dataclass
class Slow:
    """A copy out of another rank's memory that is under way until somebody waits for it."""

    source: torch.Tensor
    seen: torch.Tensor

    def synchronize(self) -> None:
        same = torch.equal(self.source.view(torch.uint8), self.seen.view(torch.uint8))  # also where it is not a number
        assert same, "overwritten before it was copied"


@dataclass
class Cudart:
    """What CUDA knows of pinned memory: addresses and sizes."""

    pinned: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    error: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.error == 0:
            assert address not in self.pinned
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert any(low <= address < high for low, high in mapped()), "unmapped before it was unpinned"
        del self.pinned[address]
        return 0


def mapped() -> list[tuple[int, int]]:
    """The addresses of memory that this process may share with others."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dilated-attention" in line]
    return [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in lines]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def staged(received=None) -> Iterator[Cudart]:
    """Every message goes through host memory, and what was sent from is overwritten at once.

    Groups that are used inside have to be destroyed inside: their memory is unpinned then.
    """
    plain_init, plain_start, plain_copy_in = transport.Wire.__init__, transport.Wire.start, transport.Wire._copy_in
    cudart = Cudart()

    def init(self, *args) -> None:
        plain_init(self, *args)
        self.staged, self.lag, self.outward, self.inward = True, 1, Still(), Still()

    def start(self, sends, receives, after):
        wait = plain_start(self, sends, receives, after)
        for parcel in sends:
            if parcel.what != "heads":  # those may be the caller's
                parcel.rows.fill_(torch.nan if parcel.rows.is_floating_point() else 99)
        return wait

    def copy_in(self, parcel, came) -> None:
        plain_copy_in(self, parcel, came)
        if self._shared(parcel):
            pages = self._memory._arrivals[-1].pages
            source = pages.rows(parcel.rows)
            pages.reads[:] = [Slow(source, source.clone())]
            if received is not None and parcel.rows.is_floating_point():
                received.bytes += source.numel() * source.element_size()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport.Wire, "__init__", init)
        patch.setattr(transport.Wire, "start", start)
        patch.setattr(transport.Wire, "_copy_in", copy_in)
        patch.setattr(transport, "_pinned", torch.empty_like)
        patch.setattr(transport, "_SMALL_MESSAGE", 0)  # every message in several parts, or through shared memory
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: Still())
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        yield cudart


@contextlib.contextmanager
def machines(name: str | None) -> Iterator[None]:
    """Groups that are used first inside find themselves on a machine of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "machine", lambda: name)
        yield
