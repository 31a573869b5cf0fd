"""Data files that are empty, damaged, too short or mixed with the output of a run; and the kind of tokens of a score."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import os
import resource
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.models import LongNetConfig, LongNetDecoder
from dilated_attention_pytorch.training import Trainer, TrainSettings
from dilated_attention_pytorch.training.data import IGNORED, Corpus, split
from dilated_attention_pytorch.training.files import DataError, fingerprint, list_files
from dilated_attention_pytorch.training.log import TrainLog
from dilated_attention_pytorch.training.score import trained_kind

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MODEL = LongNetConfig(
    num_layers=1, embed_dim=8, num_heads=1, ffn_dim=8, vocab_size=256, segment_lengths=(8,), dilation_rates=(1,)
)


def settings(data: Path, **changes: object) -> TrainSettings:
    values: dict[str, object] = {"model": MODEL, "context": 8, "steps": 2, "data": (str(data),)}
    return TrainSettings(**(values | changes))


def opened(*paths: Path) -> Corpus:
    return Corpus.of(paths, paths[0].parent / "cache")


def trained(data: Path, out: Path, **changes: object) -> Path:
    trainer = Trainer(settings(data, **changes), out, CPU)
    list(trainer.run())
    trainer.close()
    return out


def score(*arguments: object) -> tuple[int, str, str]:
    """The exit code and what the command prints."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from dilated_attention_pytorch.cli.app import app

    result = CliRunner().invoke(app, ["score", *map(str, arguments), "--device", "cpu"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", ["{}.txt", "{}.txt.gz", "{}.fa", "{}.fa.gz"])
def test_an_empty_file_has_no_document(tmp_path, name):
    contents = ["", "ACGTA", "", "", "CCC", ""]
    for number, content in enumerate(contents):
        text = f">{number}\n{content}\n" if ".fa" in name else content
        data = text.encode()
        (tmp_path / name.format(number)).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    corpus = Corpus.of([tmp_path], tmp_path.parent / f"{tmp_path.name}-cache")
    assert corpus.documents == [0, 5]
    for start in range(7):
        for count in range(1, 8 - start):
            assert corpus.ignored(start, count) == int((corpus.pair(start, count)[1] == IGNORED).sum())


def test_empty_files_between_two_texts(tmp_path):
    """The mean loss has the number of targets that the model counts: the loss of untrained bytes is near log(256)."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(30):
        (data / f"a{number:02}").touch()
    for name in ("0", "b"):  # before and behind the empty files
        (data / name).write_bytes(bytes(torch.randint(256, (100,)).tolist()))
    trainer = Trainer(settings(data, steps=1, batch=30, held_out=0.1), tmp_path / "out", CPU)
    (point,) = trainer.run()
    assert point.loss == pytest.approx(5.545, abs=1.0)
    assert point.held_out_loss == pytest.approx(5.545, abs=1.0)


def test_a_run_below_its_data_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_bytes(bytes(range(256)))
    Path("sub").mkdir()
    Path("sub/y.txt.gz").write_bytes(gzip.compress(b"text" * 100))
    out = Path("sub/out")
    first = Trainer(settings(tmp_path, every=1), out, CPU)
    next(first.run())
    first.close()
    second = Trainer(settings(tmp_path, every=1), out, CPU)
    assert second.step == 1
    assert [Path(file.path).name for file in second.corpus.files] == ["x.txt", "y.txt.gz"]
    assert list_files(["."], tmp_path / "sub" / "out") == [Path("x.txt"), Path("sub/y.txt.gz")]
    assert len(list_files([tmp_path])) > 2
    assert list_files(["sub/out/log.jsonl"], out) == [Path("sub/out/log.jsonl")]  # a file that is named is data
    with pytest.raises(DataError, match="keep data in another folder"):
        list_files([tmp_path / "sub" / "out"], out)


def test_the_command_lists_no_output(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    from dilated_attention_pytorch.cli.train_options import TrainOptions
    from dilated_attention_pytorch.cli.train_run import make_settings

    monkeypatch.chdir(tmp_path)
    Path("x.fa").write_text(">x\nACGT\n")
    Path("train-output").mkdir()
    Path("train-output/log.jsonl").touch()
    assert make_settings(TrainOptions(data=[Path(".")]), CPU).kind == "bases"


@pytest.mark.parametrize("damage", ["cut", "empty", "empty index", "cut index", "list", "documents", "no index", "a token"])
def test_a_damaged_cache_is_unpacked_again(tmp_path, damage):
    path = tmp_path / "x.fa.gz"
    path.write_bytes(gzip.compress(b">a\nACGTACGT\n>b\nTTTT\n"))
    expected = opened(path)
    (tokens,), (index,) = ((tmp_path / "cache").glob(f"*.{end}") for end in ("tokens", "json"))
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-3])
    elif damage == "a token":
        tokens.write_bytes(b"\x02" + tokens.read_bytes()[1:])
    elif damage == "empty":
        tokens.write_bytes(b"")
    elif damage == "no index":
        index.unlink()
    else:
        whole = index.read_text()
        wrong = json.dumps(json.loads(whole) | {"documents": [0, 99]})
        texts = {"empty index": "", "cut index": whole[:-1], "list": "[0, 8]", "documents": wrong}
        index.write_text(texts[damage])
    again = opened(path)
    assert again.read(0, len(again)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 3, 3, 3, 3]
    assert again.documents == expected.documents == [0, 8]
    written = json.loads(index.read_text())
    assert written == {"tokens": 12, "documents": [0, 8], "fingerprint": fingerprint(tokens)}


def test_unpacked_files_are_durable_before_they_have_a_name(tmp_path, monkeypatch):
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append("fsync"), sync(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(Path(b).suffix), replace(a, b)))
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"text"))
    opened(tmp_path / "x.gz")
    assert calls == ["fsync", ".tokens", "fsync", ".json"]


def test_a_full_disk_names_the_file_that_is_written(tmp_path):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(bytes(2_000_000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cache/x.*tokens could not be written: File too large; free") as caught:
            opened(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "repair" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(opened(path)) == 2_000_000


@pytest.mark.parametrize("held_out", [0.0, 0.4])
def test_documents_of_one_token_have_no_target(tmp_path, held_out):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(60):
        (data / f"{number:02}").write_bytes(b"x" if number > 30 or not held_out else b"xy" * 4)
    with pytest.raises(DataError, match=r"first token of a document is not a target.*use longer documents"):
        list(Trainer(settings(data, held_out=held_out and 0.1), tmp_path / "out", CPU).run())
    assert not list((tmp_path / "out").glob("checkpoints/step-*"))


def test_targets_are_counted_as_the_pairs_do(tmp_path):
    for name, content in (("a", b"x"), ("b", b"yyyy"), ("c", b""), ("d", b"zz")):
        (tmp_path / name).write_bytes(content)
    corpus = Corpus.of([tmp_path], tmp_path / "cache")
    assert corpus.targets([0, 2], 4) == sum(int((corpus.pair(x, 4)[1] != IGNORED).sum()) for x in (0, 2)) == 6
    assert corpus.targets([], 4) == 0
    with pytest.raises(DataError, match="1 windows of 1 tokens"):
        corpus.targets([4], 1)


def test_a_context_that_is_longer_than_the_data(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1000))
    corpus = opened(tmp_path / "x")
    for held_out in (0.05, 0.5):
        with pytest.raises(DataError) as caught:
            split(corpus, 1500, held_out, 0)
        for phrase in ("needs 1501 tokens", "contain 1000 tokens", f"held-out share {held_out}"):
            assert phrase in str(caught.value)
        assert "-" not in str(caught.value).replace("held-out", "")
    with pytest.raises(DataError, match="contain 1000 tokens; use a shorter context, or more data"):
        split(corpus, 1000, 0.0, 0)
    with pytest.raises(DataError, match=r"held-out share 0\.05"):
        split(corpus, 600, 0.05, 0)
    assert split(corpus, 499, 0.05, 0)[0].last == 500


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_a_file_that_becomes_shorter(tmp_path, name):
    content = bytes(torch.randint(256, (100_000,)).tolist())
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    corpus = opened(path)
    stored = Path(corpus.files[0].stored)
    os.truncate(stored, 50_000)
    assert bytes(corpus.read(0, 50_000).tolist()) == content[:50_000]
    with pytest.raises(DataError, match=r"had 100000 tokens when it was opened, and now ends at token 50000; restore"):
        corpus.read(40_000, 60_000)
    stored.unlink()
    with pytest.raises(DataError, match="could not be read: No such file"):
        corpus.read(0, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs on bytes and on bases, and files of both kinds."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "x.txt").write_bytes(b"some text " * 30)
    (folder / "x.fa").write_text(">x\n" + "ACGTTGCA" * 30)
    trained(folder / "x.txt", folder / "text", kind="bytes")
    trained(folder / "x.fa", folder / "fasta-bytes", kind="bytes")
    trained(folder / "x.fa", folder / "auto")  # bases with a vocabulary of 256
    return folder


def test_the_kind_of_a_run(runs, tmp_path):
    assert [trained_kind(runs / name) for name in ("text", "fasta-bytes", "auto")] == ["bytes", "bytes", "bases"]
    LongNetDecoder(MODEL).save_pretrained(tmp_path)
    assert trained_kind(tmp_path) is None


@pytest.mark.parametrize(
    ("run", "data", "tokens", "sentence"),
    [
        ("text", "x.fa", None, "trained on bytes, and by their names the files contain bases; use --tokens bytes"),
        ("text", "x.fa", "bases", "trained on bytes, got --tokens bases; use --tokens bytes"),
        ("auto", "x.txt", None, "trained on bases, and by their names the files contain bytes; use --tokens bases"),
        ("auto", "x.fa", "bytes", "trained on bases, got --tokens bytes; use --tokens bases"),
        ("text", "x.txt", "words", "--tokens must be one of auto, bytes, bases"),
    ],
)
def test_a_model_is_not_scored_on_other_tokens(runs, run, data, tokens, sentence):
    code, _, error = score(runs / run, runs / data, *(() if tokens is None else ("--tokens", tokens)))
    assert code == 2
    assert sentence in error


def test_a_model_is_scored_on_the_tokens_of_its_run(runs, tmp_path):
    for run, data, tokens, count in (
        ("text", "x.txt", "auto", 299), ("text", "x.fa", "bytes", 242), ("auto", "x.fa", "auto", 239),
    ):  # fmt: skip
        code, out, error = score(runs / run, runs / data, "--tokens", tokens, "--json", "-", "--quiet")
        assert code == 0, error
        assert json.loads(out)["tokens"] == count
    # The kind of save_pretrained is not known: "auto" needs the vocabulary of exactly that kind.
    LongNetDecoder(MODEL).save_pretrained(tmp_path)
    code, _, error = score(tmp_path, runs / "x.fa")
    assert code == 2
    assert "has 256 tokens, and bases need 5; use --tokens" in error
    assert score(tmp_path, runs / "x.fa", "--tokens", "bases")[0] == 0


def test_a_score_without_counted_tokens(runs, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "empty").touch()
    for _ in range(3):
        code, _, error = score(runs / "text", data, "--json", tmp_path / "figures.json")
        assert code == 2
        assert "a document needs 2 tokens, because its first has no prediction" in error
        (data / f"one{len(list(data.iterdir()))}").write_bytes(b"x")
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.parametrize(
    ("option", "target", "code", "sentence"),
    [
        ("--json", "none/x.json", 1, "none/x.json could not be written: No such file or directory; choose another file."),
        ("--plot", "none/x.png", 1, "none/x.png could not be written: No such file or directory; choose another file."),
        ("--plot", "x.jpeg5", 2, "--plot must be a picture, a name that ends in .png"),
        ("--log-probabilities", "", 1, "could not be read or written: Is a directory"),
    ],
)
def test_targets_of_scores_are_checked_before_the_run(runs, tmp_path, monkeypatch, option, target, code, sentence):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("dilated_attention_pytorch.cli.score_run.load_decoder", None)  # a run would raise
    found, _, error = score(runs / "text", runs / "x.txt", option, tmp_path / target)
    assert found == code
    assert sentence in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
@pytest.mark.parametrize("option", ["--json", "--log-probabilities"])
def test_a_full_disk_under_scores_is_named(runs, option):
    code, _, error = score(runs / "text", runs / "x.txt", option, "/dev/full", "--quiet")
    assert code == 1
    assert error.startswith("/dev/full could not be ")
    assert error.partition(": ")[2].startswith("No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_a_full_disk_under_the_log_is_named(tmp_path):
    log = TrainLog(tmp_path / "log.jsonl", 0)
    log.close()
    with Path("/dev/full").open("ab", buffering=0) as log._file, pytest.raises(OSError, match="No space left") as error:
        log.append({"step": 1})
    assert error.value.filename == str(tmp_path / "log.jsonl")


def test_a_model_that_is_not_finite_has_no_score(runs, tmp_path):
    model = LongNetDecoder(MODEL)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    model.save_pretrained(tmp_path / "model")
    code, _, error = score(tmp_path / "model", runs / "x.txt", "--json", tmp_path / "figures.json")
    assert code == 1
    assert "299 of 299 log-probabilities are NaN" in error
    assert not (tmp_path / "figures.json").exists()


def test_a_folder_without_a_model(tmp_path):
    code, _, error = score(tmp_path / "nope", tmp_path / "x")
    assert code == 1
    assert error.startswith(f"{tmp_path / 'nope'} holds no model: ")


@pytest.mark.parametrize(
    ("name", "vocabulary"), [("my.family.txt", 256), ("notes.fax", 256), ("X.FASTA", 5), ("x.ffn.gz", 5), ("x.fna", 5)]
)
def test_the_example_decides_by_the_rule_of_the_library(tmp_path, monkeypatch, name, vocabulary):
    path = Path(__file__).parents[2] / "examples" / "train_longnet.py"
    spec = importlib.util.spec_from_file_location("train_longnet_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / name).touch()
    found: list[TrainSettings] = []

    class SeenError(RuntimeError):
        pass

    def stop(chosen: TrainSettings, out: Path, device: torch.device) -> None:
        found.append(dataclasses.replace(chosen))
        raise SeenError

    monkeypatch.setattr(example, "Trainer", stop)
    monkeypatch.setattr("sys.argv", ["example", str(tmp_path / name)])
    with pytest.raises(SeenError):
        example.main()
    assert found[0].model.vocab_size == vocabulary
