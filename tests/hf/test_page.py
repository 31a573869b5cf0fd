"""The table of docs/transformers.md, and the benchmark and the example. Code of pages: tests/cli/test_documentation.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import programs
from dilated_attention_pytorch import Dilated, DilatedKVCache

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transformers.md").read_text()


def test_the_table_of_cache_sizes():
    rows = re.findall(r"\| `(\[.*?\])`, `(\[.*?\])` \| ([\d.]+) GiB \| (\d+) GiB \| (\d+) GiB \| (\d+) GiB", PAGE)
    assert len(rows) == 3
    for segments, rates, size, *dynamic in rows:
        pattern = Dilated(*(list(map(int, x.strip("[]").split(","))) for x in (segments, rates)))
        nbytes = 32 * DilatedKVCache.max_nbytes(pattern, 1, 8, 128, dtype=torch.bfloat16)
        assert f"{nbytes / 2**30:.2f}" == size
        assert [int(x) for x in dynamic] == [32 * n * 8 * 128 * 4 // 2**30 for n in (32_768, 262_144, 1_048_576)]


def run_file(path, arguments, folder):
    result = programs.run(
        programs.FILE, str(ROOT / path), *arguments.split(), folder=folder, modules=programs.WITH_TRANSFORMERS
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.hf
def test_the_benchmark_in_small(tmp_path):
    options = "--tiny --device cpu --tokens 600 --chunk 250 --layers 1 --rounds 1 --steps 2 --out report.json"
    run_file("benchmarks/transformers_gpu.py", options, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert max(report["errors"]["one segment"], report["errors"]["cache"]) < 1e-5
    assert report["errors"]["dilated against dense (no error)"] > 0.1
    assert report["dense"]["cache_bytes"] == 606 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, head size, bytes
    assert report["dilated"]["cache_bytes"] == report["dilated in chunks"]["cache_bytes"] > 0


@pytest.mark.hf
def test_the_example_in_small(tmp_path):
    path = "examples/hf_finetune.py"
    assert len((ROOT / path).read_text().splitlines()) < 100
    out = run_file(path, "--short 32 --long 128 --steps 2 --long-steps 2 --width 64 --layers 1 --batch 2", tmp_path)
    assert "'segments': [32, 128]" in out
