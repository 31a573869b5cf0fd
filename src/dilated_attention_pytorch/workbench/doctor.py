"""What works on this machine: every backend on every device, checked, and what to install for more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.workbench.backend_checks import PATTERN, SHAPES, ExactnessCheck, Example, check_backend
from dilated_attention_pytorch.workbench.machine import OTHER_PROJECT, MachineFacts

INTERPRETED = "Triton's interpreter, which TRITON_INTERPRET=1 asks for, takes minutes"
CPU_DTYPES = (torch.float32,)
CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class BackendFinding:
    """One backend on one device, for one type."""

    backend: str
    device: str
    dtype: str
    reasons: tuple[str, ...]  # why it cannot serve; empty if it can
    check: ExactnessCheck | None  # None if it cannot serve, or if the check is left out
    skipped: str = ""  # why the check is left out

    @property
    def passed(self) -> bool:
        """Whether the backend is exact. One that cannot serve is no failure."""
        return self.check is None or self.check.passed


def count_findings(gpus: int) -> int:
    """How many findings ``examine_backends`` yields."""
    return len(backends.BACKENDS) * (len(CPU_DTYPES) + gpus * len(CUDA_DTYPES))


def examine_backends(gpus: int) -> Iterator[BackendFinding]:
    """Check every backend on the CPU and on each GPU.

    The reasons are all that a backend gives for the call of the check.
    """
    examples = {dtype: Example.make(dtype) for dtype in (CUDA_DTYPES if gpus else CPU_DTYPES)}
    devices: list[tuple[torch.device, tuple[torch.dtype, ...]]] = [(torch.device("cpu"), CPU_DTYPES)]
    devices += [(torch.device("cuda", number), CUDA_DTYPES) for number in range(gpus)]
    for device, dtypes in devices:
        for dtype in dtypes:
            request = request_of_check(device, dtype)
            for backend in backends.BACKENDS:
                reasons = tuple(backend.why_not(request))
                interpreted = backend.name == "triton" and device.type == "cpu"
                skipped = INTERPRETED if interpreted and not reasons else ""
                check = None if reasons or skipped else check_backend(backend.name, device, examples[dtype])
                told = str(dtype).removeprefix("torch.")
                yield BackendFinding(backend.name, str(device), told, reasons, check, skipped)


def request_of_check(device: torch.device, dtype: torch.dtype) -> Request:
    """What the check asks a backend for."""
    query, key, value = (torch.empty(shape, dtype=dtype, device=device) for shape in SHAPES)
    call, _ = make_call(query, key, value, PATTERN, is_causal=True)
    return Request.of(call)


def advise(machine: MachineFacts) -> tuple[str, ...]:
    """What to change or to install, one sentence each. An installation that is complete has none."""
    return tuple(_advice(machine))


def _advice(machine: MachineFacts) -> Iterator[str]:
    installed, cuda, variables = machine.installed, machine.cuda, dict(machine.variables)
    if installed.other_project is not None:
        yield (
            f"{OTHER_PROJECT} {installed.other_project} is installed. It is another project with the same import name, and "
            f"files of both may be mixed: run pip uninstall {OTHER_PROJECT} dilated-attention, and install this one again."
        )
    if installed.distribution not in (None, installed.version):
        yield (
            f"The distribution dilated-attention {installed.distribution} is installed, and version {installed.version} is "
            f"imported from {installed.folder}: check PYTHONPATH and the current folder."
        )
    if cuda.driver is not None and cuda.build is None and torch.version.hip is None:
        yield (
            f"There is an NVIDIA driver ({cuda.driver}), and this PyTorch is built without CUDA: install a build for CUDA, "
            "see https://pytorch.org/get-started/locally."
        )
    elif cuda.build is not None and not cuda.gpus:
        hidden = "CUDA_VISIBLE_DEVICES" in variables
        why = f": {cuda.problem}" if cuda.problem else ""
        check = f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']!r}" if hidden else "the driver, with nvidia-smi"
        yield f"This PyTorch is built for CUDA {cuda.build}, and it finds no GPU{why}. Check {check}."
    if machine.triton_problem is not None:
        way = "pip install --force-reinstall triton in the version that this PyTorch needs"
        yield f"Triton is installed, and importing it fails: {machine.triton_problem}. Run {way}."
    elif machine.triton is None and sys.platform == "linux" and cuda.gpus:
        yield "The backends hopper and triton need Triton: run pip install triton."
    if variables.get("TRITON_INTERPRET") == "1":
        yield "TRITON_INTERPRET=1 runs kernels in Triton's interpreter, which is slow: unset it except to debug kernels."
    if variables.get("OMP_NUM_THREADS", "").isdigit() and int(variables["OMP_NUM_THREADS"]) < machine.processors:
        used = variables["OMP_NUM_THREADS"]
        yield f"OMP_NUM_THREADS={used} leaves {machine.processors - int(used)} of {machine.processors} processors unused."
    for package, gives in (
        ("matplotlib", "pictures (--plot)"),
        ("transformers", "models of Hugging Face"),
        ("accelerate", "Trainer of transformers"),
    ):
        if dict(machine.packages)[package] is None:
            yield f"For {gives}: pip install {package}."
