from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import ranks

# Triton reads this when a kernel is defined; on a GPU its kernels are compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        import fast_interpreter

        fast_interpreter.install()

# Processes side by side, each with a thread per core, spend their time waiting for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

collect_ignore = ["support"]  # helpers; imported by the tests

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")

UNIT = Path(__file__).parent / "unit"
SOURCE = Path(__file__).parents[1] / "src"


def pytest_collection_modifyitems(config, items):
    """Add the marks that follow from a test's folder, and leave out what was not asked for."""
    for item in items:
        if item.path.is_relative_to(SOURCE) or (item.path.is_relative_to(UNIT) and not item.get_closest_marker("slow")):
            item.add_marker("quick")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    on_request = {name for name in ("machine_code", "hf") if name not in config.option.markexpr}
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in on_request)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    # What takes longest comes first, so that no process works on it while the others are done.
    items.sort(key=lambda item: item.path.name not in ("test_compiled.py", "test_machine_code.py"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with ranks.fresh():
        yield


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[ranks.Pool]:
    with ranks.Pool() as pool:
        yield pool


@pytest.fixture
def on_ranks(rank_pool: ranks.Pool) -> Callable[..., None]:
    """Run a function in every rank of a group, in processes that live as long as the test run. See support/ranks.py."""
    return rank_pool.run
