"""What the ranks of a group learn from each other while they wait, through the store of the group.

A rank that waits for a message does not know why it does not arrive. One thread per group and process therefore looks into
the store, where ranks write three things:

* the first failure of the group, with the rank that failed. Every rank that waits raises it;
* the calls that a rank refused although the others do not compare their arguments;
* on request, what a rank does: its last turns, and the rank for which it waits.

A turn is a comparison or an exchange. Turns have the same numbers on all ranks, so two ranks that do different things in
the same turn have made different calls. Nothing is written while messages arrive in time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from dilated_attention_pytorch.distributed.failures import ORDER, WAY_OUT, GroupError, named, refusal
from dilated_attention_pytorch.distributed.groups import TOO_FEW_GPUS, backend_for

PERIOD_S = 0.25  # between two looks into the store; a rank that waits less does not look
RANKS_PER_S = 2048  # looks into one store; the period grows with the number of ranks
TURNS_KEPT = 32
_INTERRUPT_TAG = 2**30 - 2**10  # the tag of messages that nobody sends
_SHORTEST = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Turn:
    """A comparison or an exchange of a group."""

    number: int
    label: str  # "the forward of call 3"
    hash: int = 0  # of the arguments
    texts: Callable[[], dict[str, str]] = dict  # the arguments by name, for messages


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits for."""

    task: str  # "receive keys and values from rank 2", for messages
    peers: tuple[int, ...]  # empty for all ranks
    since_s: float


@dataclass(slots=True)
class _Report:
    """A failure that the thread writes into the store, and the text of the first failure that it finds there."""

    key: str
    find: Callable[[], str]
    text: str | None = None
    done: Event = field(default_factory=Event)


