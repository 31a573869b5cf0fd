"""The tables and the claims of five reports of an earlier project, in their settings, on this machine.

    python benchmarks/seeds_report.py [NAME ...] --out FILE --page FILE    (make seeds-report)
    python benchmarks/seeds_report.py --docs --page FILE
    python benchmarks/seeds_report.py --check NAME

Without names, all tables and all checks run, in about 12 minutes on two idle cores. Named tables and checks (``checks``
are all checks) replace their part of FILE. ``--docs`` measures nothing and makes the page of the committed
results/seeds.json. ``--check`` runs one check and prints what it finds; a check of figures reads the committed results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from seeds import probes_exact, probes_memory, probes_use
from seeds.conditions import CONDITIONS
from seeds.measure import Ranks
from seeds.page import outcomes, page
from seeds.tables import TABLES, measure

import dilated_attention_pytorch

RESULTS = Path(__file__).parent / "results" / "seeds.json"
PROBES = {probe.__name__: probe for module in (probes_exact, probes_memory, probes_use) for probe in module.PROBES}


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run_all(names: list[str], results: dict[str, Any], repeats: int, shrink: int) -> None:
    """Measure the named tables and run the checks, and put them into the results."""
    start = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", file=sys.stderr, flush=True)

    results.setdefault("tables", {})
    machine = {"cores": os.cpu_count(), "processor": processor(), "load_first": os.getloadavg()[0]}
    with Ranks() as ranks:
        found = results.setdefault("probes", {})
        for name, probe in PROBES.items():
            if "checks" in names or name in names:
                report(f"check {name}")
                outcome = probe(ranks)
                found[name] = {"passed": outcome.passed, "shown": outcome.shown, "how": probe.__doc__}
        for name in TABLES:
            if name in names:
                results["tables"][name] = measure(name, ranks, report, repeats=repeats, shrink=shrink)
    machine |= {"load_last": os.getloadavg()[0], "torch": torch.__version__, "python": platform.python_version()}
    if set(names) >= {"checks", *TABLES} or "machine" not in results:
        results["machine"] = machine
    results["version"] = dilated_attention_pytorch.__version__
    report("done")


def check(name: str) -> int:
    """Run one check; 1 if it fails."""
    if name in PROBES:
        with Ranks() as ranks:
            outcome, how = PROBES[name](ranks), PROBES[name].__doc__
    else:
        outcome, how = outcomes(json.loads(RESULTS.read_text()))[name]
    print(f"{name}: {how}\n{ {True: 'pass', False: 'fail', None: 'not here'}[outcome.passed] }: {outcome.shown}")
    return int(outcome.passed is False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*TABLES, "checks", *PROBES, []], default=[], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each configuration that take less than 3 s")
    parser.add_argument("--shrink", type=int, default=1, help="divide the tokens by this power of two, to try the script")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    parser.add_argument("--docs", action="store_true", help="measure nothing, make the page of the committed results")
    parser.add_argument("--check", metavar="NAME", help="run this check")
    options = parser.parse_args()
    if options.check:
        names = [*PROBES, *(condition.__name__ for condition in CONDITIONS)]
        if options.check not in names:
            parser.error(f"--check must be one of {', '.join(names)}, got {options.check!r}")
        return check(options.check)
    if options.docs:
        results = json.loads(RESULTS.read_text())
    else:
        results = json.loads(options.out.read_text()) if options.out and options.out.exists() and options.names else {}
        run_all(options.names or [*TABLES, "checks"], results, options.repeats, options.shrink)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    file = options.page
    if file and set(results["tables"]) == set(TABLES) and set(results["probes"]) == set(PROBES):
        file.write_text(page(results))
    elif not options.out and not file:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
