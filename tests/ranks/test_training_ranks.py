"""Training over several ranks: the losses of one process to rounding, and checkpoints for another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch.training import DataError, LossError, SaveError, Trainer, TrainSettings
from dilated_attention_pytorch.training.ranks import TrainRanks
from training_cases import curve, finish, make_settings, write_text

CPU = torch.device("cpu")


def run_until(group, settings: TrainSettings, out: Path, stop: int) -> None:
    """Train up to a step, after which all ranks stop together, though only the last one was asked to."""
    trainer = Trainer(settings, out, CPU)
    assert trainer.ranks.world == dist.get_world_size()
    for point in trainer.run():
        trainer.stop = point.step == stop - 1 and dist.get_rank() == dist.get_world_size() - 1
    assert trainer.step == min(stop, settings.steps)
    trainer.close()


def assert_same_to_rounding(actual: list[dict], expected: list[dict]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a["step"], a["tokens"]) == (b["step"], b["tokens"])
        for name in ("loss", "gradient_norm", "held_out_loss"):
            assert (a[name] is None) == (b[name] is None)
            if a[name] is not None:
                assert a[name] == pytest.approx(b[name], rel=3e-6), (name, a["step"])  # measured: 3e-7


@pytest.mark.parametrize(("world", "sequence"), [(2, 1), (2, 2), (4, 2)], ids=["data", "sequence", "both"])
def test_losses_are_those_of_one_process(on_ranks, tmp_path, world, sequence):
    text = write_text(tmp_path)
    finish(make_settings(text, accumulate=2), tmp_path / "one")
    settings = make_settings(text, accumulate=2, sequence_ranks=sequence)
    on_ranks(world, run_until, settings, tmp_path / "many", 100)
    assert_same_to_rounding(curve(tmp_path / "many"), curve(tmp_path / "one"))


def test_other_numbers_of_ranks_go_on(on_ranks, tmp_path):
    """One process, then two ranks of data, then four with shared windows, then one process again."""
    text = write_text(tmp_path)
    out = tmp_path / "out"
    finish(make_settings(text), tmp_path / "one")
    trainer = Trainer(make_settings(text, every=100), out, CPU)
    for point in trainer.run():
        trainer.stop = point.step == 1
    trainer.close()
    on_ranks(2, run_until, make_settings(text, every=100), out, 4)
    on_ranks(4, run_until, make_settings(text, every=100, sequence_ranks=2), out, 6)
    finish(make_settings(text, every=100), out)
    assert trainer.checkpoints.steps() == [6, 8]
    assert_same_to_rounding(curve(out), curve(tmp_path / "one"))


def test_ranks_that_stop_repeat_every_digit(on_ranks, tmp_path):
    """With dropout: the seeds of ranks follow from the step too."""
    text = write_text(tmp_path)
    settings = make_settings(text, {"dropout": 0.2}, accumulate=2, sequence_ranks=2)
    on_ranks(2, run_until, settings, tmp_path / "whole", 100)
    for stop in (3, 100):
        on_ranks(2, run_until, settings, tmp_path / "out", stop)
    assert len(curve(tmp_path / "out")) == 8
    assert curve(tmp_path / "out") == curve(tmp_path / "whole")


def fail_together(group, settings: TrainSettings, out: Path, what: str) -> None:
    trainer = Trainer(settings, out, CPU)
    points = trainer.run()
    for _ in range(3):
        next(points)
    if dist.get_rank() == 1:
        if what == "loss":
            next(trainer.model.layers[0].ffn.fc1.parameters()).to_local().data.fill_(float("nan"))
        else:

            def fail(*arguments, **options):
                raise OSError(28, "No space left on device")

            torch.save, before = fail, torch.save
    try:
        with pytest.raises(LossError if what == "loss" else SaveError) as error:
            next(points)
    finally:
        if dist.get_rank() == 1 and what == "disk":
            torch.save = before
    assert ("its loss is nan" if what == "loss" else "No space left on device") in str(error.value)
    assert "step-000000002" in str(error.value)
    dist.barrier()
    assert trainer.checkpoints.steps() == [2]


@pytest.mark.parametrize("what", ["loss", "disk"])
def test_what_one_rank_meets_stops_all(on_ranks, tmp_path, what):
    on_ranks(2, fail_together, make_settings(write_text(tmp_path)), tmp_path / "out", what)


def refuse(group, settings: TrainSettings, out: Path) -> None:
    with pytest.raises(ValueError, match="multiple of accumulate times the ranks of data, got 4, 4 and 2"):
        Trainer(settings, out, CPU)


def test_a_batch_that_ranks_cannot_share(on_ranks, tmp_path):
    on_ranks(2, refuse, make_settings(write_text(tmp_path), accumulate=4), tmp_path / "out")


def pass_on(group, kind: type[Exception], raised: type[Exception]) -> None:
    """Only the first rank fails. The others do not wait for it, and raise the same sentence."""
    ranks = TrainRanks.make(1, CPU)

    def make() -> int:
        if ranks.rank == 0:
            raise kind("utf-8", b"x", 0, 1, "wrong") if kind is UnicodeDecodeError else kind("nothing to read")
        return 1

    with pytest.raises(kind if ranks.rank == 0 else raised, match="wrong" if kind is UnicodeDecodeError else "^nothing"):
        ranks.first_then_others(make)
    assert ranks.first_then_others(lambda: ranks.rank) == ranks.rank


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (OSError, OSError), (ValueError, ValueError), (TypeError, TypeError), (RuntimeError, RuntimeError),
        (DataError, DataError), (UnicodeDecodeError, ValueError),
    ],
)  # fmt: skip
def test_an_error_of_the_first_rank_is_raised_by_all(on_ranks, kind, raised):
    on_ranks(2, pass_on, kind, raised)


def go_on_damaged(group, settings: TrainSettings, out: Path) -> None:
    trainer = Trainer(settings, out, CPU)
    assert trainer.step == 6
    trainer.close()


def test_ranks_skip_a_damaged_checkpoint(on_ranks, tmp_path):
    settings = make_settings(write_text(tmp_path))
    finish(settings, tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "step-000000008" / "state.json").write_text('{"format": 1}')
    on_ranks(2, go_on_damaged, settings, tmp_path / "out")
