"""The command ``maxlen``: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.cli.maxlen_picture import maxlen_picture
from dilated_attention_pytorch.workbench.maxlen import TryResult, TrySettings
from dilated_attention_pytorch.workbench.tries import Tries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

LIMIT = 10_000


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tried(monkeypatch) -> list[TrySettings]:
    """Tries that only look at the length: 10,000 tokens fit, and a tenth of them with dense attention."""
    seen = []

    def run(self, tokens):
        seen.append(self.settings)
        if tokens <= LIMIT // (10 if self.settings.method == "dense" else 1):
            return TryResult(tokens, "ran", tokens * 2**10, tokens / 1e4)
        return TryResult(tokens, "out of memory", reason="no memory for another tensor of 4.0 MiB")

    monkeypatch.setattr(Tries, "run", run)
    return seen


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["maxlen", "--device", "cpu", *map(str, arguments)])


def test_table_json_and_picture(tmp_path, tried):
    path = tmp_path / "x.json"
    result = run("--start", "1k", "--memory", "64MiB", "--json", path, "--plot", tmp_path / "x.svg", "--train", "--causal")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"].startswith("CPU with ")
    assert found["finished"]
    assert found["kernel"] == "sdpa: CPU flash"
    assert found["settings"] == {
        "heads": 8, "head_dim": 64, "dtype": "float32", "device": "cpu", "is_causal": True, "train": True,
        "backend": "auto", "pattern": None, "preset": None, "memory": 2**26, "seconds": 60.0,
    }  # fmt: skip
    dilated = found["results"]["dilated"]
    longest, failed = dilated["longest"], dilated["shortest_failed"]
    assert longest["tokens"] <= LIMIT < failed["tokens"] <= 1.05 * longest["tokens"]
    assert failed["outcome"] == "out of memory"
    assert [x["tokens"] for x in dilated["tries"]][:6] == [1000, 2000, 4000, 8000, 16000, 12000]
    last = result.stdout.splitlines()[-2]  # the name of the picture follows
    assert last.startswith(f"longest that ran: {longest['tokens']:,} tokens in ")
    assert last.endswith(
        f"; shortest that failed: {failed['tokens']:,} tokens, out of memory: no memory for another tensor of 4.0 MiB."
    )
    assert len(result.stderr.splitlines()) == len(dilated["tries"])
    assert result.stderr.splitlines()[0].split() == ["dilated:", "1,000", "tokens", "ran,", "1.0", "MiB,", "0.10", "s"]
    assert "<svg" in (tmp_path / "x.svg").read_text()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["x.json", "x.svg"]
    assert all(x.train and x.is_causal for x in tried)


def test_against_dense(tried):
    result = run("--start", 1000, "--against", "dense", "--json", "-")
    found = json.loads(result.stdout)["results"]
    assert found["dense"]["longest"]["tokens"] <= LIMIT // 10 < found["dense"]["shortest_failed"]["tokens"]
    assert "dense: longest that ran: 1,000 tokens" in result.stderr
    assert {x.method for x in tried} == {"dilated", "dense"}
    assert run("--against", "dense", "--quiet").output == ""


def test_interrupt_prints_the_bounds_so_far(monkeypatch, tmp_path, tried):
    before, quick = [], Tries.run

    def run_and_interrupt(self, tokens):
        before.append(tokens)
        if len(before) == 3:
            signal.raise_signal(signal.SIGINT)
        return quick(self, tokens)

    monkeypatch.setattr(Tries, "run", run_and_interrupt)
    result = run("--start", 1000, "--json", tmp_path / "x.json", "--plot", tmp_path / "x.png")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("Interrupted: 2 tries are finished.")
    assert "longest that ran: 2,000 tokens" in result.stdout
    assert "no length has failed" in result.stdout
    found = json.loads((tmp_path / "x.json").read_text())
    assert not found["finished"]
    assert [x["tokens"] for x in found["results"]["dilated"]["tries"]] == [1000, 2000]
    assert not (tmp_path / "x.png").exists()


def test_nothing_runs(monkeypatch):
    monkeypatch.setattr(Tries, "run", lambda self, tokens: TryResult(tokens, "killed", reason="ended by SIGKILL"))
    result = run("--start", 4)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "no length ran; shortest that failed: 1 tokens, killed: ended by SIGKILL."


def test_settings_of_options(tried):
    arguments = ["--heads", 2, "--head-dim", 8, "--segment-lengths", "64,256", "--dilation-rates", "1,4"]
    assert run(*arguments, "--seconds", 3, "--memory", "2GB", "--backend", "eager", "--dtype", "float64").exit_code == 0
    assert tried[0] == TrySettings(
        heads=2, head_dim=8, pattern=((64, 1), (256, 4)), seconds=3.0, memory=2 * 10**9, backend="eager", dtype="float64"
    )
    assert run("--preset", "tiny").exit_code == 0
    assert (tried[-1].preset, tried[-1].is_causal) == ("tiny", True)
    assert 0 < tried[-1].memory < 2**50  # half of what is free


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "64"], ["--memory must be a size with a unit", "'64'"]),
        (["--memory", "lots"], ["--memory", "'lots'"]),
        (["--memory", "-1GiB"], ["--memory must be a size with a unit", "'-1GiB'"]),
        (["--memory", "1KiB"], ["--memory must be at least 1MiB"]),
        (["--dtype", "int8"], ["--dtype must be one of", "'int8'"]),
        (["--backend", "hopper"], ["no backend can serve this call", "Hopper kernels run on CUDA tensors, got cpu"]),
        (["--backend", "fast"], ["backend must be one of", "'fast'"]),
        (["--precision", "-1"], ["--precision must be a share from 0 to below 1"]),
        (["--precision", "nan"], ["--precision"]),
        (["--seconds", "0"], ["seconds must be a positive number, got 0.0"]),
        (["--start", "0"], ["--start must be from 1", "got 0"]),
        (["--start", "x"], ["--start must be a number such as", "'x'"]),
        (["--heads", "0"], ["heads", "0"]),
        (["--segment-lengths", "64"], ["give both or neither"]),
        (["--against", "flex"], ["--against must be dense, got 'flex'"]),
        (["--preset", "gigapath-12x768"], ["--preset must be a decoder, one of longnet-base, tiny, small"]),
        (["--preset", "tiny", "--heads", "2", "--against", "dense"], ["--heads, --against belong to one attention call"]),
        (["--preset", "tiny", "--dtype", "float16"], ["autocast to bfloat16, got --dtype float16"]),
        (["--plot", "x.txt"], ["--plot must be a picture"]),
        (["--device", "tpu"], ["--device must be cpu, cuda"]),
    ],
)
def test_bad_options(monkeypatch, arguments, said):
    monkeypatch.setattr(Tries, "run", None)  # nothing is tried
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert all(part in result.stderr for part in said), result.stderr


def test_a_file_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(Tries, "run", None)
    result = run("--json", tmp_path)
    assert result.exit_code == 1
    assert "could not be written: Is a directory" in result.stderr


def test_a_search_in_processes():
    """32 MiB: query, key, value and output take 256 bytes a token, and what is left is for partial results."""
    result = run(
        "--heads", 1, "--head-dim", 16, "--memory", "32MiB", "--start", "64Ki", "--precision", 0.2, "--json", "-",
        "--segment-lengths", "256", "--dilation-rates", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]["dilated"]
    longest, failed = found["longest"], found["shortest_failed"]
    assert longest["tokens"] * 256 <= 2**25
    assert 0.6 * 2**25 < longest["memory_bytes"] <= 1.1 * 2**25  # the libraries' own pages are not limited
    assert failed["outcome"] == "out of memory"
    assert failed["tokens"] <= 1.2 * longest["tokens"]


def test_the_picture_shows_what_ran_and_what_did_not():
    found = {"dilated": [TryResult(8, "ran", 2**20, 1.0), TryResult(16, "too slow"), TryResult(4, "ran", 2**19, 0.5)]}
    figure = maxlen_picture(found, TrySettings(memory=2**21))
    memory, seconds = figure.axes
    assert memory.lines[0].get_xydata().tolist() == [[4, 0.5], [8, 1.0]]
    assert seconds.lines[0].get_xydata().tolist() == [[4, 0.5], [8, 1.0]]
    assert [x.get_text() for x in memory.texts] == ["too slow"]
    limits = [axes.lines[-1].get_ydata()[0] for axes in (memory, seconds)]
    assert limits == [2.0, 60.0]


GPU_PROGRAM = """
import os, time
from dilated_attention_pytorch.workbench import one_try
from dilated_attention_pytorch.workbench.maxlen import TryResult
def try_length(settings, tokens, started):
    started()
    if tokens == 7:
        raise RuntimeError("CUDA error: an illegal memory access")
    if tokens == 8:
        time.sleep(60)
    return TryResult(tokens, "ran", memory_bytes=os.getpid())
one_try.try_length = try_length
one_try.main()
"""


def test_tries_on_a_gpu_share_a_process_until_one_fails():
    settings = TrySettings(device="cuda", seconds=1.0)
    with Tries(settings, command=[sys.executable, "-c", GPU_PROGRAM]) as tries:
        found = [tries.run(tokens) for tokens in (1, 2, 7, 3, 4, 8, 5)]
    assert [x.outcome for x in found] == ["ran", "ran", "failed", "ran", "ran", "too slow", "ran"]
    first, second, _, third, fourth, _, fifth = (x.memory_bytes for x in found)
    assert first == second
    assert third == fourth
    assert len({first, third, fifth}) == 3
