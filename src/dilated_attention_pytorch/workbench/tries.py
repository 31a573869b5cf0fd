"""Tries of lengths in child processes, so that running out of memory or of time is a result."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from dilated_attention_pytorch.workbench.children import command_line, describe_exit, last_line
from dilated_attention_pytorch.workbench.maxlen import TryResult, TrySettings

PROGRAM = "from dilated_attention_pytorch.workbench.one_try import main; main()"
_START_S = 300.0  # imports, and kernels that are compiled for the first time


@dataclass(slots=True)
class _Progress:
    """What the events of a try have said so far."""

    pid: int | None = None
    started: bool = False
    told: dict[str, Any] | None = None
    late: bool = False
    seconds: float = 0.0


class Tries:
    """Runs tries, one after the other. Leaving the context ends the processes.

    The processes are a session of their own, so that Ctrl-C reaches only this process, which then ends them.
    """

    def __init__(self, settings: TrySettings, command: Sequence[str] = ()) -> None:
        self.settings = settings
        self._command = list(command) or command_line(PROGRAM)
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``close``
        self._child: int | None = None  # the process of the try, while it runs

    def __enter__(self) -> Tries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._kill_try()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._stderr.close()

    def run(self, tokens: int) -> TryResult:
        """Try one length."""
        said_before = self._stderr.seek(0, os.SEEK_END)
        self._send(tokens)
        progress = _Progress()
        code = self._follow(progress)
        self._child = None
        if self._process is not None and self._process.poll() is not None:
            self._process = None  # the next try starts a new one
        if progress.told is not None:
            return TryResult(tokens, **progress.told)
        if progress.late:
            rule = f"more than {self.settings.seconds:g} s" if progress.started else f"no start within {_START_S:g} s"
            return TryResult(tokens, "too slow" if progress.started else "failed", seconds=progress.seconds, reason=rule)
        self._stderr.seek(said_before)
        said = last_line(self._stderr.read().decode(errors="replace"))
        reason = f"{describe_exit(code)}{', out of memory or a crash' * (code < 0)}{said and f': {said}'}"
        return TryResult(tokens, "killed" if code < 0 else "failed", reason=reason)

    def _send(self, tokens: int) -> None:
        if self._process is None:
            self._events = queue.Queue()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
            )
            threading.Thread(target=_read, args=(self._process, self._events), daemon=True).start()
        assert self._process.stdin is not None
        request = {"tokens": tokens, "settings": asdict(self.settings)}
        with suppress(BrokenPipeError):  # the process has ended, which is the next event
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()

    def _follow(self, progress: _Progress) -> int:
        """Read the events of a try until it ends, and end it if it takes too long. Return the exit code."""
        start = time.monotonic()
        deadline: float | None = start + _START_S
        while True:
            try:
                event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                progress.late, deadline = True, None
                progress.seconds = time.monotonic() - start
                self._kill_try()
                continue
            if event["event"] == "pid":
                self._child = event["pid"]
            elif event["event"] == "started":
                progress.started, start = True, time.monotonic()
                deadline = start + self.settings.seconds
            elif event["event"] == "result":
                progress.told = {name: x for name, x in event.items() if name != "event"}
                deadline = time.monotonic() + _START_S  # freeing the memory is not part of the try
            else:
                return int(event["code"])

    def _kill_try(self) -> None:
        """Kill the process of the try, or the one that was about to make it."""
        if self._child is not None and self._process is not None and self._child != self._process.pid:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
        elif self._process is not None:
            self._process.kill()


def _read(process: subprocess.Popen[bytes], events: queue.Queue[dict[str, Any]]) -> None:
    """Pass on the events of a process, and then its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            events.put(json.loads(line))
    events.put({"event": "exit", "code": process.wait()})
