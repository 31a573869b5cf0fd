from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

import ranks

# Triton reads this when a kernel is defined; on a GPU its kernels are compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        import fast_interpreter  # noqa: F401

# Processes side by side, each with a thread per core, spend their time waiting for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

collect_ignore = ["support"]  # helpers; imported by the tests

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """Tests marked gpu are run by ``make test-gpu``; without a device they say so.

    Those that compile kernels come first: half a minute each, they would be what one process does while others are done.
    """
    items.sort(key=lambda item: item.path.name != "test_compiled.py")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
