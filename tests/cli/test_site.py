"""What ``make docs`` builds, checked without Sphinx: the table of contents, the API reference and the figures of tables."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = (
    "dilated_attention_pytorch",
    "dilated_attention_pytorch.distributed",
    "dilated_attention_pytorch.models",
    "dilated_attention_pytorch.nn",
    "dilated_attention_pytorch.training",
    "dilated_attention_pytorch.integrations.transformers",
)


def documented() -> set[str]:
    """The names that a directive of the API reference documents, without their modules."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.rst")))
    return {name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)}


def public_names(module: str) -> set[str]:
    """``__all__`` of a package, read without importing it."""
    path = ROOT / "src" / module.replace(".", "/") / "__init__.py"
    assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    (names,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return set(ast.literal_eval(names))


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(module):
    """Sphinx fails the other way round: if a directive names something that does not exist."""
    assert public_names(module) - documented() == set()


def test_the_table_of_contents_has_every_page():
    text = (DOCS / "index.rst").read_text()
    entries = re.findall(r"^   (/?[\w/]+\*?)$", text, re.MULTILINE)
    listed = [path for entry in entries for path in ROOT.glob(f"{entry[1:] if entry[0] == '/' else f'docs/{entry}'}.*")]
    assert len(listed) == len(set(listed)), "a page is listed twice"
    assert {path for path in DOCS.rglob("*.*") if path.suffix in {".md", ".rst"}} - {*listed, DOCS / "index.rst"} == set()
    missing = [entry for entry in entries if "*" not in entry and not any(entry.strip("/") in str(path) for path in listed)]
    assert missing == []


def test_links_and_anchors_of_a_site(tmp_path):
    """The check of ``make docs`` finds files, anchors and loaded files that are missing or come from elsewhere."""
    problems = runpy.run_path(str(DOCS / "check_site.py"))["problems"]
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">b</a><img src="c.png"><a href="https://x.y">x</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1><a href="a.html#top">a</a><a href="#there">b</a>')
    (tmp_path / "c.png").touch()
    assert problems(tmp_path) == []
    (tmp_path / "c.png").unlink()
    (tmp_path / "b.html").write_text(
        '<a href="a.html#gone">a</a><script src="https://x.y/z.js"></script><a href="../up.html">u</a>'
    )
    found = problems(tmp_path)
    assert len(found) == 5
    for part in ("b.html loads https://x.y/z.js", "a.html#gone", "../up.html", "c.png", "b.html#there"):
        assert any(part in sentence for sentence in found), part


def rows_of(page: str, header: str) -> list[list[str]]:
    """The cells below the header of a table."""
    table = (DOCS / page).read_text().partition(header)[2].partition("\n\n")[0]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def results(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


def milliseconds(value: float) -> str:
    return f"{value:#.3g} ms" if value < 100 else f"{value:.1f} ms"


def test_the_table_of_the_gpu_has_the_figures_of_its_file():
    rows = results("h200_version16.json")
    in_graphs = [
        {name: f" (graph {row[f'{name}_graph_ms']:#.3g})" for name in ("forward", "both") if f"{name}_graph_ms" in row}
        for row in rows
    ]
    assert rows_of("performance.md", "| setting | forward | of dense | rested |") == [
        [
            row["setting"], milliseconds(row["forward_ms"]) + graph.get("forward", ""), f"{row['forward_x_dense']:.2f}",
            milliseconds(row["forward_rested_ms"]), milliseconds(row["backward_ms"]), f"{row['backward_x_dense']:.2f}",
            milliseconds(row["both_ms"]) + graph.get("both", ""), milliseconds(row["both_rested_ms"]),
            f"{row['forward_extra_over_output']:.1f} x", f"{row['both_extra_gib']:.2f} GiB", f"{row['relative_error']:.0e}",
        ]
        for row, graph in zip(rows, in_graphs, strict=True)
    ]  # fmt: skip


def test_the_table_of_the_cpu_has_the_figures_of_its_file():
    rows = rows_of("performance.md", "| tokens | forward | of dense | backward | of dense | extra memory | error |")
    expected = [
        [
            f"{row['tokens']:,}", f"{row['forward_s']:.1f} s", f"{row['forward_ratio']:.2f}", f"{row['backward_s']:.1f} s",
            f"{row['backward_ratio']:.2f}", f"{row['extra_over_output']:.1f} x", f"{row['relative_error']:.0e}",
        ]
        for row in results("cpu.json")
    ]  # fmt: skip
    assert rows == expected


def test_the_errors_of_numerics_are_those_of_the_files():
    text = (DOCS / "numerics.md").read_text()
    errors = {f"`{row['setting']}`": row["relative_error"] for row in results("h200_version16.json")}
    for name in ("`paper`", "`paper fp16`", "`paper float32`"):
        (cell,) = re.findall(rf"^\| {name}.*\| ([\d.e-]+) \|$", text, re.MULTILINE)
        assert cell == f"{errors[name]:.1e}"
    assert f"| {results('cpu.json')[-1]['relative_error']:.1e} |" in text
