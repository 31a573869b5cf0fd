"""docs/seeds.md is what its script makes of the committed figures, and its checks can fail."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import oracle
from dilated_attention_pytorch import Dilated

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from seeds import conditions, measure, page, probes_exact, probes_memory, probes_use, tables  # noqa: E402
from seeds.claims import REPORTS  # noqa: E402
from seeds.outcome import Outcome, of_error, of_ratio, together  # noqa: E402

RESULTS = json.loads((ROOT / "benchmarks" / "results" / "seeds.json").read_text())
PROBES = {probe.__name__ for module in (probes_exact, probes_memory, probes_use) for probe in module.PROBES}
CONDITIONS = {condition.__name__: condition for condition in conditions.CONDITIONS}


def test_the_page_is_made_of_the_results():
    assert (ROOT / "docs" / "seeds.md").read_text() == page.page(RESULTS)


def test_every_statement_has_a_check_that_ran():
    assert set(RESULTS["probes"]) == PROBES
    assert set(RESULTS["tables"]) == set(tables.TABLES)
    checks = {claim.check for report in REPORTS for claim in report.claims}
    assert checks == PROBES | set(CONDITIONS)
    assert sum(len(report.claims) for report in REPORTS) == sum(
        line.endswith(("| pass |", "| **fail** |", "| not here |")) and "| `" in line
        for line in page.page(RESULTS).splitlines()
    )


def poisoned(change) -> dict:
    """The tables with other figures in every place of every row."""
    changed = copy.deepcopy(RESULTS["tables"])
    for rows in changed.values():
        for row in rows:
            for place, found in row["places"].items():
                change(row["name"], place, found)
    return changed


def wrong(name, place, found):
    found["error"] = 1e-2


def not_finite(name, place, found):
    found["finite"] = False


def same_everywhere(name, place, found):
    """Ranks that help nothing, and need as much memory as one device."""
    found["bytes"], found["busiest_s"], found["together_s"] = 1000, [1.0], [1.0]
    if place in ("two ranks", "two samples"):
        found["bytes"], found["busiest_s"], found["together_s"] = 1400, [3.0], [6.0]


def slow_dilation(name, place, found):
    """As the last report: dilation takes longer, on ranks most of all, and memory grows with the square of the length."""
    dilated = "dilation 2" in name or name.startswith(("[", "Hilbert"))
    found["busiest_s"] = [(175.0 if place == "two ranks" else 2.0) if dilated else 1.0]
    found["bytes"] = int(name.split(",")[0]) ** 2 * 1000 if name[0].isdigit() and "," in name else 1000


def slow_samples(name, place, found):
    found["busiest_s"] = [4.0 if place == "two samples" else 1.0]


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_can_fail(name):
    changes = (wrong, not_finite, same_everywhere, slow_dilation, slow_samples)
    outcomes = [CONDITIONS[name](poisoned(change)) for change in changes]
    assert any(x.passed is False for x in outcomes), [x.shown for x in outcomes]


def test_limits():
    assert of_error(1e-7, "").passed
    assert not of_error(1e-5, "").passed
    assert not of_error(math.nan, "").passed
    assert not of_error(math.inf, "").passed
    assert of_ratio(2.0, "", least=1.5, most=2.5).passed
    assert not of_ratio(1.0, "", least=1.5).passed
    assert not of_ratio(3.0, "", most=2.5).passed
    assert not of_ratio(math.nan, "", most=2.5).passed
    yes, no, unknown = (Outcome(x, "") for x in (True, False, None))
    assert together(yes, unknown).passed is None
    assert together(yes, unknown, no).passed is False


CASE = measure.Case(40, Dilated([12, 40], [1, 3]), heads=3, head_dim=8, batch=2)


@pytest.mark.parametrize("causal", [False, True])
def test_definition_against_the_oracle(causal):
    case = measure.Case(23, Dilated([5, 16], [2, 3]), heads=3, head_dim=4, batch=2, is_causal=causal)
    expected = oracle.attention(*measure.inputs(case, 0, 1), case.pattern, is_causal=causal)
    for actual, right in zip(measure.definition(case), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


def test_wrong_results_are_found():
    """A wrong number, NaN, a missing row, and a result that is not finite elsewhere."""
    threads = torch.get_num_threads()
    try:
        right = measure.memory_and_rows(None, CASE)
        assert of_error(measure.errors_of(CASE, [right])["error"], "").passed
        for value in (1.0, math.nan):
            broken = copy.deepcopy(right)
            broken["rows"][39][1, 2, 7] += value
            assert not of_error(measure.errors_of(CASE, [broken])["error"], "").passed
        missing = copy.deepcopy(right)
        del missing["rows"][20]
        assert measure.errors_of(CASE, [missing])["error"] == math.inf
        assert not measure.errors_of(CASE, [right | {"finite": False}])["finite"]
        assert probes_exact.worst([{"error": 0.0, "finite": False}]) == math.inf
    finally:
        torch.set_num_threads(threads)
