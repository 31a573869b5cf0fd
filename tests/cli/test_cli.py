from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import programs

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch import __version__ as version
from dilated_attention_pytorch.cli import demo, pictures
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.cli.demo import standard_library

START = "from dilated_attention_command import main; main()"
PNG = b"\x89PNG\r\n\x1a\n"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A developer's or a CI's own wish for colours is not what is tested here.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small(monkeypatch):
    """The demo with lengths and a pattern for a test: 64, 128, 256 tokens."""

    def make_settings(*, quick, is_causal, device, max_tokens):
        return demo.Settings(
            Dilated([32, 64], [1, 2]), (64, 128, 256), is_causal, device, torch.float32, budget_s=1e9, dense_s=1e9
        )

    monkeypatch.setattr("dilated_attention_pytorch.cli.app.make_settings", make_settings)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", "--device", "cpu", *map(str, arguments)])


def table_rows(text: str) -> list[list[str]]:
    """The cells of the table's lines: tokens, time, tokens/s, memory, error, dense time."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return [cells for cells in lines if len(cells) == 6 and cells[0].replace(",", "").isdigit()]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("causal", [False, True])
def test_demo_measures_checks_and_draws(tmp_path, causal):
    result = run("--quick", "--max-tokens", 3000, "--output", tmp_path / "new" / "folder", *["--causal"] * causal)
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert [row[0] for row in rows] == ["2,048", "3,000"]
    assert all(0.0 < float(row[4]) < 1e-5 for row in rows)
    assert files_in(tmp_path / "new" / "folder") == ["pattern.png", "scaling.png"]
    for name in ("pattern.png", "scaling.png"):
        path = tmp_path / "new" / "folder" / name
        assert path.read_bytes().startswith(PNG)
        assert str(path) in result.stdout
    assert ("causal" in result.stdout) == causal


@pytest.mark.usefixtures("small")
def test_demo_as_json(tmp_path):
    result = run("--json", "-", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)  # nothing else is on standard output
    assert [row["tokens"] for row in found["rows"]] == [64, 128, 256]
    assert found["versions"]["torch"] == torch.__version__
    assert "tokens/s" in result.stderr


def test_nothing_but_text_where_there_is_no_terminal(tmp_path):
    """In a process of its own: escape codes, the profiler's log and warnings of PyTorch would all be seen."""
    arguments = ("demo", "--quick", "--max-tokens", 300, "--device", "cpu", "--output", tmp_path)
    result = programs.run(START, *arguments, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert len(table_rows(result.stdout)) == 1
    assert all(re.fullmatch(r" *\d+%  300 tokens: [a-z ]+", line) for line in result.stderr.splitlines()), result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_missing_extras_are_one_sentence(tmp_path, missing):
    result = programs.run(f"import sys; sys.modules[{missing!r}] = None; {START}", "demo", folder=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert missing in result.stderr
    assert "pip install '.[cli,plot]' in a clone of the repository, or pip install typer rich matplotlib" in result.stderr


@pytest.mark.parametrize("taken", ["out", "out/pattern.png", "out/scaling.png"])
def test_the_folder_is_checked_before_anything_is_measured(tmp_path, monkeypatch, taken):
    """A file in the place of the folder, or a folder in the place of a picture."""

    def measure(settings, report):
        raise AssertionError("nothing can be written, so nothing should be measured")

    monkeypatch.setattr("dilated_attention_pytorch.cli.app.measure", measure)
    if taken == "out":
        (tmp_path / taken).write_text("mine")
    else:
        (tmp_path / taken).mkdir(parents=True)
    result = run("--output", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout == ""
    reason = "Not a directory" if taken == "out" else "Is a directory"
    path = tmp_path / ("out/pattern.png" if taken == "out" else taken)
    assert result.stderr == f"{path} could not be written: {reason}; choose another folder with --output.\n"
    assert (tmp_path / taken).is_dir() or (tmp_path / taken).read_text() == "mine"


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path, small):
    tmp_path.chmod(0o500)
    result = run("--output", tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{tmp_path / 'pattern.png'} could not be written: Permission denied" in result.stderr


def test_numbers_are_whole_at_60_columns(tmp_path, small, monkeypatch):
    """Large numbers of a GPU: a cell that does not fit would end with an ellipsis."""
    rows = [demo.Row(1_048_576, 0.0310, 1_610_612_736, 2**30, 2.1e-3, 1234.5, False)] * 3
    monkeypatch.setattr("dilated_attention_pytorch.cli.app.measure", lambda settings, report: rows)
    for columns in ("60", "30"):
        monkeypatch.setenv("COLUMNS", columns)
        result = run("--output", tmp_path)
        assert result.exit_code == 0, result.output
        cells = ["1,048,576", "31.0 ms", "33,825,032", "1,536.0", "2.1e-03", "~1,234 s"]
        assert table_rows(result.stdout) == [cells] * 3
        assert "…" not in result.stdout
        lines = [line for line in result.stdout.splitlines() if not line.startswith("Picture: ")]
        if columns == "60":
            assert max(map(len, lines)) <= 60


def test_what_is_measured_and_what_is_predicted(tmp_path, small, monkeypatch):
    measured, predicted = (demo.Row(64, 0.1, 2**20, 2**20, 1e-7, 0.2, known) for known in (True, False))
    for rows, said in (([measured], [True, False]), ([measured, predicted], [True, True]), ([predicted], [False, True])):
        monkeypatch.setattr("dilated_attention_pytorch.cli.app.measure", lambda settings, report, rows=rows: rows)
        text = " ".join(run("--output", tmp_path).stdout.split())
        assert "Measured: time, tokens/s, and MiB" in text
        assert ["Measured: dense" in text, "Predicted: dense with ~" in text] == said


def test_logarithmic_axes_say_so():
    rows = [demo.Row(64 << i, 0.1 * 2**i, 2**20, 2**20, 1e-7, 0.2 * 4**i, i < 2) for i in range(3)]
    figure = pictures.scaling_picture(rows, "title")
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert "logarithmic" in axes.get_xlabel()
        assert "logarithmic" in axes.get_ylabel()
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["dilated attention, measured", "dense attention, measured", "dense attention, predicted"]


def test_version_and_module():
    result = subprocess.run(
        [sys.executable, "-m", "dilated_attention_pytorch", "--version"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    python = ".".join(map(str, sys.version_info[:3]))
    assert result.stdout == f"dilated-attention {version}, torch {torch.__version__}, Python {python}\n"
    assert result.stderr == ""


def test_a_full_disk_leaves_the_old_picture_and_nothing_half_written(tmp_path, small, monkeypatch):
    def savefig(self, path, **options):
        Path(path).write_bytes(PNG)
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "pattern.png").write_bytes(b"old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    result = run("--output", tmp_path)
    assert result.exit_code == 1
    assert len(table_rows(result.stdout)) == 3
    assert f"{tmp_path / 'pattern.png'} could not be written: No space left on device" in result.stderr
    assert files_in(tmp_path) == ["pattern.png"]
    assert (tmp_path / "pattern.png").read_bytes() == b"old"


def _raise_at_128(error: BaseException):
    def embed(text, device, dtype, embed=demo.embed):
        if len(text) == 128:
            raise error
        return embed(text, device, dtype)

    return embed


def test_interrupt_shows_what_is_finished(tmp_path, small, monkeypatch):
    monkeypatch.setattr(demo, "embed", _raise_at_128(KeyboardInterrupt()))
    result = run("--output", tmp_path)
    assert result.exit_code == 130
    assert [row[0] for row in table_rows(result.stdout)] == ["64"]
    assert "Interrupted: 1 of 3 lengths" in result.stderr
    assert "Traceback" not in result.output
    assert files_in(tmp_path) == []


def test_a_device_without_memory_shows_what_fits(tmp_path, small, monkeypatch):
    monkeypatch.setattr(demo, "embed", _raise_at_128(torch.OutOfMemoryError("full")))
    result = run("--output", tmp_path)
    assert result.exit_code == 0
    assert [row[0] for row in table_rows(result.stdout)] == ["64"]
    assert "Left out: 128, 256 tokens, since cpu has too little memory" in result.stdout
    assert files_in(tmp_path) == ["pattern.png", "scaling.png"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", 0], ["--max-tokens", "at least 1", "got 0"]),
        (["--max-tokens", -5], ["at least 1", "got -5"]),
        (["--max-tokens", "many"], ["--max-tokens", "integer"]),
        (["--device", "tpu"], ["cpu, cuda or cuda:NUMBER", "'tpu'"]),
        (["--device", "cuda:first"], ["cuda:NUMBER", "'cuda:first'"]),
        (["--device", "cuda:99"], ["cuda:99"]),
    ],
)
def test_bad_options(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(part in result.stderr for part in said), result.stderr


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run("--device", "cuda")
    assert result.exit_code == 2
    assert "needs a GPU" in result.stderr
    assert "--device cpu" in result.stderr


def test_demo_is_a_named_command():
    assert CliRunner().invoke(app, ["--quick"]).exit_code == 2
    assert "demo" in CliRunner().invoke(app, ["--help"]).stdout


def test_the_text_is_the_standard_library():
    text = standard_library(200_000)
    assert len(text) == 200_000
    assert text == standard_library(200_000)
    assert text.startswith(standard_library(1000))
    assert b"def " in text
    assert b"import " in text


def test_the_text_starts_again_when_it_ends(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"one ")
    (tmp_path / "b.py").write_bytes(b"two ")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_bytes(b"three ")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert standard_library(18) == b"one two one two on"


def test_lengths_double_up_to_the_longest():
    lengths = {
        n: demo.make_settings(quick=True, is_causal=False, device=CPU, max_tokens=n).lengths for n in (7, 2048, 5000)
    }
    assert lengths == {7: (7,), 2048: (2048,), 5000: (2048, 4096, 5000)}


def _settings(lengths, **limits):
    return demo.Settings(Dilated([32, 64], [1, 2]), lengths, False, CPU, torch.float32, **limits)


def test_a_length_that_does_not_fit_the_budget_is_never_started(monkeypatch):
    # A clock of its own: a call takes a second for every 64 tokens, so the rate is exact.
    now = 0.0

    def seconds(call, device, repeats):
        nonlocal now
        call()
        assert isinstance(call, demo._Attend), "dense attention is not affordable here"
        one = call.qkv[0].shape[1] / 64
        now += one * (repeats + 2)
        return one

    monkeypatch.setattr(demo, "median_seconds", seconds)
    monkeypatch.setattr(demo.time, "monotonic", lambda: now)
    rows = list(demo.measure(_settings((64, 128, 256), budget_s=14.0, dense_s=0.0), lambda step, part: None))
    assert [row.tokens for row in rows] == [64, 128]
    assert now <= 14.0


def test_dense_time_is_measured_where_affordable_and_else_grows_with_the_square(monkeypatch):
    def seconds(call, device, repeats):
        call()
        return 1.0 if isinstance(call, demo._Attend) else 3.0

    monkeypatch.setattr(demo, "median_seconds", seconds)
    rows = list(demo.measure(_settings((64, 128, 256), budget_s=1e9, dense_s=10.0), lambda step, part: None))
    assert [row.dense_measured for row in rows] == [True, False, False]
    assert [row.dense_seconds for row in rows] == [3.0, 12.0, 48.0]


def test_progress_runs_from_nothing_to_all():
    parts: list[float] = []
    list(demo.measure(_settings((64, 100), budget_s=1e9, dense_s=1e9), lambda step, part: parts.append(part)))
    assert parts == sorted(parts)
    assert parts[0] == 0.0
    assert parts[-1] == pytest.approx(1.0)


def test_a_wrong_row_shows_in_the_error():
    pattern = Dilated([32, 64], [1, 2])
    qkv = demo.embed(standard_library(100), CPU, torch.float32)
    out = attention(*qkv, pattern)
    assert demo.largest_error(out, qkv, pattern, is_causal=False) < 1e-5
    out[:, -1] *= 1.01
    assert demo.largest_error(out, qkv, pattern, is_causal=False) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.gpu
def test_measurements_on_a_gpu():
    settings = demo.make_settings(quick=True, is_causal=True, device=torch.device("cuda"), max_tokens=5000)
    settings = dataclasses.replace(settings, budget_s=600.0)  # other tests may keep the GPU busy
    rows = list(demo.measure(settings, lambda step, part: None))
    assert [row.tokens for row in rows] == [2048, 4096, 5000]
    assert all(row.error < 2e-2 for row in rows)  # bfloat16
    assert all(row.extra_bytes >= row.output_bytes for row in rows)
