"""Training runs that are stopped, killed or out of disk: losses are those of an uninterrupted run, to the last digit."""

from __future__ import annotations

import gzip
import math
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import programs
import training_cases
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.training import (
    Checkpoints,
    Corpus,
    DataError,
    LossError,
    SaveError,
    ScoreBins,
    Trainer,
    TrainSettings,
    load_decoder,
    log_probabilities,
    read_log,
)
from dilated_attention_pytorch.training.costs import attention_flops, peak_of, window_flops
from dilated_attention_pytorch.training.data import IGNORED, batch_of
from dilated_attention_pytorch.training.log import TrainLog
from training_cases import curve, finish, make_settings, write_text

pytestmark = pytest.mark.slow

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


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


# What a step computes


def test_losses_and_gradients_are_those_of_plain_pytorch(tmp_path, text):
    """Three steps of a loop of its own: the mean over all targets, torch's clipping and AdamW, the cosine written out."""
    settings = make_settings(text, accumulate=2, steps=3, warm_up=1, clip=0.5)
    trainer = finish(settings, tmp_path / "out")
    torch.manual_seed(0)
    fresh = Trainer(settings, tmp_path / "fresh", CPU)
    model = fresh.model
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), fused=False
    )
    for step, rate in enumerate((1e-2, 1e-2, 1e-3)):
        tokens, targets = batch_of(fresh.corpus, fresh.training.starts(step, 4), 64)
        assert (targets != IGNORED).all()
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for values in optimizer.param_groups:
            values["lr"] = rate
        optimizer.step()
        line = curve(tmp_path / "out")[step]
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-12)
        assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in trainer.model.state_dict().items():
        torch.testing.assert_close(parameter, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_held_out_loss_is_that_of_plain_pytorch(tmp_path, text):
    trainer = finish(make_settings(text, evaluate_windows=3), tmp_path / "out")
    starts = trainer.held_out.spread(3)
    assert min(starts) >= trainer.training.last
    model = load_decoder(tmp_path / "out", CPU)
    with torch.no_grad():
        pairs = [trainer.corpus.pair(first, 64) for first in starts]
        loss = sum(cross_entropy(model(tokens[None])[0], targets) for tokens, targets in pairs) / len(starts)
    assert curve(tmp_path / "out")[-1]["held_out_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_documents_do_not_predict_one_another(tmp_path):
    """Targets that are the first token of a file do not count, and the mean is over those that do."""
    paths = [tmp_path / f"{i}.txt" for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([65 + i]) * 50)
    settings = make_settings(paths[0], data=tuple(map(str, paths)), batch=2, accumulate=2, steps=1)
    trainer = Trainer(settings, tmp_path / "out", CPU)
    starts = trainer.training.starts(0, 2)
    tokens, targets = batch_of(trainer.corpus, starts, 64)
    assert (targets == IGNORED).sum() == sum((s + 1 + i) % 50 == 0 for s in starts for i in range(64)) > 0
    with torch.no_grad():
        expected = cross_entropy(trainer.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    (point,) = trainer.run()
    assert point.loss == pytest.approx(float(expected), rel=1e-5)


def test_operations_of_a_window():
    """Dense attention over one segment: the closed form of a decoder."""
    config = LongNetConfig.from_dict(training_cases.MODEL | {"segment_lengths": (64,), "dilation_rates": (1,)})
    pairs = 64 * 65 // 2
    assert attention_flops(config, 64) == 2 * 2 * pairs * 8 * (4 + 10)  # layers, heads, D, forward and backward
    sparse = config.replace(segment_lengths=(16, 64), dilation_rates=(1, 4))
    met = sum(1 for q in range(64) for k in range(q + 1) if q // 16 == k // 16) + 16 * 17 // 2
    assert attention_flops(sparse, 64) == 2 * 2 * met * 8 * 14
    for tied in (True, False):
        chosen = config.replace(tie_embeddings=tied)
        model = LongNetDecoder(chosen)
        count = sum(p.numel() for name, p in model.named_parameters() if tied or name != "embed_tokens.weight")
        assert window_flops(model, chosen, 64) == 6 * 64 * count + attention_flops(config, 64)


def test_rates_of_gpus(monkeypatch):
    """Names as the driver reports them. A GPU whose name only begins like another one has no rate."""
    for name, expected in (
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40", None), ("NVIDIA A10G", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = peak_of(torch.device("cuda"))
        assert (None if found is None else found[1]) == expected, name
    assert peak_of(CPU) is None


def test_settings_are_checked(text):
    for changes, reason in (
        ({"steps": 0}, "steps"), ({"seed": -1}, "seed"), ({"batch": 3, "accumulate": 2}, "multiple of accumulate"),
        ({"held_out": 0.9}, "held_out"), ({"learning_rate": math.nan}, "learning_rate"), ({"clip": 0.0}, "clip"),
        ({"dtype": "float16"}, "dtype"), ({"kind": "words"}, "kind"), ({"betas": (0.9, 1.0)}, "betas"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            make_settings(text, **changes)
    with pytest.raises(ValueError, match="start it with torchrun"):
        Trainer(make_settings(text, sequence_ranks=2), text.parent / "out", CPU)


def test_learning_rates():
    settings = make_settings(Path("x"), steps=10, warm_up=4, learning_rate=1.0, last_rate=0.2)
    rates = [settings.rate(step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[9] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[4] - rates[5] < rates[6] - rates[7]  # slow at both ends


# Scores


@pytest.mark.parametrize("chunk", [7, 100, 10_000])
def test_scores_are_those_of_one_forward(tmp_path, chunk):
    paths = [tmp_path / "a.fa", tmp_path / "b.fa.gz"]
    bases = "".join("ACGT"[i] for i in torch.randint(4, (500,), generator=torch.Generator().manual_seed(1)))
    paths[0].write_text(f">a\n{bases[:300]}\n")
    paths[1].write_bytes(gzip.compress(f">b\n{bases[300:]}\n".encode()))
    torch.manual_seed(0)
    config = LongNetConfig.from_dict(training_cases.MODEL | {"vocab_size": 5})
    model = LongNetDecoder(config, dtype=torch.float64).eval()
    corpus = Corpus.of(paths, tmp_path / "cache")
    bins = ScoreBins(len(corpus), 10)
    values = []
    for first, some in log_probabilities(model, corpus, chunk):
        assert first == 1 + len(values)
        values += some.tolist()
        bins.add(first, some)
    tokens = torch.tensor(["ACGT".index(letter) for letter in bases])
    with torch.no_grad():
        expected = model(tokens[None, :-1])[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert math.isnan(values[299])  # token 300 is the first of its document
    del values[299]
    expected = torch.cat((expected[:299], expected[300:]))
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6)
    assert bins.tokens == 498
    assert bins.bits == pytest.approx(-float(expected.mean()) / math.log(2), rel=1e-6)
    assert bins.means[0] == pytest.approx(-float(expected[:49].mean()) / math.log(2), rel=1e-6)
    assert bins.positions[0] == 25.0


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_decoder(tmp_path, CPU)


def test_saved_models_are_loaded(tmp_path):
    model = LongNetDecoder(LongNetConfig.from_dict(training_cases.MODEL))
    model.save_pretrained(tmp_path / "model")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load_decoder(tmp_path / "model", CPU)(tokens), model.eval()(tokens))
    assert model.config.pattern == Dilated([16, 64], [1, 4])
