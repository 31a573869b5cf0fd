"""Calls off the headline settings, beside dense cuDNN attention on tiles of the same length: where speed is lost.

    PYTHONPATH=src python3 benchmarks/cliffs.py [--only 'tiles,documents'] [--seconds 0.3] [--fa4] [--out FILE]

A row is a call. ``forward`` and ``backward`` are its rate on the pairs that it needs, over the rate of dense cuDNN
attention with the same head size, type and causality on tiles of ``dense`` rows that fill the GPU. Both take turns in the
same run, and calls are queued. A forward has 4 D FLOPs per pair, a backward 2.5 times as many. ``aim`` is what the rates
should reach. Where the host limits a call, its milliseconds say more.

Errors are largest relative differences by norm: of sampled rows of ``out`` from the definition in float64, and of dq, dk
and dv from the stock operators of the same call (``sdpa``, or ``eager`` where that cannot serve it).

``--fa4`` adds FlashAttention-4 to the turns of tiles of 2048 and 16,384 rows and of block lists. ``over FA4`` is our rate
over its rate on the same pairs. ``fa4_error`` and ``fa4_gradients_error`` are its differences from ours, by norm.
``fa4.py`` says what it computes and where its packages have to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fa4
import gpu
import torch
from torch import Tensor

from dilated_attention_pytorch import BlockSparse, Dilated, Hilbert, attention, attention_weights
from dilated_attention_pytorch.plan.tiles import compile_plan

ROUNDS = 3
DENSE_TOKENS = 2**17
FOURS = Dilated([1024, 2048, 4096], [1, 2, 4])
BLOCK = 128


@dataclass(frozen=True)
class Case:
    """A call, the dense tiles that it is compared with, and the rates that it should reach."""

    name: str
    pattern: Dilated | BlockSparse | Callable[[], BlockSparse]
    shape: tuple[int, int, int, int]  # batch, tokens, heads, head size
    dense: int
    causal: bool = False
    aim: tuple[float, float] = (0.95, 0.95)
    documents: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> tuple[int, ...]:
        return self.documents or (self.shape[1],) * self.shape[0]

    def flops(self) -> int:
        """Of a forward, on the pairs that are needed."""
        _, tokens, heads, head_dim = self.shape
        if isinstance(self.pattern, Dilated):
            plans = (compile_plan(self.pattern, n, heads, is_causal=self.causal) for n in self.sequences)
            return sum(plan.flops(head_dim) for plan in plans)
        return 4 * head_dim * heads * int(random_blocks(tokens).sum()) * BLOCK**2

    def run(self, q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
        # A function makes a new pattern for every call, as a training loop does.
        pattern = self.pattern if isinstance(self.pattern, Dilated | BlockSparse) else self.pattern()
        return attention(q, k, v, pattern, is_causal=self.causal, backend=backend, **self.options)


def random_blocks(tokens: int) -> Tensor:
    blocks = tokens // BLOCK
    random = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.1
    return random | torch.eye(blocks, dtype=torch.bool)


def document_lengths() -> tuple[int, ...]:
    lengths = torch.randint(200, 9001, (60,), generator=torch.Generator().manual_seed(0))
    return tuple(lengths.tolist())


def cases() -> list[Case]:
    """All calls of the table."""
    found = []
    for d, heads in ((64, 16), (128, 8)):
        for causal in (True, False):
            kind = f"D={d} {'causal' if causal else 'full'}"
            for tile in (128, 256, 512, 1024, 2048, 16384):
                aim = (1.0, 1.0) if tile >= 2048 else (0.95, 0.95)
                found.append(Case(f"tiles {tile} {kind}", Dilated([tile], [1]), (1, 2**18, heads, d), tile, causal, aim))
    mask = random_blocks(2**16).cuda()
    for d in (64, 128):
        found.append(Case(f"blocks D={d}", BlockSparse.custom(mask, block_size=BLOCK), (1, 2**16, 16, d), 2048))
    found.append(
        Case("blocks made anew D=64", lambda: BlockSparse.custom(mask, block_size=BLOCK), (1, 2**16, 16, 64), 2048)
    )
    odd = Dilated([1500, 6000, 24000], [1, 3, 9])
    found.append(Case("odd causal D=128", odd, (1, 200_000, 8, 128), 2048, True, (0.93, 0.93)))
    for tokens in (2**17, 2**14):
        found.append(Case(f"gigapath causal {tokens}", gpu.GIGAPATH, (1, tokens, 16, 48), 2048, True, (1.0, 1.0)))
    lengths = document_lengths()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    shape = (1, sum(lengths), 12, 64)
    packed = {"cu_seqlens": bounds}
    found.append(Case("documents causal", FOURS, shape, 2048, True, (0.78, 0.78), documents=lengths, options=packed))
    found.append(Case("batch of 16 x 4096 causal", FOURS, (16, 4096, 12, 64), 1024, True, (0.80, 0.85)))
    short = Dilated([128, 256, 512], [1, 2, 4])
    found.append(Case("batch of 64 x 512", short, (64, 512, 12, 64), 128, False, (0.0, 0.0)))
    paper = (1, 2**18, 12, 64)
    found.append(Case("dropout", gpu.PAPER, paper, 2048, False, (0.6, 0.6), options={"dropout_p": 0.1, "seed": 1}))
    detached = {"mixing_gradient": "detached"}
    found.append(Case("detached", gpu.PAPER, paper, 2048, False, (1.0, 0.68), options=detached))
    ordered = {"order": Hilbert.grid(256, 256, device=gpu.GPU)}
    nested = Dilated([2048, 8192, 32768], [1, 4, 16])
    found.append(Case("order causal", nested, (1, 2**16, 12, 64), 2048, True, (0.65, 0.65), options=ordered))
    return found


def dense_calls(case: Case) -> tuple[float, dict[str, Callable[[], Any]]]:
    """The FLOPs of a forward of the dense tiles, and its calls."""
    _, _, heads, head_dim = case.shape
    batch = max(1, DENSE_TOKENS // case.dense)
    inputs = gpu.tensors(gpu.Setting(gpu.FLAT, case.dense, heads, head_dim, case.dense), batch)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            found = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=case.causal
            )
        return found.transpose(1, 2)

    flops = batch * heads * head_dim * 4 * case.dense**2 / (2 if case.causal else 1)
    return flops, calls_of(dense, inputs)


def calls_of(run: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    out = run(*inputs)
    dout = torch.randn_like(out)
    both = lambda: torch.autograd.grad(run(*inputs), inputs, dout)  # noqa: E731
    backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    return {"forward": torch.no_grad()(partial(run, *inputs)), "backward": backward, "both": both}


def errors(case: Case, inputs: list[Tensor]) -> dict[str, float]:
    """Of sampled rows against float64, and of gradients against stock operators."""
    dout = torch.randn_like(inputs[0])
    grads = torch.autograd.grad(case.run(*inputs), inputs, dout)
    backend = "eager" if "order" in case.options or "dropout_p" in case.options else "sdpa"
    stock = torch.autograd.grad(case.run(*inputs, backend=backend), inputs, dout)
    found = {"gradients": max(relative(x, y) for x, y in zip(grads, stock, strict=True))}
    if isinstance(case.pattern, Dilated) and not case.options:
        n = case.shape[1]
        rows = sorted({0, n // 3, n - 1})
        out = case.run(*inputs).detach()[:1]
        q, k, v = (x.detach()[:1].double() for x in inputs)
        weights = attention_weights(q, k, case.pattern, rows, is_causal=case.causal)
        found["out"] = relative(out[:, rows], torch.einsum("bhrm,bmhd->brhd", weights, v))
    else:
        with torch.no_grad():
            found["out"] = relative(case.run(*inputs), case.run(*inputs, backend=backend))
    return found


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def fa4_calls(case: Case, inputs: list[Tensor], row: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The calls of FlashAttention-4 on the same work. Its differences from ours are written to the row."""
    if isinstance(case.pattern, Dilated):
        run, theirs = fa4.over_tiles(inputs, case.dense, case.causal)
    else:
        run, theirs = fa4.over_blocks(inputs, random_blocks(case.shape[1]).to(gpu.GPU), BLOCK)
    ours, other = case.run(*inputs), run(*theirs)
    dout = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, inputs, dout)
    others = torch.autograd.grad(other, theirs, dout.view_as(other))
    row["fa4_error"] = relative(other.detach().reshape_as(ours), ours.detach())
    row["fa4_gradients_error"] = max(relative(x.reshape_as(y), y) for x, y in zip(others, grads, strict=True))
    return calls_of(run, theirs)


