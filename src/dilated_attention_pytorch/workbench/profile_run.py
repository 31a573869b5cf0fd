"""One attention call or one training step under PyTorch's profiler, on one rank or on each of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.distributed.sequence import shard_sequence
from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.models.presets import PRESETS
from dilated_attention_pytorch.workbench.processes import Send, run_ranks
from dilated_attention_pytorch.workbench.profile_events import (
    BACKWARD,
    FORWARD,
    UPDATE,
    communication_of,
    memory_curve,
    operator_spans,
    operator_times,
)
from dilated_attention_pytorch.workbench.profile_values import ProfileResult, ProfileSettings

Group = dist.ProcessGroup | None
Made = dict[str, list[Tensor]]  # tensors by component


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """A call to profile. It returns the tensors that it leaves behind, by component."""

    call: Callable[[], Made]
    before: Made  # what exists before the call


def make_task(settings: ProfileSettings, group: Group) -> ProfileTask:
    """The call of the settings, on this rank's share of the sequence if there is a group."""
    return _attention_task(settings, group) if settings.preset is None else _training_task(settings, group)


def _attention_task(settings: ProfileSettings, group: Group) -> ProfileTask:
    pattern, causal = settings.pattern, settings.is_causal
    layout = "zigzag" if causal else "contiguous"
    assert pattern is not None
    shape = (1, settings.tokens, settings.heads, settings.head_dim)
    generator = torch.Generator(settings.device).manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=settings.dtype, device=settings.device) for _ in range(4)]
    if group is not None:
        made = [shard_sequence(x, group, layout=layout) for x in made]
    query, key, value, dout = made
    inputs = [query, key, value]
    sharding = None if group is None else Sharding(group, layout)
    for x in inputs:
        x.requires_grad_(settings.backward)

    def call() -> Made:
        with record_function(FORWARD):
            out = attention(
                query, key, value, pattern, is_causal=settings.is_causal, backend=settings.backend, group=sharding
            )
        if not settings.backward:
            return {"output": [out]}
        with record_function(BACKWARD):
            gradients = torch.autograd.grad(out, inputs, dout)
        return {"output": [out], "gradients": list(gradients)}

    before = {"query, key, value": inputs} | ({"gradient of the output": [dout]} if settings.backward else {})
    return ProfileTask(call, before)


def _training_task(settings: ProfileSettings, group: Group) -> ProfileTask:
    config = model_config(settings.preset or "")
    torch.manual_seed(0)  # the same on every rank
    layout = None if group is None else "zigzag"
    model = LongNetDecoder(config, group=group, layout=layout, device=settings.device).train()
    step: torch.nn.Module = model if group is None else DistributedDataParallel(model)
    parameters: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    generator = torch.Generator(settings.device).manual_seed(0)
    text = torch.randint(config.vocab_size or 1, (1, settings.tokens + 1), generator=generator, device=settings.device)
    tokens, targets = text[:, :-1], text[:, 1:]
    if group is not None:
        tokens, targets = (shard_sequence(x, group, layout="zigzag") for x in (tokens, targets))

    def call() -> Made:
        with (
            record_function(FORWARD),
            torch.autocast(settings.device.type, settings.dtype, enabled=settings.dtype != torch.float32),
        ):
            loss = step(tokens, targets=targets, reduction="mean")
        with record_function(BACKWARD):
            loss.backward()
        with record_function(UPDATE):
            optimizer.step()
        gradients = [p.grad for p in parameters if p.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        return {"loss": [loss.detach()], "gradients": gradients}

    call()  # the sums of the optimizer are made in the first step
    sums = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return ProfileTask(call, {"parameters": parameters, "sums of the optimizer": sums, "tokens": [tokens, targets]})


def model_config(preset: str) -> LongNetConfig:
    """The configuration of a decoder. Raise a ValueError for other presets."""
    decoders = [name for name, fields in PRESETS.items() if fields.get("vocab_size")]
    if preset not in decoders:
        raise ValueError(f"--preset must be one of {', '.join(decoders)}, got {preset!r}")
    return LongNetConfig.preset(preset)


def profile_call(settings: ProfileSettings, group: Group, count: int, trace: Path | None) -> ProfileResult:
    """Profile the call on this rank. ``count`` is how many operators are listed.

    The trace is for chrome://tracing and Perfetto.
    """
    task = make_task(settings, group)
    with torch.set_grad_enabled(settings.backward or settings.preset is not None):
        task.call()  # fills caches, and connects the ranks
        _synchronize(settings.device, group)
        activities = [ProfilerActivity.CPU]
        if settings.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True) as recorded:
            start = time.perf_counter()
            left = task.call()
            _synchronize(settings.device, None)
            seconds = time.perf_counter() - start
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    profiler = recorded.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    known = {x.untyped_storage().data_ptr(): name for name, tensors in left.items() for x in tensors}
    events, kind = recorded.events(), settings.device.type
    operators = operator_times(recorded.key_averages(), kind, count)
    return ProfileResult(
        rank=0 if group is None else dist.get_rank(group),
        seconds=seconds,
        made_before=tuple((name, _bytes(tensors)) for name, tensors in task.before.items()),
        memory=memory_curve(profiler.kineto_results.experimental_event_tree(), kind, known),
        operators=operators,
        spans=operator_spans(events, operators, kind),
        communication=communication_of(events, kind),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    """The memory of the storages of tensors, each counted once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _synchronize(device: torch.device, group: Group) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if group is not None:
        dist.barrier(group)


def profile_ranks(settings: ProfileSettings, world: int, count: int, trace: Path | None) -> Iterator[ProfileResult]:
    """Profile the call on ``world`` new processes that share its sequence. The trace is that of the first rank."""
    yield from run_ranks(world, settings.device, _worker, settings, count, trace)


def _worker(rank: int, device: torch.device, send: Send, settings: ProfileSettings, count: int, trace: Path | None) -> None:
    own = replace(settings, device=device)
    send(profile_call(own, dist.group.WORLD, count, trace if rank == 0 else None))
