"""The chart of the README: rates of attention over those of dense cuDNN attention, from committed results.

python benchmarks/chart.py --picture docs/performance.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
ROWS = (
    ("paper", "LongNet's pattern, 1M tokens"),
    ("paper causal", "the same, causal"),
    ("wide", "rates up to 256, 512k tokens"),
    ("wide causal", "the same, causal"),
    ("gigapath", "GigaPath's pattern, 128k tokens"),
)


def rate(file: str, setting: str, direction: str) -> float | None:
    rows = json.loads((HERE / "results" / file).read_text())["rows"]
    found = [row for row in rows if row["setting"] == setting]
    return found[0][f"{direction}_tflops"] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, required=True, help="the SVG file to write")
    options = parser.parse_args()
    ours = json.loads((HERE / "results" / "h200_version16.json").read_text())["rows"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, direction in zip(figure.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        for y, (setting, _) in enumerate(ROWS):
            row = next(row for row in ours if row["setting"] == setting)
            dense = row[f"dense_{direction}_tflops"]
            axes.barh(y, row[f"{direction}_tflops"] / dense, 0.6, color="#1f5fa8")
            for file in ("h200_authors_long.json", "h200_authors_causal.json", "h200_authors.json"):
                theirs = rate(file, setting, direction)
                if theirs is not None:
                    axes.barh(y, theirs / dense, 0.6, color="#c8551b")
                    break
        axes.axvline(1.0, color="#777777", linestyle=":")
        axes.set(title=direction, xlabel="rate over dense cuDNN attention", yticks=range(len(ROWS)), xlim=(0, 1.25))
        axes.set_yticklabels([name for _, name in ROWS])
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    handles = [figure.axes[0].patches[0], figure.axes[0].patches[1]]
    figure.legend(handles, ["this library", "the authors' method"], loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("One H200, bfloat16, at its power limit")
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
