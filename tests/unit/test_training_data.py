"""Files of a training run: tokens against an independent reading, windows by enumeration, fingerprints of changed files."""

from __future__ import annotations

import gzip
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.training.data import IGNORED, Corpus, Windows, batch_of, derived_seed, split
from dilated_attention_pytorch.training.files import DataError, fingerprint, list_files

FASTA = ">one description\nACGTN\nacgtnRYK*-\n\n>two\n>empty\nTTTT\r\nGG\n; a comment\nA"


def bases_of(text: str) -> tuple[list[int], list[int]]:
    """Tokens and the first token of each record, letter by letter."""
    tokens: list[int] = []
    starts: list[int] = []
    for record in text.split(">")[1:]:
        lines = [line for line in record.splitlines()[1:] if not line.startswith(";")]
        letters = [letter for line in lines for letter in line.strip().upper()]
        if letters:
            starts.append(len(tokens))
        tokens += ["ACGT".find(letter) % 5 for letter in letters]
    return tokens, starts


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def opened(*paths: Path) -> Corpus:
    return Corpus.of(paths, paths[0].parent / "cache")


@pytest.mark.parametrize("name", ["x.fa", "x.fna.gz", "x.FASTA"])
def test_fasta_against_reading_letters(folder, name):
    corpus = opened(write(folder / name, FASTA.encode()))
    tokens, starts = bases_of(FASTA)
    assert corpus.kind == "bases"
    assert corpus.vocabulary == 5
    assert corpus.read(0, len(corpus)).tolist() == tokens
    assert corpus.documents == starts == [0, 15]


@given(st.lists(st.text("ACGTNacgtnRYKM", max_size=50), min_size=1, max_size=5), st.integers(1, 20))
def test_fasta_of_any_line_length(tmp_path_factory, records, width):
    text = "".join(
        f">{i}\n" + "".join(f"{r[j : j + width]}\n" for j in range(0, len(r), width)) for i, r in enumerate(records)
    )
    corpus = opened(write(tmp_path_factory.mktemp("fasta") / "x.fa.gz", text.encode()))
    tokens, starts = bases_of(text)
    assert corpus.read(0, len(corpus)).tolist() == tokens
    assert corpus.documents == starts


def test_text_plain_and_gzip_in_the_order_of_the_arguments(folder):
    contents = {"b.txt": os.urandom(1000), "a.txt.gz": b"one " * 500, "empty.txt": b"", "c.bin": bytes(range(256))}
    paths = [write(folder / name, content) for name, content in contents.items()]
    corpus = opened(*paths)
    whole = b"".join(contents.values())
    assert corpus.kind == "bytes"
    assert bytes(corpus.read(0, len(corpus)).tolist()) == whole
    for start, stop in ((0, 0), (990, 1010), (2999, 3001), (500, 3200), (len(whole), len(whole))):
        assert bytes(corpus.read(start, stop).tolist()) == whole[start:stop]
    assert corpus.where(1003) == f"{paths[1]} token 3"
    assert corpus.where(3000) == f"{paths[3]} token 0"
    assert [path.suffix for path in sorted((folder / "cache").iterdir())] == [".json", ".tokens"]  # of the gzip file only


def test_an_unpacked_file_is_read_again_only_if_its_source_changed(folder):
    path = write(folder / "x.txt.gz", b"first")
    opened(path)
    (unpacked,) = (folder / "cache").glob("*.tokens")
    before = unpacked.stat().st_ino
    assert bytes(opened(path).read(0, 5).tolist()) == b"first"
    assert unpacked.stat().st_ino == before  # another file would have its name if the source were unpacked again
    write(path, b"second")
    assert bytes(opened(path).read(0, 6).tolist()) == b"second"


