"""The command ``show``: what it says and draws of an order, against enumeration by the definition."""

from __future__ import annotations

import re

import pytest
import torch

import programs

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

import oracle
from dilated_attention_pytorch import Hilbert, Order, Striped, ZigZag
from dilated_attention_pytorch.cli import pictures
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.cli.show import make_order, make_view
from dilated_attention_pytorch.orders.kinds import perimeters


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["show", "order", *map(str, arguments)])


def mean_perimeter(positions: list[int], width: int, length: int) -> float:
    found = []
    for start in range(0, len(positions), length):
        rows, columns = zip(*(divmod(p, width) for p in positions[start : start + length]), strict=True)
        found.append(2 * (max(rows) - min(rows) + 1) + 2 * (max(columns) - min(columns) + 1))
    return sum(found) / len(found)


def said_perimeters(text: str) -> dict[str, float]:
    return {name: float(number) for name, number in re.findall(r"^  ([a-z-]+) +([0-9.]+)$", text, re.MULTILINE)}


def test_the_example_of_the_documentation(tmp_path):
    output = tmp_path / "order.png"
    result = run("--order", "hilbert", "--grid", "64x64", "--plot", output)
    assert result.exit_code == 0, result.output
    assert "64 x 64 tokens, segments of 64" in result.stdout
    assert said_perimeters(result.stdout) == {"hilbert": 32.0, "row-major": 130.0}  # 8 x 8 against 1 x 64
    assert f"Picture: {output}" in result.stdout
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in output.parent.iterdir()] == ["order.png"]


@pytest.mark.parametrize(
    ("name", "grid", "arguments", "order"),
    [
        ("hilbert", (5, 9), [], Hilbert.grid(5, 9)),
        ("row-major", (5, 9), [], Order.from_permutation(range(45))),
        ("zigzag", (4, 6), [], ZigZag(24, 4)),
        ("striped", (1, 20), ["--ranks", 3], Striped(20, 3)),
        ("hilbert", (1, 1), [], Hilbert.grid(1, 1)),
    ],
)
def test_perimeters_of_every_order(tmp_path, name, grid, arguments, order):
    result = run(
        "--order", name, "--grid", "{}x{}".format(*grid), "--segment-lengths", "7,14", "--dilation-rates", "1,2",
        "--plot", tmp_path / "x.png", *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    n = grid[0] * grid[1]
    expected = {
        "row-major": mean_perimeter(list(range(n)), grid[1], 7),
        name: mean_perimeter(order.positions.tolist(), grid[1], 7),
    }
    assert said_perimeters(result.stdout) == {key: pytest.approx(value, abs=0.051) for key, value in expected.items()}


def test_perimeters_of_nothing_and_of_a_segment_longer_than_the_sequence():
    assert perimeters(torch.empty(0, 2, dtype=torch.int64), 4).tolist() == []
    assert perimeters(torch.tensor([[2, 0], [5, 1]]), 2**40).tolist() == [12]


@pytest.mark.parametrize("name", ["hilbert", "row-major", "zigzag", "striped"])
@pytest.mark.parametrize("query", ["0,0", "2,3", "5,8"])
def test_what_the_query_sees_is_the_definition(name, query):
    view = make_view("6x9", "8,24,54", "1,2,6", query)
    order = make_order(name, view, None)
    places = order.places.tolist()
    row, column = map(int, query.split(","))
    place = places[9 * row + column]
    head = place % 54 % 6  # the head that reads it in the branch of the largest rate
    expected = []
    for j in places:
        met = [oracle.met_in((w, r), oracle.offset("interleaved", head, 6, r), place, j) for w, r in view.pattern.branches]
        expected.append(met.index(True) if any(met) else -1)
    assert view.seen(order).flatten().tolist() == expected
    assert view.seen(order)[row, column] == 0  # itself, in the dense branch


def test_the_picture_has_the_curve_the_segments_and_the_query():
    view = make_view("8x8", "16", "1", "7,0")
    figure = pictures.order_picture({"hilbert": make_order("hilbert", view, None)}, view)
    curve, segments, seen = figure.axes
    lines = curve.collections[0].get_segments()
    assert len(lines) == 63
    # Neighbours on the curve are neighbours on the grid, and x is the column.
    assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1.0 for a, b in lines)
    first, second = (divmod(int(p), 8) for p in Hilbert.grid(8, 8).positions[:2])
    assert lines[0].tolist() == [[first[1] + 0.5, first[0] + 0.5], [second[1] + 0.5, second[0] + 0.5]]
    # Four segments of 4 x 4: two borders of 8 cells; the query's is the last one, at the lower left.
    assert len(segments.collections[0].get_segments()) == 16
    assert segments.patches[0].get_bbox().bounds == (0.0, 4.0, 4.0, 4.0)
    shown = torch.as_tensor(seen.images[0].get_array().data)
    assert (shown == 0).nonzero().tolist() == [[i, j] for i in range(4, 8) for j in range(4)]
    assert (shown == -1).sum() == 48
    assert [panel.lines[-1].get_xydata().tolist() for panel in (segments, seen)] == [[[0.5, 7.5]]] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "64x"], ["--grid must be HEIGHTxWIDTH", "'64x'"]),
        (["--grid", "0x3"], ["sides from 1 to 256", "'0x3'"]),
        (["--grid", "-4x4"], ["HEIGHTxWIDTH", "'-4x4'"]),
        (["--grid", "4x4x4"], ["HEIGHTxWIDTH", "'4x4x4'"]),
        (["--grid", "64x257"], ["sides from 1 to 256", "'64x257'"]),
        (["--grid", "64x99999999999999999999"], ["HEIGHTxWIDTH"]),
        (["--order", "peano"], ["hilbert, row-major, zigzag, striped", "'peano'"]),
        (["--query", "64,0"], ["ROW,COLUMN", "rows from 0 to 63", "'64,0'"]),
        (["--query", "3"], ["ROW,COLUMN", "'3'"]),
        (["--query", "a,b"], ["--query", "integers", "'a,b'"]),
        (["--segment-lengths", "64"], ["give both or neither"]),
        (["--dilation-rates", "1"], ["give both or neither"]),
        (["--segment-lengths", "64,", "--dilation-rates", "1"], ["--segment-lengths must be integers", "'64,'"]),
        (["--segment-lengths", "64,128", "--dilation-rates", "1"], ["same number", "(64, 128)", "(1,)"]),
        (["--segment-lengths", "0", "--dilation-rates", "1"], ["must be positive"]),
        (["--ranks", 4], ["--ranks belongs to the orders zigzag and striped", "--order hilbert"]),
        (["--order", "zigzag", "--ranks", 0], ["--ranks must be from 1 to", "4096, got 0"]),
        (["--order", "striped", "--grid", "2x3", "--ranks", 7], ["--ranks must be from 1 to", "6, got 7"]),
    ],
)
def test_bad_options(tmp_path, arguments, said):
    result = run("--plot", tmp_path / "x.png", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert all(part in result.stderr for part in said), result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x.txt", "x.gif", "picture.png.bak", ".png"])
def test_names_that_are_not_pictures(tmp_path, name, monkeypatch):
    monkeypatch.setattr("dilated_attention_pytorch.cli.show_order.make_view", None)  # it would be called later
    result = run("--plot", tmp_path / name)
    assert result.exit_code == 2
    assert result.stdout == ""
    said = f"--plot must be a picture, a name that ends in .png, .svg, .pdf, got '{tmp_path / name}'"
    assert result.stderr == said + "\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "start"), [("x.PNG", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")])
