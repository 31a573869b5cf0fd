"""Training runs that are stopped, killed or out of disk: losses are those of an uninterrupted run, to the last digit."""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

import programs
import training_cases
from dilated_attention_pytorch.training import (
    Checkpoints,
    DataError,
    LossError,
    SaveError,
    Trainer,
    TrainSettings,
    read_log,
)
from dilated_attention_pytorch.training.log import TrainLog
from training_cases import curve, finish, make_settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "drop_path": 0.1}
MODULES = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import training_cases as cases
out = Path(sys.argv[2])
settings = cases.make_settings(out.parent / "text.txt", {"dropout": 0.2}, accumulate=2, every=1)
"""


def start(program: str, out: Path, *arguments: object) -> int:
    support = Path(training_cases.__file__).parent
    (result,) = programs.run_together(
        PROGRAM + program, support, out, *arguments, folder=out.parent, environments=[os.environ], modules=MODULES
    )
    assert result.returncode in (0, -9), result.stderr
    return result.returncode


# Going on


def test_a_run_that_goes_on_repeats_every_digit(tmp_path, text):
    settings = make_settings(text, DROPOUT, accumulate=2)
    finish(settings, tmp_path / "whole")
    out = tmp_path / "stopped"
    for stop in (1, 5, 6):  # not all of them at a checkpoint
        trainer = Trainer(settings, out, CPU)
        for point in trainer.run():
            if point.step == stop:
                break  # as if the process had ended here
        trainer.close()
    finish(settings, out)
    assert len(curve(out)) == 8
    assert curve(out) == curve(tmp_path / "whole")
    losses = [line["loss"] for line in curve(out)]
    assert losses[-1] < losses[0] - 0.5
    assert len({line["gradient_norm"] for line in curve(out)}) == 8
    # Without the saved sums of the optimizer the curve is another one.
    assert curve(out) != curve(_without_sums(settings, tmp_path, out))


def _without_sums(settings: TrainSettings, tmp_path: Path, out: Path) -> Path:
    other = tmp_path / "other"
    shutil.copytree(out, other)
    for step in (8,):
        shutil.rmtree(Checkpoints(other / "checkpoints", 2).path(step))
    trainer = Trainer(settings, other, CPU)
    assert trainer.step == 6
    for state in trainer.optimizer.state.values():
        state["exp_avg"].zero_()
    for _ in trainer.run():
        pass
    return other


def test_a_stop_writes_a_checkpoint_of_its_step(tmp_path, text):
    settings = make_settings(text, every=100)
    finish(settings, tmp_path / "whole")
    trainer = Trainer(settings, tmp_path / "out", CPU)
    for point in trainer.run():
        trainer.stop = point.step == 2  # as a handler of signals does: the step in progress is finished
    assert trainer.step == 3
    assert trainer.checkpoints.steps() == [3]
    trainer.close()
    finish(settings, tmp_path / "out")
    assert curve(tmp_path / "out") == curve(tmp_path / "whole")


def test_a_finished_run_does_nothing(tmp_path, text):
    settings = make_settings(text)
    finish(settings, tmp_path / "out")
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    assert list(Trainer(settings, tmp_path / "out", CPU).run()) == []
    assert (tmp_path / "out" / "log.jsonl").read_bytes() == before


def test_dropout_is_drawn_anew_in_each_step_and_microbatch(tmp_path, text):
    """One window, so that only dropout differs between forwards."""
    settings = make_settings(text, {"dropout": 0.3}, learning_rate=0.0, steps=4, batch=2, accumulate=2)
    settings_off = make_settings(text, learning_rate=0.0, steps=4, batch=2, accumulate=2)
    seen = []
    for chosen, name in ((settings, "on"), (settings_off, "off")):
        trainer = Trainer(chosen, tmp_path / name, CPU)
        seen.append([float(trainer._gradients([0, 0])) for trainer.step in range(4)])
    assert len(set(seen[0])) == 4
    assert len(set(seen[1])) == 1


@pytest.mark.slow
def test_kill_at_operations_on_files(tmp_path, text):
    """SIGKILL at the 1st, 3rd, 6th, ... operation on a file of the run after each start: a walk through all of saving."""
    assert start("cases.finish(settings, out)", tmp_path / "whole") == 0
    out = tmp_path / "out"
    killed, done = 0, 0
    for number in (1, 3, 6, 10, 15, 21, 28, 36, 10**9):
        code = start("cases.kill_at_event(int(sys.argv[3]), out)\ncases.finish(settings, out)", out, number)
        killed += code == -9
        steps = Checkpoints(out / "checkpoints", 2).steps()
        assert max(steps, default=0) >= done, "a checkpoint was lost"
        done = max(steps, default=0)
    assert killed >= 6
    assert curve(out) == curve(tmp_path / "whole")
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-000000007", "step-000000008"]


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path, text):
    assert start("cases.finish(settings, out)", tmp_path / "whole") == 0
    out = tmp_path / "out"
    begin = time.monotonic()
    start("", out)  # imports only
    imports = time.monotonic() - begin
    chance = random.Random(0)
    done = 0
    for _ in range(4):
        start(
            "cases.kill_after(float(sys.argv[3]))\ncases.finish(settings, out)", out, chance.uniform(0, 1.0 + imports / 4)
        )
        steps = Checkpoints(out / "checkpoints", 2).steps()
        assert max(steps, default=0) >= done, "a checkpoint was lost"
        done = max(steps, default=0)
    assert start("cases.finish(settings, out)", out) == 0
    assert curve(out) == curve(tmp_path / "whole")


# What stops a run


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, text):
    out = tmp_path / "out"
    program = """
