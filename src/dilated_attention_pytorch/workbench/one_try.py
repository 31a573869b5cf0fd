"""The program of the processes in which ``maxlen`` tries lengths.

It reads requests as lines of JSON, and it writes events as lines of JSON:

    {"event": "pid", "pid": 17}         the process of the try
    {"event": "started"}                everything is imported, and the time of the try begins
    {"event": "result", ...}            the outcome, unless the process is killed before
    {"event": "exit", "code": 0}        how the try ended

On a CPU, this process imports PyTorch once, and every try is a fork of it. That is safe as long as this process computes
nothing, so that PyTorch has started no threads. On a GPU, this process makes the tries itself, because CUDA cannot be used
in a fork of a process that has initialised it. It ends after a try that did not run: a context is in an undefined state
after some errors.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.measure import lacks_memory, median_seconds
from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.streaming import default_pattern
from dilated_attention_pytorch.training.costs import peak_memory
from dilated_attention_pytorch.workbench.maxlen import TryResult, TrySettings

_WARM_UP_TOKENS = 64
_POLL_S = 0.5


def main() -> None:
    """Serve requests until standard input ends, with forks on a CPU; serve one request in this process on a GPU."""
    events = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not an event

    def tell(event: dict[str, Any]) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    trying = threading.Event()
    threading.Thread(target=_end_with_parent, args=(trying,), daemon=True).start()
    while line := sys.stdin.readline():
        request = json.loads(line)
        tokens, settings = request["tokens"], TrySettings(**request["settings"])
        if settings.device != "cpu":
            trying.set()
            ran = _try_in_this_process(settings, tokens, tell)
            torch.cuda.empty_cache()
            trying.clear()
            if not ran:
                return
            tell({"event": "exit", "code": 0})
            continue
        child = os.fork()
        if child == 0:
            trying.set()
            threading.Thread(target=_end_with_parent, args=(trying,), daemon=True).start()  # a fork has no other threads
            _try_in_this_process(settings, tokens, tell)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        tell({"event": "exit", "code": code})


def _try_in_this_process(settings: TrySettings, tokens: int, tell: Callable[[dict[str, Any]], None]) -> bool:
    """Make a try, and return whether it ran."""
    tell({"event": "pid", "pid": os.getpid()})
    try:
        result = try_length(settings, tokens, lambda: tell({"event": "started"}))
    except (MemoryError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result = _failure(tokens, error)
    told = {name: getattr(result, name) for name in ("outcome", "memory_bytes", "seconds", "reason")}
    tell({"event": "result", **told})
    return result.ran


def _end_with_parent(trying: threading.Event) -> None:
    """End the process in a try as soon as nobody can read its result.

    Nothing is sent during a try, so input means its end. Between tries, the main thread reads the input.
    """
    while True:
        trying.wait()
        # The input may have been the request that the main thread has just read: only what is left is looked at.
        if select.select([0], [], [], _POLL_S)[0] and trying.is_set() and select.select([0], [], [], 0)[0]:
            os._exit(1)


def _failure(tokens: int, error: Exception) -> TryResult:
    text = str(error).partition("\n")[0] or type(error).__name__
    no_memory = lacks_memory(error)
    if wanted := re.search(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", text, re.IGNORECASE) if no_memory else None:
        size = f"{int(wanted[1]) / 2**20:,.1f} MiB" if wanted[2] == "bytes" else f"{wanted[1]} {wanted[2]}"
        text = f"no memory for another tensor of {size}"
    return TryResult(tokens, "out of memory" if no_memory else "failed", reason=text)


def try_length(settings: TrySettings, tokens: int, started: Callable[[], None] = lambda: None) -> TryResult:
    """Compute one length in this process, whose memory is limited from then on."""
    device = torch.device(settings.device)
    torch.manual_seed(0)
    _make_call(settings, _WARM_UP_TOKENS)()  # threads, libraries and kernels
    _limit_memory(settings.memory, device)
    before = _reset_peak(device)
    started()
    call = _make_call(settings, tokens)
    if device.type == "cuda":
        seconds = median_seconds(call, device, repeats=1)  # the first call may compile kernels
    else:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
    return TryResult(tokens, "ran", peak_memory(device) - before, seconds)


def _limit_memory(memory: int | None, device: torch.device) -> None:
    if device.type == "cuda":
        if memory is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
        return
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if the machine runs out of memory, this process ends first
    if memory is not None:
        import resource  # not on Windows

        # The limit counts data, not addresses: libraries and reserved addresses take none of it.
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = _status_bytes("VmData:") + memory
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _reset_peak(device: torch.device) -> int:
    """Forget the peak so far, and return the bytes that the process holds already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident
    return peak_memory(device)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _make_call(settings: TrySettings, tokens: int) -> Callable[[], None]:
    """The inputs of a length, and a function that computes it."""
    device = torch.device(settings.device)
    if settings.preset is not None:
        return _model_call(settings, tokens, device)
    shape, dtype = (1, tokens, settings.heads, settings.head_dim), getattr(torch, settings.dtype)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=settings.train) for _ in range(3))
    dout = torch.ones(shape, dtype=dtype, device=device) if settings.train else None
    branches = settings.pattern or default_pattern(tokens).branches
    pattern = Dilated([w for w, _ in branches], [r for _, r in branches])

    def call() -> None:
        if settings.method == "dense":
            out = scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=settings.is_causal
            ).transpose(1, 2)
        else:
            out = attention(q, k, v, pattern, is_causal=settings.is_causal, backend=settings.backend)
        if dout is not None:
            torch.autograd.grad(out, (q, k, v), dout)

    return call


def _model_call(settings: TrySettings, tokens: int, device: torch.device) -> Callable[[], None]:
    """A window of a decoder: its loss, and the gradients of the parameters if the settings ask for them."""
    assert settings.preset is not None
    config = LongNetConfig.preset(settings.preset)
    assert config.vocab_size is not None, "only decoders are offered"
    model = LongNetDecoder(config, device=device)
    window: Tensor = torch.randint(config.vocab_size, (1, tokens + 1), device=device)

    def call() -> None:
        with torch.set_grad_enabled(settings.train), torch.autocast(
            device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"
        ):  # fmt: skip
            loss = model.loss(window[:, :-1], window[:, 1:])
        if settings.train:
            model.zero_grad()
            torch.autograd.backward(loss)

    return call