class Watch:
    """The turns of one group in this process, and the thread that looks into the store of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self.broken: str | None = None  # why the group cannot be used any more
        self.calls = 0  # sharded calls so far, the same number on all ranks
        self.connected: set[str] = set()  # device types whose communicator exists
        self.acknowledged: dict[int, Any] = {}  # by rank: the handle of the last acknowledgement that was sent to it
        self._group, self._store = ref(group), group.get_group_store()
        self._turns: deque[Turn] = deque(maxlen=TURNS_KEPT)
        self._number = 0  # of the last turn
        self._wait: Wait | None = None
        self._found: str | None = None  # the failure for which this rank's wait was ended
        self._lost = ""  # why the store cannot be read any more
        self._period_s = max(PERIOD_S, self.world / RANKS_PER_S)
        self._answered, self._posted_turn, self._next_peer = 0, 0, 0
        self._asked: deque[tuple[float, int]] = deque(maxlen=64)  # when this rank asked, and the number of the question
        self._reports: SimpleQueue[_Report | None] = SimpleQueue()
        self._thread: Thread | None = None

    # Methods that the threads of the calls use.

    def turn(self, label: str, hash_: int = 0, texts: Callable[[], dict[str, str]] = dict) -> TurnContext:
        """A context for the next turn. An exception inside is reported to the ranks that wait for this one."""
        return TurnContext(self, partial(self.begin, label, hash_, texts))

    def begin(self, label: str, hash_: int = 0, texts: Callable[[], dict[str, str]] = dict) -> Turn:
        """The next turn; raise if the group cannot be used any more."""
        if self.broken is not None:
            raise GroupError(f"the group cannot be used any more: {self.broken}. {WAY_OUT}")
        self._number += 1
        turn = Turn(self._number, label, hash_, texts)
        self._turns.append(turn)
        if self._thread is None and self.world > 1:
            self._thread = Thread(target=_watch, args=(ref(self),), daemon=True, name="dilated_attention watch")
            self._thread.start()
            _with_threads.add(self)
        return turn

    @contextlib.contextmanager
    def waiting(self, task: str, *peers: int) -> Iterator[None]:
        """Name the task and the rank that has failed in an error of PyTorch's communication. No peers means all ranks."""
        self._wait = Wait(task, peers, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            raise self._failed(self._wait, error) from error
        finally:
            self._wait = None

    def refuse(self, mistake: Exception) -> None:
        """Let the ranks that wait in the next turn know that this rank refused its arguments. The group stays usable."""
        turn = self.begin("a call that it refused")
        self._publish(f"refusal {turn.number}", lambda: refusal(self.rank, mistake))

    def abandon(self, error: BaseException) -> None:
        """Let the other ranks know that this rank leaves the turn, in which messages are under way."""
        lines = str(error).splitlines() or [""]
        where = self._turns[-1].label
        self.broken = f"rank {self.rank} raised {type(error).__name__} in {where}: {lines[0]}"
        self._publish("failure", lambda: str(self.broken))
        error.add_note(
            f"Messages of {where} were under way. Collectives of this process group may wait for them until its timeout. "
            f"{WAY_OUT}."
        )

    def _failed(self, wait: Wait, error: RuntimeError) -> GroupError:
        what = f"rank {self.rank} could not {wait.task}"
        if "Duplicate GPU" in str(error):
            return GroupError(f"two ranks share a GPU. {TOO_FEW_GPUS} ({what})")
        is_closed = any(text in str(error) for text in ("Connection closed", "Connection reset", "Broken pipe"))
        found = self._found or self._publish("failure", lambda: self._cause(wait, is_closed))
        if found is None:
            lost = self._lost or "the store of the group does not answer"
            found = f"{error}. A rank has ended, or was stopped longer than the group's timeout; {lost}"
            self._interrupt(found)  # closes the connections, so that the ranks that wait for this one notice
        self.broken = found
        return GroupError(f"{what}: {found}. {WAY_OUT}")

    def _publish(self, key: str, find: Callable[[], str]) -> str | None:
        """Let the thread write a failure, and return the first one of the group; None if the store does not answer."""
        if self._thread is None or not self._thread.is_alive():
            return None
        report = _Report(key, find)
        self._reports.put(report)
        report.done.wait(4 * self._period_s + 1.0)
        return report.text

    # Methods that the thread of the watch uses. A store that does not answer blocks no other thread.

    def look(self) -> None:
        """Look into the store once: for failures while this rank waits, otherwise for questions."""
        wait, now = self._wait, time.monotonic()
        if wait is None or now - wait.since_s < PERIOD_S or self._found is not None:
            if self._store.check(["asked"]):
                self._answer(int(self._store.get("asked")))
            return
        found = self._known_failure()
        if found is None:
            self._ask()
            difference = self._difference(wait)
            found = None if difference is None else self._first("failure", difference)
        if found is not None:
            self._interrupt(found)

    def write(self, report: _Report) -> None:
        """Write a failure of this rank, unless there is one."""
        if report.key != "failure":
            self._store.set(report.key, report.find())
        else:
            report.text = self._known_failure() or self._first("failure", report.find())

    def lose_store(self) -> None:
        """Remember that the store is gone. Waits go on: its process may have ended after its last call."""
        self._lost = "the process that holds the store of the group, usually rank 0, has ended"

    def end(self) -> None:
        """End the thread."""
        self._reports.put(None)
        if self._thread is not None:
            self._thread.join(1.0)

    def next_report(self) -> _Report | None:
        """A failure of this rank; None after a period, or at the end of the process."""
        with contextlib.suppress(Empty):
            return self._reports.get(timeout=self._period_s)
        return None

    def _known_failure(self) -> str | None:
        for key in ("failure", f"refusal {self._number}"):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None

    def _first(self, key: str, text: str) -> str:
        """The first text that any rank has written."""
        return str(self._store.compare_set(key, "", text).decode())

    def _ask(self) -> int:
        """Ask all ranks what they do. They answer within a period."""
        number = int(self._store.add("asked", 1))
        self._asked.append((time.monotonic(), number))
        self._answer(number)
        return number

    def _answer(self, question: int) -> None:
        """Write what this rank does, if a rank has asked since the last time."""
        if question == self._answered:
            return
        turns, wait = list(self._turns), self._wait
        if turns and turns[-1].number != self._posted_turn:
            # Values of arguments are long, and differences are seen early.
            known = [[x.number, x.label, x.hash, x.texts() if x.number > self._number - 4 else {}] for x in turns]
            self._store.set(f"turns of rank {self.rank}", json.dumps(known))
            self._posted_turn = turns[-1].number
        waits_for = wait.peers[0] if wait is not None and len(wait.peers) == 1 else None
        state = [question, self._number, wait is not None or self.broken is not None, waits_for]
        self._store.set(f"state of rank {self.rank}", json.dumps(state))
        self._answered = question

    def _read(self, what: str, rank: int) -> Any:
        key = f"{what} of rank {rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _difference(self, wait: Wait) -> str | None:
        """A sentence about a rank that does something else in the same turn; None if no such rank is known."""
        peers = wait.peers
        if not peers:  # all of a small group, a few of a large one at each look
            peers = tuple((self._next_peer + i) % self.world for i in range(min(self.world, 16)))
            self._next_peer += 16
        own = self._turns[-1]
        for peer in peers:
            for number, label, hash_, values in (self._read("turns", peer) if peer != self.rank else None) or ():
                if number == own.number and (label, hash_) != (own.label, own.hash):
                    return self._different(own, peer, label, values)
        return None

    def _different(self, own: Turn, peer: int, label: str, values: dict[str, str]) -> str:
        if label != own.label:
            return f"rank {self.rank} is in {own.label} and rank {peer} in {label}; {ORDER}"
        listed = "\n".join(
            f"  {name}: {text} on rank {self.rank}, {values.get(name)} on rank {peer}"
            for name, text in own.texts().items()
            if text != values.get(name)
        )
        return f"rank {self.rank} and rank {peer} have different arguments in {own.label}:\n{listed}"

    def _cause(self, wait: Wait, is_closed: bool) -> str:
        """Which rank failed, as far as the others answer: one that has died or was stopped does not."""
        if len(wait.peers) == 1 and is_closed:
            return f"rank {wait.peers[0]} has ended or left the group"
        # A rank that has only just closed its connections may have answered all earlier questions.
        questions = [] if is_closed else [number for asked_s, number in self._asked if asked_s >= wait.since_s]
        while len(questions) < 3:  # too few were asked, for example because the wait was short
            questions.append(self._ask())
            time.sleep(self._period_s)
        states = {rank: self._read("state", rank) for rank in self._suspects(wait)}
        silent = [rank for rank, state in states.items() if state is None or state[0] < questions[-3]]
        if silent:
            return f"{named(silent)} did not take part and did not answer, so it has ended or was stopped"
        if is_closed:
            return f"one of {named(list(states))} has left the group"
        late = [rank for rank, (_, turn, is_there, _) in states.items() if turn < self._number or not is_there]
        if late:
            return f"{named(late)} did not take part within the timeout of the group"
        return f"nothing arrived from {named(list(states))} within the timeout of the group"

    def _suspects(self, wait: Wait) -> list[int]:
        """The ranks that may have failed: all others, or the last of those that wait for each other in a chain."""
        if len(wait.peers) != 1:
            return [rank for rank in wait.peers or range(self.world) if rank != self.rank]
        chain, rank = [], wait.peers[0]
        while rank not in chain and rank != self.rank:
            state = self._read("state", rank)
            chain.append(rank)
            if state is None or state[3] is None:
                break
            rank = state[3]
        return chain[-1:]

    def _interrupt(self, found: str) -> None:
        """End the waits of this process: gloo closes all connections when the wait for a message times out."""
        self._found = found
        group = self._group()
        if group is None or backend_for("cpu", group) != "gloo":
            return
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
        ranks = dist.get_process_group_ranks(group)
        for lane in range(interfaces):
            for peer in (rank for rank in ranks if rank != dist.get_rank()):
                try:
                    never = dist.irecv(torch.empty(1, device="cpu"), peer, group, _INTERRUPT_TAG + lane)
                    assert never is not None
                    never.wait(_SHORTEST)
                except RuntimeError as error:
                    if "Timed out" in str(error):
                        break


class TurnContext:
    """See ``Watch.turn``."""

    def __init__(self, watch: Watch, begin: Callable[[], Turn]) -> None:
        self._watch, self._begin = watch, begin
        self.complete = False  # whether all messages of the turn have arrived

    @contextlib.contextmanager
    def completed_by(self, drain: Callable[[], None]) -> Iterator[None]:
        """After an error of PyTorch, missing memory for example, exchange what remains: the group stays usable."""
        try:
            yield
        except GroupError:
            raise
        except (RuntimeError, MemoryError):
            drain()
            self.complete = True
            raise

    def __enter__(self) -> TurnContext:
        self._begin()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.complete and not isinstance(error, GroupError):
            self._watch.abandon(error)


def _watch(watch_ref: ref[Watch]) -> None:
    """The thread of a watch. It ends with the group, with the process, or when the process that holds the store ends."""
    while (watch := watch_ref()) is not None:
        report = watch.next_report()
        if _ending.is_set() or not dist.is_initialized():
            return
        try:
            if report is not None:
                watch.write(report)
            else:
                watch.look()
        except RuntimeError:  # as PyTorch reports a store that is gone
            watch.lose_store()
            return
        finally:
            if report is not None:
                report.done.set()
        del watch


_watches: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()
_with_threads: WeakSet[Watch] = WeakSet()
_ending = Event()


@atexit.register
def _end_threads() -> None:
    """End the threads before the interpreter ends: it would abort the process if one of them returned from the store."""
    _ending.set()
    for watch in list(_with_threads):
        watch.end()


def watch_of(group: dist.ProcessGroup) -> Watch:
    """The watch of a group in this process."""
    if group not in _watches:
        _watches[group] = Watch(group)
    return _watches[group]
