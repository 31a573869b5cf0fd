"""What users can import, what an import costs, and what we rely on inside PyTorch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch as package

ROOT = Path(package.__file__).parent


def test_public_surface():
    assert sorted(package.__all__) == [
        "Dilated",
        "DilatedAttention",
        "MultiheadDilatedAttention",
        "attention",
        "attention_weights",
        "dilated_attention",
    ]
    assert all(hasattr(package, name) for name in package.__all__)
    assert (ROOT / "py.typed").exists()


def test_import_brings_neither_triton_nor_distributed():
    """PyTorch itself may import torch.distributed; the package adds nothing to that."""
    code = (
        "import sys, torch; before = set(sys.modules); import dilated_attention_pytorch;"
        "new = {name for name in set(sys.modules) - before if not name.startswith('dilated_attention_pytorch')};"
        "bad = {n for n in new if n.split('.')[0] in ('triton', 'typer', 'rich', 'matplotlib', 'numpy') "
        "or n.startswith('torch.distributed')};"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dilated_attention_pytorch"):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_layers():
    """Backends do not know one another, and nothing imports the reference but the public function."""
    backends = [path for path in (ROOT / "backends").glob("*.py") if path.stem not in ("__init__", "request")]
    names = {f"dilated_attention_pytorch.backends.{path.stem}" for path in backends}
    for path in backends:
        assert not imports(path) & names, path
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
             if "dilated_attention_pytorch.backends.reference" in imports(path)}  # fmt: skip
    assert users == {"api.py", "backends/__init__.py"}


@pytest.mark.parametrize(
    ("name", "arguments", "results"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal attn_mask scale", 2),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
            3,
        ),
        ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale", 9),
        (
            "_scaled_dot_product_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale",
            3,
        ),
        (
            "_scaled_dot_product_cudnn_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
            9,
        ),
        (
            "_scaled_dot_product_cudnn_attention_backward",
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
            "dropout_p is_causal scale",
            3,
        ),
        (
            "_scaled_dot_product_efficient_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
            4,
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale",
            4,
        ),
    ],
)
def test_signatures_of_the_private_operators_we_call(name, arguments, results):
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    assert len(schema.returns) == results
