"""How ranks fail in tests: three ranks, of which the last stalls or dies."""

from __future__ import annotations

import os
import time

from dilated_attention_pytorch.distributed.watch import PERIOD_S
from ranks import LIMIT_S

WORLD = 3
TIMEOUT_S = 2  # of a group in which a rank stalls
LONG_S = 2 * LIMIT_S  # of a group in which a rank dies: noticed by this timeout, it is noticed too late


def stall() -> None:
    """Sleep until the others have given up."""
    time.sleep(TIMEOUT_S + 3)


def answer_and_die() -> None:
    """Die when the others have waited for so long that this rank has answered their questions."""
    time.sleep(6 * PERIOD_S)
    die()


def die() -> None:
    os._exit(0)
