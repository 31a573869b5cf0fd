"""docs/seeds.md from the measured figures. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seeds.claims import REPORTS, Claim, Report
from seeds.conditions import CONDITIONS, speedup
from seeds.measure import LIMIT
from seeds.outcome import Outcome

MARKS = {True: "pass", False: "**fail**", None: "not here"}
TITLES = {
    "baseline": "Single GPU performance",
    "hilbert": "Hilbert order",
    "ring": "Successful multi-GPU runs",
    "bucketed": "Basic multi-GPU functionality, bucketed",
    "data_parallel": "DataParallel",
    "blocks": "Distributed block-sparse attention, memory scaling",
    "longest": "Maximum sequence lengths, single GPU, fp32",
    "two_devices": "Distributed test results",
    "far": "Theoretical and actual scaling: 64K, 237K and 475K tokens",
}
_PLACES = {
    "one": "1 thread",
    "two threads": "2 threads",
    "two ranks": "2 ranks",
    "two samples": "2 ranks, halves of the batch",
}

_INTRO = """# The seed reports, reproduced

Five reports of an earlier project describe attempts at dilated attention on two GPUs. This page has every table of
those reports beside the same measured here, and a check of every claim, problem, demand, expectation and
recommendation. `make seeds-report` measures, and writes [`seeds.json`](../benchmarks/results/seeds.json) and this
page. `python benchmarks/seeds_report.py --check NAME` runs one check. The names are in the tables.

## How to read the tables

* The reports ran on two NVIDIA GTX 1080. This run had {cores} CPU cores ({processor}), PyTorch {torch} and gloo, in
  float32. **Times of different machines say nothing about each other. Compare the ratios**: two ranks over one
  device, memory per rank over memory of one device, and the speed-up by dilation.
* The load of the machine was {load_first:.1f} at the start and {load_last:.1f} at the end of this run, with {cores} cores.
  A load above the number of cores means that other programs ran too, which makes wall times and their ratios worse. The
  tables have medians of wall times. **Checks of speed compare processor times of the busiest process**, which other
  programs hardly change. Waiting for messages is not in them. Configurations of a table take turns.
* A rank has one thread. One device is measured with one thread, for the ratios, and with two threads, which use the
  same cores as two ranks. Two threads or ranks on two hyperthreads of one core gain less than a factor of 2.
* *GB* is what a forward needs on a device or rank: its rows of q, k and v, and everything that the call allocates,
  with the result.
* The reports do not name heads, head sizes and most patterns. The tables have our choice. `w` are segment lengths and
  `r` dilation rates. Memory of 0.078 GB at 8,192 tokens and 0.276 GB at 32,768 suggests 8 heads of 64 float32
  numbers, which is used where time permits. At 200,000 tokens and more there are 2 heads of 16 numbers, because one
  dense segment of 237,568 tokens takes minutes on CPU cores.
* *Error* is the largest absolute difference to the definition, computed in float64, over {rows} or more rows with all
  heads, at the ends of the sequence and of the shards and between them. It fails above {limit:.1e}, and NaN anywhere
  fails. Inputs are normal numbers.
* Tables and checks can be measured again one by one (`python benchmarks/seeds_report.py NAME --out FILE`). The load is
  that of the last run of everything.
* *not here* is what needs hardware that this machine does not have.

## Summary

| report | pass | fail | not here |
| --- | ---: | ---: | ---: |
{summary}

{failed}
"""

_NOTES = """## Notes

* The reports expect that every GPU keeps the whole query. Here a rank keeps `1 / N` of the query, keys and values,
  and the result of its rows is complete, because a row of the result needs one row of the query.
* The recommended loop of report 2 adds up results that are normalised one by one. This is not attention. Parts must
  be weighted by the exponential of their lse, as in the check `scheme_of_the_report`.
* With one segment, dilation 2 leaves a quarter of the work. A speed-up above 4 means that the call without dilation
  was slower than its work. Patterns of several segments gain more, because their segments are shorter.
* An order changes which positions meet, and not how many. It makes segments of an image compact; it does not make the
  call faster.
* `nn.DataParallel` divides a batch over GPUs. Without GPUs it calls the module. The counterpart here is half of a
  batch on each of two ranks. A batch of one sample cannot be divided, so the last row of that table divides the rows
  of the sequence.
* `transport="auto"` exchanges heads instead of rows for one dense segment: fewer bytes, and one more shard of memory.
  The table of distributed test results is about memory per rank, and has `transport="ring"`.
