"""The search for the longest sequence, and the processes in which lengths are tried."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import programs
from dilated_attention_pytorch.workbench.children import describe_exit
from dilated_attention_pytorch.workbench.maxlen import Bounds, TryResult, TrySettings, search
from dilated_attention_pytorch.workbench.tries import Tries

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")

# What stands for the process of a try: it gets a request as a line of JSON.
CHILD = """
import json, os, signal, sys, time
def tell(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)
tokens = json.loads(sys.stdin.readline())["tokens"]
tell("pid", pid=os.getpid())
tell("started")
"""
RESULT = 'tell("result", outcome="ran", memory_bytes=4 * tokens, seconds=0.5, reason="")'
# A process that stays, and forks one for each request.
SERVER = (
    """
import json, os, signal, sys, time
def tell(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)
while line := sys.stdin.readline():
    tokens = json.loads(line)["tokens"]
    child = os.fork()
    if child == 0:
        tell("pid", pid=os.getpid())
        tell("started")
        if tokens > 100:
            time.sleep(60)
        """
    + RESULT
    + """
        os._exit(0)
    tell("exit", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)


def limited(limit: int):
    return lambda tokens: TryResult(tokens, "ran" if tokens <= limit else "out of memory")


def tries(code: str, seconds: float = 60.0) -> Tries:
    return Tries(TrySettings(seconds=seconds), [sys.executable, "-c", code])


@pytest.mark.parametrize("precision", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("limit", [1, 2, 3, 63, 64, 65, 1000, 123_457])
@pytest.mark.parametrize("start", [1, 64, 4096, 10**6])
def test_a_known_limit_is_found_to_the_precision(start, limit, precision):
    found = list(search(limited(limit), start, precision))
    bounds = Bounds.of(found)
    assert bounds.longest.tokens <= limit < bounds.failed.tokens
    assert bounds.failed.tokens - bounds.longest.tokens <= max(1, precision * bounds.longest.tokens)
    assert len({x.tokens for x in found}) == len(found) < 60  # nothing is tried twice
    assert found[0].tokens == start


def test_nothing_runs():
    found = list(search(limited(0), 100, 0.05))
    assert [x.tokens for x in found] == [100, 25, 6, 1]
    assert Bounds.of(found) == Bounds(None, found[-1])


def test_everything_runs():
    found = list(search(limited(2**60), 2**30, 0.05))
    assert Bounds.of(found) == Bounds(TryResult(2**40, "ran"), None)


@pytest.mark.parametrize(("start", "precision"), [(0, 0.1), (1, -0.1), (1, float("nan")), (1, float("inf"))])
def test_searches_that_are_refused(start, precision):
    with pytest.raises(ValueError, match=r"start|precision"):
        next(search(limited(1), start, precision))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "sparse"}, "method must be one of dilated, dense, got 'sparse'"),
        ({"heads": 0}, "heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"memory": 0}, "memory"),
        ({"seconds": 0.0}, "seconds must be a positive number, got 0.0"),
        ({"seconds": float("nan")}, "seconds"),
    ],
)
def test_settings_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        TrySettings(**options)


def test_a_try_that_runs_and_a_process_for_each():
    with tries(CHILD + RESULT) as children:
        assert [children.run(n) for n in (3, 5)] == [TryResult(n, "ran", 4 * n, 0.5) for n in (3, 5)]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_signal_is_a_result_with_its_name(name):
    with tries(CHILD + f"os.kill(os.getpid(), signal.{name})") as children:
        result = children.run(7)
    assert (result.tokens, result.outcome) == (7, "killed")
    assert result.reason == f"ended by {name}, out of memory or a crash"


def test_the_last_line_of_standard_error_is_the_reason():
    with tries(CHILD + "sys.exit('first line\\nlibgomp: Thread creation failed\\n\\n')") as children:
        result = children.run(7)
    assert (result.outcome, result.reason) == ("failed", "ended with exit code 1: libgomp: Thread creation failed")


def test_a_try_that_takes_too_long_is_killed():
    with tries(CHILD + "time.sleep(60)", seconds=0.2) as children:
        result = children.run(7)
    assert (result.outcome, result.reason) == ("too slow", "more than 0.2 s")
    assert 0.2 <= result.seconds < 30


def test_forks_of_one_process_are_tries_of_their_own():
    with tries(SERVER, seconds=0.3) as children:
        outcomes = [children.run(n).outcome for n in (50, 200, 60)]
        server = children._process
        assert server.poll() is None
    assert outcomes == ["ran", "too slow", "ran"]
    assert server.returncode == -signal.SIGKILL


def test_an_interrupted_try_leaves_no_process():
    """Ctrl-C ends the fork that computes, and the process that made it."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def send_when_started():
        while children._child is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    children = tries(SERVER)
    try:
        threading.Thread(target=send_when_started).start()
        with pytest.raises(KeyboardInterrupt), children:
            children.run(200)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert children._process is None
    end = time.monotonic() + 20
    while Path(f"/proc/{children._child}").exists() and time.monotonic() < end:
        if Path(f"/proc/{children._child}/stat").read_text().split()[2] == "Z":
            break  # killed, and nobody has read its exit code
        time.sleep(0.01)
    assert time.monotonic() < end


def test_exits_in_words():
    assert describe_exit(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert describe_exit(-200) == "ended by signal 200"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_memory_of_a_process_is_limited(tmp_path):
    """Query, key, value and output of 4 heads of size 16 take 1,024 bytes a token: 16 MiB hold at most 16,384 tokens."""
    code = """
import sys
from dilated_attention_pytorch.workbench import one_try
from dilated_attention_pytorch.workbench.maxlen import TrySettings
settings = TrySettings(heads=4, head_dim=16, memory=2**24, pattern=((512, 1),))
print(one_try.try_length(settings, 8_000))
try:
    one_try.try_length(settings, 17_000)
except RuntimeError as error:
    print(one_try._failure(17_000, error))
"""
    result = programs.run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    ran, failed = (eval(line, {"TryResult": TryResult}) for line in result.stdout.splitlines())
    assert ran.outcome == "ran"
    assert 8_000 * 1024 <= ran.memory_bytes <= 2**24
    assert (failed.outcome, failed.memory_bytes) == ("out of memory", None)
    assert failed.reason.startswith("no memory for another tensor of ")


def test_the_end_of_a_process_is_not_part_of_the_try():
    with tries(CHILD + RESULT + "\ntime.sleep(0.4)", seconds=0.3) as children:
        assert children.run(3).outcome == "ran"
