"""Machine code of the kernels for sm_90 and others, without a GPU: spilled registers, loops, order of memory accesses.

The numbers hold for the versions of Triton that the library was tuned with, so these tests are not part of ``make test``:
another version may spill more and still be right. ``make test-machine-code`` runs them, after a change of a kernel, of a
table of configurations or of Triton's version.
"""

from __future__ import annotations

import importlib.util
import re
from functools import partial

import pytest

import compiler
from compiler import OTHER_SHARED_LIMIT, SHARED_LIMIT
from dilated_attention_pytorch.backends.triton.configs import _HOPPER, _HOPPER_DROPOUT, _OTHER

pytestmark = [
    pytest.mark.machine_code,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
]
compiled = partial(compiler.compiled, machine_code=True)


# Bytes of registers that kernels may spill, by head size: dk and dv together do, and 256 columns.
HALF_SPILLS = {"forward": {64: 0, 128: 0, 256: 576}, "dq": {64: 0, 128: 0, 256: 512}, "dkv": {64: 32, 128: 192, 256: 160}}


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_half_precision_kernels(kernel):
    spills = HALF_SPILLS[kernel]
    configs = {head_dim: getattr(_HOPPER[2, head_dim], kernel) for head_dim in spills}
    cases = [[kernel, 2, d, c.block_m, c.block_n, c.warps, c.stages] for d, c in configs.items()]
    for used, config, most in zip(compiled(cases), configs.values(), spills.values(), strict=True):
        # Products of 64 rows and more, but of 32 for dk and dv of 256 columns.
        assert used["tensor_cores"] if config.block_n >= 64 or kernel != "dkv" else used["warp_products"]
        assert used["wide_copies"] == (config.stages > 1)
        assert used["shared_bytes"] <= SHARED_LIMIT
        assert used["spilled_bytes"] <= most
        if used["tensor_cores"]:  # before and after the loop over whole blocks, not in it
            assert min(used["loops"], key=lambda loop: loop["instructions"])["local_memory"] == 0


# Bytes of registers that float32 kernels may spill, by head size. What is split in three takes room; without tensor cores
# they would spill 376 bytes and more.
SINGLE_SPILLS = {
    "forward": {16: 0, 64: 32, 128: 128, 256: 512},
    "dq": {16: 0, 64: 0, 128: 256, 256: 1_792},
    "dkv": {16: 0, 64: 96, 128: 448, 256: 2_560},
}


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_single_precision_kernels(kernel):
    spills = SINGLE_SPILLS[kernel]
    configs = {head_dim: getattr(_HOPPER[4, max(64, head_dim)], kernel) for head_dim in spills}
    cases = [
        [kernel, 4, d, c.block_m, c.block_n, c.warps, c.stages, True, False, c.float32] for d, c in configs.items()
    ]  # fmt: skip
    for used, config, most in zip(compiled(cases), configs.values(), spills.values(), strict=True):
        assert (used["tensor_cores"] or used["warp_products"]) == (config.float32 == "tf32x3")
        assert not used["narrow_products"]  # Triton's have read memory that is not theirs
        assert used["shared_bytes"] <= SHARED_LIMIT
        assert used["spilled_bytes"] <= most


# Bytes of registers that may be spilled for other GPUs.
OTHER_SPILLS = {(2, 64): 0, (2, 256): 128, (4, 128): 256, (4, 256): 2_304}


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_tables_of_other_gpus(kernel):
    """Compiled for Ampere, whose tensor cores Ada's are too; nothing of it has been run on either. Half of the table."""
    configs = {sizes: getattr(_OTHER[sizes], kernel) for sizes in OTHER_SPILLS}
    cases = [
        [kernel, *sizes, c.block_m, c.block_n, c.warps, c.stages, True, False, c.float32] for sizes, c in configs.items()
    ]
    cases.append([f"block {kernel}", 4, 128, 128])
    for used in compiled(cases, 86):
        sizes = tuple(used["arguments"][1:3])
        assert used["warp_products"] == (configs[sizes].float32 == "tf32x3")
        assert used["shared_bytes"] <= OTHER_SHARED_LIMIT
        assert used["spilled_bytes"] <= OTHER_SPILLS[sizes]


# Instructions per pair by which dropout lengthens the loop over whole blocks. A second hash per pair would double them.
@pytest.mark.parametrize(("kernel", "most"), [("forward", 12), ("dq", 11), ("dkv", 18)])
def test_instructions_of_dropout(kernel, most):
    config = getattr(_HOPPER_DROPOUT[2, 64], kernel)
    sizes = config.block_m, config.block_n, config.warps, config.stages
    loops = [used["loops"] for used in compiled([[kernel, 2, 64, *sizes], [f"dropout {kernel}", 2, 64, *sizes]])]
    without, dropping = (min(loop["instructions"] for loop in own) for own in loops)
    pairs = config.block_m * config.block_n // (32 * config.warps)  # of a thread
    assert (dropping - without) / pairs <= most