def measure(case: Case, seconds: float, with_fa4: bool) -> dict[str, Any]:
    inputs = [torch.randn(case.shape, device=gpu.GPU, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    row: dict[str, Any] = {"call": case.name, "dense": case.dense, "aim": case.aim, "errors": errors(case, inputs)}
    dense_flops, dense = dense_calls(case)
    methods = {"dense": dense, "ours": calls_of(case.run, inputs)}
    if with_fa4 and case.name.startswith(fa4.ROWS):
        methods["fa4"] = fa4_calls(case, inputs, row)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for kind, calls in methods.items():
            for way, call in calls.items():
                if kind == "ours" or way != "both":
                    times.setdefault(f"{kind}_{way}", []).append(gpu.steady_milliseconds(call, seconds))
    row |= {f"{name}_ms": statistics.median(x) for name, x in times.items()}
    for way, factor in (("forward", 1.0), ("backward", 2.5)):
        row[f"{way}_tflops"] = factor * case.flops() / row[f"ours_{way}_ms"] / 1e9
        row[f"dense_{way}_tflops"] = factor * dense_flops / row[f"dense_{way}_ms"] / 1e9
        row[way] = row[f"{way}_tflops"] / row[f"dense_{way}_tflops"]
        if "fa4" in methods:
            row[f"fa4_{way}_tflops"] = factor * case.flops() / row[f"fa4_{way}_ms"] / 1e9
            row[f"over_fa4_{way}"] = row[f"{way}_tflops"] / row[f"fa4_{way}_tflops"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of the names of calls, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fa4", action="store_true", help="compare with FlashAttention-4 too, where it applies")
    options = parser.parse_args()
    versions = {"flash_attn_4": fa4.version()} if options.fa4 else {}
    torch.manual_seed(0)
    chosen = [x for x in cases() if x.name.startswith(tuple(options.only.split(",")))]
    command = f"PYTHONPATH=src python3 benchmarks/cliffs.py --only '{options.only}' --seconds {options.seconds:g}"
    command += " --fa4" if options.fa4 else ""
    report: dict[str, Any] = {"command": command, **gpu.versions(), **versions, "rows": []}
    head = "call                        forward  aim   backward  aim   forward ms  both ms  error out  gradients"
    print(head + ("  over FA4  backward" if options.fa4 else ""))
    for case in chosen:
        torch.cuda.empty_cache()
        row = measure(case, options.seconds, options.fa4)
        report["rows"].append(row)
        forward, backward = row["aim"]
        over = [f"{row[x]:.2f}" if x in row else "-" for x in ("over_fa4_forward", "over_fa4_backward")]
        print(
            f"{row['call']:26s}  {row['forward']:7.2f}  {forward:4.2f}  {row['backward']:8.2f}  {backward:4.2f}"
            f"  {row['ours_forward_ms']:10.3f}  {row['ours_both_ms']:7.3f}  {row['errors']['out']:9.1e}"
            f"  {row['errors']['gradients']:9.1e}" + ("  {:>8s}  {:>8s}".format(*over) if options.fa4 else ""),
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
