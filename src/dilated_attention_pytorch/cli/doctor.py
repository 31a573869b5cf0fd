"""The command ``doctor``: its options, and the report that it prints and writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Annotated, Any

import torch
import typer

from dilated_attention_pytorch.cli.outputs import Outputs, device_name, end, versions
from dilated_attention_pytorch.cli.progress import show_progress
from dilated_attention_pytorch.cli.streams import interruptible
from dilated_attention_pytorch.workbench.backend_checks import ExactnessCheck
from dilated_attention_pytorch.workbench.doctor import BackendFinding, advise, count_findings, examine_backends
from dilated_attention_pytorch.workbench.machine import OTHER_PROJECT, CudaFacts, MachineFacts, read_machine
from dilated_attention_pytorch.workbench.ring_check import WORLD, check_ring

_RANKS_S = 120.0


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options as they are given. Typer reads the fields."""

    ranks: Annotated[bool, typer.Option("--ranks", help="Also check two processes over gloo, which takes longer.")] = False
    ranks_seconds: Annotated[float | None, typer.Option(help="The longest time of that check. By default 120.")] = None
    json: Annotated[str | None, typer.Option(help="A file for the report as JSON, or - for standard output.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing: the exit code says whether all is exact.")] = False


@dataclass(frozen=True, slots=True)
class _DoctorReport:
    """Everything that was found so far."""

    machine: MachineFacts
    findings: tuple[BackendFinding, ...] = ()
    ring: ExactnessCheck | None = None

    @property
    def passed(self) -> bool:
        return all(x.passed for x in self.findings) and (self.ring is None or self.ring.passed)


def doctor(**options: Any) -> None:
    """Report what this machine has, and check every backend that can serve it.

    The report says for each backend and device every reason why it cannot serve. Those that can are compared with a
    definition in float64: forward and gradients. The exit code is 0 if all of them are exact, else 1. The text is made to
    be pasted into an issue.

    \b
    Examples:
      dilated-attention doctor
      dilated-attention doctor --ranks
      dilated-attention doctor --json report.json --quiet
    """
    _run(DoctorOptions(**options))


doctor.__signature__ = inspect.signature(DoctorOptions, eval_str=True)  # type: ignore[attr-defined]


def _run(options: DoctorOptions) -> None:
    outputs = Outputs(options.json, quiet=options.quiet)
    if options.ranks_seconds is not None and not options.ranks:
        end(f"--ranks-seconds belongs to --ranks, got {options.ranks_seconds:g} without it; add --ranks", 2)
    seconds = _RANKS_S if options.ranks_seconds is None else options.ranks_seconds
    if not 0.0 < seconds < float("inf"):
        end(f"--ranks-seconds must be a positive number, got {seconds}", 2)
    outputs.check()
    console = outputs.console()
    report, interrupted = None, False
    try:
        with interruptible():
            report = _DoctorReport(read_machine())
            gpus = len(report.machine.cuda.gpus)
            total = count_findings(gpus) + options.ranks
            with show_progress(console, total, "check {:,}", quiet=options.quiet) as progress:
                for finding in examine_backends(gpus):
                    report = replace(report, findings=(*report.findings, finding))
                    done = f"{finding.backend} on {finding.device}, {finding.dtype}"
                    progress(len(report.findings), lambda done=done: done)  # type: ignore[misc]
                if options.ranks:
                    report = replace(report, ring=check_ring(seconds))
                    progress(total, lambda: f"{WORLD} ranks over gloo")
    except KeyboardInterrupt:
        interrupted = True
    if report is None:
        end("Interrupted: nothing was checked.", 130)
    for line in _lines(report, finished=not interrupted):
        console.print(line, soft_wrap=True, markup=False)
    outputs.write(_figures(report, finished=not interrupted))
    if interrupted:
        end(f"Interrupted: {len(report.findings)} backends are checked.", 130)
    if not report.passed:
        raise typer.Exit(1)


def _lines(report: _DoctorReport, *, finished: bool) -> Iterator[str]:
    """The report as plain lines."""
    yield from _machine_lines(report.machine)
    for (device, dtype), group in groupby(report.findings, key=lambda x: (x.device, x.dtype)):
        yield f"\n{device}, {dtype}"
        for finding in group:
            yield from _finding_lines(finding)
    if report.ring is not None:
        yield f"\n{WORLD} ranks over gloo, cpu, float32"
        yield from _check_lines("ring", report.ring)
    if advice := advise(report.machine):
        yield "\nto do"
        yield from (f"  {sentence}" for sentence in advice)
    if finished:
        red = sum(not x.passed for x in report.findings) + (report.ring is not None and not report.ring.passed)
        checked = sum(x.check is not None for x in report.findings) + (report.ring is not None)
        yield f"\n{checked} checks, all exact." if not red else f"\n{checked} checks, {red} wrong."


