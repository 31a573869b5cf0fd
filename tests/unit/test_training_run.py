"""What a run checks: its settings, its checkpoints, its folder and the files that it writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dilated_attention_pytorch
import training_cases
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.streaming import CheckpointError
from dilated_attention_pytorch.training import Checkpoints, SaveError, Trainer, load_decoder
from dilated_attention_pytorch.training.costs import peak_memory
from training_cases import curve, finish, make_settings

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SOURCES = Path(dilated_attention_pytorch.__file__).parents[1]


@pytest.fixture
def done(tmp_path, text):
    """A finished run with checkpoints of steps 2 and 4, and the settings."""
    settings = make_settings(text, steps=4)
    finish(settings, tmp_path / "out")
    return settings, tmp_path / "out"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_state(path: Path, change: str) -> None:
    state = json.loads((path / "state.json").read_text())
    texts = {
        "format only": '{"format": 1}',
        "no settings": json.dumps({name: value for name, value in state.items() if name != "settings"}),
        "no model": json.dumps(state | {"settings": {}}),
        "no hashes": json.dumps({name: value for name, value in state.items() if name != "hashes"}),
        "other types": json.dumps(state | {"data": 3, "files": []}),
        "other step": json.dumps(state | {"step": 2}),
        "list": "[]",
        "deep": '{"format":' * 200_000,
    }
    (path / "state.json").write_text(texts[change])


# Checkpoints


@pytest.mark.parametrize(
    "change", ["format only", "no settings", "no model", "no hashes", "other types", "other step", "list", "deep"]
)
def test_an_incomplete_state_is_a_damaged_checkpoint(done, change):
    settings, out = done
    expected = curve(out)
    path = Checkpoints(out / "checkpoints", 2).path(4)
    change_state(path, change)
    with pytest.warns(UserWarning, match=r"step-000000004 .*state\.json.*The run uses .*step-000000002"):
        trainer = Trainer(settings, out, CPU)
    assert trainer.step == 2
    assert [point.step for point in trainer.run()] == [3, 4]
    trainer.close()
    assert curve(out) == expected
    assert trainer.checkpoints.steps() == [2, 4]
    assert Checkpoints(out / "checkpoints", 2).newest() == 4


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_changed_bit_is_found(done, name):
    settings, out = done
    expected = curve(out)
    flip(out / "checkpoints" / "step-000000004" / name)
    with pytest.raises(CheckpointError, match=rf"step-000000004 is damaged: the content of {name} has changed"):
        Checkpoints(out / "checkpoints", 2).load(4, {})
    with pytest.warns(UserWarning, match=rf"step-000000004 \(the content of {name} has changed\)"):
        trainer = Trainer(settings, out, CPU)
    assert trainer.checkpoints.last() == out / "checkpoints" / "step-000000002"
    for _ in trainer.run():
        pass
    trainer.close()
    assert curve(out) == expected
    assert load_decoder(out, CPU) is not None


def test_a_run_does_not_begin_again_if_all_checkpoints_are_damaged(done):
    settings, out = done
    flip(out / "checkpoints" / "step-000000004" / "__0_0.distcp")
    (out / "checkpoints" / "step-000000002" / "state.json").unlink()
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as error:
        Trainer(settings, out, CPU)
    said = str(error.value)
    assert said.startswith("every checkpoint is damaged: ")
    assert all(f"step-00000000{step} (" in said for step in (2, 4))
    assert said.endswith("Restore one of them from a copy, or delete these folders to begin at step 0.")
    assert (out / "log.jsonl").read_bytes() == before
    shutil.rmtree(out / "checkpoints")
    finish(settings, out)
    assert Checkpoints(out / "checkpoints", 2).newest() == 4


def test_a_damaged_later_checkpoint_does_not_push_out_good_ones(tmp_path, text):
    """The run goes on from step 4 and keeps one checkpoint, though the damaged folder of step 8 comes later."""
    finish(make_settings(text, keep=3), tmp_path / "out")
    flip(tmp_path / "out" / "checkpoints" / "step-000000008" / "__0_0.distcp")
    flip(tmp_path / "out" / "checkpoints" / "step-000000006" / ".metadata")
    with pytest.warns(UserWarning, match=r"step-000000008 .*step-000000006 .*The run uses .*step-000000004"):
        trainer = Trainer(make_settings(text, keep=1, every=1), tmp_path / "out", CPU)
    next(trainer.run())
    trainer.save()
    assert trainer.checkpoints.steps() == [5]
    trainer.close()
    with pytest.warns(UserWarning, match="The run uses .*step-000000005"):
        assert Checkpoints(tmp_path / "out" / "checkpoints", 1).newest() == 5


# The folder


def test_a_second_run_in_a_folder(tmp_path, text):
    """A process that holds the folder, is seen by this one, and is ended by SIGKILL."""
    out = tmp_path / "out"
    program = """
