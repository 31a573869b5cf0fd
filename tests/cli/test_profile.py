"""The command ``profile``: components that add up, messages and their overlap, files, and endings."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.cli import profile_run as command
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.workbench.profile_events import communication_of, operator_spans, operator_times
from dilated_attention_pytorch.workbench.profile_run import make_task, profile_call
from dilated_attention_pytorch.workbench.profile_values import ProfileSettings

CPU = torch.device("cpu")
TINY = ["profile", "--device", "cpu", "--tokens", "256", "--heads", "2", "--head-dim", "8"]
PATTERN = ["--segment-lengths", "32,128", "--dilation-rates", "1,4"]
CALL = {"device": CPU, "dtype": torch.float32, "tokens": 300, "heads": 2, "head_dim": 8}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("backward", [False, True])
def test_components_add_up_to_the_measured_peak(backend, backward):
    settings = ProfileSettings(**CALL, pattern=Dilated([32, 128], [1, 4]), backward=backward, backend=backend)
    found = profile_call(settings, None, 5, None)
    task = make_task(settings, None)
    with torch.set_grad_enabled(backward):
        task.call()
        assert sum(found.memory.peak) == found.memory.peak_bytes == peak_extra_bytes(task.call, CPU) > 0
    output = 300 * 2 * 8 * 4
    at_end = dict(zip(found.memory.names, found.memory.sizes[-1], strict=True))
    assert at_end["output"] == output
    assert at_end.get("gradients") == (3 * output if backward else None)
    left = {name for name, size in at_end.items() if size}
    assert left <= {"output", "gradients", "kept for the backward"}
    assert dict(found.made_before) == {"query, key, value": 3 * output} | (
        {"gradient of the output": output} if backward else {}
    )
    assert all(size >= 0 for sizes in found.memory.sizes for size in sizes)
    assert list(found.memory.seconds) == sorted(found.memory.seconds)
    assert len(found.operators) == 5
    assert found.communication is None


def test_training_step():
    settings = ProfileSettings(device=CPU, dtype=torch.float32, tokens=64, preset="tiny")
    found = profile_call(settings, None, 5, None)
    before, at_end = dict(found.made_before), dict(zip(found.memory.names, found.memory.sizes[-1], strict=True))
    assert at_end["gradients"] == before["parameters"]  # of the same type
    assert 2 * before["parameters"] < before["sums of the optimizer"] < 2.1 * before["parameters"]
    task = make_task(settings, None)
    assert found.memory.peak_bytes == peak_extra_bytes(task.call, CPU)
    assert found.memory.names.index("kept for the backward") >= 0


def test_table_files_and_picture(tmp_path):
    files = ["--json", tmp_path / "p.json", "--plot", tmp_path / "p.png", "--trace", tmp_path / "t.json"]
    result = run(*TINY, *PATTERN, "--causal", "--backward", "--top", 4, *files)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "p.json").read_text(), parse_constant=pytest.fail)
    assert found["settings"] == {
        "device": "cpu", "dtype": "float32", "preset": None, "tokens": 256, "segment_lengths": [32, 128],
        "dilation_rates": [1, 4], "heads": 2, "head_dim": 8, "is_causal": True, "backward": True, "backend": "auto",
    }  # fmt: skip
    (rank,) = found["ranks"]
    assert sum(rank["peak_components"].values()) == rank["peak_extra_bytes"]
    curves = rank["memory"]["components"].values()
    assert max(map(sum, zip(*curves, strict=True))) == rank["peak_extra_bytes"]
    assert {len(x) for x in curves} == {len(rank["memory"]["seconds"])}
    assert len(rank["operators"]) == 4
    assert "allocated by the call" in result.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "t.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"profile: forward", "profile: backward", "aten::empty"} <= names
    assert sorted(x.name for x in tmp_path.iterdir()) == ["p.json", "p.png", "t.json"]


def event(name: str, start: float, end: float, device: str = "CPU") -> SimpleNamespace:
    times = SimpleNamespace(start=1e6 * start, end=1e6 * end)
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=device))


def test_overlap_of_messages():
    """Messages are in flight from 1 to 6 and from 8 to 9. Operators run from 0 to 2, 4 to 5 and 8.5 to 10."""
    events = [
        event("gloo:recv", 1, 5), event("gloo:send", 2, 6), event("gloo:send", 8, 9), event("c10d::send", 1, 9),
        event("aten::mm", 0, 2), event("aten::add", 4, 5), event("aten::fill_", 4, 5), event("aten::mm", 8.5, 10),
    ]  # fmt: skip
    found = communication_of(events, "cpu")
    assert (found.messages, found.in_flight_seconds) == (3, pytest.approx(6.0))
    assert found.overlapped_seconds == pytest.approx(1 + 1 + 0.5)
    assert found.overlap == pytest.approx(2.5 / 6)
    assert communication_of(events[3:], "cpu") is None
    kernels = [event("ncclDevKernel_SendRecv", 0, 4, "CUDA"), event("kernel", 3, 5, "CUDA")]
    assert communication_of([*events[4:], *kernels], "cuda").overlapped_seconds == pytest.approx(1.0)


def test_kernels_of_a_gpu_are_not_counted_twice():
    """PyTorch adds the time of kernels to the operators that launch them, and names kernels with all template arguments."""

    def average(key: str, device: str, host_us: float, device_us: float) -> SimpleNamespace:
        times = {"self_cpu_time_total": host_us, "self_device_time_total": device_us}
        return SimpleNamespace(key=key, count=1, device_type=SimpleNamespace(name=device), **times)

    fill = "void at::native::(anonymous namespace)::fill_kernel<4, at::Fill<{}> >(int, float*)"
    averages = [
        average("dilated_attention::attend", "CPU", 900, 2000), average("Activity Buffer Request", "CPU", 800, 700),
        average("forward_kernel", "CUDA", 0, 2000), average(fill.format("int"), "CUDA", 0, 30),
        average(fill.format("float"), "CUDA", 0, 20), average("profile: forward", "CUDA", 0, 2100),
    ]  # fmt: skip
    kernels = operator_times(averages, "cuda", 5)
    assert [(x.name, x.calls) for x in kernels] == [("forward_kernel", 1), ("at::native::fill_kernel", 2)]
    assert [x.seconds for x in kernels] == pytest.approx([2e-3, 5e-5])
    assert [x.name for x in operator_times(averages, "cpu", 1)] == ["dilated_attention::attend"]
    events = [event("profile: forward", 1, 9), event("forward_kernel", 1, 2), event("forward_kernel", 3, 4, "CUDA")]
    (span,) = operator_spans(events, kernels, "cuda")
    assert (span.name, span.start, span.seconds) == ("forward_kernel", pytest.approx(2.0), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--preset", "tiny"], "--preset has a pattern and sizes of its own: leave out --tokens, --heads, --head-dim"),
        (["--context", "64"], "--context is of a training step"),
        (["--segment-lengths", "32"], "give both or neither"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--ranks", "0"], "--ranks must be from 1 to 64"),
        (["--ranks", "100000"], "--ranks must be from 1 to 64"),
        (["--heads", "0"], "--heads must be at least 1"),
        (["--head-dim", "0"], "--head-dim must be at least 1"),
        (["--top", "0"], "--top must be at least 1"),
        (["--backend", "fastest"], "fastest"),
        (["--plot", "p.txt"], "--plot must be a picture"),
    ],
)
def test_wrong_options(options, sentence):
    result = run(*TINY, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_presets_without_a_vocabulary_are_refused():
    result = run("profile", "--device", "cpu", "--preset", "gigapath-12x768")
    assert result.exit_code == 2
    assert result.stderr == "--preset must be one of longnet-base, tiny, small, got 'gigapath-12x768'\n"


def test_a_context_of_no_tokens():
    result = run("profile", "--device", "cpu", "--preset", "tiny", "--context", "0")
    assert (result.exit_code, result.stderr) == (2, "--context must be at least 1, got 0\n")


def test_a_trace_that_cannot_be_written_is_reported_before_the_call(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "profile_call", pytest.fail)
    result = run(*TINY, "--trace", tmp_path / "none" / "t.json")
    assert result.exit_code == 1
    assert "could not be written" in result.stderr


def test_interrupt_writes_nothing(tmp_path, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "profile_call", stopped)
    result = run(*TINY, "--json", tmp_path / "p.json", "--trace", tmp_path / "t.json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "Interrupted: the profile is not finished, and nothing was written."
    assert list(tmp_path.iterdir()) == []
