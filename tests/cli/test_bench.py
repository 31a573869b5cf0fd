"""The command ``bench``: what is measured, what gets no time, and how two runs are compared."""

from __future__ import annotations

import json

import pytest
import torch

import oracle

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from dilated_attention_pytorch import Dilated, attention
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.measure import Spread
from dilated_attention_pytorch.workbench import bench as engine
from dilated_attention_pytorch.workbench import bench_suites
from dilated_attention_pytorch.workbench.bench_compare import compare_rows
from dilated_attention_pytorch.workbench.bench_values import BenchProblem, BenchRow, Neighborhood
from dilated_attention_pytorch.workbench.exactness import expected_rows, largest_relative
from dilated_attention_pytorch.workbench.processes import rank_device

TINY = ["--device", "cpu", "--tokens", "96", "--heads", "2", "--head-dim", "8", "--turns", "2", "--seconds", "0"]
CPU = torch.device("cpu")
REASON = "out of memory: cannot allocate memory: you tried"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def document(text: str) -> dict:
    return json.loads(text, parse_constant=pytest.fail)


def rows_of(found: dict, method: str) -> dict[str, dict]:
    return {row["direction"]: row for row in found["rows"] if row["method"] == method}


def test_table_json_and_picture(tmp_path):
    result = run(*TINY, "--json", tmp_path / "b.json", "--plot", tmp_path / "b.svg")
    assert result.exit_code == 0, result.output
    found = document((tmp_path / "b.json").read_text())
    assert found["command"] == "bench"
    assert found["suites"] == ["single"]
    assert found["finished"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"].startswith("CPU with ")
    names = {(row["method"], row["direction"]) for row in found["rows"]}
    assert names == {
        (method, direction)
        for method in ("hopper", "triton", "sdpa", "eager", "dense tiles", "dense")
        for direction in ("forward", "forward and backward")
    }
    for row in found["rows"]:
        if row["method"] in ("hopper", "triton"):
            assert (row["status"], row["median_seconds"], row["tflops"]) == ("not run", None, None)
            assert row["reason"]
            continue
        assert row["status"] == "measured"
        assert 0 < row["error"] < row["tolerance"] < 1e-4
        assert 0 < row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"]
        assert row["turns"] == 2
        assert row["tokens_per_second"] == pytest.approx(96 / row["median_seconds"]) or row["method"] == "dense tiles"
        assert row["tflops"] == pytest.approx(row["flops"] / row["median_seconds"] / 1e12)
    dense = rows_of(found, "dense")
    assert dense["forward"]["flops"] == 4 * 8 * 2 * 96**2  # 4 D for each pair and head
    assert dense["forward and backward"]["flops"] == 3.5 * dense["forward"]["flops"]
    assert dense["forward"]["extra_bytes"] >= 96 * 2 * 8 * 4
    lines = result.stdout.splitlines()
    assert any(line.startswith("sdpa ") and " forward " in line for line in lines)
    assert "not run: triton: its kernels need a GPU" in lines
    assert "dense attention of the whole sequence: dense" in lines
    assert "<svg" in (tmp_path / "b.svg").read_text()


class _Scaled(torch.autograd.Function):
    """The identity with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient


def _wrong_for_long(q, out):
    last = torch.zeros_like(out)
    last[:, -1] = 0.01
    return out + last if q.shape[1] > 400 else out


WRONG = {
    "results": (lambda q, out: 1.001 * out, {"forward", "forward and backward"}),
    "not numbers": (lambda q, out: out * torch.nan, {"forward", "forward and backward"}),
    "gradients": (lambda q, out: _Scaled.apply(out), {"forward and backward"}),
    "a row of the large problem": (_wrong_for_long, {"forward", "forward and backward"}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_method_gets_no_time(monkeypatch, kind):
    change, wrong = WRONG[kind]

    def broken(q, *arguments, **options):
        return change(q, attention(q, *arguments, **options))

    monkeypatch.setattr(bench_suites, "attention", broken)
    size = ["--tokens", "500"] if kind.startswith("a row") else []
    result = run(*TINY, *size, "--only", "sdpa", "--json", "-")
    assert result.exit_code == 1
    found = rows_of(document(result.stdout), "sdpa")
    for direction, row in found.items():
        assert row["status"] == ("wrong" if direction in wrong else "measured")
        assert (row["median_seconds"] is None) == (direction in wrong)
        assert (row["tflops"] is None) == (direction in wrong)
        if direction in wrong and kind != "not numbers":
            assert row["error"] > row["tolerance"]
            assert f"short, sdpa, {direction}: wrong" in result.stderr
    lines = [line.split() for line in result.stderr.splitlines() if line.startswith("sdpa ")]
    assert [line[2] for line in lines if line[1] == "both"] == ["wrong"]


def test_an_error_of_a_backend_is_a_failure(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(bench_suites, "attention", broken)
    result = run(*TINY, "--only", "sdpa", "--json", "-")
    assert result.exit_code == 1
    assert {row["status"] for row in document(result.stdout)["rows"]} == {"failed"}
    assert "failed: sdpa: RuntimeError: no kernel image" in result.stderr


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # of a GPU, of a CPU
def test_a_call_that_runs_out_of_memory_in_a_turn_ends_no_other(monkeypatch, error):
    turn, times = engine.turn_seconds, []

    def without_memory(*arguments):
        times.append(1)
        if len(times) == 4:  # in the second turn of the second call
            raise error("cannot allocate memory:\nyou tried")
        return turn(*arguments)

    monkeypatch.setattr(engine, "turn_seconds", without_memory)
    result = run(*TINY, "--only", "sdpa", "--json", "-")
    assert result.exit_code == 0
    found = rows_of(document(result.stdout), "sdpa")
    assert found["forward"]["status"] == "measured"
    both = found["forward and backward"]
    assert (both["status"], both["median_seconds"], both["reason"]) == ("not run", None, REASON)
    assert f"not run: sdpa: {REASON}" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("count", "device", "devices"),
    [
        (4, "cuda", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (3, "cuda", ["cuda:0"] * 4),
        (3, "cuda:1", ["cuda:1"] * 4),
        (0, "cpu", ["cpu"] * 4),
    ],
)
def test_the_gpu_of_a_rank_has_a_number(monkeypatch, count, device, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(rank_device(torch.device(device), 4, rank)) for rank in range(4)] == devices


def test_dense_attention_of_long_sequences_is_predicted(monkeypatch):
    monkeypatch.setattr(engine, "DENSE_SECONDS", {"cpu": 0.0})
    result = run(*TINY, "--only", "dense,dense tiles", "--json", "-")
    assert result.exit_code == 0, result.output
    found = document(result.stdout)
    tiles, dense = rows_of(found, "dense tiles")["forward"], rows_of(found, "dense")["forward"]
    assert (dense["status"], dense["error"], dense["reason"]) == ("predicted", None, "from the rate of dense tiles")
    assert dense["tflops"] == pytest.approx(tiles["tflops"])
    assert "~" in result.stderr


@pytest.mark.parametrize("suite", ["sparse", "streaming", "peers"])
def test_other_suites(suite):
    only = ["--only", "random 0.05,random 0.25"] if suite == "sparse" else []
    result = run(suite, *TINY, "--tokens", "300", "--turns", "1", *only, "--json", "-")
    assert result.exit_code == 0, result.output
    found = document(result.stdout)
    assert {row["suite"] for row in found["rows"]} == {suite}
    status = {row["method"]: row["status"] for row in found["rows"]}
    assert all(row["error"] < row["tolerance"] for row in found["rows"] if row["status"] == "measured")
    if suite == "streaming":
        assert status == dict.fromkeys(("one call", "chunks of 37", "step"), "measured")
        assert {row["tokens"] for row in found["rows"]} == {1, 300}
    elif suite == "peers":
        assert status["authors"] == status["sdpa math"] == status["sdpa flash"] == "measured"
        assert status["sdpa cudnn"] == status["cudnn blocks"] == "not run"
        assert {row["setting"] for row in found["rows"] if row["method"] == "this library"} == {
            "dilated", "dense", "random blocks 0.1",
        }  # fmt: skip
        assert "minutes on a CPU" in next(row["reason"] for row in found["rows"] if row["method"] == "flex")
    else:
        density = {row["setting"]: row["flops"] for row in found["rows"] if row["method"] == "sdpa"}
        assert density["random 0.05"] <= density["random 0.25"] < 3.5 * 4 * 8 * 2 * 300**2


def test_interrupt_prints_what_is_finished(monkeypatch):
    turn, times = engine.turn_seconds, []

    def stopped(*arguments):
        times.append(1)
        if len(times) == 4:  # in the second turn of the second call
            raise KeyboardInterrupt
        return turn(*arguments)

    monkeypatch.setattr(engine, "turn_seconds", stopped)
    result = run(*TINY, "--only", "sdpa", "--json", "-")
    assert result.exit_code == 130
    found = document(result.stdout)
    assert not found["finished"]
    assert [row["turns"] for row in found["rows"]] == [2, 1]
    assert result.stderr.splitlines()[-1] == "Interrupted: 2 rows are finished."


def test_compare_with_an_earlier_run(tmp_path):
    path = tmp_path / "before.json"
    small = [*TINY, "--only", "sdpa"]
    assert run(*small, "--json", path, "--quiet").exit_code == 0
    before = document(path.read_text())
    for row in before["rows"]:
        if row["status"] == "measured":
            row["median_seconds"] *= 1e4  # whatever this machine does, nothing is slower than that
    path.write_text(json.dumps(before))
    result = run(*small, "--compare", path, "--json", "-")
    assert result.exit_code == 0, result.output
    assert document(result.stdout)["comparison"]["missing"] == []
    assert "2 rows compared, 0 figures grew by more than 10 %." in result.stderr
    before["rows"][0]["median_seconds"] /= 1e9
    before["rows"].append(before["rows"][0] | {"method": "gone"})
    before["rows"][1]["method"] = "renamed"
    path.write_text(json.dumps(before))
    result = run(*small, "--compare", path)
    assert result.exit_code == 1
    assert "regression: single, short, sdpa, forward: " in result.stdout
    assert "missing: single, short, gone, forward" in result.stdout
    assert "new: single, short, sdpa, forward and backward" in result.stdout


def test_noise_below_the_tolerance_is_no_regression():
    def row(method: str, seconds: float, size: int) -> BenchRow:
        time = Spread.of([seconds])
        return BenchRow("single", "s", method, "forward", "", "measured", time=time, extra_bytes=size)

    earlier = {"rows": [row(x, 1.0, 100).figures() for x in "abcd"]}
    now = [row("a", 1.09, 100), row("b", 1.11, 100), row("c", 0.5, 111), row("d", 1.0, 109)]
    found = compare_rows(earlier, now, 0.10)
    assert [(x.key[2], x.figure) for x in found.regressed] == [("b", "time"), ("c", "memory")]
    assert found.missing == found.new == ()
    assert not compare_rows(earlier, now, 0.12).regressed
    wrong = [BenchRow("single", "s", "a", "forward", "", "wrong")]
    assert len(compare_rows(earlier, wrong, 0.1).missing) == 4


HEAD = {"command": "bench", "suites": ["single"], "device": "CPU with 1 thread", "settings": {}, "rows": []}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "could not read"),
        ('{"command": "bench", "rows": [', "is not JSON"),
        ("[]", "is another document"),
        (json.dumps(HEAD | {"command": "profile"}), "is another document"),
        (json.dumps(HEAD | {"rows": [{"suite": "single"}]}), "is another document"),
        (json.dumps(HEAD | {"suites": ["peers"]}), "has peers, and this run has single"),
        (json.dumps(HEAD | {"device": "H200"}), "the same device"),
    ],
)
def test_files_that_cannot_be_compared_with(tmp_path, content, sentence):
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    result = run(*TINY, "--compare", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert str(path) in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["fast"], "SUITE must be one of single, ring, sparse, streaming, peers, got 'fast'"),
        (["--dtype", "float8"], "--dtype must be one of"),
        (["--tokens", "many"], "--tokens must be a number such as"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--only", "fastest"], "there are dense, dense tiles, eager, hopper, sdpa, short, triton"),
        (["ring", "--only", "3 ranks"], "--only takes ring, 1 rank, 2 ranks, 4 ranks in this suite"),
        (["--tolerance", "-1"], "--tolerance must be"),
        (["--plot", "b.txt"], "--plot must be a picture"),
    ],
)
def test_wrong_options(options, sentence):
    result = run("--device", "cpu", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_help_has_examples():
    result = run("--help")
    assert "  dilated-attention bench peers --tokens 8k --causal\n" in result.stdout


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(8, 32), (8, 20)])
def test_expected_rows_are_those_of_the_oracle(causal, lengths):
    problem = BenchProblem("", Dilated(lengths, (1, 4)), 70, 2, 4, torch.float64, CPU, causal)
    *inputs, _ = problem.tensors()
    expected, _ = oracle.attention(*inputs, problem.pattern, is_causal=causal)
    rows = [0, 33, 69]
    torch.testing.assert_close(expected_rows(problem, inputs, rows), expected[:, rows].detach())


def test_rows_without_keys_have_an_error_only_if_they_are_not_zero():
    zero, row = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    assert largest_relative(zero, zero) == 0.0
    assert largest_relative(row, zero) == float("inf")


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_neighborhoods_are_the_nearest_keys_of_a_residue(causal, dilation):
    size, tokens = 3, 14
    seen = Neighborhood(size, dilation).visible(torch.arange(tokens), tokens, causal)
    for i in range(tokens):
        own = [j for j in range(i % dilation, tokens, dilation) if j <= i or not causal]
        nearest = sorted(own, key=lambda j: (abs(i - j), j))[:size]
        assert seen[i].nonzero().flatten().tolist() == sorted(nearest)
