"""The wheel and the source distribution: what they hold, and the quickstart with nothing but the wheel and PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE_BY_THE_BUILD = {"PKG-INFO"}


def build(target: str, source: Path, folder: Path) -> Path:
    """The file that the build backend makes of a source tree, in this environment and thus without a network."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder], cwd=source, check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    sdist = build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked_sdist, tmp_path_factory) -> Path:
    """The wheel that users of an index get: it is built from the source distribution."""
    return build("wheel", unpacked_sdist, tmp_path_factory.mktemp("wheel"))


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_sdist_holds_every_file_of_the_repository(unpacked_sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository: a source distribution does not know which files it should hold")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    assert tracked - files_below(unpacked_sdist) == set()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    sources = {name for name in files_below(ROOT / "src") if "__pycache__" not in name and ".egg-info" not in name}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == sources
    assert "dilated_attention_pytorch/py.typed" in inside


# The last lines of the program: what was imported, what the command is, and which version the installed metadata has.
WHERE = """
import sys, importlib.metadata, dilated_attention_pytorch
(command,) = importlib.metadata.entry_points(group="console_scripts", name="dilated-attention")
print(dilated_attention_pytorch.__file__)
print(sys.modules[command.load().__module__].__file__)
print(importlib.metadata.version("dilated-attention") == dilated_attention_pytorch.__version__)
"""


def test_quickstart_with_the_wheel_alone(wheel, tmp_path):
    """A fresh environment holds the wheel. A .pth file adds PyTorch, but not the editable installation beside it."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--python", python]
    subprocess.run([*pip, "install", "--no-compile", "--no-deps", "--no-index", wheel], check=True)
    (installed,) = environment.glob("lib/python*/site-packages")
    (installed / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")

    section = (ROOT / "README.md").read_text().partition("\n## Sixty seconds\n")[2]
    quickstart = re.search(r"```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (tmp_path / "quickstart.py").write_text(quickstart[1] + WHERE)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    result = subprocess.run(
        [python, "quickstart.py"], cwd=tmp_path, capture_output=True, text=True, env=inherited | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    *explanation, package, command, same_version = result.stdout.splitlines()
    assert "sdpa" in "\n".join(explanation)
    assert Path(package) == installed / "dilated_attention_pytorch" / "__init__.py"
    assert Path(command) == installed / "dilated_attention_command.py"
    assert (environment / "bin" / "dilated-attention").exists()
    assert same_version == "True"


def test_workflow_runs_every_supported_version():
    """The versions of the workflow are those of pyproject.toml and constraints.txt, and its scripts are targets of make."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    versions = workflow["jobs"]["cpu"]["strategy"]["matrix"]["include"]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (oldest,) = (name.removeprefix("torch>=") for name in PROJECT["dependencies"])
    supported = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert {row["python"] for row in versions if row["torch"] == pinned[1]} == supported
    assert f"{oldest}.0" in {row["torch"] for row in versions}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"].split() for step in workflow["jobs"]["package"]["steps"] if "run" in step]
    assert commands
    assert all(make == "make" and target in targets for make, target in commands)
