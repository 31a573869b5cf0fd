"""Sphinx builds the pages of this folder and the pages in the root of the repository that they link to.

The source folder is the root of the repository, so that a link between two pages is the same here and on a code host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from dilated_attention_pytorch import __version__  # noqa: E402

project = "dilated-attention"
author = "The dilated-attention authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md"]
exclude_patterns = [".*", "build", "dist", "**/__pycache__"]
nitpicky = True
# Types of other packages, whose inventories would need a network, and types of parameters that users do not name.
nitpick_ignore_regex = [
    ("py:class", r"(torch|transformers|collections|fractions|os|pathlib)\..*"),
    ("py:class", r"Tensor|Lengths|Pattern|ProcessGroup|DeviceMesh|BlockMask|Model|Other"),
    ("py:class", r"dilated_attention_pytorch\..*\.(\w+Options|Model|BlockLists|Inputs|Rows|ForwardRows|DataFile|Decoding)"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"dilated-attention {version}"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


def without_overloads(self: ModuleAnalyzer, analyze: Callable[[ModuleAnalyzer], None] = ModuleAnalyzer.analyze) -> None:
    """Forget overloads, so that a signature is that of the implementation, with its options and their defaults."""
    analyze(self)
    self.overloads = {}


ModuleAnalyzer.analyze = without_overloads
HIDDEN_COLON = "\0"


def hide_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Hide the colons of attributes from napoleon, which takes the words before the first one for a type."""
    if what in {"attribute", "property", "data"}:
        lines[:] = [line.replace(":", HIDDEN_COLON) for line in lines]


def show_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Undo ``hide_colons`` behind napoleon."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def drop_empty_patterns(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave out patterns of the first page without a match, because a page may not be there yet."""
    if page == root_doc:
        lines = source[0].splitlines()
        matches = (not line.endswith("*") or any((ROOT / "docs").glob(f"{line.strip()}.md")) for line in lines)
        source[0] = "\n".join(line for line, keep in zip(lines, matches, strict=True) if keep)


def add_start_page(app: Sphinx, error: Exception | None) -> None:
    """Let the folder's own index lead to the first page, which is one folder below like the others."""
    if error is None:
        page = '<!DOCTYPE html><meta charset="utf-8"><title>dilated-attention</title>\n'
        page += (
            '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">dilated-attention</a>\n'
        )
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Connect the hooks of this file."""
    app.connect("autodoc-process-docstring", hide_colons, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("source-read", drop_empty_patterns)
    app.connect("build-finished", add_start_page)
