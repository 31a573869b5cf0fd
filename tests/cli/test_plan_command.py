"""The command ``plan``: its tables, its JSON and picture, and its exit codes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from dilated_attention_pytorch.cli.app import app

SMALL = ["plan", "--tokens", "100k", "--heads", "8", "--head-dim", "64", "--gpu", "h200"]


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_json(tmp_path):
    result = run(
        "plan", "--tokens", "131072", "--heads", "8", "--head-dim", "64", "--gpu", "h200", "--gpus", "4", "--train",
        "--segments", "2048,131072", "--rates", "1,8", "--gpus-per-node", "2", "--json", str(tmp_path / "plan.json"),
    )  # fmt: skip
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["pattern"] == [[2048, 1], [131072, 8]]
    assert figures["fits"]
    memory = figures["memory_bytes"]
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    assert memory["query"] == 32768 * 8 * 64 * 2
    # Every other rank sends its rows of rate 8: 4,096 of 8 heads of 64 numbers of 2 bytes, for keys and values.
    assert figures["messages"]["forward_bytes"] == 3 * 4096 * 8 * 64 * 2 * 2
    assert figures["messages"]["forward_bytes_inside_node"] == 4096 * 8 * 64 * 2 * 2
    assert figures["work"]["backward_flops"] == figures["work"]["forward_flops"] * 5 // 2
    assert [x["gpus"] for x in figures["scaling"]] == [1, 2, 4]
    assert "buffers of messages" in result.output
    assert "longest that fits" in result.output


def test_picture(tmp_path):
    """From 1 to 4,096 GPUs, as far as each has a token."""
    run("plan", "--tokens", "40", "--heads", "2", "--head-dim", "16", "--plot", str(tmp_path / "plan.svg"), "--quiet")
    assert b"<svg" in (tmp_path / "plan.svg").read_bytes()
    assert [x.name for x in tmp_path.iterdir()] == ["plan.svg"]


def test_suggest():
    result = run("plan", "--suggest", "--tokens", "20k", "--heads", "12", "--segments", "512", "--rates", "2")
    assert "--segments 2048,8192,24576 --rates 1,4,12" in result.output
    assert "below 512 a GPU loses speed" in result.output
    assert "no branch has rate 1" in result.output
    result = run("plan", "--suggest", "--tokens", "20k", "--heads", "12", "--json", "-", "--quiet")
    assert json.loads(result.stdout)["suggestion"]["pattern"] == [[2048, 1], [8192, 4], [24576, 12]]


def test_a_plan_that_does_not_fit_says_what_would():
    result = run("plan", "--tokens", "1M", "--gpu", "gtx1080", "--heads", "8", "--head-dim", "64", "--train", code=1)
    assert "Does not fit: a rank needs" in result.output
    assert "What fits: 2 GPUs" in result.output or "GPUs for 1,000,000 tokens" in result.output


def test_a_gpu_by_numbers():
    numbers = "--gpu-memory", "80GB", "--gpu-tflops", "500", "--gpu-bandwidth", "3.3TB", "--gpu-capability", "9.0"
    result = run(*SMALL[:-1], "mine", *numbers, "--json", "-", "--quiet")
    gpu = json.loads(result.stdout)["gpu"]
    assert (gpu["name"], gpu["memory"], gpu["half"], gpu["bandwidth"]) == ("mine", 80 * 10**9, 500e12, 3.3e12)


def test_a_model():
    result = run("plan", "--tokens", "1Mi", "--gpu", "h200", "--model", "small", "--train", "--checkpoint", "--causal")
    assert "training step" in result.output
    assert "optimizer" in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--tokens", "many"], "--tokens must be a number"),
        (["--tokens", "1M", "--gpu", "h300"], "the GPU must be one of v100"),
        (["--tokens", "1M", "--gpu", "mine", "--gpu-memory", "80GB"], "give --gpu-tflops, --gpu-bandwidth as well"),
        (["--tokens", "1M", "--gpu-memory", "0GB"], "above 0"),
        (["--tokens", "1M", "--gpu-tflops", "nan"], "--gpu-tflops must be a number above 0"),
        (["--tokens", "1M", "--gpus", "0"], "gpus must be an integer from 1"),
        (["--tokens", "1M", "--gpus-per-node", "0"], "a node has at least one GPU"),
        (["--tokens", "1M", "--link", "string"], "the link must be one of"),
        (["--tokens", "1M", "--heads", "0"], "heads must be positive"),
        (["--tokens", "1M", "--heads", "1000000000"], "heads must be an integer from 1 to 1,024"),
        (["--tokens", "9" * 20], "tokens must be an integer from 1 to 1,099,511,627,776"),
        (["--tokens", "1M", "--segments", "5"], "give both or neither"),
        (["--tokens", "1M", "--segments", "5", "--rates", "1,2"], "1"),
        (["--tokens", "1M", "--blocks", "spiral"], "pattern_type must be one of"),
        (["--tokens", "1M", "--model", "small", "--heads", "4"], "leave out --heads"),
        (["--tokens", "1M", "--ffn", "64"], "give --layers or --model"),
        (["--tokens", "1M", "--device", "cpu"], "give --measure as well"),
        (["--tokens", "1M", "--plot", "plan.txt"], "--plot must be a picture"),
        (["--tokens", "1M", "--suggest", "--plot", "plan.png"], "leave out --suggest"),
        (["--tokens", "1M", "--gpus", "8", "--transport", "ulysses"], "heads cannot be exchanged"),
    ],
)
def test_wrong_options(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reason in run("plan", *arguments, code=2).output
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written():
    assert "could not be written" in run(*SMALL, "--json", "/nonexistent/plan.json", code=1).output


def test_measured_rates_are_printed_beside_those_of_the_table():
    result = run(
        "plan", "--tokens", "4k", "--heads", "2", "--head-dim", "16", "--dtype", "float32", "--measure", "--device", "cpu"
    )
    assert "measured on CPU" in result.output
    assert "from the table" in result.output
