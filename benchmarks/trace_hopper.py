"""Where a program of the Hopper forward kernel spends its cycles: clock readings at marked places, written by one program.

    PYTHONPATH=src python3 benchmarks/trace_hopper.py [--out FILE]

The marks are put into a copy of the kernel's source (MARKS: a line of it, and the mark to be written before it), so the
kernel itself stays free of them. They cost about 7 % of its time. Printed: mean cycles between consecutive marks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
from gpu import GPU, PAPER, milliseconds

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.hopper import forward, run
from dilated_attention_pytorch.problem import Problem

READINGS = 6000  # per warp group
PROGRAM = 5
# The first words of a line of the kernel -> a mark before it, in the order of the source.
MARKS = [
    ("mbarrier.wait(facts_full.index(slot)", "item begins"),
    ("first = known(facts, slot, FIRST)", "facts there"),
    ("mbarrier.wait(q_full.index(which)", "queries waited for"),
    ("q = hold(q_smem.index(which)", "queries there"),
    ("if HELD:  # not before", "first scores there"),
    ("mbarrier.arrive(k_empty.index(stage)", None),  # of the first block
    ("for block in range(1, blocks):", "first weights there"),
    ("last, last_phase = stage, phase", "block begins"),
    ("s, q = wait_held(1, s, q, HELD)", "products asked for"),
    ("mbarrier.arrive(k_empty.index(stage)", "scores there"),
    ("acc, last_p = warpgroup_mma_wait(0", "weights there"),
    ("mbarrier.arrive(v_empty.index(last)", "values there"),
    ("inside = (known(facts, slot, FIRST)", "last product asked for"),
    ("acc, p = warpgroup_mma_wait(0", "first part asked for"),
    ("mbarrier.arrive(v_empty.index(stage)", "last product there"),
    ("place = known(facts, slot, PLACE)", "parts added"),
    ("mbarrier.arrive(done.index(slot)", "result stored"),
]
HELPER = f"""
@gluon.jit
def mark(TRACE, at, code: gl.constexpr):
    time = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [at], dtype=gl.int64, is_pure=False, pack=1)
    more = at % {READINGS} < {READINGS - 1}
    gl.store(TRACE + at, time * 32 + code, mask=(gl.program_id(0) == {PROGRAM}) & more)
    return at + gl.where(more, 1, 0)
"""


def marked_source() -> str:
    """The kernel's source with the marks in it."""
    lines = Path(forward.__file__).read_text().splitlines()
    marks = list(enumerate(MARKS))
    result = []
    for line in lines:
        for n, (words, name) in marks:
            if line.strip().startswith(words):
                if name:
                    result.append(line[: len(line) - len(line.lstrip())] + f"reading = mark(TRACE, reading, {n})")
                marks.remove((n, (words, name)))
                break
        result.append(line)
    if marks:
        raise SystemExit(f"lines that are no longer in the kernel: {[words for _, (words, _) in marks]}")
    source = "\n".join(result) + "\n"
    for old, new in (
        ("\n\n@gluon.jit\ndef _load_item(", f"\n{HELPER}\n\n@gluon.jit\ndef _load_item("),
        ("    which: gl.constexpr, results", "    which: gl.constexpr, TRACE, results"),
        ("    which: gl.constexpr, m2", "    which: gl.constexpr, TRACE, reading, m2"),
        (
            "stage, counter = attend_item(\n            which, m2",
            "stage, counter, reading = attend_item(\n            which, TRACE, reading, m2",
        ),
        ("    return acc, p, m2, total, stage, counter\n", "    return acc, p, m2, total, stage, counter, reading\n"),
        (
            "    number = 0\n    for _ in",
            f"    number = 0\n    reading = gl.program_id(0) * 0 + which * {READINGS}\n    for _ in",
        ),
        ("    HELD: gl.constexpr,  # q stays in registers\n", "    HELD: gl.constexpr,\n    TRACE,\n"),
        ("(gl.constexpr(0), results", "(gl.constexpr(0), TRACE, results"),
        ("(gl.constexpr(1), results", "(gl.constexpr(1), TRACE, results"),
    ):
        if old not in source:
            raise SystemExit(f"not in the kernel's source any more: {old!r}")
        source = source.replace(old, new, 1)
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(marked_source())
        file.flush()
        spec = importlib.util.spec_from_file_location("marked_forward", file.name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
        for head_dim in (64, 128):
            for name, pattern in (("one branch", Dilated([2048], [1])), ("paper", PAPER)):
                report["rows"].append(trace(module.forward_kernel, name, pattern, head_dim))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def trace(kernel, name: str, pattern: Dilated, head_dim: int, n: int = 2**17, heads: int = 12) -> dict:
    """Cycles of the last launch of a forward, which writes the result."""
    readings = torch.zeros(2 * READINGS, dtype=torch.int64, device=GPU)

    class Traced:
        def __getitem__(self, grid):
            def call(*a, **k) -> None:  # nothing is returned, so nothing is called without TRACE
                kernel[grid](*a, TRACE=readings, **k)

            return call

    run.forward_kernel = Traced()
    x = [torch.randn(1, n, heads, head_dim, device=GPU, dtype=torch.bfloat16) for _ in range(3)]
    problem = Problem(pattern, False, 1, n, n, heads, heads, None, None)
    ms = milliseconds(lambda: run.forward(problem, *x, scale=head_dim**-0.5), 5)
    torch.cuda.synchronize()
    steps: dict[str, list[int]] = defaultdict(list)
    period = []
    for group in readings.view(2, READINGS).tolist():
        events = [(value >> 5, MARKS[value & 31][1]) for value in group if value]
        for (t0, a), (t1, b) in pairwise(events):
            steps[f"{a} -> {b}"].append(t1 - t0)
        starts = [t for t, a in events if a == "item begins"]
        period += [b - a for a, b in pairwise(starts)]
    mean = {key: round(sum(x) / len(x)) for key, x in steps.items()}
    cycles_per_item = round(sum(period) / len(period))
    print(f"{name}, D = {head_dim}: {ms:.2f} ms, {cycles_per_item} cycles per item")
    for key, cycles in mean.items():
        print(f"   {cycles:6d}  x {len(steps[key]):5d}  {key}")
    return {"pattern": name, "head_dim": head_dim, "ms": ms, "cycles_per_item": cycles_per_item, "steps": mean}


if __name__ == "__main__":
    main()