import sys
from pathlib import Path
from training_cases import Trainer, make_settings
trainer = Trainer(make_settings(Path(sys.argv[1])), sys.argv[2], "cpu")
print("ready", flush=True)
sys.stdin.read()
"""
    paths = os.pathsep.join((str(SOURCES), str(Path(training_cases.__file__).parent)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(text), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as other:
        try:
            assert other.stdout.readline() == "ready\n"
            with pytest.raises(SaveError, match=f"out is in use by another run, process {other.pid}; wait until it ends"):
                Trainer(make_settings(text), out, CPU)
        finally:
            other.send_signal(signal.SIGKILL)
    finish(make_settings(text), out)
    assert len(curve(out)) == 8


def test_close_releases_the_folder(tmp_path, text):
    settings = make_settings(text)
    trainer = Trainer(settings, str(tmp_path / "out"), "cpu")
    assert (trainer.out, trainer.device) == (tmp_path / "out", CPU)
    with pytest.raises(SaveError, match=r"in use by another Trainer of this process; call its close\(\)"):
        Trainer(settings, tmp_path / "out", CPU)
    trainer.close()
    finish(settings, tmp_path / "out")
    with pytest.raises(ValueError, match="other settings") as kept:  # a Trainer that fails does not keep the folder
        Trainer(make_settings(text, seed=1), tmp_path / "out", CPU)
    assert kept.traceback
    Trainer(settings, tmp_path / "out", CPU).close()


def test_a_system_without_locks(tmp_path, text, monkeypatch):
    monkeypatch.setattr("dilated_attention_pytorch.training.lock.fcntl", None)
    for _ in range(2):
        trainer = Trainer(make_settings(text), tmp_path / "out", CPU)
    trainer.close()


# Settings


def test_settings_are_converted(text):
    model = LongNetConfig.from_dict(training_cases.MODEL)
    settings = make_settings(
        text, steps=np.int64(8), seed=np.uint8(3), learning_rate=np.float32(0.5), clip=1, data=[text],
        betas=[np.float64(0.5), 0],
    )  # fmt: skip
    expected = make_settings(text, steps=8, seed=3, learning_rate=0.5, clip=1.0, data=(str(text),), betas=(0.5, 0.0))
    assert settings == expected
    assert settings.model == model
    assert json.dumps(settings.description()) == json.dumps(expected.description())
    for name in ("steps", "seed", "learning_rate", "clip", "data", "betas"):
        assert type(getattr(settings, name)) is type(getattr(expected, name)), name
    assert [type(x) for x in settings.betas] == [float, float]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "text.txt"}, {"data": Path("text.txt")}, {"data": (3,)}, {"data": None}, {"steps": True}, {"clip": True},
        {"learning_rate": "1"}, {"learning_rate": None}, {"betas": 0.9}, {"betas": (True, 0.9)}, {"seed": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_other_types(changes):
    (name,) = changes
    with pytest.raises(TypeError, match=f"^{name} must be"):
        make_settings(Path("x"), **changes)


def test_other_values_of_settings():
    with pytest.raises(ValueError, match="clip must be finite, got an integer that a float cannot hold"):
        make_settings(Path("x"), clip=10**400)
    with pytest.raises(TypeError, match="model must be a LongNetConfig, got dict"):
        training_cases.TrainSettings(model=training_cases.MODEL, context=64, steps=1)


def test_memory_of_a_system_without_the_line(monkeypatch):
    assert peak_memory(CPU) > 2**20
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_: "Name:\tpython\nno colon\n")
    assert peak_memory(CPU) == 0


# Options


@pytest.mark.parametrize("name", ["steps", "context", "batch"])
def test_zero_is_not_the_default(text, name):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from dilated_attention_pytorch.cli.train_options import TrainOptions
    from dilated_attention_pytorch.cli.train_run import make_settings as from_options

    with pytest.raises(ValueError, match=f"{name} must be an integer, at least 1, got 0"):
        from_options(TrainOptions(data=[text], **{name: 0}), CPU)
    assert from_options(TrainOptions(data=[text]), CPU).context == 1024


@pytest.mark.parametrize(
    ("json_target", "out", "named"),
    [("missing/figures.json", "out", "missing/figures.json"), (".", "out", "."), (None, "with", "with/loss.png")],
    ids=["folder", "directory", "picture"],
)
def test_targets_are_checked_before_the_run(tmp_path, text, monkeypatch, capsys, json_target, out, named):
    typer = pytest.importorskip("typer")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from dilated_attention_pytorch.cli.train_options import TrainOptions
    from dilated_attention_pytorch.cli.train_run import run_training

    monkeypatch.chdir(tmp_path)
    (tmp_path / "with" / "loss.png").mkdir(parents=True)
    options = TrainOptions(data=[text], context=64, steps=1, batch=1, out=Path(out), json=json_target, quiet=True)
    with pytest.raises(typer.Exit) as ended:
        run_training(options)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.startswith(f"{named} could not be read or written: ")
    assert not (tmp_path / out / "log.jsonl").exists()


def test_figures_in_the_new_folder_of_the_run(tmp_path, text, monkeypatch):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from dilated_attention_pytorch.cli.train_options import TrainOptions
    from dilated_attention_pytorch.cli.train_run import run_training

    monkeypatch.chdir(tmp_path)
    values = {"context": 64, "steps": 2, "batch": 1, "out": Path("out"), "json": "out/figures.json", "quiet": True}
    run_training(TrainOptions(data=[text], device="cpu", **values))
    assert json.loads((tmp_path / "out" / "figures.json").read_text())["step"] == 2
