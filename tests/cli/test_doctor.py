"""The command ``doctor``: its report, its checks, and what it says about broken installations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import oracle
import programs

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner, Result

import dilated_attention_pytorch as package
from dilated_attention_pytorch import Dilated, backends
from dilated_attention_pytorch.backends import eager
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.cli import doctor as command
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.workbench import doctor as checks
from dilated_attention_pytorch.workbench import machine as machines
from dilated_attention_pytorch.workbench import ring_check
from dilated_attention_pytorch.workbench.backend_checks import (
    NAMES,
    PATTERN,
    ExactnessCheck,
    Example,
    compare,
    definition,
    tolerance,
)
from dilated_attention_pytorch.workbench.machine import CudaFacts, GpuFacts, InstalledFacts, MachineFacts

START = "from dilated_attention_command import main; main()"
ON_CPU = ["hopper", "triton", "sdpa", "eager", "reference"]
MACHINE = MachineFacts(
    installed=InstalledFacts("0.1.0", "/somewhere", "0.1.0", None), python="3.12.3", platform="Linux", torch="2.11.0+cu130",
    torch_debug=False, triton="3.6.0", triton_problem=None,
    cuda=CudaFacts(build="13.0", cudnn=91900, nccl="2.28.9", driver="580.1", gpus=(), peers=()), gloo=True, processors=8,
    threads=8, instructions="AVX512", memory_bytes=2**34, free_bytes=2**33,
    packages=tuple((name, "1.0") for name in machines.PACKAGES), variables=(),
)  # fmt: skip
GPU = GpuFacts("NVIDIA H200", (9, 0), 140 * 2**30, 139 * 2**30, 132)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def no_probe(monkeypatch):
    """Without the process that imports Triton."""
    monkeypatch.setattr(machines, "_triton", lambda: ("3.6.0", None))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_the_report_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NVIDIA_REQUIRE_CUDA", "cuda>=13.0 brand=tesla,driver>=535,driver<536")  # set by images
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    path = tmp_path / "report.json"
    result = run("--json", path)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"].startswith("CPU with ")
    assert (found["finished"], found["passed"], found["ranks"]) == (True, True, None)
    machine = found["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["installed"]["folder"] == str(Path(package.__file__).parent)
    assert machine["installed"]["version"] == package.__version__
    assert (machine["variables"]["NCCL_DEBUG"], machine["variables"]["NVIDIA_VISIBLE_DEVICES"]) == ("INFO", "all")
    assert "NVIDIA_REQUIRE_CUDA" not in machine["variables"]
    assert machine["packages"]["typer"] is not None
    assert 0 < machine["free_bytes"] <= machine["memory_bytes"]
    assert machine["processors"] >= 1
    assert machine["cuda"]["gpus"] == []
    assert [x["backend"] for x in found["backends"]] == ON_CPU
    served = [x for x in found["backends"] if x["check"] is not None]
    assert [x["backend"] for x in served] == ["sdpa", "eager", "reference"]
    for check in (x["check"] for x in served):
        assert list(check["errors"]) == list(NAMES)
        assert 0 < check["error"] == max(check["errors"].values()) <= check["tolerance"] < 1e-4
    # The text says the same.
    lines = result.stdout.splitlines()
    assert f"torch      {torch.__version__}" in lines
    assert any(line.startswith("variables ") and "NCCL_DEBUG=INFO" in line for line in lines)
    assert sum(line.startswith("  sdpa       exact: error ") for line in lines) == 1
    assert lines[-1] == "3 checks, all exact."


@pytest.mark.usefixtures("no_probe")
def test_every_reason_of_a_backend_is_listed():
    result = run("--json", "-")
    found = {x["backend"]: x["reasons"] for x in json.loads(result.stdout)["backends"]}
    request = Request("cpu", (0, 0), torch.float32, head_dim=64)
    assert found == {backend.name: backend.why_not(request) for backend in backends.BACKENDS}
    assert len(found["hopper"]) >= 2
    for name, reasons in found.items():
        assert all(f"  {name:<10} cannot serve: {reason}" in result.stderr.splitlines() for reason in reasons)


def _off(forward, amount):
    return lambda *args, **masks: tuple(x + amount for x in forward(*args, **masks))


def _raising(*args, **masks):
    raise OSError("libfast.so: cannot open shared object file")


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (replace(eager.KERNEL, forward=_off(eager.KERNEL.forward, 1e-3)), "WRONG: errors out "),
        (replace(eager.KERNEL, backward=_off(eager.KERNEL.backward, 1e-3)), "WRONG: errors out "),
        (replace(eager.KERNEL, forward=_off(eager.KERNEL.forward, float("nan"))), "WRONG: errors out nan"),
        (replace(eager.KERNEL, forward=_raising), "FAILED: OSError: libfast.so: cannot open shared object file"),
    ],
    ids=["forward", "backward", "nan", "error"],
)
def test_a_broken_backend_is_red(monkeypatch, tmp_path, broken, line):
    monkeypatch.setattr(eager, "KERNEL", broken)
    result = run("--json", tmp_path / "x.json")
    assert result.exit_code == 1
    assert any(x.startswith(f"  eager      {line}") for x in result.stdout.splitlines()), result.stdout
    assert result.stdout.splitlines()[-1] == "3 checks, 1 wrong."
    assert "Traceback" not in result.output
    found = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert not found["passed"]
    assert {x["backend"]: x["passed"] for x in found["backends"]} == {name: name != "eager" for name in ON_CPU}
    quiet = run("--quiet")
    assert (quiet.exit_code, quiet.output) == (1, "")


@pytest.mark.usefixtures("no_probe")
def test_the_interpreter_is_not_checked(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = run()
    assert result.exit_code == 0
    assert "  triton     not checked: Triton's interpreter" in result.stdout
    assert "unset it except to debug kernels" in result.stdout


@pytest.mark.usefixtures("no_probe")
def test_interrupt_prints_what_is_checked(monkeypatch):
    def check(name, device, example):
        if name == "eager":
            raise KeyboardInterrupt
        return ExactnessCheck((("out", 0.0),), 1.0, 0.0)

    monkeypatch.setattr(checks, "check_backend", check)
    result = run()
    assert result.exit_code == 130
    assert "  sdpa       exact" in result.stdout
    assert result.stderr.splitlines()[-1] == "Interrupted: 3 backends are checked."


def test_options_that_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "read_machine", None)
    assert run("--ranks", "--ranks-seconds", 0).exit_code == 2
    result = run("--ranks-seconds", 5)
    assert (result.exit_code, result.stderr) == (2, "--ranks-seconds belongs to --ranks, got 5 without it; add --ranks\n")
    result = run("--json", "")
    assert (result.exit_code, result.stderr) == (2, "--json must be a file, or - for standard output, got an empty name\n")
    result = run("--json", tmp_path)
    assert result.exit_code == 1
    assert "could not be written: Is a directory" in result.stderr


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 3), (6, 1)])
def test_the_definition_of_the_checks(heads, key_heads):
    """Against the oracle of the tests, which loops over positions."""
    pattern = Dilated([9, 16, 64], [1, 3, 4])
    inputs = oracle.random_inputs(2, 41, 41, heads, key_heads, 8)
    dout, dlse = torch.randn(2, 41, heads, 8), torch.randn(2, heads, 41)
    actual = oracle.with_grads(lambda *x: definition(x, pattern.branches), inputs, dout, dlse)
    exact = lambda *x: oracle.attention(*x, pattern, is_causal=True)  # noqa: E731
    oracle.assert_same(actual, oracle.with_grads(exact, inputs, dout, dlse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tolerance_of_half_precision(dtype):
    """Twice the error of plain attention that rounds where kernels do: weights, their gradients, and results."""
    example, rounded = Example.make(dtype), lambda x: x.to(dtype).float()
    q, k, v = (x.float() for x in example.inputs)
    dout, n, d = example.dout.float(), q.shape[1], q.shape[3]
    count = oracle.multiplicities(PATTERN, n, n, 4, 2, True).float()
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * d**-0.5 + count.log()
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp()
    out = rounded(torch.einsum("bhnm,bmhd->bnhd", rounded(p), v))
    delta = (dout * out).sum(-1).transpose(1, 2) - example.dlse
    ds = rounded(p * (torch.einsum("bnhd,bmhd->bhnm", dout, v) - delta.unsqueeze(-1)))
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k) * d**-0.5
    dk, dv = torch.einsum("bhnm,bnhd->bmhd", ds, q) * d**-0.5, torch.einsum("bhnm,bnhd->bmhd", rounded(p), dout)
    dk, dv = (x.unflatten(2, (2, 2)).sum(3) for x in (dk, dv))
    errors = dict(compare((out, lse, *map(rounded, (dq, dk, dv))), example.expected))
    assert tolerance(dtype) / 8 < 2 * max(errors.values()) <= tolerance(dtype)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libtriton.so: undefined symbol: abc')", "ImportError: libtriton.so: undefined symbol: abc"),
        ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "its import ended by SIGSEGV"),
        ("import a_part_that_is_missing", "ModuleNotFoundError: No module named 'a_part_that_is_missing'"),
        ("raise ModuleNotFoundError(\"No module named 'triton'\")", None),
        ("__version__ = '9.9'", "9.9"),
    ],
)
def test_importing_triton(monkeypatch, tmp_path, text, said):
    (tmp_path / "triton.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    version, problem = machines._triton()
    assert said == (version if said == "9.9" else problem)
    assert (problem is None) == (said in (None, "9.9"))


def test_a_broken_triton_is_reported(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "triton.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    program = (
        f"import os, sys; os.environ.pop('TRITON_INTERPRET', 0); sys.path.insert(0, {str(tmp_path / 'broken')!r});{START}"
    )
    result = programs.run(program, "doctor", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    problem = "OSError: libcuda.so.1: cannot open shared object file"
    assert f", cannot be imported: {problem}\n" in result.stdout
    assert f"  Triton is installed, and importing it fails: {problem}. Run pip install" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def _install(folder: Path, version: str) -> None:
    """The metadata of the project of the same import name."""
    info = folder / f"dilated_attention_pytorch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dilated-attention-pytorch\nVersion: {version}\n")


@pytest.mark.usefixtures("no_probe")
def test_the_other_project_is_found(monkeypatch, tmp_path):
    assert machines.read_machine().installed.other_project is None
    _install(tmp_path, "0.8.3")
    monkeypatch.syspath_prepend(tmp_path)
    result = run()
    assert "conflict   dilated-attention-pytorch 0.8.3 has the same import name\n" in result.stdout
    assert "pip uninstall dilated-attention-pytorch dilated-attention, and install" in result.stdout


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_package_that_cannot_be_imported_is_one_sentence(tmp_path, with_metadata):
    (tmp_path / "dilated_attention_pytorch").mkdir()
    (tmp_path / "dilated_attention_pytorch" / "__init__.py").write_text("raise ImportError('no attention here')")
    if with_metadata:
        _install(tmp_path, "0.8.3")
    paths = os.pathsep.join((str(tmp_path), str(programs.SOURCE)))
    result = subprocess.run(
        [sys.executable, "-c", START, "doctor"], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("dilated_attention_pytorch cannot be imported: no attention here. ")
    assert ("dilated-attention-pytorch 0.8.3 is installed" in result.stderr) == with_metadata
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "built for CUDA 13.0, and it finds no GPU. Check the driver"),
        ({"variables": (("CUDA_VISIBLE_DEVICES", ""),)}, "finds no GPU. Check CUDA_VISIBLE_DEVICES=''."),
        ({"cuda": replace(MACHINE.cuda, problem="too old")}, "finds no GPU: too old. Check"),
        ({"cuda": replace(MACHINE.cuda, build=None)}, "NVIDIA driver (580.1), and this PyTorch is built without CUDA"),
        ({"cuda": replace(MACHINE.cuda, gpus=(GPU,)), "triton": None}, "run pip install triton"),
        ({"variables": (("OMP_NUM_THREADS", "2"),)}, "OMP_NUM_THREADS=2 leaves 6 of 8 processors unused"),
        ({"packages": (("matplotlib", None), ("transformers", "5"), ("accelerate", "1"))}, "pip install matplotlib"),
        ({"installed": replace(MACHINE.installed, distribution="0.0.9")}, "dilated-attention 0.0.9 is installed"),
    ],
)
def test_advice(changes, said):
    assert sum(said in sentence for sentence in checks.advise(replace(MACHINE, **changes))) == 1


def test_a_complete_machine_needs_no_advice():
    assert checks.advise(replace(MACHINE, cuda=replace(MACHINE.cuda, gpus=(GPU,)))) == ()


def test_lines_of_gpus():
    peers = ((True, True), (False, True))
    lines = list(command._machine_lines(replace(MACHINE, cuda=replace(MACHINE.cuda, gpus=(GPU, GPU), peers=peers))))
    gpu = "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.0 GiB free of 140.0 GiB"
    assert f"gpu 1      {gpu}" in lines
    assert "peers      no access from GPU 1 to 0" in lines
    assert "cuda       PyTorch is built for CUDA 13.0, driver 580.1, cuDNN 91900, 2 GPUs" in lines
    assert "nccl       2.28.9" in lines


def test_a_driver_that_fails_is_a_fact(monkeypatch):
    def fail():
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    facts = machines._cuda()
    assert (facts.gpus, facts.problem) == ((), "CUDA driver initialization failed")


def test_two_ranks_are_exact(tmp_path):
    """The program of each rank, in processes that have imported PyTorch before."""
    code = """