# The words of dropout take registers: 20 of about 2,500 instructions in each loop of the forward move spilled ones.
@pytest.mark.parametrize(("kernel", "spills"), [("forward", 144), ("dq", 32), ("dkv", 32)])
def test_kernels_of_dropout_under_an_order(kernel, spills):
    config = getattr(_HOPPER_DROPOUT[2, 64], kernel)
    (used,) = compiled([[kernel, 2, 64, config.block_m, config.block_n, config.warps, config.stages, True, True]])
    assert used["tensor_cores"]
    assert used["wide_copies"]
    assert used["shared_bytes"] <= SHARED_LIMIT
    assert used["spilled_bytes"] <= spills


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_kernels_over_block_lists(kernel):
    halves = [[2, 64, 128, True, 1], [2, 128, 128, False, 2], [2, 256, 128, True, 1]]
    singles = [[4, 64, 128, True, 1], [4, 128, 128, True, 1], [4, 16, 64, True, 1], [4, 256, 128, True, 1]]
    cases = [*halves, [2, 64, 32, True, 1], *singles]
    *found, large = compiled([[f"block {kernel}", *case] for case in cases])
    halves, wide, small, singles = found[:2], *found[2:4], found[4:]
    for used in (*found, large):
        assert used["shared_bytes"] <= SHARED_LIMIT
        assert not used["narrow_products"]
    for used in (*singles, large):
        head_dim = used["arguments"][2]
        exact = getattr(_HOPPER[4, max(64, head_dim)], kernel).float32 == "ieee"
        assert (used["tensor_cores"] or used["warp_products"]) != exact
        # Of head size 256 forward, loops over whole and over partial blocks together spill twice what one loop does.
        assert used["spilled_bytes"] <= SINGLE_SPILLS[kernel][head_dim] * (2 if head_dim == 256 else 1)
    assert wide["warp_products" if kernel == "dkv" else "tensor_cores"]
    assert wide["spilled_bytes"] <= 64
    for used in halves:
        assert used["tensor_cores"]
        assert used["wide_copies"]
        # Two loops, and the one without masks, the shorter, touches no memory for spilled registers.
        masked, whole_blocks = sorted(used["loops"], key=lambda loop: -loop["instructions"])
        assert whole_blocks["local_memory"] == 0
        if kernel != "dkv":
            assert used["spilled_bytes"] == masked["local_memory"] == 0
    assert small["warp_products"]
    assert small["spilled_bytes"] == 0


