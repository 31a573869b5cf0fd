"""The tiles of a message through the fused kernels: exactness on ranks that share one GPU, and rates without communication.

    PYTHONPATH=src python3 benchmarks/messages_gpu.py [--skip-check] [--skip-rates] [--out FILE]

``check`` compares 2 and 4 ranks over gloo with one device: errors against float64, in units of the error of the same
backend on one device. ``rates`` times one message of a rank that holds ``tokens`` rows: all query rows of the rank with
``rows`` packed keys of each head. ``one device`` is the same backend on the same tiles: as many rows in segments of
``rows`` keys, or the block lists of the message. ``stock`` is the message through PyTorch's operators. Rates are TFLOP/s
on the pairs of the tiles, median of seven runs in turns after one that is not counted: 4 D operations for a pair forward,
10 D backward. What a call computes once for all messages (delta) is not counted on either side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dilated_attention_pytorch
from dilated_attention_pytorch import BlockSparse, Dilated, Sharding, SparsePatternConfig, attention
from dilated_attention_pytorch.backends import find, stock_kernel
from dilated_attention_pytorch.backends.request import Request
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.executor import RankCall
from dilated_attention_pytorch.distributed.own_rows import FusedStep, OwnRows, received
from dilated_attention_pytorch.distributed.rank_plans import dilated_plan, static_block_plan
from dilated_attention_pytorch.execute import loop
from dilated_attention_pytorch.execute.loop import RowGradients
from dilated_attention_pytorch.plan.problem import BlockRule, Problem
from dilated_attention_pytorch.values import Inputs, Options, Saved

GPU = torch.device("cuda")
TOKENS = 2600  # of the comparison with float64
PAPER = Dilated([64, 256, 1024, 4096], [1, 4, 16, 64])
DILATED = {"paper": PAPER, **{f"w = N, r = {r}": Dilated([4096], [r]) for r in (1, 2, 4)}}
WINDOW = BlockSparse.from_config(SparsePatternConfig("local_window", 0.3, block_size=128))


class Case(NamedTuple):
    """A ring to be compared with one device."""

    name: str
    pattern: Dilated | BlockSparse
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    backend: str = "hopper"
    causal: bool = False
    layout: str = "contiguous"
    bucket: int | None = 256
    at_once: bool | None = None  # all gradients by one kernel; None chooses as always


def cases() -> dict[str, list[Case]]:
    """By the kernels that they need, which are compiled in processes of their own at the same time."""
    one = [Case(name, DILATED[name]) for name in DILATED]
    zigzag = [Case(name, DILATED[name], causal=True, layout="zigzag") for name in DILATED]
    return {
        "apart": [*one, Case("paper", PAPER, causal=True), *zigzag],
        "at once": [
            Case("paper, at once", PAPER, at_once=True),
            Case("paper, at once", PAPER, causal=True, at_once=True),
            Case("w = N, r = 2, at once", DILATED["w = N, r = 2"], causal=True, layout="zigzag", at_once=True),
            Case("paper, at once", PAPER, head_dim=128, at_once=True),
        ],
        "128": [Case("paper, one message", PAPER, head_dim=128, bucket=None)],
        "float32": [Case(name, DILATED[name], torch.float32, backend="triton", causal=name == "paper") for name in DILATED],
        "blocks": [
            Case("window", WINDOW, bucket=None),
            Case("window", WINDOW, causal=True, bucket=None),
            Case("window, float32", WINDOW, torch.float32, backend="triton", causal=True, bucket=None),
            Case("window, shards cut blocks", WINDOW, backend="auto", causal=True, layout="zigzag", bucket=None),
        ],
    }


def results(pattern: Dilated | BlockSparse, tensors: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
    *inputs, dout = (x.clone().requires_grad_() for x in tensors)
    out = attention(*inputs, pattern, **options)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, dout))]


def check(rank: int, world: int, folder: str, kinds: list[str]) -> None:
    """Compare the cases of these kinds."""
    file, timeout = f"file://{folder}/{world}{kinds[0]}", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world, timeout=timeout)
    from dilated_attention_pytorch.backends.hopper import configs, run

    chosen = run.joint_config
    uneven = [TOKENS // world + (7 if p == 0 else 0) - (7 if p == world - 1 else 0) for p in range(world)]
    whole_blocks = [2560 // world] * (world - 1) + [2560 // world + 40]
    worst = 0.0
    for case in (case for kind in kinds for case in cases()[kind]):
        generator = torch.Generator(GPU).manual_seed(0)
        lengths = whole_blocks if isinstance(case.pattern, BlockSparse) else uneven
        shape = (2, sum(lengths), 4, case.head_dim)
        whole = [torch.randn(shape, generator=generator, device=GPU, dtype=case.dtype) for _ in range(4)]
        chunks = Shards.of(lengths, case.layout).chunks[rank]
        own = torch.cat([torch.arange(x.start, x.stop, device=GPU) for x in chunks])
        run.joint_config = (lambda _, d: configs.configs(d).joint) if case.at_once else chosen
        options = {"is_causal": case.causal}
        exact = results(case.pattern, [x.double() for x in whole], backend="reference", **options)
        options["backend"] = case.backend
        one = results(case.pattern, whole, **options)
        options["group"] = Sharding(dist.group.WORLD, case.layout, case.bucket, transport="ring")
        ring, again = (results(case.pattern, [x[:, own] for x in whole], **options) for _ in range(2))
        errors = []
        for a, m, e in zip(ring, one, exact, strict=True):
            errors.append(float((a - e[:, own]).norm()) / float((m[:, own] - e[:, own]).norm()))
        same = all(torch.equal(a, b) for a, b in zip(ring, again, strict=True))
        gathered = [torch.zeros(5) for _ in range(world)]
        dist.all_gather(gathered, torch.tensor([*errors, float(same)]))
        every = torch.stack(gathered)
        worst = max(worst, float(every[:, :4].max()))
        if rank == 0:
            shown = " ".join(f"{x:.2f}" for x in every[:, :4].max(0).values.tolist())
            kind = f"{str(case.dtype)[6:]}, D={case.head_dim}, {'causal' if case.causal else 'full'}, {case.layout}"
            repeat = "" if every[:, 4].min() == 1.0 else ", DIFFERENT BITS IN TWO RUNS"
            mark = "" if every[:, :4].max() < 2.0 else "  <-- TOO LARGE"
            print(f"{world} ranks, {case.name}, {kind}: {shown}{repeat}{mark}", flush=True)
        run.joint_config = chosen
    dist.destroy_process_group()
    assert worst < 2.0, f"an error is {worst:.2f} times that of one device"


def check_all() -> bool:
    """All cases on 2 ranks, which compile what they need at the same time, then on 4."""
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        for world, together in ((2, [[kind] for kind in cases()]), (4, [list(cases())])):
            running = [mp.spawn(check, (world, folder, kinds), nprocs=world, join=False) for kinds in together]
            for one in running:
                try:
                    while not one.join():
                        pass
                except mp.ProcessRaisedException as error:
                    print(error, flush=True)
                    passed = False
    return passed


Launch = Callable[[], object]


def once_ms(launch: Launch) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # launches are queued behind it
    start.record()
    launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def medians_ms(*launches: Launch, rounds: int = 7) -> list[float]:
    """The median of each, in turns: the clock of the GPU falls by several per cent while it gets warm."""
    for launch in launches:
        launch()
    times = [[once_ms(launch) for launch in launches] for _ in range(rounds)]
    return [statistics.median(own) for own in zip(*times, strict=True)]


class MessageCase:
    """A message of a rank with its buffers, and the same pairs on one device."""

    has_stock = True

    def __init__(self, rows: int, rate: int, head_dim: int, heads: int = 8, world: int = 2) -> None:
        self.rows, self.rate, self.head_dim, self.heads = rows, rate, head_dim, heads
        self.tokens = max(2**16, rows * rate)
        self.scale = head_dim**-0.5
        n = world * self.tokens
        self.shards = Shards.even(n, world, "contiguous")
        problem = Problem(Dilated([n], [rate]), False, 1, n, n, heads, heads)
        self.plan = dilated_plan(problem, self.shards, 0, rows)
        self.step = FusedStep(OwnRows.of(problem, self.shards, 0), "hopper")
        generator = torch.Generator(GPU).manual_seed(0)
        shape = (1, self.tokens, heads, head_dim)
        self.query, self.key, self.value, self.dout = (
            torch.randn(shape, generator=generator, device=GPU, dtype=torch.bfloat16) for _ in range(4)
        )
        self.inputs = Inputs(self.query, self.key, self.value)
        self.message = next(received for _, received in self.plan.ticks if received is not None)
        size = self.message.numel(head_dim)
        self.flat = torch.randn(size, generator=generator, device=GPU, dtype=torch.bfloat16)
        self.returning = torch.zeros(size, device=GPU)
        own = received(self.plan, self.message.tick, self.step.sizes)
        self.pairs = sum(f.pairs for problem in own for x in problem.tiles for f in x.families)

    def rates(self) -> dict[str, list[float]]:
        """TFLOP/s forward and backward."""
        own, one = self.fused(), self.one_device()
        found = [medians_ms(*both) for both in zip(own, one, strict=True)]
        times = {"one_device": [x[1] for x in found], "message": [x[0] for x in found]}
        if self.has_stock:
            times["stock"] = [medians_ms(launch, rounds=1)[0] for launch in self.stock()]
        return {name: [self.rate_of(k, x) for k, x in zip((4, 10), ms, strict=True)] for name, ms in times.items()}

    def rate_of(self, products: int, ms: float) -> float:
        return products * self.head_dim * self.pairs / ms / 1e9

    def fused(self) -> tuple[Launch, Launch]:
        sums = self.step.sums(self.query)

        def forward() -> None:
            self.step.attend_message_(self.plan, self.message, self.flat, self.inputs, sums, self.scale)

        forward()
        out, lse = sums.results(torch.bfloat16)
        rows = RowGradients.of(Saved(out, lse, self.dout))
        grads = Inputs(*(torch.zeros(x.shape, device=GPU) for x in self.inputs))
        gradients = self.step.gradients(self.plan, self.inputs, rows, grads, self.scale)

        def backward() -> None:
            gradients.add_message_(self.message, self.flat, self.returning)

        return forward, backward

    def one_device(self) -> tuple[Launch, Launch]:
        w, n = self.rows * self.rate, self.tokens
        return self.launches(Problem(Dilated([w], [self.rate]), False, 1, n, n, self.heads, self.heads))

    def launches(self, problem: Problem) -> tuple[Launch, Launch]:
        kernels, options = find("hopper"), Options(self.scale)
        saved = Saved(*kernels.forward(problem, self.inputs, options), self.dout)
        arguments = problem, self.inputs, self.dout, kernels.row_statistics(problem, saved, options), options
        return lambda: kernels.forward(problem, self.inputs, options), lambda: kernels.gradients(*arguments)

    def stock(self) -> tuple[Launch, Launch]:
        kernel, d = stock_kernel("sdpa", Request.like(self.query)), self.head_dim
        call = RankCall(self.plan, (), None, 1, kernel, Options(self.scale), torch.float32)
        how, sums = call.stock(self.query), loop.Sums.like(self.query)
        grads = Inputs(*(torch.zeros(x.shape, device=GPU) for x in self.inputs))

        def attend() -> None:
            for step, key, value in self.message.steps(self.flat, d):
                own = loop.Sums(sums.out[step.queries], sums.lse_bnh[step.queries])
                tiles = step.tiles(call.options)
                loop.attend_(tiles, Inputs(self.query[step.queries], key, value), own, how)

        attend()
        out, lse = sums.results(torch.bfloat16)
        rows = RowGradients.of(Saved(out, lse, self.dout))

        def add() -> None:
            both = zip(self.message.steps(self.flat, d), self.message.steps(self.returning.zero_(), d), strict=True)
            for (step, key, value), (_, dk, dv) in both:
                at, tiles = step.queries, step.tiles(call.options)
                inputs, own_grads = Inputs(self.query[at], key, value), Inputs(grads.query[at], dk, dv)
                loop.add_gradients_(tiles, inputs, rows.at(at), own_grads, how)

        return attend, add


class BlockCase(MessageCase):
    """A message of block lists: a tenth of the blocks of a sequence on four ranks."""

    has_stock = False  # one to three TFLOP/s

    def __init__(self, n: int, head_dim: int, heads: int = 8, world: int = 4) -> None:
        self.head_dim, self.heads, self.tokens, self.scale = head_dim, heads, n // world, head_dim**-0.5
        mask = torch.rand(n // 128, n // 128, generator=torch.Generator().manual_seed(0)) < 0.1
        rule = BlockRule(128, None, BlockSparse.custom(mask, block_size=128).given)
        problem = Problem(rule, False, 1, n, n, heads, heads)
        self.shards = Shards.even(n, world, "contiguous")
        self.plan = static_block_plan(problem, self.shards, 0, GPU)
        self.step = FusedStep(OwnRows.of(problem, self.shards, 0), "hopper")
        generator = torch.Generator(GPU).manual_seed(0)
        shape = (1, self.tokens, heads, head_dim)
        self.query, self.key, self.value, self.dout = (
            torch.randn(shape, generator=generator, device=GPU, dtype=torch.bfloat16) for _ in range(4)
        )
        self.inputs = Inputs(self.query, self.key, self.value)
        self.message = next(received for _, received in self.plan.ticks if received is not None)
        size = self.message.numel(head_dim)
        self.flat = torch.randn(size, generator=generator, device=GPU, dtype=torch.bfloat16)
        self.returning = torch.zeros(size, device=GPU)
        own = received(self.plan, self.message.tick, self.step.sizes)
        self.pairs = heads * 128**2 * sum(int(x.lists.counts.sum()) for x in own)

    def one_device(self) -> tuple[Launch, Launch]:
        """The same lists between the rows of one device, without running sums."""
        (own,) = received(self.plan, self.message.tick, self.step.sizes)
        problem = Problem(BlockRule(128, None, own.lists), False, 1, self.tokens, self.tokens, self.heads, self.heads)
        return self.launches(problem)


RATES = [(rows, rate, d) for d in (64, 128) for rows in (16384, 65536) for rate in (1, 4)] + [(2048, 16, 64)]


def shown(row: dict) -> str:
    """One device, message, stock operators if measured, and the ratio, forward and backward."""
    names = [name for name in ("one_device", "message", "stock") if name in row]
    both = zip(*(row[name] for name in names), strict=True)
    return " | ".join(f"{', '.join(f'{x:.0f}' for x in rates)} | {rates[1] / rates[0]:.3f}" for rates in both)


def rates() -> list[dict]:
    from dilated_attention_pytorch.backends.hopper import configs, run

    found = []
    print("| rows | rate | D | forward: one device, message, stock | ratio | backward | ratio | apart | at once |")
    print("|" + " --- |" * 9)
    for rows, rate, head_dim in RATES:
        case, chosen = MessageCase(rows, rate, head_dim), run.joint_config
        row: dict = {"rows": rows, "rate": rate, "head_dim": head_dim} | case.rates()
        for name, config in (("apart", None), ("at_once", configs.configs(head_dim).joint)):
            run.joint_config = lambda _, d, config=config: config
            is_possible = config or name == "apart"
            row[name] = case.rate_of(10, medians_ms(case.fused()[1])[0]) if is_possible else None
        run.joint_config = chosen
        found.append(row)
        others = [f"{row[name]:.0f}" if row[name] else "" for name in ("apart", "at_once")]
        print("| " + " | ".join([str(rows), str(rate), str(head_dim), shown(row), *others]) + " |", flush=True)
        del case
        torch.cuda.empty_cache()
    print("| tokens, blocks of 128 | D | forward: one device, message | ratio | backward | ratio |")
    print("|" + " --- |" * 6)
    for tokens, head_dim in ((n, d) for d in (64, 128) for n in (2**17, 2**19)):
        row = {"blocks": 128, "tokens": tokens, "head_dim": head_dim} | BlockCase(tokens, head_dim).rates()
        found.append(row)
        print(f"| {tokens} | {head_dim} | {shown(row)} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--skip-rates", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo,lo,lo,lo")
    passed = options.skip_check or check_all()
    table = [] if options.skip_rates else rates()
    if options.out is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        answer = {"machine": machine, "version": dilated_attention_pytorch.__version__, "rows": table}
        options.out.write_text(json.dumps(answer, indent=1) + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
