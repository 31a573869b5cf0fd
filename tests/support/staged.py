"""Messages through host memory without a GPU: streams that are always done, and memory that is pinned in name only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from dilated_attention_pytorch.distributed import wire


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


@contextlib.contextmanager
def staged() -> Iterator[None]:
    """Every message goes through host memory, in several tags, and what was sent from is overwritten at once."""
    plain_init, plain_start = wire.Wire.__init__, wire.Wire.start

    def init(self, *args) -> None:
        plain_init(self, *args)
        self.staged, self.lag, self.outward, self.inward = True, 1, Still(), Still()

    def start(self, sends, receives, after):
        wait = plain_start(self, sends, receives, after)
        for parcel in sends:
            if parcel.content != "heads":  # those may be the caller's
                parcel.rows.fill_(torch.nan if parcel.rows.is_floating_point() else 99)
        return wait

    def on_host(self, rows, *, copy):
        return rows.clone() if copy else torch.empty_like(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire.Wire, "__init__", init)
        patch.setattr(wire.Wire, "start", start)
        patch.setattr(wire.Wire, "_on_host", on_host)
        patch.setattr(wire, "_SMALL_MESSAGE", 0)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: Still())
        yield
