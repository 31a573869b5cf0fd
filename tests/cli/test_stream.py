"""The command ``stream``: what it prints and writes, and how it goes on after it was stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from programs import WITH_CTRL_C

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from dilated_attention_pytorch import DilatedKVCache
from dilated_attention_pytorch.cli.app import app

SMALL = [
    "stream", "--device", "cpu", "--tokens", "3_000", "--segment-lengths", "16,64,256", "--dilation-rates", "1,4,16",
    "--heads", "4", "--head-dim", "8", "--chunk", "250", "--rows", "20", "--seed", "7",
]  # fmt: skip
START = "from dilated_attention_command import main; main()"
# A signal in the middle of the seventh chunk, which has been computed but not been counted.
AT_CHUNK = """
import os, signal
from dilated_attention_pytorch import DilatedKVCache
attend, calls = DilatedKVCache.attend, []
def stopped(self, *inputs):
    out = attend(self, *inputs)
    calls.append(1)
    if len(calls) == 7:
        os.kill(os.getpid(), signal.{name})
    return out
DilatedKVCache.attend = stopped
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*SMALL, *map(str, arguments)])


def figures(text: str) -> dict:
    """What does not depend on times."""
    found = json.loads(text)
    names = ("settings", "finished", "tokens", "checksum", "rows", "largest_error", "tolerance", "passed", "cache_bytes")
    return {name: found[name] for name in names}


def test_table_json_and_picture(tmp_path):
    path = tmp_path / "figures.json"
    result = run("--json", path, "--plot", tmp_path / "run.png")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["settings"] == {
        "tokens": 3000, "segment_lengths": [16, 64, 256], "dilation_rates": [1, 4, 16], "heads": 4, "head_dim": 8,
        "dtype": "float32", "device": "cpu", "chunk": 250, "seed": 7, "rows": 20,
    }  # fmt: skip
    assert found["finished"]
    assert found["passed"]
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["rows"]) == 20
    assert {row["position"] for row in found["rows"]} >= {0, 2999}
    assert found["largest_error"] == max(row["error"] for row in found["rows"]) < found["tolerance"]
    assert [point["position"] for point in found["points"]] == list(range(0, 3001, 250))
    assert found["peak_memory_bytes"] > found["cache_bytes"] > 0
    assert found["tokens_per_second"] == pytest.approx(3000 / found["seconds"])
    ratio = found["last_tenth_tokens_per_second"] / found["first_tenth_tokens_per_second"]
    assert found["last_tenth_to_first"] == pytest.approx(ratio)
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in result.stdout.splitlines()[1:-1])
    assert lines["tokens"] == "3,000"
    assert lines["checksum"] == found["checksum"]
    assert lines["checked rows"].startswith("20, 0 wrong, largest error ")
    assert all(re.match(r" *\d+%  [\d,]+ tokens, [\d,]+ tokens/s, ", line) for line in result.stderr.splitlines())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["figures.json", "run.png"]


def test_json_on_standard_output_is_all_of_it(tmp_path):
    result = run("--json", "-", "--plot", tmp_path / "run.svg")
    assert json.loads(result.stdout)["passed"]
    assert "checksum" in result.stderr
    assert "<svg" in (tmp_path / "run.svg").read_text()
    quiet = run("--json", "-", "--quiet")
    assert figures(quiet.stdout) == figures(result.stdout)
    assert quiet.stderr == ""
    assert run("--quiet").output == ""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")
