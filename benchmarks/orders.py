"""Orders on the CPU: how compact segments are along a Hilbert curve against row by row, and what making orders costs.

    python benchmarks/orders.py [--quick]

Writes benchmarks/results/orders.json and docs/orders.svg.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from dilated_attention_pytorch import Hilbert, Identity, Order

ROOT = Path(__file__).parent.parent
SIDE = 1024
SEGMENTS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def compactness(order: Order, segment: int, pairs: int = 4096) -> dict[str, float]:
    """Means over all segments: perimeter of the bounding box, and distance of two of its points (sampled)."""
    points = torch.stack((order.positions // SIDE, order.positions % SIDE), -1).reshape(-1, segment, 2)
    sides = points.amax(1) - points.amin(1) + 1
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, segment, (2, pairs), generator=generator)
    distance = (points[:, a] - points[:, b]).double().norm(dim=-1)
    return {
        "perimeter": float(2 * sides.sum(-1).double().mean()),
        "distance": float(distance.mean()),
    }


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


def plot(rows: list[dict]) -> None:
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
    for name, label in (("row_major", "row by row"), ("hilbert", "Hilbert")):
        boxes.loglog([row["segment"] for row in rows], [row[name]["perimeter"] for row in rows], "o-", label=label)
    boxes.set(title=f"{SIDE} x {SIDE} grid", xlabel="tokens of a segment", ylabel="mean perimeter of its bounding box")
    boxes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "orders.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    options = parser.parse_args()
    measured = times(options.quick)
    print(json.dumps(measured))
    hilbert, row_major = Hilbert.grid(SIDE, SIDE), Identity(SIDE * SIDE)
    rows = []
    for segment in SEGMENTS[:2] if options.quick else SEGMENTS:
        row = {
            "segment": segment,
            "hilbert": compactness(hilbert, segment),
            "row_major": compactness(row_major, segment),
        }
        row["perimeter_ratio"] = row["row_major"]["perimeter"] / row["hilbert"]["perimeter"]
        row["distance_ratio"] = row["row_major"]["distance"] / row["hilbert"]["distance"]
        rows.append(row)
        print(json.dumps(row))
    if options.quick:
        return
    result = {
        "command": "python benchmarks/orders.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "grid": [SIDE, SIDE],
        "compactness": rows,
        "seconds": measured,
    }
    (ROOT / "benchmarks" / "results" / "orders.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows)


if __name__ == "__main__":
    main()