import resource
trainer = cases.Trainer(settings, out, torch.device("cpu"))
for point in trainer.run():
    if point.step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
"""
    support = Path(training_cases.__file__).parent
    environment = [os.environ]
    (result,) = programs.run_together(
        PROGRAM + program, support, out, folder=tmp_path, environments=environment, modules=MODULES
    )
    last = out / "checkpoints" / "step-000000003"
    assert result.returncode == 1
    reason = f"the checkpoint of step 4 could not be written: File too large; the last good one is {last}"
    assert result.stderr.splitlines()[-1].endswith(reason)
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-000000002", "step-000000003"]
    assert start("cases.finish(settings, out)", out) == 0
    assert start("cases.finish(settings, out)", tmp_path / "whole") == 0
    assert curve(out) == curve(tmp_path / "whole")


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_an_error_of_the_system_while_a_checkpoint_is_finished(tmp_path, text, monkeypatch, name):
    trainer = Trainer(make_settings(text), tmp_path / "out", CPU)
    points = trainer.run()
    next(points), next(points)  # the checkpoint of step 2

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync" if name == "fsync" else "pathlib.Path.rename", fail)
    if name == "fsync":
        monkeypatch.setattr(trainer.log, "sync", lambda: None)
    next(points)
    with pytest.raises(SaveError, match=r"step 4 could not be written: No space left.*last good one is .*step-000000002"):
        next(points)
    assert trainer.checkpoints.steps() == [2]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000000002"]


def test_a_changed_data_file(tmp_path, text):
    settings = make_settings(text)
    trainer = Trainer(settings, tmp_path / "out", CPU)
    points = trainer.run()
    for _ in range(3):
        next(points)
    content = bytearray(text.read_bytes())
    content[100] ^= 1
    text.write_bytes(content)
    with pytest.raises(DataError, match=r"text\.txt has changed while the run read it"):
        next(points)
    trainer.close()
    with pytest.raises(DataError, match=r"text\.txt has changed since the run began"):
        Trainer(settings, tmp_path / "out", CPU)
    assert Checkpoints(tmp_path / "out" / "checkpoints", 2).steps() == [2]
    content[100] ^= 1
    text.write_bytes(content)
    finish(settings, tmp_path / "out")
    finish(settings, tmp_path / "whole")
    assert curve(tmp_path / "out") == curve(tmp_path / "whole")


def test_a_loss_that_is_not_finite(tmp_path, text):
    settings = make_settings(text, steps=20, every=2)
    trainer = Trainer(settings, tmp_path / "out", CPU)
    points = trainer.run()
    for _ in range(3):
        next(points)
    with torch.no_grad():
        trainer.model.layers[0].ffn.fc1.weight[0, 0] = math.nan
    starts = trainer.training.starts(3, 4)
    with pytest.raises(LossError) as error:
        next(points)
    said = str(error.value)
    assert said.startswith("step 4 stopped: its loss is nan")
    assert all(f"{text} token {position}" in said for position in starts)
    assert f"The last good checkpoint is {tmp_path / 'out' / 'checkpoints' / 'step-000000002'}" in said
    assert [line["step"] for line in read_log(tmp_path / "out" / "log.jsonl")] == [1, 2, 3]


def test_no_checkpoint_holds_parameters_that_are_not_finite(tmp_path, text):
    trainer = Trainer(make_settings(text, learning_rate=1e38, clip=1e30, warm_up=0), tmp_path / "out", CPU)
    with torch.no_grad():
        trainer.model.layers[0].ffn.fc1.weight[0, 0] = math.inf
    with pytest.raises(LossError, match="1 numbers in the parameters are not finite after step 0"):
        trainer.save()
    assert trainer.checkpoints.steps() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite(tmp_path, text, monkeypatch, value):
    trainer = Trainer(make_settings(text), tmp_path / "out", CPU)
    points = trainer.run()
    for _ in range(3):
        next(points)
    monkeypatch.setattr(trainer, "evaluate", lambda: value)
    with pytest.raises(LossError, match=r"held-out loss after step 4 is (nan|inf)\. The last good .*step-000000002\. Use"):
        next(points)
    assert len(read_log(tmp_path / "out" / "log.jsonl")) == 3


def test_other_settings_in_the_same_folder(tmp_path, text):
    finish(make_settings(text), tmp_path / "out")
    with pytest.raises(ValueError, match=r"holds a run with other settings: learning_rate 0\.01 instead of 0\.1"):
        Trainer(make_settings(text, learning_rate=0.1), tmp_path / "out", CPU)
    Trainer(make_settings(text, every=5, keep=1), tmp_path / "out", CPU)  # what does not change the losses
    Trainer(make_settings(text, {"checkpoint_layers": True}), tmp_path / "out", CPU)


# Checkpoints and the log


def test_incomplete_folders_are_never_chosen(tmp_path, text):
    settings = make_settings(text, keep=3)
    finish(settings, tmp_path / "out")
    folder = tmp_path / "out" / "checkpoints"
    checkpoints = Checkpoints(folder, 3)
    assert checkpoints.steps() == [4, 6, 8]
    shutil.copytree(checkpoints.path(8), folder / ".step-000000009.unfinished")
    data = next(checkpoints.path(8).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    (checkpoints.path(6) / "state.json").write_text("{")
    assert checkpoints.steps() == [4]
    with pytest.warns(UserWarning, match="The run uses .*step-000000004"):
        finish(settings, tmp_path / "out")
    assert checkpoints.steps() == [4, 6, 8]
    assert [path.name for path in folder.glob(".*")] == []
    finish(settings, tmp_path / "whole")
    assert curve(tmp_path / "out") == curve(tmp_path / "whole")


def test_at_most_k_checkpoints(tmp_path, text):
    for keep in (1, 3):
        trainer = finish(make_settings(text, keep=keep, every=1), tmp_path / f"{keep}")
        assert trainer.checkpoints.steps() == list(range(9 - keep, 9))


def test_the_log_is_cut_off_behind_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = TrainLog(path, 2)
    log.append({"step": 3, "again": True})
    log.close()
    assert read_log(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    TrainLog(path, 0).close()
    assert path.read_bytes() == b""