# Head size, writes the result or parts, query heads per key head, parts to be added, float32 results (of a ring's ranks).
# A compilation takes up to 20 seconds: each row of the table once, and each variant in one of them.
HOPPER_CASES = [[24, True, 2, 8, True], [48, False, 1, 0], [64, True, 1, 8], [80, False, 2, 8], [128, True, 1, 8]]
WHOLE_CASES = [[64, True, 1, 0, False, False, True], [128, True, 1, 0, False, False, True]]  # one descriptor of each tensor
# Tensor core instructions for a block, 16 elements of the contraction each. Head size 48 is 32 and 16 columns, 80 is 64 and
# 16: 3 or 5 instructions for scores, not 4 or 8, and two narrow ones where results have that many columns.
PRODUCTS = {
    "forward": {48: 3 + 8 * 2, 64: 4 + 8, 80: 5 + 8 * 2, 128: 8 + 8},
    "dq": {48: 2 * 3 + 4 * 2, 64: 2 * 4 + 4, 80: 2 * 5 + 4 * 2, 128: 2 * 8 + 4},
    # And one for the shifts of scores, and of their gradients.
    "dkv": {48: 2 + 2 * 3 + 2 * 4 * 2, 64: 2 + 4 * 4, 80: 2 + 2 * 5 + 2 * 4 * 2, 128: 2 + 2 * 8 + 2 * 4},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_hopper_kernels(kernel, head_dim):
    cases = [case for case in HOPPER_CASES if (case[0] <= 64) == (head_dim == 64)]
    if kernel == "dkv" and head_dim == 128:  # which adds twice as many parts; what is known of so many takes a stage's room
        cases[-1] = [128, True, 1, 32]
    several = compiled([[f"hopper {kernel}", *case] for case in cases])
    for case, used in zip(cases, several, strict=True):
        check_hopper(kernel, used, single_results=case[4:] == [True])
        if kernel == "forward":  # see end_together in hopper/kernels/common.py; Triton 3.6 has such loops without it
            assert used["thread_loops"] == 0
        assert case[0] not in PRODUCTS[kernel] or {x["products"] for x in used["loops"]} == {PRODUCTS[kernel][case[0]]}
        # The next launch may begin before tables are read. Groups that add parts wait for the last launch before they read
        # these and before they write. Others read nothing, but for the second pass of a forward, which reads its own marks.
        group = r"WL+S+" if case[3] > 0 else r"S+LLS+" if kernel == "forward" else r"S+"
        assert re.fullmatch(rf"({group}|BL+)*", used["memory_order"])
        assert used["memory_order"].count("B") == 1
        assert used["memory_order"].count("W") == (2 * passes(kernel) if case[3] > 0 else 0)


def test_hopper_forward_with_one_descriptor_of_each_tensor():
    for case, used in zip(WHOLE_CASES, compiled([["hopper forward", *case] for case in WHOLE_CASES]), strict=True):
        check_hopper("forward", used, descriptors=3)
        assert used["thread_loops"] == 0
        assert {x["products"] for x in used["loops"]} == {PRODUCTS["forward"][case[0]]}


def test_hopper_forward_of_short_tiles():
    (used,) = compiled([["hopper short", 128, True, 1, 8]])
    check_hopper("forward", used)


def test_hopper_forward_of_short_tiles_by_two_programs():
    """With 104 registers, the assembler waits for each product at once."""
    cases = [64, True, 1, 0, False, False, True], [64, False, 1, 8], [64, True, 1, 64]
    for case, used in zip(cases, compiled([["hopper short", *case] for case in cases]), strict=True):
        assert used["registers"] == 80  # of a thread when the program starts: 24 warps share 65,536
        assert used["shared_bytes"] <= SHARED_LIMIT // 2
        assert used["thread_loops"] == 0
        assert re.fullmatch(rf"({r'WL+S+' if case[3] > 0 else r'S+LLS+'}|BL+)*", used["memory_order"])
        assert used["overwritten_operands"] == []
        assert used["arrivals"][1] == []
        assert used["narrow_stores"] == 8
        for loop in used["loops"]:
            assert loop["local_memory"] <= 12
            assert loop["products"] == 8


def test_hopper_kernel_of_all_gradients():
    cases = [48, False, 2, 0], [64, True, 1, 32], [128, True, 1, 8], [128, False, 2, 0, False, True]
    for case, used in zip(cases, compiled([["hopper joint", *case] for case in cases]), strict=True):
        shared = case[0] > 64  # the two groups that compute dk and dv compute dq as well
        check_hopper("joint", used, groups=2 if shared else 3, waits=4 if shared else 3)
        computing, multiplying = PRODUCTS["dkv"][case[0]], 8  # 128 keys
        products = [computing + multiplying] * 2 if shared else [multiplying, computing, computing]
        assert sorted(x["products"] for x in used["loops"]) == products
        # Who adds to dq waits for the last launch as well.
        assert used["memory_order"].count("W") == (3 if case[3] > 0 else 0)


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_hopper_kernels_over_block_lists(kernel):
    cases = [24, 128, True, 1], [64, 128, True, 1], [96, 128, False, 1], [128, 256, False, 2]
    for used in compiled([[f"hopper block {kernel}", *case] for case in cases]):
        check_hopper(kernel, used)


def passes(kernel):
    """The forward has code for two: the second is online, for programs that have met an overflow."""
    return 2 if kernel == "forward" else 1


def check_hopper(kernel, used, single_results=False, groups=2, descriptors=None, waits=3):
    # Two places of 128 bytes for each descriptor: compilers like to merge them.
    descriptors = descriptors or {"forward": 12, "dq": 8, "dkv": 10, "joint": 11}[kernel]
    assert used["scratch_bytes"] == descriptors * 128
    assert used["tensor_cores"]
    assert used["tensor_copies"]
    assert used["shared_bytes"] <= SHARED_LIMIT
    assert used["overwritten_operands"] == []
    number, bare = used["arrivals"]
    assert number >= 6
    assert bare == []
    # Rows go 16 bytes at a time; what does not is lse, two rows of each thread.
    if not single_results:
        assert used["narrow_stores"] == (8 if kernel == "forward" else 0)
    assert len(used["loops"]) == groups * passes(kernel)
    if kernel == "forward":
        # The first pass looks for no maximum.
        first, second = used["loops"][:2]
        assert first["instructions"] < 0.8 * second["instructions"]
    for loop in used["loops"]:
        # Spilled scalars are for before and after the loop. A wait per product is how the assembler serialises them all.
        assert loop["local_memory"] <= 0.02 * loop["instructions"]
        assert loop["waits"] <= waits < loop["products"]
