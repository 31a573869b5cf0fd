"""Orders on the CPU: how compact segments are along a Hilbert curve and in row-major order, and what making orders
costs.

    python benchmarks/orders.py [--quick] [--out FILE] [--picture FILE.svg]
    pip install --no-deps scikit-image==0.26.0
    python benchmarks/orders.py --tissue [--quick] [--out FILE] [--picture FILE.png]

The first command takes a 1024 x 1024 grid. The other one takes the tissue pixels of a picture from the wheel of
scikit-image: scattered points without the background.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from images import picture, wheel_version
from torch import Tensor

from dilated_attention_pytorch import Hilbert, Identity
from dilated_attention_pytorch.orders.kinds import perimeters

SIDE = 1024
SEGMENTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TISSUE = "ihc.png"
THRESHOLDS = range(150, 221, 10)  # other grey levels that one might call background


def compactness(points: Tensor, segment: int, pairs: int = 4096) -> dict[str, float]:
    """Means over the whole segments of points (n, 2): perimeter of the bounding box, distance of two points (sampled)."""
    points = points[: len(points) // segment * segment]
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, segment, (2, pairs), generator=generator)
    segments = points.view(-1, segment, 2)
    distance = (segments[:, a] - segments[:, b]).double().norm(dim=-1)
    return {
        "perimeter": float(perimeters(points, segment).double().mean()),
        "distance": float(distance.mean()),
    }


def compare(hilbert: Tensor, row_major: Tensor, segments: tuple[int, ...]) -> list[dict]:
    """The compactness of the same points in both orders, for each length of segments."""
    rows = []
    for segment in segments:
        row = {
            "segment": segment,
            "hilbert": compactness(hilbert, segment),
            "row_major": compactness(row_major, segment),
        }
        row["perimeter_ratio"] = row["row_major"]["perimeter"] / row["hilbert"]["perimeter"]
        row["distance_ratio"] = row["row_major"]["distance"] / row["hilbert"]["distance"]
        rows.append(row)
        print(json.dumps(row))
    return rows


def otsu(grey: Tensor) -> int:
    """The grey level from which pixels are background: that which parts the levels into two groups best (Otsu, 1979)."""
    count = torch.bincount(grey.flatten().long(), minlength=256).double()
    below, total = count.cumsum(0), (count * torch.arange(256)).cumsum(0)
    above = below[-1] - below
    between = (total[-1] * below / below[-1] - total).square() / (below * above).clamp(min=1.0)
    return int(between.argmax()) + 1


def darker(grey: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """The pixels (n, 2) below a grey level, row by row and along a Hilbert curve."""
    points = (grey < threshold).nonzero()
    return points, Hilbert.coordinates(points).permute(points, dim=0)


def perimeter_ratio(row_major: Tensor, hilbert: Tensor, segment: int = 1024) -> float:
    return compactness(row_major, segment)["perimeter"] / compactness(hilbert, segment)["perimeter"]


def tissue(options: argparse.Namespace) -> None:
    grey = picture(TISSUE)
    threshold = otsu(grey)
    points, along = darker(grey, threshold)
    print(f"{TISSUE}: {len(points):,} of {grey.numel():,} pixels are darker than {threshold}")
    rows = compare(along, points, SEGMENTS[:2] if options.quick else SEGMENTS)
    result = {
        "command": "python benchmarks/orders.py --tissue",
        "scikit_image": wheel_version(),
        "picture": TISSUE,
        "size": list(grey.shape),
        "threshold": threshold,
        "points": len(points),
        **versions(),
        "compactness": rows,
        "perimeter_ratio_at_1024_by_threshold": {level: perimeter_ratio(*darker(grey, level)) for level in THRESHOLDS},
    }
    write(options.out, result)
    if options.picture:
        plot_tissue(options.picture, rows, points, along, tuple(grey.shape))


def versions() -> dict:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write(file: Path | None, result: dict) -> None:
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")


def seconds(make) -> float:
    start = time.perf_counter()
    make()
    return time.perf_counter() - start


def fastest(make, repeats: int) -> float:
    return min(seconds(make) for _ in range(repeats))


def times(quick: bool) -> dict[str, float]:
    side = 512 if quick else 4096
    points = side * side
    first = seconds(lambda: Hilbert.grid(side, side))
    scattered = torch.rand(points // 16, 2)
    x, order = torch.randn(1, points // 16, 64), Hilbert.line(points // 16)
    order.permute(x)
    return {
        "points": points,
        "grid_2d_first_s": first,
        "grid_2d_s": fastest(lambda: Hilbert.grid(side, side), 3),
        "grid_2d_cut_s": fastest(lambda: Hilbert.grid(side - 1, side + 1), 3),
        "grid_3d_s": fastest(lambda: Hilbert.grid(points // 65536, 256, 256), 3),
        "line_s": fastest(lambda: Hilbert.line(points), 3),
        "scattered_points": points // 16,
        "scattered_s": fastest(lambda: Hilbert.coordinates(scattered), 1),
        "permuted_rows_of_64": points // 16,
        "permute_s": fastest(lambda: order.permute(x), 3),
        "copy_s": fastest(x.clone, 3),
    }


def plot(file: Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "orders", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, (curve, boxes) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    positions = Hilbert.grid(16, 16).positions
    for start in range(0, 256, 32):
        some = positions[start : start + 32]
        curve.plot(some % 16, some // 16, marker="o", markersize=3)
    curve.set(title="16 x 16 along the curve, segments of 32", aspect="equal", xticks=[], yticks=[])
    curve.invert_yaxis()
    plot_perimeters(boxes, rows)
    boxes.set_title(f"{SIDE} x {SIDE} grid")
    figure.tight_layout()
    figure.savefig(file, format="svg", metadata={"Date": None})


def plot_perimeters(axes, rows: list[dict]) -> None:
    for name, label in (("row_major", "row by row"), ("hilbert", "Hilbert")):
        axes.loglog([row["segment"] for row in rows], [row[name]["perimeter"] for row in rows], "o-", label=label)
    axes.set(xlabel="tokens of a segment", ylabel="mean perimeter of bounding box")
    axes.legend()


def plot_tissue(
    file: Path, rows: list[dict], row_major: Tensor, hilbert: Tensor, size: tuple[int, int], segment: int = 1024
) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.9), layout="constrained")
    whole, lines, curve, boxes = figure.subplots(1, 4)
    whole.imshow(picture(TISSUE, "RGB").numpy())
    whole.set_title(TISSUE)
    colours = torch.tensor(colormaps["tab20"].colors)
    for axes, points, title in ((lines, row_major, "row by row"), (curve, hilbert, "Hilbert")):
        drawn = torch.ones(*size, 3)
        drawn[points[:, 0], points[:, 1]] = colours[torch.arange(len(points)) // segment % len(colours)].to(drawn)
        axes.imshow(drawn.numpy(), interpolation="nearest")
        axes.set_title(f"segments of {segment:,}, {title}", fontsize=11)
    for axes in (whole, lines, curve):
        axes.set(xticks=[], yticks=[])
    plot_perimeters(boxes, rows)
    boxes.set_box_aspect(1)
    figure.savefig(file, format="png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--tissue", action="store_true", help="pixels of tissue, not a grid")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--picture", type=Path, help="draw the results into this file")
    options = parser.parse_args()
    if options.tissue:
        tissue(options)
        return
    measured = times(options.quick)
    print(json.dumps(measured))
    hilbert, row_major = (
        torch.stack((order.positions // SIDE, order.positions % SIDE), -1)
        for order in (Hilbert.grid(SIDE, SIDE), Identity(SIDE * SIDE))
    )
    rows = compare(hilbert, row_major, SEGMENTS[:2] if options.quick else SEGMENTS)
    result = {
        "command": "python benchmarks/orders.py",
        **versions(),
        "grid": [SIDE, SIDE],
        "compactness": rows,
        "seconds": measured,
    }
    write(options.out, result)
    if options.picture:
        plot(options.picture, rows)


if __name__ == "__main__":
    main()