def test_kill_in_the_middle_of_a_chunk_changes_no_result(tmp_path):
    """The file is written after every chunk. What the killed process did after that is done again."""
    options = ["--checkpoint", str(tmp_path / "state"), "--every", "0", "--json", "-"]
    program = AT_CHUNK.format(name="SIGKILL") + START
    killed = subprocess.run(
        [sys.executable, "-c", program, *SMALL, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "")
    assert torch.load(tmp_path / "state", weights_only=True)["cache"]["tokens_seen"].tolist() == [1500]
    resumed = run(*options)
    assert resumed.exit_code == 0, resumed.output
    assert figures(resumed.stdout) == figures(run("--json", "-").stdout)
    assert [x.name for x in tmp_path.iterdir()] == ["state"]
    # The run is finished: the same command prints its results again.
    assert figures(run(*options).stdout) == figures(resumed.stdout)
    other = run(*options, "--seed", 8)
    assert (other.exit_code, other.stdout) == (2, "")
    assert f"{tmp_path / 'state'} is the checkpoint of a run with other settings: seed 7 instead of 8" in other.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")
def test_interrupt_prints_what_is_finished(tmp_path):
    path = tmp_path / "state"
    program = WITH_CTRL_C + AT_CHUNK.format(name="SIGINT") + START
    options = ["--checkpoint", str(path), "--every", "0", "--json", str(tmp_path / "figures.json")]
    result = subprocess.run(
        [sys.executable, "-c", program, *SMALL, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 130
    expected = f"Interrupted: 1,500 of 3,000 tokens are finished; the same command goes on from {path}."
    assert result.stderr.splitlines()[-1] == expected
    assert "Traceback" not in result.stderr
    assert re.search(r"^tokens +1,500 *$", result.stdout, re.MULTILINE)
    assert re.search(r"^last tenth +- *$", result.stdout, re.MULTILINE)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (found["finished"], found["tokens"], found["passed"]) == (False, 1500, True)
    assert 0 < len(found["rows"]) < 20
    assert figures(run(*options[:4], "--json", "-").stdout) == figures(run("--json", "-").stdout)


def test_interrupt_before_the_first_checkpoint(monkeypatch, tmp_path):
    """The command does not go on from a file that is not there."""

    def attend(self, *inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr(DilatedKVCache, "attend", attend)
    result = run("--checkpoint", tmp_path / "state")
    assert result.exit_code == 130
    assert result.stderr.endswith("Interrupted: 0 of 3,000 tokens are finished.\n")
    assert not list(tmp_path.iterdir())


def test_interrupt_before_the_first_chunk(monkeypatch):
    def attend(self, *inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr(DilatedKVCache, "attend", attend)
    result = run()
    assert result.exit_code == 130
    assert "Interrupted: 0 of 3,000 tokens are finished." in result.stderr


def test_a_wrong_row_is_named(monkeypatch, tmp_path):
    exact = DilatedKVCache.attend

    def attend(self, *inputs):
        out = exact(self, *inputs)
        if int(self.tokens_seen) == 3000:
            out[0, -1, 2] *= 1.001
        return out

    monkeypatch.setattr(DilatedKVCache, "attend", attend)
    result = run("--json", tmp_path / "figures.json")
    assert result.exit_code == 1
    assert re.search(r"^Row 2999 is wrong: its error is \d\.\de-0\d, and the tolerance is 7\.6e-06\.$", result.stderr, re.M)
    assert re.search(r"checked rows +20, 1 wrong, largest error \S+ at position 2,999", result.stdout)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [row["position"] for row in found["rows"] if not row["passed"]] == [2999]
    assert not found["passed"]


def test_nan_is_wrong_and_valid_json(monkeypatch):
    exact = DilatedKVCache.attend
    monkeypatch.setattr(DilatedKVCache, "attend", lambda self, *inputs: exact(self, *inputs) * torch.nan)
    result = run("--json", "-")
    assert result.exit_code == 1
    assert "Row 0 is wrong: its error is nan" in result.stderr
    assert json.loads(result.stdout, parse_constant=pytest.fail)["largest_error"] is None


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_checkpoint_names_itself(tmp_path, damage):
    path = tmp_path / "state"
    assert run("--checkpoint", path).exit_code == 0
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] if damage == "truncated" else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes(damaged)
    result = run("--checkpoint", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{path} is not a complete checkpoint: " in result.stderr
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("option", ["--checkpoint", "--json", "--plot"])
def test_files_are_checked_before_the_run(tmp_path, monkeypatch, option):
    def attend(self, *inputs):
        raise AssertionError("nothing can be written, so nothing should be computed")

    monkeypatch.setattr(DilatedKVCache, "attend", attend)
    (tmp_path / "folder.png").mkdir()
    for path, reason in ((tmp_path / "folder.png", "Is a directory"), (tmp_path / "no" / "x.png", "No such file")):
        result = run(option, path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{path} could not be written: {reason}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", 0], ["tokens", "at least 1", "got 0"]),
        (["--tokens", "many"], ["--tokens", "integer"]),
        (["--dtype", "int8"], ["--dtype must be one of bfloat16", "'int8'"]),
        (["--device", "tpu"], ["cpu, cuda or cuda:NUMBER", "'tpu'"]),
        (["--segment-lengths", "16,x,256"], ["--segment-lengths must be integers", "'16,x,256'"]),
        (["--dilation-rates", "1,4"], ["3 segment lengths", "2 rates"]),
        (["--plot", "run.gif"], ["--plot must be a picture, a name that ends in .png, .svg, .pdf", "'run.gif'"]),
        (["--every", -1], ["--every must be a number of seconds from 0 on", "-1"]),
        (["--every", "nan"], ["--every must be", "nan"]),
        (["--seed", -1], ["seed must be from 0"]),
        (["--heads", 3, "--head-dim", 3], ["multiple of 4", "3 * 3"]),
    ],
)
def test_bad_options(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(part in result.stderr for part in said), result.stderr


def test_one_of_lengths_and_rates():
    result = CliRunner().invoke(app, ["stream", "--segment-lengths", "16,64"])
    assert result.exit_code == 2
    assert "give both or neither" in result.stderr


def test_defaults_of_a_gpu(monkeypatch):
    from dilated_attention_pytorch.cli import stream

    monkeypatch.setattr(stream, "choose_device", lambda name: torch.device("cuda"))
    settings = stream.make_settings(stream.StreamOptions())
    assert (settings.tokens, settings.heads, settings.head_dim, settings.rows) == (1_000_000_000, 8, 64, 64)
    assert settings.dtype == torch.bfloat16
    assert settings.pattern.branches == tuple((2048 * 4**i, 4**i) for i in range(11))
    monkeypatch.setattr(stream, "choose_device", lambda name: torch.device("cpu"))
    settings = stream.make_settings(stream.StreamOptions())
    assert settings.dtype == torch.float32
    assert settings.tokens == 131_072


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    result = run()
    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert "s left" in result.stdout
    assert "\x1b" in result.stdout
    assert result.stderr == ""


def test_the_picture_has_both_panels():
    from dilated_attention_pytorch.cli.stream_picture import stream_picture
    from dilated_attention_pytorch.streaming import StreamPoint

    points = [StreamPoint(0, 0.0, 2**20), StreamPoint(100, 2.0, 2**21), StreamPoint(300, 4.0, 2**21)]
    rate, memory = stream_picture(points, "title").axes
    assert rate.lines[0].get_xydata().tolist() == [[50, 50], [200, 100]]
    assert memory.lines[0].get_xydata().tolist() == [[0, 1], [100, 2], [300, 2]]
