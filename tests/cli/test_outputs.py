"""Files and numbers of all commands: nothing half-written, links and devices stay what they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer

from dilated_attention_pytorch.cli.outputs import Outputs, check_file, parse_count, parse_integers, write_file


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("65536", 65536), ("1_000_000", 10**6), ("64k", 64_000), ("64Ki", 65536), ("10M", 10**7), ("1.5M", 1_500_000),
        ("2B", 2 * 10**9), ("2g", 2 * 10**9), ("1Gi", 2**30), (" 7 ", 7), ("0.5Ki", 512),
    ],
)  # fmt: skip
def test_numbers_with_units(text, number):
    assert parse_count("--tokens", text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5.5", "12Q", "1e9", "1 000", "0x10", "1Bi", "½"])
def test_what_is_not_a_number(text):
    with pytest.raises(ValueError, match="--tokens must be a number such as 65536, 64k, 10M, 1B or 64Ki, got"):
        parse_count("--tokens", text)


def test_integers_separated_by_commas():
    assert parse_integers("--rates", "1,4, 16") == (1, 4, 16)
    with pytest.raises(ValueError, match="--rates must be integers separated by commas, such as 2048,8192, got '1,,2'"):
        parse_integers("--rates", "1,,2")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")

    def half(unfinished: Path) -> None:
        unfinished.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    check_file(link)
    assert real.read_text() == "old"
    write_file(link, lambda unfinished: unfinished.write_text("new"))
    assert link.is_symlink()
    assert real.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_file(pipe)
        write_file(pipe, lambda path: path.write_text("text"))
        assert os.read(reader, 100) == b"text"
        assert pipe.is_fifo()
    finally:
        os.close(reader)


def test_numbers_that_json_does_not_have(tmp_path):
    outputs = Outputs(str(tmp_path / "x.json"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        outputs.write({"rate": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_ends_the_command(tmp_path, capsys):
    path = tmp_path / "none" / "x.json"
    with pytest.raises(typer.Exit) as end:
        Outputs(str(path)).check()
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == f"{path} could not be written: No such file or directory; choose another file.\n"


def test_what_is_written_is_json(tmp_path):
    Outputs(str(tmp_path / "x.json")).write({"tokens": 3})
    assert json.loads((tmp_path / "x.json").read_text()) == {"tokens": 3}
