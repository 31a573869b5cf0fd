"""Compile kernels without a GPU and print what they use: a line of JSON in, one out. Run by tests/kernels/test_compiled.py.

    echo '[90, "forward", 2, 64, 64, 64, 4, 3]' | python tests/support/compile_kernels.py
                                                             capability, kernel, element size, head size, config
    echo '[90, "dropout forward", 2, 64, 64, 64, 4, 3]' | ... the same, with dropout
    echo '[90, "hopper forward", 64]' | ...                  kernel, head size [, final, group, parts, single]
    echo '[90, "hopper joint", 64]' | ...                    the same, all gradients
    echo '[90, "hopper short", 64]' | ...                    the same, forward of short tiles
    echo '[90, "sorted merge", 2, 64, 3]' | ...              kernel, element size, head size, branches
    echo '[86, "block forward", 2, 64, 128]' | ...           kernel, element size, head size, block size
    echo '[90, "hopper block dq", 64, 128, true, 1]' | ...   kernel, head size, block size, causal, group

Compiles for the capability in front: 90 is sm_90. With an argument "machine-code" the answer also has what the machine code
shows: spilled registers, loops, order of memory accesses. This runs in a process of its own, because the interpreter that
other tests use must be off when kernels are defined.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import sass
from dilated_attention_pytorch.backends.gpu import sorted_rows
from dilated_attention_pytorch.backends.gpu.kernels import backward, block_backward, block_forward, forward
from dilated_attention_pytorch.backends.gpu.launch import FUSED
from dilated_attention_pytorch.backends.gpu.portable import padded
from dilated_attention_pytorch.backends.hopper import configs as hopper_configs
from dilated_attention_pytorch.backends.hopper import persistent
from dilated_attention_pytorch.backends.hopper import run as hopper_run
from dilated_attention_pytorch.backends.hopper.kernels import block_dkv as hopper_block_dkv
from dilated_attention_pytorch.backends.hopper.kernels import block_dq as hopper_block_dq
from dilated_attention_pytorch.backends.hopper.kernels import block_forward as hopper_block_forward
from dilated_attention_pytorch.backends.hopper.kernels import dkv as hopper_dkv
from dilated_attention_pytorch.backends.hopper.kernels import dq as hopper_dq
from dilated_attention_pytorch.backends.hopper.kernels import forward as hopper_forward
from dilated_attention_pytorch.backends.hopper.kernels import joint as hopper_joint
from dilated_attention_pytorch.backends.triton.configs import block_configs

KERNELS = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkv": backward.dkv_kernel}
BLOCKS = {
    "forward": block_forward.block_forward_kernel,
    "dq": block_backward.block_dq_kernel,
    "dkv": block_backward.block_dkv_kernel,
}
SORTED = {"move": sorted_rows.move_kernel, "merge": sorted_rows.merge_kernel}
HOPPER = {
    "forward": hopper_forward.forward_kernel,
    "dq": hopper_dq.dq_kernel,
    "dkv": hopper_dkv.dkv_kernel,
    "joint": hopper_joint.joint_kernel,
}
HOPPER_BLOCKS = {
    "forward": hopper_block_forward.block_forward_kernel,
    "dq": hopper_block_dq.block_dq_kernel,
    "dkv": hopper_block_dkv.block_dkv_kernel,
}
ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else []
RESULTS = ("OUT", "DQ", "DK", "DV")
HALF = ("Q", "K", "V", "DOUT", "X", "Y", *RESULTS)
FLOAT = (
    "PARTS",
    "PARTS_LSE2",
    "PARTS_LSE",
    "DK_PARTS",
    "DV_PARTS",
    "LSE",
    "LAST_LSE",
    "DELTA",
    "PART_OUT",
    "PART_LSE2",
    "PART_DQ",
    "PART_DK",
    "PART_DV",
    "SUMS",
)
INTEGER = ("TABLE", "LAYOUT", "OFFSETS", "ORDER", "SEED", "ROWS", "STARTS", "SIZES")
SHORT_INTEGER = ("TAKEN", "TURNS", "PLACES", "COUNTS", "INDICES", "ROW_LISTS", "LISTS", "SLOTS", "OWNERS")


def argument_type(name: str, element: str) -> str:
    if name in HALF:
        return f"*{element}"
    if name == "SHIFTS":
        return "*bf16"
    if name in FLOAT:
        return "*fp32"
    if name in INTEGER:
        return "*i64"
    if name in SHORT_INTEGER:
        return "*i32"
    return "fp32" if name in ("scale_log2", "scale", "keep_scale") else "i32"


def usage(
    kernel,
    size,
    head_dim,
    block_m,
    block_n,
    warps,
    stages,
    final=True,
    placed=False,
    float32="tf32x3",
    running=False,
    dropout=False,
    *,
    capability,
):
    function = KERNELS[kernel]
    constants = {
        "D": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ATTEND": not running,
        "RUNNING": running,
        "FINAL": final,
        "IN_FOURS": False,
        "DROPOUT": placed or dropout,
        "PLACED": placed,
        "WIDE": False,
        "PRECISION": "tf32" if size == 2 else float32,
        "group": 1,  # as Triton specialises it
    }
    if kernel == "forward":
        constants["NEGATIVE"] = False
    options = {"num_warps": warps, "num_stages": stages}
    return compiled_usage(ASTSource, function, constants, size, options, capability=capability)


def block_usage(kernel, size, head_dim, block_size, causal=True, group=1, config=None, running=False, *, capability):
    """``config`` in place of the shipped one: rows, keys, warps, stages."""
    dtype = torch.bfloat16 if size == 2 else torch.float32
    shipped = getattr(block_configs(divmod(capability, 10), dtype, head_dim, block_size), kernel)
    block_m, block_n, warps, stages = config or (shipped.block_m, shipped.block_n, shipped.warps, shipped.stages)
    constants = {
        "D": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_SIZE": block_size,
        "CAUSAL": causal,
        "RUNNING": running,
        "DROPOUT": False,
        "WIDE": False,
        "PRECISION": "tf32" if size == 2 else shipped.float32,
    }
    if group == 1:  # as Triton specialises it
        constants["group"] = 1
    if kernel == "forward":
        constants["NEGATIVE"] = False
    options = {"num_warps": warps, "num_stages": stages}
    return compiled_usage(ASTSource, BLOCKS[kernel], constants, size, options, capability=capability)


def sorted_usage(kernel, size, head_dim, branches=None, *, capability):
    """The kernels that move rows into slots, and that merge the results of this many branches."""
    constants = sorted_rows.constants_of(head_dim)
    if kernel == "merge":
        constants |= {"BRANCHES": branches, "HAS_LSE": True}
    return compiled_usage(ASTSource, SORTED[kernel], constants, size, {}, capability=capability)


def hopper_usage(
    kernel,
    head_dim,
    final=True,
    group=1,
    parts=hopper_run.LEAST_PARTIALS,
    single_results=False,
    running=False,
    whole=False,
    *,
    capability,
):
    known = hopper_configs.configs(head_dim)
    config, kernel = (known.short.config, "forward") if kernel == "short" else (getattr(known, kernel), kernel)
    constants = {
        "D": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M" if kernel in ("dkv", "joint") else "BLOCK_N": config.block,
        "STAGES": hopper_run.stages(config, head_dim, parts),
        "HELD": config.held,
        "FINAL": final,
        "PARTS": parts,
    }
    if group == 1:  # as Triton specialises it
        constants["group"] = 1
    if kernel == "dkv":
        constants["OVERLAP"] = config.overlap
    if kernel == "joint":
        constants["SCALED"] = running
    if kernel == "forward":
        constants["WHOLE"] = whole
        constants["PROGRAMS"] = config.programs
    options = {"num_warps": 4, "maxnreg": persistent.start_registers(config)}
    single = RESULTS if single_results else ()
    return compiled_usage(GluonASTSource, HOPPER[kernel], constants, 2, options, single, capability=capability)


def hopper_block_usage(kernel, head_dim, block_size, causal, group, running=False, *, capability):
    config = getattr(hopper_configs.configs(head_dim), kernel)
    constants = {
        "D": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M" if kernel == "dkv" else "BLOCK_N": config.block,
        "STAGES": config.stages,
        "HELD": config.held,
        "BLOCK_SIZE": block_size,
        "CAUSAL": causal,
        "RUNNING": running,
    }
    if group == 1:  # as Triton specialises it
        constants["group"] = 1
    if kernel == "dkv":
        constants["OVERLAP"] = config.overlap
    options = {"num_warps": 4, "maxnreg": persistent.start_registers(config)}
    return compiled_usage(GluonASTSource, HOPPER_BLOCKS[kernel], constants, 2, options, capability=capability)


def compiled_usage(source, function, constants, size, options, single=(), *, capability):
    """``single``: parameters that are float32 whatever the size."""
    names = function.arg_names
    signature, hints = {}, {}
    for i, name in enumerate(names):
        element = "bf16" if size == 2 and name not in single else "fp32"
        signature[name] = "constexpr" if name in constants else argument_type(name, element)
        if signature[name].startswith("*") or "stride" in name:
            hints[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = source(fn=function, signature=signature, constexprs=constexprs, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options | FUSED)
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "scratch_bytes": getattr(compiled.metadata, "global_scratch_size", 0),
        "tensor_cores": "wgmma" in ptx or "tcgen05.mma" in ptx,  # from sm_90 and sm_100 on
        "narrow_products": "m64n8k" in ptx,
        "warp_products": "mma.sync" in ptx,  # of tiles too small for the above, and before sm_90
        "wide_copies": "cp.async.cg.shared.global" in ptx,
        "tensor_copies": "cp.async.bulk.tensor" in ptx,
        "wide_loads": bool(re.search(r"ld\.global[.\w:]*\.v[48]", ptx)),
        "arrivals": sass.arrivals(ptx),
        "row_accesses": row_accesses(compiled.asm["ttgir"]),
        "warp_barriers": ptx.count("bar.warp.sync 0xffffffff"),
    } | (machine_code(compiled.asm["cubin"]) if "machine-code" in ARGUMENTS else {})


def row_accesses(ttgir: str) -> str:
    """Loads (L) and stores (S) of one float32 number per row, and barriers of all threads (B), in the order of the code."""
    lines = re.findall(r"(tt\.load|tt\.store) .*: tensor<\d+x!tt\.ptr<f32>|((?:gpu|ttg)\.barrier)", ttgir)
    return "".join("B" if barrier else access[3].upper() for access, barrier in lines)


def machine_code(cubin: bytes) -> dict:
    """What the assembler made of it."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = dict(re.findall(r"(REG|STACK):(\d+)", report))
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]),
        "thread_loops": len(re.findall(r"\bBRA\.U\.ANY\b", code)),  # over threads that have parted
        "narrow_stores": len(re.findall(r"\bSTG\.E(?!\.128)", code)),
        "memory_order": sass.memory_order(code),
        "loops": [
            {
                "instructions": len(loop),
                "products": sum("HGMMA" in line for line in loop),
                "waits": sum("WARPGROUP.DEPBAR" in line for line in loop),
                "local_memory": sum("LDL" in line or "STL" in line for line in loop),
            }
            for loop in (sass.hot_path(code, found) for found in sass.product_loops(code))
        ],
        "overwritten_operands": sass.overwritten_operands(code),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        capability, *arguments = json.loads(line)
        name, *rest = arguments
        family, _, kernel = name.rpartition(" ")
        families = {
            "hopper": hopper_usage,
            "hopper block": hopper_block_usage,
            "block": block_usage,
            "sorted": sorted_usage,
            "dropout": partial(usage, dropout=True),
        }
        used = families.get(family, usage)(kernel, *rest, capability=capability)
        print(json.dumps({"arguments": arguments} | used), flush=True)
