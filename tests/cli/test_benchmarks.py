"""Scripts of benchmarks/: each explains itself without a GPU, and none writes a file that it was not asked to write."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import programs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text())

# One process for all scripts: each is run as a main program with --help, and PyTorch is imported once.
ALL_HELP = """
import contextlib, io, runpy, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv, text, code = [name, "--help"], io.StringIO(), None
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(f"{sys.path[0]}/{name}", run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(f"=== {name} {code}", text.getvalue(), sep="\\n")
"""


def run(code: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    (result,) = programs.run_together(code, *arguments, folder=folder, environments=[environment])
    return result


def contents() -> dict[str, bytes]:
    folders = (FOLDER, FOLDER / "results", ROOT / "docs", ROOT)
    return {str(path): path.read_bytes() for folder in folders for path in folder.iterdir() if path.is_file()}


def test_every_script_has_help(tmp_path):
    result = run(ALL_HELP, FOLDER, *SCRIPTS, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    found = re.split(r"^=== (\S+) (\S+)$", result.stdout, flags=re.MULTILINE)[1:]
    assert found[::3] == SCRIPTS
    assert found[1::3] == ["0"] * len(SCRIPTS)
    for name, text in zip(found[::3], found[2::3], strict=True):
        assert text.strip().startswith("usage: "), name
        # The docstring follows the usage, and every script that has results can write them.
        assert len(text) > 300, name
        assert "--out" in text or name in ("blocks_balance.py", "chart.py"), name


def test_every_script_writes_only_to_files_of_its_options():
    """All writes name an option, or a folder of the run: no script has a path of its own to write to."""
    for name in SCRIPTS:
        source = (FOLDER / name).read_text()
        for line in re.findall(r".*(?:\.write_text\(|\.write_bytes\(|savefig\(|\bopen\().*", source):
            assert re.search(r"options\.out|options\.picture|Path\(folder|\bfile\b|\bpicture\b", line), f"{name}: {line}"


def test_only_the_named_file_is_written(tmp_path):
    before = contents()
    result = run(programs.FILE, FOLDER / "blocks_balance.py", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
    result = run(programs.FILE, FOLDER / "ring.py", "--docs", "--picture", "new.svg", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.svg"]
    assert (tmp_path / "new.svg").read_text() == (ROOT / "docs" / "ring_traffic.svg").read_text()
    assert contents() == before
