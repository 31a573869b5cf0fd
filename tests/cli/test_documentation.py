"""Every Python block of the documentation runs in a process of its own, and README is shown without other files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from programs import WITH_COMMAND, WITH_TRANSFORMERS, of_ranks, run_together

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
RANKS = re.compile(r"# torchrun --nproc-per-node (\d) example\.py\n")
NEEDS_GPU = "# needs a CUDA device\n"


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(languages: tuple[str, ...]) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 2
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def run(
    code: str, *arguments: str, folder: Path, environments: Sequence[dict[str, str]] = ({},)
) -> list[subprocess.CompletedProcess[str]]:
    # The interpreter of kernels, which the tests set, is not what a reader has.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    each = [inherited | one for one in environments]
    modules = WITH_TRANSFORMERS if "transformers import" in code else WITH_COMMAND
    return run_together(code, *arguments, folder=folder, environments=each, modules=modules)


def test_blocks_are_found():
    """Every fence has a language that this file knows, so that no block is left out by a typing error."""
    assert {block.language for block in blocks(("python", "sh", "text", ""))} == {"python", "sh", "text"}
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert fences == 2 * len(blocks(("python", "sh", "text")))
    assert len(blocks(("python",))) >= 13


@pytest.mark.parametrize("block", blocks(("python",)), ids=str)
def test_python_blocks_run_by_themselves(block, tmp_path):
    if block.code.startswith(NEEDS_GPU) and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ranks = RANKS.match(block.code)
    assert bool(ranks) == ("init_process_group" in block.code), "a block for several ranks says so in its first line"
    world = int(ranks[1]) if ranks else 1
    results = run(block.code, folder=tmp_path, environments=of_ranks(world) if ranks else [{}])
    assert [result.returncode for result in results] == [0] * world, "\n".join(result.stderr for result in results)


# Commands that measure take minutes, and so does a plan of 4,096 GPUs. Their options are checked, and other tests run them.
TAKES_MINUTES = re.compile(r"dilated-attention (demo|bench|maxlen|profile)\b|--gpus 4096")


def our_commands() -> list[str]:
    """Lines of shell blocks that call the command, each once."""
    lines = [line.partition("#")[0].strip() for block in blocks(("sh",)) for line in block.code.splitlines()]
    return [line for line in dict.fromkeys(lines) if line.startswith("dilated-attention")]


@pytest.mark.parametrize("line", our_commands())
def test_commands_run(line, tmp_path):
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    arguments = shlex.split(line)[1:] + ["--help"] * bool(TAKES_MINUTES.search(line))  # options are parsed before
    (result,) = run("from dilated_attention_command import main; main()", *arguments, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_options_of_commands_with_help_are_parsed(tmp_path):
    """``--help`` does not hide an option that a command does not have."""
    pytest.importorskip("typer")
    (result,) = run("from dilated_attention_command import main; main()", "bench", "--no-such", "--help", folder=tmp_path)
    assert result.returncode == 2


def test_readme_renders_without_a_git_host():
    """A package index shows README by itself: links are absolute, and there are no pictures and no formulas."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 260
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "$$" not in text
    assert not re.search(r"<img|!\[", text)


def test_files_that_readme_names_exist():
    named = set(re.findall(r"`((?:docs|benchmarks|examples|src)/[\w/.]+|[A-Z]+\.md)`", (ROOT / "README.md").read_text()))
    assert {"docs/orders.md", "DESIGN.md"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages(page):
    """Files exist, and so do the headings that a link names."""
    for target in re.findall(r"\]\(([^)\s]*)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]
            assert heading in slugs, target
