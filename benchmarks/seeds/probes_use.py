"""Checks of what users do: examples, modules, wrong arguments, and the reports' own code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    Dilated,
    Hilbert,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    SparsePatternConfig,
    attention,
    explain,
)
from dilated_attention_pytorch.distributed import shard_sequence
from seeds.measure import Case, Ranks, definition, inputs, largest_difference, on_one, on_ranks
from seeds.outcome import Outcome, of_error, of_ratio, together

ROOT = Path(__file__).parents[2]

# Report 4, usage example 1, without the line that moves the model to a GPU. The report leaves out the inputs.
DATA_PARALLEL = """
import torch.nn as nn
from dilated_attention_pytorch.block_sparse_ring_dilated_attention import (
    BlockSparseRingDilatedAttention,
    SparsePatternConfig
)

# Create model
model = BlockSparseRingDilatedAttention(
    segment_lengths=[4096, 8192],
    dilation_rates=[1, 2],
    sparse_config=SparsePatternConfig(
        pattern_type="dilated_sparse",
        sparsity_ratio=0.1
    )
)

# Wrap in DataParallel
model = nn.DataParallel(model)

# Use normally - PyTorch handles distribution
output = model(inputs)
"""

# Report 4, usage example 2.
BLOCK_SPARSE = """
from dilated_attention_pytorch.block_sparse_ring_distributed_dilated_attention import (
    BlockSparseRingDistributedDilatedAttention,
    DistributedSparseConfig
)

# Configure distributed settings
config = DistributedSparseConfig(
    sparsity_ratio=0.05,
    pattern_type="hierarchical"
)