import os, sys
sys.argv[1:] = [os.environ["RANK"], "2", sys.argv[1], "60"]
from dilated_attention_pytorch.workbench.ring_rank import main
main()
"""
    environments = [dict(os.environ, RANK=str(rank)) for rank in range(2)]
    results = programs.run_together(
        code, tmp_path / "store", folder=tmp_path, environments=environments, modules=programs.WITH_DYNAMO
    )
    for result in results:
        assert result.returncode == 0, result.stderr
        errors = json.loads(result.stdout)
        assert list(errors) == list(NAMES)
        assert 0 < max(errors.values()) <= tolerance(torch.float32)


ERRORS = "dict.fromkeys(['out', 'lse', 'dq', 'dk', 'dv'], 1e-3 * int(sys.argv[1]))"


@pytest.mark.usefixtures("no_probe")
@pytest.mark.parametrize(
    ("program", "line"),
    [
        (f"import json, sys; print(json.dumps({ERRORS}))", "WRONG: errors out 1.0e-03"),
        ("import sys; sys.exit('connectFullMesh failed')", "FAILED: rank 0 ended with exit code 1: connectFullMesh failed"),
        ("import os; os.kill(os.getpid(), 9)", "FAILED: rank 0 ended by SIGKILL: "),
        ("import time; time.sleep(60)", "FAILED: rank 0 has not finished within 0.5 s"),
    ],
    ids=["wrong", "error", "killed", "hangs"],
)
def test_ranks_that_fail_are_red(monkeypatch, program, line):
    limit = 0.5 if "sleep" in program else 60
    monkeypatch.setattr(ring_check, "_PROGRAM", program)
    monkeypatch.setattr(checks, "check_backend", lambda *_: ExactnessCheck((("out", 0.0),), 1.0, 0.0))
    result = run("--ranks", "--ranks-seconds", limit)
    assert result.exit_code == 1
    assert f"  ring       {line}" in result.stdout
    assert result.stdout.splitlines()[-1] == "4 checks, 1 wrong."
