"""Block-sparse attention on one GPU against FlexAttention and dense cuDNN attention: time, rate, memory, error.

    PYTHONPATH=src python3 benchmarks/blocks_gpu.py [--only 'random 0.1 D=64,window D=64'] [--backends auto] [--out FILE]

The table has one line per direction. ``x flex`` is the time of compiled FlexAttention with the same blocks over ours.
``--flex`` chooses what the ``BlockMask`` says:

* ``full``: all blocks are full and there is no mask function.
* ``made``: what ``create_block_mask`` makes. All blocks are full, and the mask function stays for partial blocks, of
  which there are none.
* ``listed``: no block is full, and the mask function is always true.
* ``masked``: no block is full, and the mask function reads the mask of blocks.

``x rate`` is our rate on the computed blocks over the rate of dense cuDNN attention. ``x dense`` is the time of dense
attention of the same length over ours. Errors are relative differences, by norms, from the path of stock operators
(``sdpa``) on the same tensors: of out for the forward, the largest of dq, dk and dv for the backward. ``theirs`` is the
error of FlexAttention, which shows that it computes the same. ``GiB`` is the extra memory of a forward, ``needed`` that
of out, lse and lists.

The methods of a setting take turns, ``ROUNDS`` times, and calls are queued, so that no method pays for its Python.
About one second after an idle time (compilation) the clock of the GPU falls by a tenth for about 0.3 s. A method that
is measured then is 2 to 3 % slower. Therefore a turn lasts one second, after one second that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import gpu
import torch
import torch._functorch.config
from torch.nn.attention import flex_attention

from dilated_attention_pytorch import BlockSparse, SparsePatternConfig, attention
from dilated_attention_pytorch.backends.gpu.block_tables import BlockTable, find_block_tables
from dilated_attention_pytorch.call import make_call
from dilated_attention_pytorch.measure import peak_extra_bytes
from dilated_attention_pytorch.operators import problem_and_options

BLOCK = 128
ROUNDS = 2
TILE = 2048  # of the dense attention whose rate is compared with
Runs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    n: int
    heads: int
    head_dim: int
    density: float = 0.0  # of a random mask, the same for all heads
    window: int = 0  # tokens, in place of the mask
    flex: bool = False  # compare with FlexAttention
    dense: bool = False  # compare with dense attention of the same length

    def mask(self) -> torch.Tensor:
        """Random blocks and the diagonal, (query blocks, key blocks)."""
        blocks = self.n // BLOCK
        random = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < self.density
        return (random | torch.eye(blocks, dtype=torch.bool)).to(gpu.GPU)

    def pattern(self) -> BlockSparse:
        if self.window:
            return BlockSparse.from_config(SparsePatternConfig("local_window", self.window / self.n, block_size=BLOCK))
        return BlockSparse.custom(self.mask(), block_size=BLOCK)

    def tensors(self) -> list[torch.Tensor]:
        shape = (1, self.n, self.heads, self.head_dim)
        return [torch.randn(shape, device=gpu.GPU, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


SETTINGS = {
    f"random {density} D={d}": Setting(2**16, 16, d, density, flex=True) for d in (64, 128) for density in (0.05, 0.1, 0.25)
}
SETTINGS |= {f"window D={d}": Setting(2**20, 1024 // d, d, window=2048) for d in (64, 128)}
SETTINGS |= {f"random 128k D={d}": Setting(2**17, 16, d, 0.1, dense=True) for d in (64, 128)}


@cache
def compiled_flex(_kind: tuple[int, int, str]) -> Callable:
    """One compilation for all masks of a kind: heads, head size, and what FlexAttention is told of blocks."""
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@cache
def held_mask(blocks: int) -> tuple[torch.Tensor, Callable]:
    """A mask whose content changes and the function that reads it: one compilation for all masks."""
    held = torch.zeros(blocks, blocks, dtype=torch.bool, device=gpu.GPU)
    return held, lambda b, h, i, j: held[i // BLOCK, j // BLOCK]


def flex_call(s: Setting, kind: str) -> Runs:
    """FlexAttention over the same blocks.

    ``"full"``: it knows that they are, and evaluates no mask. ``"made"``: it knows, and has the mask for others.
    ``"listed"``: it does not, and evaluates one that is always true. ``"masked"``: it evaluates the mask itself.
    """
    mask = s.mask()
    counts = mask.sum(-1, dtype=torch.int32)[None, None]
    indices = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None]
    lists: tuple[torch.Tensor, ...] = (counts, indices)
    function = None
    if kind in ("full", "made"):
        lists = (torch.zeros_like(counts), torch.zeros_like(indices), *lists)
    if kind in ("made", "masked"):
        held, function = held_mask(len(mask))
        held.copy_(mask)
    block_mask = flex_attention.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=function)
    run = compiled_flex((s.heads, s.head_dim, kind))
    return lambda *x: run(*(y.transpose(1, 2) for y in x), block_mask=block_mask).transpose(1, 2)


def dense_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def in_turns(runs: dict[str, tuple[Runs, list[torch.Tensor]]]) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and backward of each method with its inputs, means over rounds."""
    calls: dict[tuple[str, int], Callable] = {}
    for name, (run, inputs) in runs.items():
        out = run(*inputs)
        dout = torch.randn_like(out)
        calls[name, 0] = torch.no_grad()(partial(run, *inputs))
        calls[name, 1] = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    for call in calls.values():  # whatever has to be compiled, then until the clock has settled
        call()
    for call in calls.values():
        gpu.steady_milliseconds(call, 0.3)
    times: dict[tuple[str, int], list[float]] = {x: [] for x in calls}
    for _ in range(ROUNDS):
        for way in range(2):
            for name in runs:
                times[name, way].append(gpu.steady_milliseconds(calls[name, way], 1.0))
    return {name: (statistics.mean(times[name, 0]), statistics.mean(times[name, 1])) for name in runs}