def _machine_lines(machine: MachineFacts) -> Iterator[str]:
    installed, cuda = machine.installed, machine.cuda
    distribution = "not installed by name" if installed.distribution is None else f"installed {installed.distribution}"
    other = f"{OTHER_PROJECT} {installed.other_project} has the same import name" if installed.other_project else ""
    free, memory = (("unknown" if x is None else _gib(x)) for x in (machine.free_bytes, machine.memory_bytes))
    yield from _rows(
        ("package", f"dilated-attention {installed.version}, {distribution}, from {installed.folder}"),
        ("conflict", other),
        ("python", f"{machine.python}, {machine.platform}"),
        ("torch", f"{machine.torch}{', debug build' if machine.torch_debug else ''}"),
        ("triton", _triton_text(machine)),
        ("cuda", _cuda_text(cuda)),
        *((f"gpu {number}", text) for number, text in enumerate(_gpu_texts(cuda))),
        ("peers", _peers_text(cuda)),
        ("nccl", cuda.nccl or "not available"),
        ("gloo", "available" if machine.gloo else "not available"),
        ("cpu", f"{machine.processors} processors, {machine.threads} threads of PyTorch, {machine.instructions}"),
        ("memory", f"{free} free of {memory}"),
        ("packages", ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.packages)),
        ("variables", ", ".join(f"{name}={value}" for name, value in machine.variables) or "none"),
    )


def _rows(*rows: tuple[str, str]) -> Iterator[str]:
    return (f"{name:<10} {text}" for name, text in rows if text)


def _triton_text(machine: MachineFacts) -> str:
    version = machine.triton or "not installed"
    return version if machine.triton_problem is None else f"{version}, cannot be imported: {machine.triton_problem}"


def _cuda_text(cuda: CudaFacts) -> str:
    build = "PyTorch is built without CUDA" if cuda.build is None else f"PyTorch is built for CUDA {cuda.build}"
    parts = [build, f"driver {cuda.driver}" if cuda.driver else "no NVIDIA driver found"]
    parts += [f"cuDNN {cuda.cudnn}"] if cuda.cudnn else []
    parts += [f"{len(cuda.gpus)} GPU{'s' * (len(cuda.gpus) != 1)}"]
    parts += [cuda.problem] if cuda.problem else []
    return ", ".join(parts)


def _gpu_texts(cuda: CudaFacts) -> Iterator[str]:
    for gpu in cuda.gpus:
        capability = ".".join(map(str, gpu.capability))
        memory = f"{_gib(gpu.free_bytes)} free of {_gib(gpu.memory_bytes)}"
        yield f"{gpu.name}, compute capability {capability}, {gpu.multiprocessors} multiprocessors, {memory}"


def _peers_text(cuda: CudaFacts) -> str:
    if len(cuda.gpus) < 2:
        return ""
    missing = [f"{i} to {j}" for i, row in enumerate(cuda.peers) for j, reached in enumerate(row) if not reached]
    return f"no access from GPU {', '.join(missing)}" if missing else "every GPU reaches the memory of every other one"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _finding_lines(finding: BackendFinding) -> Iterator[str]:
    if finding.skipped:
        yield f"  {finding.backend:<10} not checked: {finding.skipped}"
    elif finding.check is None:
        yield from (f"  {finding.backend:<10} cannot serve: {reason}" for reason in finding.reasons)
    else:
        yield from _check_lines(finding.backend, finding.check)


def _check_lines(name: str, check: ExactnessCheck) -> Iterator[str]:
    allowed = f"tolerance {check.tolerance:.1e}, {check.seconds:,.2f} s"
    if check.problem is not None:
        yield f"  {name:<10} FAILED: {check.problem}"
    elif check.passed:
        yield f"  {name:<10} exact: error {check.error:.1e}, {allowed}"
    else:
        errors = ", ".join(f"{tensor} {error:.1e}" for tensor, error in check.errors)
        yield f"  {name:<10} WRONG: errors {errors}; {allowed}"


def _figures(report: _DoctorReport, *, finished: bool) -> dict[str, Any]:
    """The report, for JSON."""
    machine = report.machine
    return {
        "versions": versions(),
        "device": device_name(torch.device("cuda" if machine.cuda.gpus else "cpu")),
        "finished": finished,
        "passed": report.passed,
        "machine": asdict(machine) | {"packages": dict(machine.packages), "variables": dict(machine.variables)},
        "backends": [asdict(x) | {"passed": x.passed, "check": _check(x.check)} for x in report.findings],
        "ranks": _check(report.ring),
        "advice": advise(machine),
    }


def _check(check: ExactnessCheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    errors = {name: error if error == error else None for name, error in check.errors}
    return {
        "passed": check.passed, "error": check.error, "errors": errors, "tolerance": check.tolerance,
        "seconds": check.seconds, "problem": check.problem,
    }  # fmt: skip