# Create distributed model
model = BlockSparseRingDistributedDilatedAttention(
    embed_dim=512,
    num_heads=8,
    segment_lengths=[4096, 8192],
    dilation_rates=[1, 2],
    distributed_config=config
)
"""


def usage_data_parallel(ranks: Ranks) -> Outcome:
    """usage example 1 of report 4 without .cuda(), on 4,096 tokens; every row against the reference in float64"""
    del ranks
    config = SparsePatternConfig("dilated_sparse", 0.1, segment_lengths=[4096, 8192], dilation_rates=[1, 2])
    case = Case(4096, BlockSparseRingDilatedAttention(sparse_config=config).pattern, heads=4, head_dim=16)
    q, _, _ = inputs(case, 0, 1)
    names: dict[str, object] = {"inputs": q}
    exec(DATA_PARALLEL, names)
    expected = attention(*[q.double()] * 3, case.pattern, backend="reference")
    output = names["output"]
    assert isinstance(output, torch.Tensor)
    return of_error(largest_difference(output, expected), "output")


def _usage_block_sparse(group: dist.ProcessGroup) -> list[int]:
    names: dict[str, object] = {}
    try:
        # The group of all processes of this run is larger than the one that is checked.
        exec(
            BLOCK_SPARSE.replace("distributed_config=config", "distributed_config=config, group=group"),
            {"group": group},
            names,
        )
    except ValueError as refusal:
        return [str(refusal)]
    module = names["model"]
    assert isinstance(module, nn.Module)
    x = shard_sequence(torch.randn(1, 10000, 512, generator=torch.Generator().manual_seed(0)), group)
    out, _ = module(x, x, x)
    return [*out.shape, int(out.isfinite().all())]


def usage_block_sparse(ranks: Ranks) -> Outcome:
    """usage example 2 of report 4 with group= for 2 of 7 processes, then a forward of 10,000 tokens"""
    found = ranks.run(2, _usage_block_sparse)
    return Outcome(found == [[1, 5000, 512, 1]] * 2, f"shapes of the ranks and whether finite: {found}"[:200])


def data_parallel_equal(ranks: Ranks) -> Outcome:
    """nn.DataParallel against the module by itself: without GPUs it calls the module"""
    del ranks
    module = MultiheadDilatedAttention(64, 4, segment_lengths=[64, 256], dilation_rates=[1, 2])
    x = torch.randn(4, 300, 64)
    with torch.no_grad():
        return of_error(largest_difference(nn.DataParallel(module)(x, x, x)[0], module(x, x, x)[0]), "output")


def data_parallel_scatter(ranks: Ranks) -> Outcome:
    """nn.DataParallel over two GPUs against the module by itself"""
    del ranks
    if torch.cuda.device_count() < 2:
        return Outcome(None, f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    module = MultiheadDilatedAttention(64, 4, segment_lengths=[64, 256], dilation_rates=[1, 2]).cuda()
    x = torch.randn(4, 300, 64, device="cuda")
    return of_error(largest_difference(nn.DataParallel(module)(x, x, x)[0], module(x, x, x)[0]), "output", 1e-4)


def _ddp(group: dist.ProcessGroup) -> float:
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(32, 4, segment_lengths=[64, 200], dilation_rates=[1, 2]).double()
    x = torch.randn(4, 200, 32, dtype=torch.float64)
    module(x, x, x)[0].square().mean().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    mine = x.chunk(2)[dist.get_rank(group)]
    parallel = DistributedDataParallel(module, process_group=group)
    parallel(mine, mine, mine)[0].square().mean().backward()
    return max(largest_difference(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True))


def distributed_data_parallel(ranks: Ranks) -> Outcome:
    """DistributedDataParallel over 2 ranks, half of a batch each: gradients against those of the whole batch"""
    return of_error(max(ranks.run(2, _ddp)), "gradients in float64", 1e-12)


def _mistake(group: dist.ProcessGroup) -> list[str]:
    rank, x, said = dist.get_rank(group), torch.randn(1, 20, 2, 8), []
    for arguments in ({"is_causal": rank == 1}, {"scale": 1.0 + rank}, {"dropout_p": 2.0 if rank else 0.0}):
        try:
            attention(x, x, x, Dilated([16], [1]), group=group, **arguments)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(type(error).__name__)
    return [*said, str(attention(x, x, x, Dilated([16], [1]), group=group).isfinite().all().item())]


def mistakes_of_a_rank(ranks: Ranks) -> Outcome:
    """another is_causal, another scale, and a wrong dropout on one of 2 ranks: both raise, and the next call works"""
    found = ranks.run(2, _mistake)
    return Outcome(all("" not in x and x[-1] == "True" for x in found), f"errors of the ranks: {found}")


def bounds(ranks: Ranks) -> Outcome:
    """wrong patterns and tensors: rates of 0, lengths of 0, lists of unlike lengths, other shapes, wrong block sizes"""
    del ranks
    x = torch.randn(1, 8, 2, 4)
    wrong = (
        lambda: Dilated([4], [0]), lambda: Dilated([0], [1]), lambda: Dilated([-4], [1]), lambda: Dilated([4, 8], [1]),
        lambda: Dilated([], []), lambda: Dilated([4.5], [1]), lambda: SparsePatternConfig("dilated_sparse", 0.0),
        lambda: SparsePatternConfig("local_window", 0.1, block_size=100), lambda: SparsePatternConfig("unknown", 0.1),
        lambda: attention(x, x[:, :, :1, :2], x, Dilated([4], [1])), lambda: attention(x, x[:, :4], x, Dilated([4], [1])),
        lambda: attention(x[0], x[0], x[0], Dilated([4], [1])),
    )  # fmt: skip
    refused = 0
    for call in wrong:
        try:
            call()
        except (ValueError, TypeError):
            refused += 1
    return Outcome(refused == len(wrong), f"{refused} of {len(wrong)} refused")


def triton_kernels(ranks: Ranks) -> Outcome:
    """which kernels ranks would use on an A100 and on a GTX 1080, by explain without a device"""
    del ranks
    x = torch.empty(1, 16384, 8, 64, device="meta")
    pattern = Dilated([2048, 16384], [1, 4])
    a100 = explain(x, x, x, pattern, world_size=2, backend="triton", device="cuda:a100").sharding
    pascal = explain(x, x, x, pattern, world_size=2, device="cuda:6.1").sharding
    assert a100 is not None
    assert pascal is not None
    right = (a100.own_rows, a100.other_rows) == ("triton", "triton") and pascal.bytes > 0
    return Outcome(right, f"A100 (8.0): {a100.own_rows}; GTX 1080 (6.1): {pascal.own_rows}; rows of others travel on both")


def hilbert_exact(ranks: Ranks) -> Outcome:
    """Hilbert orders of 24 x 40 and 31 x 33 patches on 1 and 2 ranks; rows against the definition over permuted rows"""
    cases = [Case(a * b, Dilated([100, a * b], [1, 2]), heads=3, head_dim=16, grid=(a, b)) for a, b in ((24, 40), (31, 33))]
    errors = [found for case in cases for found in (on_one(case)[0], on_ranks(ranks, 2, case)[0])]
    return of_error(max(x["error"] if x["finite"] else float("inf") for x in errors), "2 grids")


def hilbert_compact(ranks: Ranks) -> Outcome:
    """height plus width of the box around segments of 256 of 64 x 64 patches, row by row over along the Hilbert curve"""
    del ranks
    n = 64
    mean = []
    for positions in (torch.arange(n * n), Hilbert.grid(n, n).positions):
        places = torch.stack((positions // n, positions % n)).view(2, -1, 256)
        mean.append(float((places.amax(2) - places.amin(2) + 1).sum(0).double().mean()))
    return of_ratio(mean[0] / mean[1], "factor", least=1.5)


def _module(group: dist.ProcessGroup) -> float:
    case = Case(500, Dilated([100, 500], [1, 3]), heads=3, head_dim=16)
    q, k, v = (shard_sequence(x, group) for x in inputs(case, 0, 1))
    out = RingDilatedAttention([100, 500], [1, 3], group=group)(q, k, v)
    return largest_difference(out, shard_sequence(definition(case)[0], group))


def ring_module(ranks: Ranks) -> Outcome:
    """RingDilatedAttention on 2, 3 and 7 ranks, 500 tokens; every row against the definition"""
    return of_error(max(max(ranks.run(world, _module)) for world in (2, 3, 7)), "2, 3 and 7 ranks")


def nccl(ranks: Ranks) -> Outcome:
    """a sharded call over NCCL"""
    del ranks
    return Outcome(None, f"needs one GPU per rank, this machine has {torch.cuda.device_count()}")


def half_precision(ranks: Ranks) -> Outcome:
    """the longest sequence in float16 against float32 by the same count of bytes"""
    del ranks
    size = torch.tensor([], dtype=torch.float16).element_size() / torch.tensor([], dtype=torch.float32).element_size()
    x = [torch.randn(1, 256, 2, 16, dtype=torch.float16) for _ in range(3)]
    pattern = Dilated([64, 256], [1, 2])
    exact = attention(*(t.double() for t in x), pattern, backend="reference")
    return together(of_error(largest_difference(attention(*x, pattern), exact), "256 tokens in float16", 4e-3),
                    of_ratio(size, "bytes per number", most=0.5))  # fmt: skip


def newer_gpus(ranks: Ranks) -> Outcome:
    """the backend on an A100, an H100 and a B200, by explain without a device, in bfloat16"""
    del ranks
    x = torch.empty(1, 16384, 8, 64, device="meta", dtype=torch.bfloat16)
    names = {
        gpu: explain(x, x, x, Dilated([2048, 16384], [1, 4]), device=f"cuda:{gpu}").backend
        for gpu in ("a100", "h100", "b200")
    }
    fused = names["h100"] == "hopper" and {names["a100"], names["b200"]} <= {"triton", "hopper"}
    return Outcome(fused, ", ".join(f"{gpu}: {backend}" for gpu, backend in names.items()))


# Programs under torchrun.
def _example() -> str:
    blocks = re.findall(r"^```python\n(# torchrun --nproc-per-node 2 example\.py\n.*?)^```$",
                        (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)  # fmt: skip
    return blocks[0] + "\nassert whole.shape == (1, 8_000, 8, 64) and whole.isfinite().all()\n"


def _torchrun(folder: str, *options: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"{folder}/example.py"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def minimal_example(ranks: Ranks) -> Outcome:
    """the example of README.md under torchrun with 2 processes"""
    del ranks
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example.py").write_text(_example())
        code = _torchrun(folder, "--standalone", "--nproc-per-node", "2").wait(300)
    return Outcome(code == 0, f"exit code {code}")


def two_nodes(ranks: Ranks) -> Outcome:
    """the example of README.md under torchrun as two nodes of one process each, both on this machine"""
    del ranks
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example.py").write_text(_example())
        options = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
        nodes = [_torchrun(folder, *options, "--node-rank", str(node)) for node in range(2)]
        codes = [node.wait(300) for node in nodes]
    return Outcome(codes == [0, 0], f"exit codes {codes}")


def own_tests(ranks: Ranks) -> Outcome:
    """pytest of one case of tests/ranks/test_ring.py, which runs 2 ranks"""
    del ranks
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "quick", "tests/ranks/test_ring.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    passed = re.search(r"\d+ passed", done.stdout)
    return Outcome(done.returncode == 0 and passed is not None, passed[0] if passed else "no test passed")


PROBES = (
    usage_data_parallel, usage_block_sparse, data_parallel_equal, data_parallel_scatter, distributed_data_parallel,
    mistakes_of_a_rank, bounds, triton_kernels, hilbert_exact, hilbert_compact, ring_module, nccl, half_precision,
    newer_gpus, minimal_example, two_nodes, own_tests,
)  # fmt: skip
