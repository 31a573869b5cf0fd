"""Tests of the transformers integration. They are left out where transformers is not installed."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
