from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 8,000 bytes for training runs."""
    from training_cases import write_text  # imports torch.distributed, which most tests do not need

    return write_text(tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread, so that a run repeats every digit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
