"""The commands ``train`` and ``score``: options, endings, files; and the example, alone and on ranks."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from programs import FILE, WITH_CTRL_C, of_ranks, run_together
from training_cases import curve, write_text

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_longnet.py"
MODULES = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")
START = "import torch; torch.set_num_threads(1)\nfrom dilated_attention_command import main; main()"
# The run of the first test without the command, in a process of its own: oneDNN's state depends on earlier tests.
WITHOUT_COMMAND = """
import sys, torch
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import Trainer, TrainSettings
torch.set_num_threads(1)
settings = TrainSettings(
    model=LongNetConfig.preset("tiny", vocab_size=256), context=64, steps=6, batch=2, seed=5, evaluate_every=3,
    data=(sys.argv[1],), kind="bytes",
)
for _ in Trainer(settings, "other", torch.device("cpu")).run():
    pass
"""
# A signal to the command when its log has two lines.
AT_STEP_2 = """
import os, signal, threading, time
def watch():
    while not os.path.exists("out/log.jsonl") or open("out/log.jsonl").read().count("\\n") < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), {signal})
threading.Thread(target=watch, daemon=True).start()
"""
OPTIONS = ("--context", 64, "--steps", 6, "--every", 100, "--evaluate-every", 3, "--batch", 2, "--seed", 5, "--out", "out")


def command(folder: Path, *arguments: object, before: str = "", world: int = 0) -> list[subprocess.CompletedProcess[str]]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environments = [inherited | one for one in (of_ranks(world) if world else [{}])]
    return run_together(before + START, *arguments, folder=folder, environments=environments, modules=MODULES)


def test_a_run_its_files_and_its_figures(tmp_path):
    text = write_text(tmp_path)
    (result,) = command(tmp_path, "train", text, *OPTIONS, "--json", "-")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert "100%  step 6, loss" in result.stderr
    assert "s left" in result.stderr
    assert (figures["step"], figures["finished"], figures["resumed_from"]) == (6, True, 0)
    assert (figures["data_tokens"], figures["tokens"]) == (8000, 6 * 2 * 64)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    # The same settings without the command: the same losses.
    (result,) = run_together(WITHOUT_COMMAND, text, folder=tmp_path, environments=[os.environ], modules=MODULES)
    assert result.returncode == 0, result.stderr
    losses = [line["loss"] for line in curve(tmp_path / "other")]
    assert [line["loss"] for line in curve(tmp_path / "out")] == losses
    assert figures["loss"] == losses[-1]
    assert figures["held_out_loss"] == curve(tmp_path / "out")[-1]["held_out_loss"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, name, code):
    text = write_text(tmp_path)
    before = WITH_CTRL_C + AT_STEP_2.format(signal=f"signal.{name}")
    (result,) = command(tmp_path, "train", text, *OPTIONS, "--steps", 2000, "--no-plot", before=before)
    assert result.returncode == code, result.stderr
    done = len(curve(tmp_path / "out"))
    path = Path("out", "checkpoints", f"step-{done:09d}")
    sentence = f"Interrupted: {done:,} of 2,000 steps are finished; the same command goes on from {path}."
    assert result.stderr.splitlines()[-1] == sentence
    assert (tmp_path / path / "state.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("missing.txt",), 1, "missing.txt could not be read: No such file or directory"),
        (("text.txt", "--preset", "huge"), 2, "there is no preset 'huge'"),
        (("text.txt", "--context", 100_000), 1, "a window needs 100001 tokens"),
        (("text.txt", "--tokens", "words"), 2, "--tokens must be one of auto, bytes, bases"),
        (("text.txt", "--segment-lengths", "4"), 2, "give both or neither"),
        (("text.txt", "--lr", "1e38", "--clip", "1e38"), 1, "step"),
        (("text.txt", "--out", "text.txt"), 1, "text.txt"),
    ],
    ids=lambda x: str(x[-1]) if isinstance(x, tuple) else "",
)
def test_what_is_refused(tmp_path, arguments, code, sentence):
    write_text(tmp_path)
    common = OPTIONS[:-2] if "--out" in arguments else OPTIONS
    (result,) = command(tmp_path, "train", *common, *arguments, "--no-plot", "--quiet")
    assert result.returncode == code, result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_score_of_a_genome(tmp_path):
    generator = torch.Generator().manual_seed(0)
    bases = "".join("ACGT"[i] for i in torch.randint(4, (3000,), generator=generator))
    (tmp_path / "x.fa.gz").write_bytes(gzip.compress(f">x\n{bases}\n".encode()))
    for _ in range(2):  # the second run goes on, though its unpacked file is there already
        (result,) = command(tmp_path, "train", "x.fa.gz", *OPTIONS, "--no-plot", "--quiet")
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
    (result,) = command(
        tmp_path, "score", "out", "x.fa.gz", "--json", "score.json", "--plot", "score.png", "--chunk", 700, "--bins", 6,
        "--log-probabilities", "values.bin",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "score.json").read_text())
    values = torch.frombuffer(bytearray((tmp_path / "values.bin").read_bytes()), dtype=torch.float32)
    assert figures["tokens"] == len(values) == 2999
    assert figures["bits_per_token"] == pytest.approx(-float(values.double().mean()) / 0.6931471805599453, rel=1e-6)
    assert 1.5 < figures["bits_per_token"] < 3.0
    assert len(figures["bits"]) == 6
    assert (tmp_path / "score.png").read_bytes().startswith(b"\x89PNG")
    (result,) = command(tmp_path, "score", "out", write_text(tmp_path))
    assert result.returncode == 2
    assert "trained on bases, and by their names the files contain bytes; use --tokens bases" in result.stderr
    (result,) = command(tmp_path, "score", "nothing", "x.fa.gz")
    assert result.returncode == 1
    assert "nothing holds no model" in result.stderr


def test_the_command_on_ranks(tmp_path):
    """As torchrun starts it. The first rank prints, and the losses are those of one process."""
    text = write_text(tmp_path)
    results = command(tmp_path, "train", text, *OPTIONS, "--sequence-ranks", 2, "--no-plot", world=2)
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    assert "6 of 6" in results[0].stdout
    assert results[1].stdout == ""
    (result,) = command(tmp_path, "train", text, *OPTIONS[:-1], "one", "--no-plot", "--quiet")
    assert result.returncode == 0, result.stderr
    for a, b in zip(curve(tmp_path / "out"), curve(tmp_path / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.parametrize("world", [0, 2])
def test_the_example(tmp_path, world):
    assert len(EXAMPLE.read_text().splitlines()) < 120
    text = write_text(tmp_path)
    environments = [os.environ | one for one in (of_ranks(world) if world else [{}])]
    arguments = (EXAMPLE, text, "--context", 64, "--steps", 20, *(("--sequence-ranks", 2) if world else ()))
    results = run_together(FILE, *arguments, folder=tmp_path, environments=environments, modules=MODULES)
    assert all(result.returncode == 0 for result in results), [result.stderr for result in results]
    assert "from step 0" in results[0].stdout
    assert "held out" in results[0].stdout
    assert "the first 4,095 tokens" in results[0].stdout
    assert len(curve(tmp_path / "train-output")) == 20


def test_options_on_the_page_exist():
    """Commands that need a GPU, data or an earlier run are not run. Their options are those of the commands."""
    from dilated_attention_pytorch.cli.train_options import ScoreOptions, TrainOptions

    page = (EXAMPLE.parents[1] / "docs" / "training.md").read_text()
    lines = re.findall(r"-m dilated_attention_pytorch (train|score) (.*)", page)
    assert {name for name, _ in lines} == {"train", "score"}
    for name, rest in lines:
        fields = {"train": TrainOptions, "score": ScoreOptions}[name].__dataclass_fields__
        options = re.findall(r"--([a-z-]+)", rest)
        assert options
        assert {option.replace("-", "_") for option in options} <= set(fields)
