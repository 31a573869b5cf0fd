"""Check the built site: every link, picture and anchor inside of it exists, and no page loads anything from a network.

python docs/check_site.py build/docs
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The anchors of a page, the links that a reader may follow, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the tag links to, loads or can be linked to by."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif LOADED.get(tag) in values:
            self.loaded.append(values[LOADED[tag]])


def problems(root: Path) -> list[str]:
    """A sentence for each broken link and each file that comes from elsewhere."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    found = [] if pages else [f"{root} holds no pages; run make docs"]
    for path, page in pages.items():
        name = path.relative_to(root)
        found += [f"{name} loads {x} from a network" for x in page.loaded if urlsplit(x).netloc]
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_relative_to(root) or not target.exists():
                found.append(f"{name} links to {link}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {link}, which has no such anchor")
    return found


def main() -> None:
    """Print the problems of a folder and exit with 1 if there are any."""
    root = Path(sys.argv[1]).resolve()
    found = problems(root)
    print("\n".join(found) or f"{len(list(root.rglob('*.html')))} pages: all internal links and anchors exist.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
