"""The rates of this machine in place of those of a data sheet, from a few short calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dilated_attention_pytorch.api import attention
from dilated_attention_pytorch.hardware import Gpu, reported_gpu
from dilated_attention_pytorch.measure import device_memory, median_seconds
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.workbench.plan_ranks import rank_work
from dilated_attention_pytorch.workbench.plan_settings import Machine, PlanSettings
from dilated_attention_pytorch.workbench.plan_time import CLOCK, attention_seconds

MEASUREMENTS = 4


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """One rate as it was measured, and that of the table; None if the table does not have the device."""

    name: str
    measured: float
    table: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine with the rates of this one, and all that was measured."""

    machine: Machine
    device: str
    rates: tuple[MeasuredRate, ...]


def measure_machine(settings: PlanSettings, device: torch.device) -> Iterator[tuple[str, Measured | None]]:
    """Measure matrix products, copies and attention in the type and head size of the settings.

    Yield the name of each step before it begins, and at last the machine. Attention is measured on few tokens. The time of
    the model on that call is corrected by one factor for forwards and one for backwards.
    """
    on_gpu, dtype = device.type == "cuda", settings.torch_dtype
    known = reported_gpu(torch.cuda.get_device_name(device)) if on_gpu else None
    yield "matrix products", None
    size = 8192 if on_gpu else 1024
    x, y = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    matmul = 2 * size**3 / median_seconds(lambda: x @ y, device)
    yield "copies of memory", None
    source = torch.empty(2**29 if on_gpu else 2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)
    machine = replace(settings.machine, gpu=_gpu(settings.machine, device, known, matmul, bandwidth))
    yield "attention forward", None
    tokens = 2**16 if on_gpu else 2048
    case = PlanSettings(
        tokens=tokens, pattern=Dilated([2048], [1]), heads=8, head_dim=settings.head_dim, dtype=settings.dtype,
        machine=machine,
    )  # fmt: skip
    forward, backward = _attention_calls(case, device)
    forward_s = median_seconds(forward, device)
    yield "attention backward", None
    backward_s = median_seconds(backward, device) - forward_s
    work, name = rank_work(case), "hopper" if machine.gpu.capability[0] == 9 and dtype != torch.float32 else "sdpa"
    predicted = [attention_seconds(case, work, name, backward=x).total for x in (False, True)]
    machine = replace(
        machine, forward_factor=forward_s / predicted[0], backward_factor=max(backward_s, forward_s / 2) / predicted[1]
    )  # fmt: skip
    peak = None if known is None else known.matmul(settings.dtype) / 1e12
    rates = (
        MeasuredRate("matrix products, TFLOP/s", matmul / 1e12, peak),
        MeasuredRate("copies, GB/s", bandwidth / 1e9, None if known is None else known.bandwidth / 1e9),
        MeasuredRate("attention forward, ms", forward_s * 1e3, predicted[0] * 1e3),
        MeasuredRate("attention backward, ms", backward_s * 1e3, predicted[1] * 1e3),
    )
    yield "", Measured(machine, torch.cuda.get_device_name(device) if on_gpu else "CPU", rates)


def _gpu(machine: Machine, device: torch.device, known: Gpu | None, matmul: float, bandwidth: float) -> Gpu:
    """The device as an entry of the table."""
    memory = device_memory(device) or machine.gpu.memory
    if known is not None:
        return replace(known, memory=memory, bandwidth=bandwidth, half=matmul, tf32=3 * matmul, float32=matmul)
    cores = torch.get_num_threads()
    capability = (0, 0)
    if device.type == "cuda":
        capability, cores = torch.cuda.get_device_capability(device), 0
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(
        name=device.type, capability=capability, memory=memory, bandwidth=bandwidth, half=matmul, tf32=3 * matmul,
        float32=matmul, multiprocessors=cores, clock=CLOCK, nvlink=None, pcie="pcie4", pattern="", source="measured",
    )  # fmt: skip


def _attention_calls(case: PlanSettings, device: torch.device) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward, and a forward with its backward."""
    shape = (1, case.tokens, case.heads, case.head_dim)
    tensors = [torch.randn(shape, dtype=case.torch_dtype, device=device).requires_grad_() for _ in range(3)]
    query, key, value = tensors
    dout = torch.randn_like(query)

    def forward() -> object:
        with torch.no_grad():
            return attention(query, key, value, case.pattern)

    return forward, lambda: torch.autograd.grad(attention(query, key, value, case.pattern), tensors, dout)
