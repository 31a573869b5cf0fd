"""What a check found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seeds.measure import LIMIT


@dataclass(frozen=True)
class Outcome:
    """Whether a requirement holds, and the figures that show it. ``passed`` is None if this machine cannot check it."""

    passed: bool | None
    shown: str


def of_error(error: float, what: str, limit: float = LIMIT) -> Outcome:
    """A largest error against its limit. NaN and infinity fail.

    >>> of_error(1e-7, "2 ranks").passed, of_error(1e-3, "2 ranks").passed, of_error(float("nan"), "2 ranks").passed
    (True, False, False)
    """
    return Outcome(math.isfinite(error) and error <= limit, f"{what}: largest error {error:.0e}")


def of_ratio(ratio: float, what: str, *, least: float = 0.0, most: float = math.inf) -> Outcome:
    """A ratio against its bounds.

    >>> of_ratio(1.9, "speed", least=1.5).passed, of_ratio(1.2, "speed", least=1.5).passed
    (True, False)
    """
    bounds = [f"at least {least:g}"] * (least > 0.0) + [f"at most {most:g}"] * math.isfinite(most)
    return Outcome(least <= ratio <= most, f"{what} {ratio:.2f}" + (f" ({', '.join(bounds)})" if bounds else ""))


def together(*outcomes: Outcome) -> Outcome:
    """All of them: fails if one fails."""
    states = [x.passed for x in outcomes]
    passed = False if False in states else None if None in states else True
    return Outcome(passed, "; ".join(x.shown for x in outcomes))