* [migration.md](migration.md) has the names of the reports and what replaces them.
"""


def outcomes(results: dict[str, Any]) -> dict[str, tuple[Outcome, str]]:
    """By name of a check: what it found, and how. Probes have run, conditions are computed from the tables."""
    found = {name: (Outcome(x["passed"], x["shown"]), x["how"]) for name, x in results["probes"].items()}
    return found | {check.__name__: (check(results["tables"]), check.__doc__ or "") for check in CONDITIONS}


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    found, machine = outcomes(results), results["machine"]
    counts = [[found[c.check][0].passed for c in report.claims] for report in REPORTS]
    summary = [
        f"| {number}. {report.title} | " + " | ".join(str(states.count(state)) for state in (True, False, None)) + " |"
        for number, (report, states) in enumerate(zip(REPORTS, counts, strict=True), 1)
    ]
    missed = {c.check: c for report in REPORTS for c in report.claims if found[c.check][0].passed is False}
    failed = "No row fails." if not missed else "Rows that fail:\n\n" + "\n".join(
        f"* {claim.text} (`{check}`): {found[check][0].shown}." for check, claim in missed.items()
    )  # fmt: skip
    measured = [x for table in results["tables"].values() for row in table for x in row["places"].items()]
    rows = min(x["rows_checked"] for place, x in measured if place != "two samples")
    intro = _INTRO.format(**machine, limit=LIMIT, rows=rows, summary="\n".join(summary), failed=failed)
    parts = [
        intro,
        *("\n".join(_report(number, report, results, found)) for number, report in enumerate(REPORTS, 1)),
        _NOTES,
    ]
    return "\n".join(parts)


def _report(number: int, report: Report, results: dict[str, Any], found: dict[str, tuple[Outcome, str]]) -> Iterator[str]:
    yield f"## Report {number}: {report.title}\n\n{report.date}, `{report.file}`.\n"
    for name in report.tables:
        yield from _table(name, results["tables"][name])
    if "two_devices" in report.tables:
        yield from _speedups(results["tables"])
    yield f"### Statements of report {number}\n"
    yield "| kind | statement | how it was checked | here | |\n| --- | --- | --- | --- | --- |"
    for claim in report.claims:
        yield _claim(claim, *found[claim.check])
    yield ""


def _claim(claim: Claim, outcome: Outcome, how: str) -> str:
    return f"| {claim.kind} | {claim.text} | `{claim.check}`: {how} | {outcome.shown} | {MARKS[outcome.passed]} |"


def _table(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    places = [p for p in _PLACES if any(p in row["places"] for row in rows)]
    compares = {"one", "two ranks"} <= set(places) or {"two threads", "two ranks"} <= set(places)
    ratios = ["time, two over one: report", "here", "processor time", "memory, two over one: report", "here"] * compares
    columns = ["setting", "heads x size", "pattern", "report", *(_PLACES[p] for p in places), *ratios, "error"]
    yield f"### {TITLES[name]}\n" if name != "hilbert" else f"### {TITLES[name]}: {rows[0]['shape'][1]:,} tokens\n"
    yield "| " + " | ".join(columns) + " |\n| --- | --- | --- | --- |" + " ---: |" * (len(columns) - 4)
    for row in rows:
        batch, tokens, heads, size = row["shape"]
        cells = [row["name"], f"{heads} x {size}", row["pattern"], _old(row["old"]) or "-"]
        cells += [_cell(row["places"].get(p), batch * tokens) for p in places]
        if compares:
            cells += _ratios(row)
        worst = max(x["error"] if x["finite"] else float("inf") for x in row["places"].values())
        yield "| " + " | ".join([*cells, f"{worst:.0e}"]) + " |"
    yield ""


def _old(old: dict[str, Any]) -> str:
    """The figures of the report in one cell."""
    units = {
        "ms": "ms",
        "gb": "GB",
        "milliseconds": "ms",
        "gigabytes": "GB",
        "tokens_per_second": "tokens/s",
        "speedup": "x",
    }
    parts: dict[str, list[str]] = {"": [], "one": [], "two": []}
    for key, value in old.items():
        device, _, unit = key.rpartition("_") if key.startswith(("one_", "two_")) else ("", "", key)
        if isinstance(value, str):
            parts[device].append(value)
        elif value is not None:
            number = f"{value:,}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"
            parts[device].append(f"{number} {units[unit]}")
    return "; ".join(f"{device}: {', '.join(x)}".removeprefix(": ") for device, x in parts.items() if x)


def _cell(found: dict[str, Any] | None, tokens: int) -> str:
    if found is None:
        return "-"
    rate = f"{tokens / found['median_s']:,.0f} tokens/s"
    seconds, size = found["median_s"], found["bytes"] / 1e9
    time = f"{1e3 * seconds:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
    return f"{time}, {rate}, {size:.3f} GB" if size >= 0.001 else f"{time}, {rate}, {1e6 * size:,.0f} kB"


def _ratios(row: dict[str, Any]) -> list[str]:
    """Time and memory of two ranks over one device: of the report, and here with as many threads per process."""
    old, places = row["old"], row["places"]
    one, two = places.get("one") or places["two threads"], places["two ranks"]
    note = "" if "one" in places else " (2 threads)"

    def of(key: str) -> str:
        first, second = old.get(f"one_{key}"), old.get(f"two_{key}")
        return f"{second / first:.2f}" if first and second else "-"

    wall, busiest = two["median_s"] / one["median_s"], min(two["busiest_s"]) / min(one["busiest_s"])
    return [of("ms"), f"{wall:.2f}{note}", f"{busiest:.2f}{note}", of("gb"), f"{two['bytes'] / one['bytes']:.2f}"]


def _speedups(tables: dict[str, Any]) -> Iterator[str]:
    """The ratios that the last report is about."""
    yield "### Speed-up by dilation 2, one segment, by processor time\n"
    yield "| where | report | here |\n| --- | ---: | ---: |"
    longest = speedup(tables, "longest", ("one segment, no", "two threads"), ("one segment, dil", "two threads"))
    yield f"| one device, 237,568 tokens | 5.8 | {longest:.2f} |"
    for tokens, old in (("8,192", "1 / 175"), ("16,384", "1 / 145")):
        for place, report in (("one", "-"), ("two ranks", old)):
            ratio = speedup(tables, "two_devices", (f"{tokens}, no", place), (f"{tokens}, dil", place))
            where = "one device, 1 thread" if place == "one" else "two ranks"
            yield f"| {where}, {tokens} tokens | {report} | {ratio:.2f} |"
    yield ""
