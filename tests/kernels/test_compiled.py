"""Each shipped configuration compiled once, without a GPU: it compiles, fits into shared memory and uses tensor cores.

What the machine code looks like is in test_machine_code.py.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

import sass
from compiler import OTHER_SHARED_LIMIT, SHARED_LIMIT, compiled
from dilated_attention_pytorch.backends.gpu.portable import SUM
from dilated_attention_pytorch.backends.hopper.configs import TABLE
from dilated_attention_pytorch.backends.triton.configs import (
    _HOPPER,
    _HOPPER_BLOCKS,
    _HOPPER_DROPOUT,
    _OTHER,
    block_configs,
    configs,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine")
KERNELS = ("forward", "dq", "dkv")
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes


def check_portable(used: dict, config, limit: int) -> None:
    assert used["shared_bytes"] <= limit
    assert (used["tensor_cores"] or used["warp_products"]) == (config.float32 == "tf32x3")
    assert not used["narrow_products"]  # Triton's have read memory that is not theirs


# A row of a table serves the kernels of dilated patterns and those over block lists. Each row is compiled for one of them;
# test_machine_code.py has the others. Head size 16 has the configuration of 64, and narrow products of its own.
DILATED = [(2, 64), (2, 256), (4, 16), (4, 128)]
BLOCKS = [(2, 128), (4, 64), (4, 256)]


def on_request(rows: list[tuple], always: list[tuple]) -> list:
    """The rows; those that are not ``always`` compiled are left to ``make test-machine-code``, for the time they take."""
    return [pytest.param(*row, marks=[] if row in always else [pytest.mark.machine_code]) for row in rows]


def portable(kernel: str, size: int, head_dim: int, config) -> list:
    blocks = [config.block_m, config.block_n, config.warps, config.stages]
    return [kernel, size, head_dim, *blocks, True, False, config.float32]


def test_every_row_is_compiled():
    rows = {(size, max(64, head_dim)) for size, head_dim in DILATED + BLOCKS}
    assert rows == set(_HOPPER) == set(_HOPPER_BLOCKS) == set(_OTHER)
    assert set(HOPPER_CASES) | set(HOPPER_BLOCK_CASES) == set(TABLE)
    # Rows over block lists differ from the others in one configuration, and that one is compiled.
    assert {row for row in _HOPPER if _HOPPER[row] != _HOPPER_BLOCKS[row]} <= set(BLOCKS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "head_dim"), on_request(DILATED, [(2, 64), (4, 16)]))
def test_portable_kernels(kernel, size, head_dim):
    config = getattr(_HOPPER[size, max(64, head_dim)], kernel)
    (used,) = compiled([portable(kernel, size, head_dim, config)])
    check_portable(used, config, SHARED_LIMIT)
    if size == 2:
        assert used["wide_copies"] == (config.stages > 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "head_dim"), on_request(BLOCKS, [(2, 128)]))
def test_portable_kernels_over_block_lists(kernel, size, head_dim):
    config = getattr(_HOPPER_BLOCKS[size, head_dim], kernel)
    (used,) = compiled([[f"block {kernel}", size, head_dim, 128]])
    check_portable(used, config, SHARED_LIMIT)


@pytest.mark.parametrize("size", [2, 4])
def test_results_are_merged_in_place_after_all_loads(size):
    """Several threads load the same lse, some in two layouts. No warp may store it before all warps have loaded it."""
    found = compiled(
        [
            ["forward", size, 64, SUM.block_m, SUM.block_n, SUM.warps, SUM.stages, True, False, "ieee", True],
            ["block forward", size, 64, 128, True, 1, None, True],
        ]
    )
    for used in found:
        assert re.fullmatch("L+BL*S", used["row_accesses"])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("size", [2, 4])
def test_kernels_of_sorted_rows(size, capability):
    """They move 16 bytes at a time. Rows of 24 elements are cut from 32."""
    for used in compiled(
        [["sorted move", size, 64], ["sorted merge", size, 24, 1], ["sorted merge", size, 64, 5]], capability
    ):
        assert used["wide_loads"]
        assert used["shared_bytes"] <= OTHER_SHARED_LIMIT


# On other GPUs, the kernel of dk and dv is the one that needs most shared memory. The others are compiled on request. So is
# sm_120, whose instructions are those of sm_89.
OTHER_KERNELS = [*(pytest.param(kernel, marks=pytest.mark.machine_code) for kernel in ("forward", "dq")), "dkv"]
OTHER_GPUS = [80, 89, 100, pytest.param(120, marks=pytest.mark.machine_code)]  # A100, Ada, B200, RTX 50


@pytest.mark.parametrize("capability", OTHER_GPUS)
@pytest.mark.parametrize("kernel", OTHER_KERNELS)
@pytest.mark.parametrize(("size", "head_dim"), on_request([row for row in DILATED if row[1] >= 64], [(2, 64)]))
def test_portable_kernels_of_other_gpus(kernel, size, head_dim, capability):
    config = getattr(configs((capability // 10, capability % 10), DTYPES[size], head_dim), kernel)
    (used,) = compiled([portable(kernel, size, head_dim, config)], capability)
    check_portable(used, config, OTHER_SHARED_LIMIT)


@pytest.mark.parametrize("capability", OTHER_GPUS)
@pytest.mark.parametrize("kernel", OTHER_KERNELS)
@pytest.mark.parametrize(("size", "head_dim"), on_request(BLOCKS, []))
def test_portable_kernels_of_other_gpus_over_block_lists(kernel, size, head_dim, capability):
    config = getattr(block_configs((capability // 10, capability % 10), DTYPES[size], head_dim, 128), kernel)
    (used,) = compiled([[f"block {kernel}", size, head_dim, 128]], capability)
    check_portable(used, config, OTHER_SHARED_LIMIT)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0)])
def test_the_rule_by_which_a_gpu_gets_its_table(capability):
    """Only Hopper has the measured table. All others have the one that fits into the least shared memory of any of them."""
    for size, head_dim in _OTHER:
        assert configs(capability, DTYPES[size], head_dim) == _OTHER[size, head_dim]
        assert block_configs(capability, DTYPES[size], head_dim, 128) == _OTHER[size, head_dim]
        assert configs((9, 0), DTYPES[size], head_dim) == _HOPPER[size, head_dim]
        assert configs(capability, DTYPES[size], head_dim, dropout=True) == _OTHER[size, head_dim]
        assert configs((9, 0), DTYPES[size], head_dim, dropout=True) == _HOPPER_DROPOUT[size, head_dim]


# Head size, writes the result or partial results, query heads per key head, partial results to be added.
HOPPER_CASES = {64: [64, True, 1, 8], 128: [128, False, 2, 8]}
# Head size, block size, causal, query heads per key head.
HOPPER_BLOCK_CASES = {32: [24, 128, True, 1], 96: [96, 256, False, 2]}
DESCRIPTORS = {"forward": 12, "dq": 8, "dkv": 10, "joint": 11}


def check_hopper(used: dict, kernel: str, descriptors: int | None = None) -> None:
    assert used["shared_bytes"] <= SHARED_LIMIT
    assert used["tensor_cores"]
    assert used["tensor_copies"]
    # A place for each descriptor: compilers like to merge them.
    assert used["scratch_bytes"] == (descriptors or DESCRIPTORS[kernel]) * 128
    number, bare = used["arrivals"]
    assert number >= 6
    assert bare == []


# The larger head size needs more shared memory. It is compiled always, the smaller one on request.
@pytest.mark.parametrize(
    ("row", "kernel"),
    on_request(
        [(row, kernel) for row in HOPPER_CASES for kernel in (*KERNELS, "joint") if getattr(TABLE[row], kernel)],
        [(128, "forward"), (128, "dkv"), (128, "joint")],
    ),
)
def test_hopper_kernels(row, kernel):
    (used,) = compiled([[f"hopper {kernel}", *HOPPER_CASES[row]]])
    check_hopper(used, kernel)
    assert used["warp_barriers"] == (kernel == "forward")  # end_together


MULTIPROCESSOR_SHARED = 228 * 1024  # bytes of shared memory, of which each program takes 1 KiB more than it asks for


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.machine_code)])
def test_hopper_forward_of_short_tiles(head_dim):
    (used,) = compiled([["hopper short", head_dim, True, 1, 8]])
    check_hopper(used, "forward")
    assert TABLE[head_dim].short.config.programs * (used["shared_bytes"] + 1024) <= MULTIPROCESSOR_SHARED


@pytest.mark.machine_code  # for its time: the code differs from that of the forward above in descriptors alone
def test_hopper_forward_with_one_descriptor_of_each_tensor():
    (used,) = compiled([["hopper forward", 128, True, 1, 0, False, False, True]])
    check_hopper(used, "forward", descriptors=3)


# The forward has the most of its own: flags and a second pass. The backward kernels differ from the others in their tables.
@pytest.mark.parametrize(
    ("row", "kernel"), on_request([(row, kernel) for row in (32, 96) for kernel in KERNELS], [(96, "forward")])
)
def test_hopper_kernels_over_block_lists(row, kernel):
    (used,) = compiled([[f"hopper block {kernel}", *HOPPER_BLOCK_CASES[row]]])
    check_hopper(used, kernel)


def test_arrivals_without_a_barrier_are_found():
    write, sync, product = "st.shared.b64 [%r1], %rd1;", "bar.warp.sync -1;", "wgmma.wait_group.sync.aligned 0;"
    arrive, group_sync = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];", "bar.sync 2, 128;"
    assert sass.arrivals("\n".join([write, sync, arrive, product, group_sync, arrive])) == (2, [])
    number, bare = sass.arrivals("\n".join([write, sync, write, arrive, group_sync, arrive]))
    assert number == 2
    assert bare == [f"{write} ... {arrive}"]
    assert len(sass.arrivals(f"{product}\n{arrive}")[1]) == 1