def test_formats_of_pictures(tmp_path, name, start):
    assert run("--grid", "4x4", "--plot", tmp_path / name).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_comes_before_the_table(tmp_path):
    result = run("--grid", "4x4", "--plot", tmp_path / "x.png")
    assert result.stdout.splitlines()[0] == f"Picture: {tmp_path / 'x.png'}"


def touching(segments: torch.Tensor) -> set[tuple[int, int]]:
    height, width = segments.shape
    cells = segments.tolist()
    pairs = [(cells[y][x], cells[y][x + 1]) for y in range(height) for x in range(width - 1)]
    pairs += [(cells[y][x], cells[y + 1][x]) for y in range(height - 1) for x in range(width)]
    return {(a, b) for a, b in pairs if a != b}


@pytest.mark.parametrize("name", ["hilbert", "row-major", "zigzag", "striped"])
@pytest.mark.parametrize("grid", ["64x64", "16x48", "1x60", "60x1", "5x9"])
def test_segments_that_touch_have_different_colours(name, grid):
    view = make_view(grid, "24,96", "1,4", None)
    segments = view.segments(make_order(name, view, None))
    colours = pictures.segment_colours(segments, 8)
    of_segment = {}
    for segment, colour in zip(segments.flatten().tolist(), colours.flatten().tolist(), strict=True):
        assert of_segment.setdefault(segment, colour) == colour
    assert all(of_segment[a] != of_segment[b] for a, b in touching(segments))
    assert set(of_segment.values()) <= set(range(8))


def test_segments_of_a_striped_order_differ_within_a_band():
    """Four ranks take turns cell by cell: their segments are next to one another, and none has the colour of another."""
    view = make_view("64x64", None, None, None)
    segments = view.segments(make_order("striped", view, 4))
    colours = pictures.segment_colours(segments, 8)
    assert len(set(segments[0, :4].tolist())) == 4
    assert len(set(colours[0, :4].tolist())) == 4


@pytest.mark.parametrize("grid", ["4x256", "1x256", "256x3", "256x1", "2x7", "64x64", "30x64"])
def test_panels_of_thin_grids_are_legible(grid):
    view = make_view(grid, None, None, None)
    figure = pictures.order_picture({name: make_order(name, view, None) for name in ("hilbert", "row-major")}, view)
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert min(box.width, box.height) / figure.dpi > 0.7
        assert max(box.width, box.height) / figure.dpi > 2
    square = figure.axes[0].get_window_extent()
    is_square = abs(square.width / view.width / (square.height / view.height) - 1) < 0.02
    assert is_square == ("drawn" not in figure.get_suptitle())


def test_a_folder_where_the_file_should_be(tmp_path):
    result = run("--grid", "4x4", "--plot", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} could not be written: Is a directory; choose another file.\n" in result.stderr


def test_show_without_matplotlib_is_one_sentence(tmp_path):
    program = "import sys; sys.modules['matplotlib'] = None; from dilated_attention_command import main; main()"
    result = programs.run(program, "show", "order", "--plot", tmp_path / "x.png", folder=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "needs matplotlib" in result.stderr
    assert result.stderr.count("\n") == 1
