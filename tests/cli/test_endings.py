"""How the command ends from outside: Ctrl-C, a closed pipe, a full disk. One sentence, the right code, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from programs import WITH_CTRL_C
from programs import run as run_after_torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and devices of POSIX systems")

START = "from dilated_attention_command import main; main()"
# Standard output is a pipe that nobody reads.
CLOSED_PIPE = """
import os
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
"""
# Ctrl-C at the moment that a module is imported.
AT_IMPORT = """
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""
AT_SAVE = """
import os, signal
from matplotlib.figure import Figure
def savefig(self, path, **options):
    open(path, "wb").write(b"half")
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("Ctrl-C is handled before this line")
Figure.savefig = savefig
"""
AT_EXIT = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


@pytest.fixture
def run(tmp_path):
    """The command after some code, in a process that has imported PyTorch before."""
    return lambda code, *arguments, **streams: run_after_torch(code + START, *arguments, folder=tmp_path, **streams)


def run_fresh(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def test_interrupt_during_the_import_of_torch(tmp_path):
    program = WITH_CTRL_C + AT_IMPORT.format(name="torch") + START
    result = run_fresh("-c", program, "show", "order", "--plot", tmp_path / "x.png")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dilated_attention_pytorch.api", "rich.table", "matplotlib"])
def test_interrupt_during_imports(tmp_path, run, name):
    result = run(AT_IMPORT.format(name=name), "show", "order", "--plot", tmp_path / "x.png")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["torch", "dilated_attention_pytorch.cli"])
def test_interrupt_of_python_m(tmp_path, name):
    """``python -m`` imports the package, and PyTorch with it, before it runs ``__main__``."""
    (tmp_path / "sitecustomize.py").write_text(WITH_CTRL_C + AT_IMPORT.format(name=name))
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    result = run_fresh("-m", "dilated_attention_pytorch", "--version", env={**os.environ, "PYTHONPATH": paths})
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_interrupt_while_a_picture_is_written(tmp_path, run):
    path = tmp_path / "x.png"
    path.write_bytes(b"old")
    result = run(AT_SAVE, "show", "order", "--grid", "4x4", "--plot", path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", f"Interrupted: {path} was not written.\n")
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]
    assert path.read_bytes() == b"old"


def test_interrupt_during_measurements(tmp_path):
    """Sent at the second step of a real run: the steps are lines on standard error."""
    command = [sys.executable, "-c", WITH_CTRL_C + START, "demo", "--quick", "--device", "cpu", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "time" in process.stderr.readline()
        assert "memory" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("Interrupted: 0 of 4 lengths are finished")
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_interrupt_after_the_end_changes_nothing(tmp_path, run):
    result = run(AT_EXIT, "show", "order", "--grid", "4x4", "--plot", tmp_path / "x.png")
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "x.png").exists()


def test_interrupt_is_ignored_where_the_shell_ignores_it(tmp_path, run):
    """A shell starts background jobs that ignore Ctrl-C, which is meant for the job in front."""
    result = run(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_IMPORT.format(name="rich.table"),
        "show", "order", "--grid", "4x4", "--plot", tmp_path / "x.png",
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["show", "order", "--grid", "4x4", "--plot"]], ids=["help", "show"])
def test_a_closed_pipe(tmp_path, run, arguments):
    if "--plot" in arguments:
        arguments = [*arguments, tmp_path / "x.png"]
    result = run(CLOSED_PIPE, *arguments)
    assert result.returncode == 141
    assert result.stderr == "Stopped: standard output could not be written: its reader has closed it.\n"
    assert (tmp_path / "x.png").exists() == ("show" in arguments)  # the picture comes first


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["show", "order", "--grid", "4x4", "--plot"]], ids=["help", "show"])
def test_a_full_disk_behind_standard_output(tmp_path, run, arguments):
    if "--plot" in arguments:
        arguments = [*arguments, tmp_path / "x.png"]
    result = run("", *arguments, stdout="/dev/full")
    assert result.returncode == 1
    assert result.stderr == "Stopped: standard output could not be written: No space left on device.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_error(tmp_path, run):
    """The sentence cannot be written either, so only the code is left."""
    result = run("", "demo", "--quick", "--device", "cpu", "--output", tmp_path, stderr="/dev/full")
    assert result.returncode == 1


def test_a_standard_output_that_was_closed_at_the_start(tmp_path):
    command = f'{sys.executable} -c "{START}" show order --grid 4x4 --plot {tmp_path / "x.png"} >&-'
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_memory_of_a_cpu(run):
    """PyTorch raises a RuntimeError for it, which other errors are too."""
    result = run("", "profile", "--device", "cpu", "--tokens", "100B", "--json", "x.json")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Stopped: there is too little memory, use smaller sizes: ")
    assert "Traceback" not in result.stderr
