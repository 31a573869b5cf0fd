from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture
def own_ranks() -> Iterator[Pool]:
    """Processes of its own for a test that stalls or ends some of them."""
    with Pool() as pool:
        yield pool
