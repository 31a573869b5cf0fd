"""The commands ``show pattern``, ``segments``, ``blocks`` and ``ring``, against enumeration by the definition."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

import block_oracle
from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.cli.app import app
from dilated_attention_pytorch.workbench.ring_view import RingSizes, RingView

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def figures(*arguments: object) -> dict:
    result = run(*arguments, "--quiet", "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def met(branches, i, j, head, *, causal=False):
    """How often two positions meet with interleaved offsets, by the definition."""
    count = sum(i // w == j // w and i % w % r == head % r and j % w % r == head % r for w, r in branches)
    return 0 if causal and j > i else count


def test_the_table_of_the_readme():
    """The README shows the first 8 queries of two heads."""
    block = re.search(r"```text\n((?:[0-9. ]+\n){8})```", (ROOT / "README.md").read_text())[1]
    lines = run("pattern").stdout.splitlines()
    assert lines[0].split() == ["head", "0", "head", "1"]
    assert lines[1:9] == [line.rstrip() for line in block.splitlines()]


@pytest.mark.parametrize("causal", [False, True])
def test_multiplicity_by_enumeration(causal):
    options = ["--tokens", 11, "--heads", 3, "--segment-lengths", "3,7", "--dilation-rates", "1,3"]
    found = figures("pattern", *options, *["--causal"] * causal)["multiplicity"]
    branches = [(3, 1), (7, 3)]
    assert found == [[[met(branches, i, j, h, causal=causal) for j in range(11)] for i in range(11)] for h in range(3)]


def test_rows_of_heads_by_enumeration():
    options = ["--tokens", 11, "--heads", 3, "--segment-lengths", "3,7", "--dilation-rates", "1,3"]
    found = figures("segments", *options)
    rows = [[[i for i in range(11) if i % w % r == h % r] for h in range(3)] for w, r in [(3, 1), (7, 3)]]
    assert found["rows_by_branch_and_head"] == rows
    assert found["offsets_by_branch_and_head"] == [[0, 0, 0], [0, 1, 2]]
    assert "  head 1   .#..#..|.#.." in run("segments", *options).stdout.splitlines()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["local_window", "global_local", "hierarchical"])
def test_blocks_by_the_rule(kind, causal):
    found = figures(
        "blocks", "--pattern", kind, "--tokens", 330, "--block-size", 16, "--ratio", 0.3, *["--causal"] * causal
    )
    blocks = {"global_blocks": 64 // 16, "window": 512 // 16}  # the defaults of the configuration
    expected = [sorted(block_oracle.choose(kind, "0.3", q, 21, causal, **blocks)) for q in range(21)]
    assert found["key_blocks"] == expected
    assert found["computed"] == sum(map(len, expected))
    assert found["visible"] == (21 * 22 // 2 if causal else 21 * 21)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks_compute_every_pair_once(layout, causal):
    """The pairs of all steps are those of the definition, and rows travel as keys and values of 2 bytes."""
    branches = [(8, 1), (30, 3)]
    found = figures(
        "ring", "--tokens", 61, "--ranks", 3, "--heads", 4, "--key-heads", 2, "--head-dim", 8, "--layout", layout,
        "--segment-lengths", "8,30", "--dilation-rates", "1,3", "--bucket-size", 4, *["--causal"] * causal,
    )  # fmt: skip
    pairs = sum(met(branches, i, j, h, causal=causal) for h in range(2) for i in range(61) for j in range(61))
    assert sum(step["pairs"] for rank in found["ranks"] for step in rank["steps"]) == 2 * pairs
    assert [rank["rows"] for rank in found["ranks"]] == [21, 20, 20]
    sent = {}
    for number, rank in enumerate(found["ranks"]):
        for tick, step in enumerate(rank["steps"]):
            if step["target"] is not None:
                sent[number, step["target"], tick] = step["sent_bytes"]
    received = {
        (step["source"], number, tick): step["received_bytes"]
        for number, rank in enumerate(found["ranks"])
        for tick, step in enumerate(rank["steps"])
        if step["source"] is not None
    }
    assert sent == received  # both ends agree on each message
    assert all(size <= 4 * 2 * 8 * 2 * 2 for size in sent.values())  # 4 rows, 2 heads of 8, key and value, 2 bytes


def test_a_timeline_can_show_uneven_work():
    branches = Dilated([64], [1])
    even = RingView.of(branches, RingSizes(64, 1, 1, 8), 4, layout="zigzag", is_causal=True)
    uneven = RingView.of(branches, RingSizes(64, 1, 1, 8), 4, is_causal=True)
    assert even.balance() == 1.0
    # Rank p of 16 rows has 16 * 17 / 2 + 256 p pairs: the mean is 520, and the last rank has 904.
    assert uneven.balance() == pytest.approx(520 / 904)


@pytest.mark.parametrize("what", ["pattern", "segments", "blocks", "ring"])
def test_pictures(tmp_path, what):
    result = run(what, "--quiet", "--plot", tmp_path / "x.png")
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_what_is_too_large_for_text():
    assert "too many for text; draw them with --plot FILE" in run("pattern", "--tokens", 65).stdout
    assert "too many for text; draw them with --plot FILE" in run("blocks", "--tokens", "64k").stdout
    assert "too many for text; draw them with --plot FILE" in run("ring", "--ranks", 17).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pattern", "--heads", 0], "heads must be from 1 to 64, got 0"),
        (["pattern", "--tokens", 1024, "--heads", 9], "tokens times heads must be from 1 to 8,192, got 9,216"),
        (["pattern", "--tokens", 2000], "tokens must be from 1 to 1,024, got 2,000"),
        (["pattern", "--offsets", "x"], "--offsets must be integers separated by commas, such as 2048,8192, got 'x'"),
        (["segments", "--segment-lengths", "4"], "need the same number of entries, at least one: got 1 segment lengths"),
        (["blocks", "--pattern", "adaptive"], "an adaptive pattern chooses its blocks from queries and keys"),
        (["blocks", "--tokens", "ten"], "--tokens must be a number such as 65536, 64k, 10M, 1B or 64Ki, got 'ten'"),
        (["blocks", "--segment-lengths", "4"], "describe branches pairwise: give both or neither"),
        (["ring", "--layout", "striped"], "layout must be one of 'contiguous', 'zigzag', got 'striped'"),
        (["ring", "--heads", 6, "--key-heads", 4], "heads must be a multiple of key heads, got 6 and 4"),
        (["ring", "--bucket-size", 0], "bucket_size must be from 1 to"),
        (["ring", "--plot", "x.txt"], "--plot must be a picture, a name that ends in .png, .svg, .pdf, got 'x.txt'"),
    ],
)  # fmt: skip
def test_bad_options(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_a_folder_that_does_not_exist(tmp_path):
    result = run("pattern", "--json", tmp_path / "none" / "x.json")  # folders are not made
    assert result.exit_code == 1
    path = tmp_path / "none" / "x.json"
    assert result.stderr == f"{path} could not be written: No such file or directory; choose another file.\n"


def test_too_many_heads_of_a_ring():
    result = run("ring", "--heads", "1000000000")
    assert (result.exit_code, result.stderr) == (2, "heads must be from 1 to 1,024, got 1,000,000,000\n")


def test_many_ranks_show_progress():
    result = run("ring", "--ranks", "20", "--tokens", "40", "--segment-lengths", "8", "--dilation-rates", "1")
    assert "100%  rank 20, of 20" in result.stderr
    assert "%  rank" not in run("ring", "--ranks", "4", "--tokens", "40").stderr


def test_interrupt_over_many_ranks(tmp_path, monkeypatch):
    """Each rank of many takes time, so that Ctrl-C comes during one."""
    from dilated_attention_pytorch.workbench import ring_view

    monkeypatch.setattr(ring_view, "dilated_plan", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run("ring", "--ranks", "20", "--json", tmp_path / "ring.json")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted: nothing was written."
    assert not list(tmp_path.iterdir())