def test_a_folder_stands_for_its_files_and_nothing_for_the_standard_library(folder):
    (folder / "sub").mkdir()
    for name in ("z.txt", "a.txt", "sub/m.txt"):
        (folder / name).write_text(name)
    assert [path.relative_to(folder).as_posix() for path in list_files([folder])] == ["a.txt", "z.txt", "sub/m.txt"]
    files = list_files([])
    assert len(files) > 100
    assert all(path.suffix == ".py" and path.is_relative_to(sysconfig.get_path("stdlib")) for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_targets_are_the_next_tokens_except_the_first_of_a_document(folder):
    corpus = opened(write(folder / "x.fa", b">a\nACGT\n>b\nCCA\n>c\nGGGG\n"))
    tokens, targets = batch_of(corpus, [0, 3], 7)
    stream = [0, 1, 2, 3, 1, 1, 0, 2, 2, 2, 2]
    assert tokens.tolist() == [stream[:7], stream[3:10]]
    assert targets.tolist() == [[1, 2, 3, IGNORED, 1, 0, IGNORED], [IGNORED, 1, 0, IGNORED, 2, 2, 2]]
    for start in range(4):
        for count in range(1, 8 - start):
            assert corpus.ignored(start, count) == int((corpus.pair(start, count)[1] == IGNORED).sum())


@given(st.integers(0, 9), st.integers(2, 200), st.integers(1, 60), st.integers(0, 5))
def test_windows_of_an_epoch_contain_every_target(first, size, context, seed):
    if size <= context:
        with pytest.raises(DataError, match=f"needs {context + 1} tokens"):
            Windows(first, first + size, context, seed)
        return
    windows = Windows(first, first + size, context, seed)
    for epoch in range(3):
        starts = [windows.start(epoch * windows.per_epoch + i) for i in range(windows.per_epoch)]
        targets = {start + i + 1 for start in starts for i in range(context)}
        assert targets == set(range(first + 1, first + size))


def test_windows_follow_from_seed_and_step():
    windows = Windows(0, 10_000, 64, seed=3)
    steps = [windows.starts(step, 4) for step in range(100)]
    assert [Windows(0, 10_000, 64, seed=3).starts(step, 4) for step in reversed(range(100))] == steps[::-1]
    assert [start for step in steps for start in step] == [windows.start(i) for i in range(400)]
    other = [Windows(0, 10_000, 64, seed=4).starts(step, 4) for step in range(100)]
    assert sum(a != b for a, b in zip(steps, other, strict=True)) > 90
    epochs = [sorted(windows.start(i + e * windows.per_epoch) for i in range(windows.per_epoch)) for e in range(2)]
    assert epochs[0] != epochs[1]  # another shift
    assert derived_seed("dropout", 0, 1) != derived_seed("dropout", 1, 0)


def test_held_out_tokens_are_in_no_training_window(folder):
    corpus = opened(write(folder / "x.txt", bytes(1000)))
    training, held_out = split(corpus, 50, 0.2, seed=0)
    assert (training.last, held_out.first, held_out.last) == (800, 800, 1000)
    assert max(training.start(i) for i in range(1000)) + 50 < 800
    starts = held_out.spread(3)
    assert starts[0] == 800
    assert starts[-1] + 51 == 1000
    assert len(starts) == 3
    assert len(held_out.spread(100)) == 3  # no window twice
    assert split(corpus, 50, 0.0, seed=0)[1] is None


def test_a_changed_file_is_named(folder):
    paths = [write(folder / name, bytes(100)) for name in ("a.txt", "b.txt")]
    corpus = opened(*paths)
    marks = corpus.fingerprints()
    opened(*paths).compare(marks)
    paths[1].write_bytes(bytes(99) + b"x")
    with pytest.raises(DataError, match=r"b\.txt has changed since the run began"):
        opened(*paths).compare(marks)
    with pytest.raises(DataError, match=r"b\.txt has changed while"):
        corpus.check_unchanged()
    with pytest.raises(DataError, match=r"b\.txt was read by the run that goes on, and is missing"):
        opened(paths[0]).compare(marks)
    write(paths[1], bytes(100))
    corpus.check_unchanged()  # another time of change, the same content
    with pytest.raises(DataError, match="another order"):
        opened(*reversed(paths)).compare(marks)
    with pytest.raises(DataError, match=r"c\.txt was not read"):
        opened(*paths, write(folder / "c.txt", b"c")).compare(marks)


def test_fingerprints_see_every_byte_up_to_a_size(folder, monkeypatch):
    """Above it, they see both ends and the size."""
    path = folder / "x"
    content = bytearray(5 * 2**20)
    marks = set()
    for change in (None, 0, 70_000, len(content) - 1):  # byte 70,000 is not in one of the 64 blocks
        if change == len(content) - 1:
            monkeypatch.setattr("dilated_attention_pytorch.training.files._WHOLE", 2**20)
        data = bytearray(content)
        if change is not None:
            data[change] = 1
        path.write_bytes(data)
        marks.add(fingerprint(path))
    path.write_bytes(content[:-1])
    assert len(marks | {fingerprint(path)}) == 5


def test_files_that_cannot_be_read(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(DataError, match="pipe is not a regular file; write what it gives into a file"):
        opened(folder / "pipe")
    with pytest.raises(DataError, match=r"missing\.txt could not be read: No such file"):
        opened(folder / "missing.txt")
    cut = folder / "cut.txt.gz"
    cut.write_bytes(gzip.compress(os.urandom(10_000))[:-100])
    with pytest.raises(DataError, match=r"cut\.txt\.gz could not be read"):
        opened(cut)
    damaged = bytearray(gzip.compress(os.urandom(10_000)))
    damaged[5000] ^= 255
    cut.write_bytes(damaged)
    with pytest.raises(DataError, match=r"cut\.txt\.gz could not be read"):
        opened(cut)
    assert list((folder / "cache").iterdir()) == []
    for content, reason in ((b"ACGT\n", "before the first header"), (b">a\nAC1GT\n", "which is no letter")):
        with pytest.raises(DataError, match=reason):
            opened(write(folder / "x.fa", content))
    with pytest.raises(DataError, match="different tokens"):
        opened(write(folder / "x.fa", b">a\nA\n"), write(folder / "x.txt", b"a"))
    (folder / "none").mkdir()
    with pytest.raises(DataError, match="without files"):
        opened(folder / "none")
    with pytest.raises(DataError, match="no tokens"):
        split(opened(write(folder / "y.txt", b"")), 4, 0.1, 0)


def test_reading_does_not_follow_the_default_device(folder):
    corpus = opened(write(folder / "x.txt", bytes(10)))
    with torch.device("meta"):
        assert corpus.read(0, 3).tolist() == [0, 0, 0]
        assert Windows(0, 100, 7).start(1) >= 0
