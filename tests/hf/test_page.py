"""The table of docs/transformers.md. The code of the page runs in tests/cli/test_documentation.py."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from dilated_attention_pytorch import Dilated, DilatedKVCache

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()


def test_the_table_of_cache_sizes():
    rows = re.findall(r"\| `(\[.*?\])`, `(\[.*?\])` \| ([\d.]+) GiB \| (\d+) GiB \| (\d+) GiB \| (\d+) GiB", PAGE)
    assert len(rows) == 3
    for segments, rates, size, *dynamic in rows:
        pattern = Dilated(*(list(map(int, x.strip("[]").split(","))) for x in (segments, rates)))
        nbytes = 32 * DilatedKVCache.max_nbytes(pattern, 1, 8, 128, dtype=torch.bfloat16)
        assert f"{nbytes / 2**30:.2f}" == size
        assert [int(x) for x in dynamic] == [32 * n * 8 * 128 * 4 // 2**30 for n in (32_768, 262_144, 1_048_576)]
