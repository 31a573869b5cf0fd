"""``--help`` of each command: its examples, one on each line, with options that exist."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import typer
from typer.testing import CliRunner

from dilated_attention_pytorch.cli.app import app


def names(group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The commands of a group and of its groups, as they are typed."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from names(command, (*before, name))
        else:
            yield (*before, name)


COMMANDS = tuple(names(typer.main.get_command(app)))


def examples(name: tuple[str, ...]) -> list[str]:
    """The lines below "Examples:", without the program's name and that of the command."""
    lines = iter(CliRunner().invoke(app, [*name, "--help"]).output.splitlines())
    assert any(line == "  Examples:" for line in lines), "no line is the title of the examples"
    found = []
    for line in lines:
        if not line:
            break
        if found and found[-1].endswith("\\"):
            found[-1] = f"{found[-1][:-1].rstrip()} {line.strip()}"
        else:
            found.append(line.strip())
    starts = (f"dilated-attention {' '.join(name)}", f"-m dilated_attention_pytorch {' '.join(name)}")
    assert all(any(start in line for start in starts) for line in found)
    return [line.partition(next(start for start in starts if start in line))[2] for line in found]


def test_all_commands_are_found():
    assert {("doctor",), ("plan",), ("show", "ring"), ("train",), ("score",)} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_examples(name):
    """``--help`` is read after all options before it, and fails with an option that does not exist."""
    found = examples(name)
    assert found
    for line in found:
        result = CliRunner().invoke(app, [*name, *shlex.split(line), "--help"])
        assert result.exit_code == 0, result.output
