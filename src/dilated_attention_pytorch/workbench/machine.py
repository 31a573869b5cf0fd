"""What this machine has: versions, GPUs, memory, environment variables. A part that is broken is a fact, and no error."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from dilated_attention_pytorch import __file__ as package_file
from dilated_attention_pytorch import __version__
from dilated_attention_pytorch.measure import available_memory, device_memory
from dilated_attention_pytorch.workbench.children import command_line, describe_exit, last_line

PACKAGES = ("transformers", "accelerate", "safetensors", "typer", "rich", "matplotlib", "numpy")
# Another project, which installs a package of the same import name.
OTHER_PROJECT = "dilated-attention-pytorch"
# Names and beginnings of names. Container images set further NVIDIA_ variables, which say nothing of the machine.
_VARIABLES = (
    "CUBLAS_", "CUDA_", "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
_PROBE_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU that PyTorch can use."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What is known of CUDA. A part that is not there is None."""

    build: str | None  # the version that PyTorch was built for
    cudnn: int | None
    nccl: str | None
    driver: str | None
    gpus: tuple[GpuFacts, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()  # whether GPU i reaches the memory of GPU j
    problem: str | None = None  # why the GPUs cannot be used, in the words of PyTorch


@dataclass(frozen=True, slots=True)
class InstalledFacts:
    """Where this package comes from."""

    version: str  # of the files that are imported
    folder: str
    distribution: str | None  # the version that is installed by name
    other_project: str | None  # the version of the project of the same import name


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything that ``doctor`` says about a machine."""

    installed: InstalledFacts
    python: str
    platform: str
    torch: str
    torch_debug: bool
    triton: str | None
    triton_problem: str | None  # why it cannot be imported, None if it is not installed
    cuda: CudaFacts
    gloo: bool
    processors: int  # that this process may use
    threads: int  # of PyTorch
    instructions: str  # the vector instructions that PyTorch uses
    memory_bytes: int | None
    free_bytes: int | None
    packages: tuple[tuple[str, str | None], ...]
    variables: tuple[tuple[str, str], ...]


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_machine() -> MachineFacts:
    """The facts of this machine. Importing Triton is tried in a process of its own, which may crash."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    triton, triton_problem = _triton()
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineFacts(
        installed=InstalledFacts(
            __version__, str(Path(package_file).parent), version_of("dilated-attention"), version_of(OTHER_PROJECT)
        ),
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        torch_debug=bool(torch.version.debug),
        triton=triton,
        triton_problem=triton_problem,
        cuda=_cuda(),
        gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        processors=processors,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=device_memory(torch.device("cpu")),
        free_bytes=available_memory(),
        packages=tuple((name, version_of(name)) for name in PACKAGES),
        variables=tuple(variables),
    )


def _triton() -> tuple[str | None, str | None]:
    """The version of Triton, and why it cannot be imported. Both are None if it is not installed."""
    program = "import triton; print(triton.__version__)"
    try:
        probe = subprocess.run(
            command_line(program), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return version_of("triton"), f"its import takes more than {_PROBE_S:g} s"
    if probe.returncode == 0:
        return last_line(probe.stdout), None
    said = last_line(probe.stderr) or f"its import {describe_exit(probe.returncode)}"
    if said == "ModuleNotFoundError: No module named 'triton'":
        return None, None
    return version_of("triton"), said


def _cuda() -> CudaFacts:
    gpus: tuple[GpuFacts, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    problem = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = tuple(map(_gpu, range(torch.cuda.device_count())))
                numbers = range(len(gpus))
                peers = tuple(tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in numbers) for i in numbers)
        except (RuntimeError, OSError, AssertionError) as error:
            problem = last_line(str(error)) or type(error).__name__
    if problem is None and not gpus and warned:
        problem = str(warned[0].message).strip()
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return CudaFacts(
        build=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,  # type: ignore[no-untyped-call]
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,  # type: ignore[no-untyped-call]
        driver=_driver(),
        gpus=gpus,
        peers=peers,
        problem=problem,
    )


def _gpu(number: int) -> GpuFacts:
    known = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return GpuFacts(known.name, (known.major, known.minor), total, free, known.multi_processor_count)


def _driver() -> str | None:
    """The version of the NVIDIA driver, by its own program or its kernel module."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            told = None
        if told is not None and told.returncode == 0 and told.stdout.strip():
            return told.stdout.split()[0]
    module = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+[.\d]*)\s", module.read_text()) if module.is_file() else None
    return found[1] if found else None
