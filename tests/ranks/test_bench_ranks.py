"""``bench ring`` and ``profile`` on ranks: what they find, and processes that fail."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.workbench import bench_ring, processes
from dilated_attention_pytorch.workbench.bench_values import BOTH, FORWARD, BenchProblem

CPU = torch.device("cpu")


def ring_rows(turns: int) -> tuple[list, list, list]:
    """What this rank reports: rows with and without a time, and times by number."""
    problem = BenchProblem("ring", Dilated([32, 128], [1, 4]), 130, 2, 8, torch.float32, CPU)
    found = []
    bench_ring._worker(dist.get_rank(), CPU, found.append, bench_ring._RingTask(problem, (1, 2), turns, 0.0))
    return tuple([content for kind, content in found if kind == wanted] for wanted in ("measured", "refused", "time"))


def check_ring(group):
    measured, refused, times = ring_rows(2)
    assert not refused
    if dist.get_rank() != 0:
        assert not measured
        return
    assert [(row.ranks, row.direction) for row in measured] == [(w, x) for w in (1, 2) for x in (FORWARD, BOTH)]
    assert [number for number, _ in times] == [0, 1, 2, 3] * 2
    for row in measured:
        assert row.status == "measured"
        assert 0 < row.error < row.tolerance < 1e-4
    one, _, two, both = measured
    assert one.received_bytes is None
    assert one.flops == two.flops
    # The first rank has positions 0 to 64. Of its last short segment, 65 to 95 are missing. Of the long one, at most 16
    # of each head. A row is a key and a value of 2 heads of 8 numbers.
    assert 31 * 128 < two.received_bytes <= (31 + 16) * 128
    assert both.received_bytes > two.received_bytes
    assert two.planned_bytes > 0


def check_wrong_ring(group):
    attend = bench_ring.RingMember.attend
    bench_ring.RingMember.attend = lambda self, *x: attend(self, *x) * (1.001 if self.world == 2 else 1.0)
    try:
        measured, refused, times = ring_rows(1)
    finally:
        bench_ring.RingMember.attend = attend
    if dist.get_rank() == 0:
        assert [row.ranks for row in measured] == [1, 1]
        assert [(row.ranks, row.status, row.extra_bytes) for row in refused] == [(2, "wrong", None)] * 2
        assert len(times) == 2


def check_profile(group, folder: str):
    path = Path(folder, "p.json")
    options = ["--tokens", "256", "--heads", "2", "--head-dim", "8", "--backward", "--json", str(path)]
    pattern = ["--segment-lengths", "32,256", "--dilation-rates", "1,4"]
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", *options, *pattern])
    assert result.exit_code == 0, result.output
    if dist.get_rank() != 0:
        assert result.output == ""
        return
    found = json.loads(path.read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["made_before_bytes"]["query, key, value"] == 3 * 128 * 2 * 8 * 4
        assert sum(rank["peak_components"].values()) == rank["peak_extra_bytes"] > 0
        sent = rank["communication"]
        assert sent["messages"] > 0
        assert 0 < sent["overlapped_seconds"] <= sent["in_flight_seconds"]
    assert "messages of rank 1: " in result.output
    assert CliRunner().invoke(app, ["profile", "--device", "cpu", *options, "--ranks", "2"]).exit_code == 2


def check_profile_of_training(group):
    options = ["--preset", "tiny", "--context", "64", "--json", "-"]
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", *options])
    assert result.exit_code == 0, result.output
    if dist.get_rank() == 0:
        ranks = json.loads(result.stdout)["ranks"]
        assert all(max(rank["memory"]["components"]["kept for the backward"]) > 0 for rank in ranks)


def test_ring(on_ranks):
    on_ranks(2, check_ring)


def test_wrong_ranks_get_no_time(on_ranks):
    on_ranks(2, check_wrong_ring)


def test_profile(on_ranks, tmp_path):
    on_ranks(2, check_profile, str(tmp_path))


def test_profile_of_a_training_step(on_ranks):
    on_ranks(2, check_profile_of_training)


def fail(rank: int, device: torch.device, send: processes.Send) -> None:
    send("before")
    raise ValueError("the rule,\nthe value")


def leave(rank: int, device: torch.device, send: processes.Send) -> None:
    raise SystemExit(7)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(fail, "rank 0 of 1: ValueError: the rule, the value"), (leave, "a process of 1 ended with exit code 7")],
)
def test_a_process_that_fails_is_a_sentence(monkeypatch, function, reason):
    fork = multiprocessing.get_context("fork")  # a new interpreter would take seconds
    monkeypatch.setattr(processes.mp, "get_context", lambda method: fork)
    found = []
    with pytest.raises(processes.ProcessError) as error:
        found += processes.run_ranks(1, CPU, function)
    assert str(error.value) == reason


def test_new_processes(monkeypatch, tmp_path):
    server = multiprocessing.get_context("forkserver")  # that of the pool has imported PyTorch
    monkeypatch.setattr(processes.mp, "get_context", lambda method: server)
    options = ["--device", "cpu", "--tokens", "64", "--heads", "2", "--head-dim", "8", "--turns", "1", "--seconds", "0"]
    path = tmp_path / "b.json"
    result = CliRunner().invoke(app, ["bench", "ring", "--only", "2 ranks", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["method"], row["status"], row["turns"]) for row in rows] == [("2 ranks", "measured", 1)] * 2
