"""Compile the kernels for sm_90 without a GPU and print what they use, as JSON. Run by test_triton_compile.py.

    python tests/compile_sm90.py '[["forward", 2, 64, 64, 64, 4, 3]]'     kernel, element size, head size, config

A process of its own, because the interpreter that the other tests use must be off when kernels are defined.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dilated_attention_pytorch.backends.triton import backward, forward

KERNELS = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkv": backward.dkv_kernel}
HALF = ("Q", "K", "V", "DOUT", "OUT", "DQ", "DK", "DV")
FLOAT = ("PARTS", "PARTS_LSE2", "DK_PARTS", "DV_PARTS", "LSE", "DELTA")
INTEGER = ("TABLE", "LAYOUT", "OFFSETS", "SEED")


def argument_type(name: str, element: str) -> str:
    if name in HALF:
        return f"*{element}"
    if name in FLOAT:
        return "*fp32"
    if name in INTEGER:
        return "*i64"
    return "fp32" if name in ("scale_log2", "scale", "keep_scale") else "i32"


def usage(kernel, size, head_dim, block_m, block_n, warps, stages, final=True):
    function = KERNELS[kernel]
    constants = {
        "D": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ATTEND": True,
        "FINAL": final,
        "DROPOUT": False,
        "WIDE": False,
        "PRECISION": "tf32" if size == 2 else "ieee",
        "group": 1,  # as Triton specialises it
    }
    if kernel == "forward":
        constants["NEGATIVE"] = False
    names = function.arg_names
    signature, hints = {}, {}
    for i, name in enumerate(names):
        signature[name] = "constexpr" if name in constants else argument_type(name, "bf16" if size == 2 else "fp32")
        if signature[name].startswith("*") or "stride" in name:
            hints[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", report))
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]),
        "shared_bytes": compiled.metadata.shared,
        "tensor_cores": "wgmma" in compiled.asm["ptx"],
        "wide_copies": "cp.async.cg.shared.global" in compiled.asm["ptx"],
    }


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        print(json.dumps({"arguments": arguments} | usage(*arguments)), flush=True)
