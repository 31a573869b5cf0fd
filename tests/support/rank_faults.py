"""How ranks fail in tests: three ranks, of which the last stalls or dies."""

from __future__ import annotations

import os
import time

from ranks import LIMIT_S

WORLD = 3
TIMEOUT_S = 2  # of a group in which a rank stalls
LONG_S = 2 * LIMIT_S  # of a group in which a rank dies: noticed by this timeout, it is noticed too late


def stall() -> None:
    """Sleep until the others have given up."""
    time.sleep(TIMEOUT_S + 3)


def die() -> None:
    os._exit(0)