def with_grads(run: Runs, inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def tables_of(pattern: BlockSparse, inputs: list[torch.Tensor]) -> tuple[BlockTable, BlockTable]:
    """What kernels read, by query and by key."""
    call, (q, k, _) = make_call(*(x.detach() for x in inputs), pattern)
    problem, options = problem_and_options(call, q, k)
    tables = find_block_tables(problem, q.device, options.chosen)
    return tables.for_queries(options.chosen), tables.for_keys(options.chosen)


def lists_of(pattern: BlockSparse, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """Entries of the lists (of one head), and bytes of both tables that kernels read."""
    by_query, by_key = tables_of(pattern, inputs)
    tables = (*by_query.tensors, *by_key.tensors)
    return int(by_query.counts.sum()), sum(x.numel() * x.element_size() for x in tables)


def errors_of(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """By norms, relative."""
    every = zip(("out", "dq", "dk", "dv"), actual, expected, strict=True)
    return {f"{x}_error": float((a - e).float().norm() / e.float().norm()) for x, a, e in every}


def measure(name: str, s: Setting, backends: list[str], flex: list[str]) -> list[dict]:
    began = time.perf_counter()
    inputs, pattern = s.tensors(), s.pattern()
    dout = torch.randn_like(inputs[0])
    entries, list_bytes = lists_of(pattern, inputs)
    flops = 4 * s.head_dim * s.heads * entries * BLOCK**2
    expected = with_grads(lambda *x: attention(*x, pattern, backend="sdpa"), inputs, dout)
    theirs: dict[str, float] = {}
    others: dict[str, Runs] = {}
    for kind in flex if s.flex else []:
        label = "flex" if kind == "full" else f"{kind}_flex"
        others[label] = flex_call(s, kind)
        theirs |= {f"{label}_{x}": e for x, e in errors_of(with_grads(others[label], inputs, dout), expected).items()}
    if s.dense:
        others["dense"] = dense_call
    ours = {b: partial(attention, pattern=pattern, backend=b) for b in backends}
    tiles = gpu.tensors(gpu.Setting(gpu.FLAT, s.n, s.heads, s.head_dim, TILE), 2**17 // TILE, TILE)
    measured = in_turns({x: (run, inputs) for x, run in (others | ours).items()} | {"tiles": (dense_call, tiles)})
    tile_flops = 4 * s.head_dim * s.heads * 2**17 * TILE
    rows = []
    for backend, run in ours.items():
        actual = with_grads(run, inputs, dout)
        with torch.no_grad():
            extra = peak_extra_bytes(lambda run=run: run(*inputs), gpu.GPU)
        needed = inputs[0].numel() * 2 + s.heads * s.n * 4 + list_bytes
        row = {"setting": name, "backend": backend, "blocks": entries, "forward_extra_gib": extra / 2**30}
        row["out_lse_lists_gib"] = needed / 2**30
        for i, (way, factor) in enumerate((("forward", 1), ("backward", 2.5))):
            ms = measured[backend][i]
            tflops, rate = factor * flops / ms / 1e9, factor * tile_flops / measured["tiles"][i] / 1e9
            row |= {f"{way}_ms": ms, f"{way}_tflops": tflops, f"{way}_x_rate": tflops / rate}
            row |= {f"{way}_dense_tflops": rate}
            for other in others:
                row |= {f"{way}_{other}_ms": measured[other][i], f"{way}_x_{other}": measured[other][i] / ms}
        rows.append(row | errors_of(actual, expected) | theirs | {"seconds": time.perf_counter() - began})
    return rows


FLEX = ("full", "made", "listed", "masked")
COMPARED = {"x flex": "flex"} | {f"x {kind}": f"{kind}_flex" for kind in FLEX[1:]} | {"x rate": "rate", "x dense": "dense"}
WIDTHS = "{:18s} {:8s} {:8s} {:>8s} {:>8s}" + " {:>8s}" * len(COMPARED) + " {:>7s} {:>7s} {:>6s} {:>6s} {:>4s}"
HEADER = WIDTHS.format(
    "setting", "backend", "way", "ms", "TFLOP/s", *COMPARED, "error", "theirs", "GiB", "needed", "s"
)  # fmt: skip


def print_row(row: dict) -> None:
    """Two lines of the table."""
    kinds = [x for x in COMPARED.values() if f"{x}_out_error" in row]
    for way, names in (("forward", ["out"]), ("backward", ["dq", "dk", "dv"])):
        ratios = [f"{row[f'{way}_x_{x}']:.2f}" if f"{way}_x_{x}" in row else "" for x in COMPARED.values()]
        ours, *theirs = (max(row[f"{kind}{x}_error"] for x in names) for kind in ("", *(f"{x}_" for x in kinds)))
        memory = [f"{row[x]:.3f}" if way == "forward" else "" for x in ("forward_extra_gib", "out_lse_lists_gib")]
        numbers = f"{row[f'{way}_ms']:.3f}", f"{row[f'{way}_tflops']:.0f}"
        error = f"{ours:.0e}", f"{max(theirs):.0e}" if theirs else ""
        seconds = f"{row['seconds']:.0f}"
        print(WIDTHS.format(row["setting"], row["backend"], way, *numbers, *ratios, *error, *memory, seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings, separated by commas")
    parser.add_argument("--backends", default="auto")
    parser.add_argument("--flex", default="full,masked", help=f"what FlexAttention is told: {', '.join(FLEX)}")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    unknown = set(options.flex.split(",")) - set(FLEX)
    if unknown:
        parser.error(f"--flex takes {', '.join(FLEX)}, separated by commas, got {', '.join(sorted(unknown))}")
    names = options.only.split(",") if options.only else list(SETTINGS)
    torch.manual_seed(0)
    torch._functorch.config.donated_buffer = False  # FlexAttention's backward is called again and again
    chosen = f"--only '{','.join(names)}' --backends {options.backends} --flex {options.flex}"
    report = {
        "command": f"PYTHONPATH=src python3 benchmarks/blocks_gpu.py {chosen}",
        **gpu.versions(),
        "rows": [],
    }
    print(HEADER, flush=True)
    for name in names:
        torch.cuda.empty_cache()
        for row in measure(name, SETTINGS[name], options.backends.split(","), options.flex.split(",")):
            report["rows"].append(row)
            print_row(row)
        if options.out:  # after each setting: what was measured is there even if a later one fails
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
