"""What users can import, what an import costs, and what we rely on inside PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch as package
import oracle
import programs
from dilated_attention_pytorch import Dilated, explain

ROOT = Path(package.__file__).parent


def test_public_surface():
    assert sorted(package.__all__) == [
        "Attention",
        "BlockSparse",
        "BlockSparseRingDilatedAttention",
        "BlockSparseRingDistributedDilatedAttention",
        "Dilated",
        "DilatedAttention",
        "DilatedKVCache",
        "DistributedSparseConfig",
        "Explanation",
        "Hilbert",
        "Identity",
        "ImageConfig",
        "LongNetConfig",
        "LongNetDecoder",
        "LongNetEncoder",
        "LongViT",
        "MultiheadDilatedAttention",
        "Order",
        "RingDilatedAttention",
        "Sharding",
        "SlideConfig",
        "SlideEncoder",
        "SparsePatternConfig",
        "Striped",
        "ZigZag",
        "attention",
        "attention_weights",
        "clear_caches",
        "dilated_attention",
        "explain",
        "warm_up",
    ]
    assert all(hasattr(package, name) for name in package.__all__)
    assert (ROOT / "py.typed").exists()


def test_import_brings_neither_triton_nor_distributed(tmp_path):
    """PyTorch itself may import torch.distributed; the package adds nothing to that."""
    code = (
        "import sys, torch; before = set(sys.modules); import dilated_attention_pytorch;"
        "new = {name for name in set(sys.modules) - before if not name.startswith('dilated_attention_pytorch')};"
        "bad = {n for n in new if n.split('.')[0] in ('triton', 'typer', 'rich', 'matplotlib', 'numpy') "
        "or n.startswith('torch.distributed')};"
        "assert not bad, bad"
    )
    result = programs.run(code, folder=tmp_path)
    assert result.returncode == 0, result.stderr


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


def test_explain_counts_what_the_oracle_counts():
    pattern = Dilated([8, 16], [1, 2])
    q, k = torch.zeros(2, 20, 4, 8), torch.zeros(2, 20, 2, 8)
    for causal in (False, True):
        for n in (20, 7):
            explained = explain(q[:, -n:], k, k, pattern, is_causal=causal)
            count = oracle.multiplicities(pattern, n, 20, 4, 2, causal)
            assert explained.pairs == 2 * int(count.sum())
            dense = oracle.multiplicities(Dilated([20], [1]), n, 20, 4, 2, causal)
            assert explained.dense_pairs == 2 * int(dense.sum())
            assert explained.forward_flops == explained.pairs * 4 * 8
    assert explained.backend == "sdpa"
    assert "CPU flash" in str(explained)
    ragged = explain(q, k, k, pattern, lengths=torch.tensor([20, 5]))
    assert ragged.sequences == 2
    assert ragged.pairs == sum(int(oracle.multiplicities(pattern, n, n, 4, 2, False).sum()) for n in (20, 5))


def test_explain_says_why_not():
    q = torch.zeros(1, 20, 2, 8)
    explained = explain(q, q, q, Dilated([8], [1]), dropout_p=0.1)
    assert explained.backend == "eager"
    assert [name for name, _ in explained.refused] == ["sdpa"]
    assert "not       sdpa: dropout is not supported" in str(explained)
    with pytest.raises(ValueError, match="no backend can serve this call"):
        explain(q, q, q, Dilated([8], [1]), dropout_p=0.1, backend="sdpa")
    with pytest.raises(ValueError, match="0 <= dropout_p < 1, got 3"):
        explain(q, q, q, Dilated([8], [1]), dropout_p=3)


def test_explain_counts_what_ranks_send():
    q = torch.zeros(1, 32, 2, 8)
    explained = explain(q, q, q, Dilated([4, 32], [1, 2]), world_size=2).sharding
    assert explained.bytes == 8 * 2 * 8 * 2 * 4  # rows per head, heads, numbers, key and value, bytes
    assert "2 rank(s), contiguous: ring" in str(explained)  # one message: it is waited for in either case
    assert "nothing is sent" in str(explain(q, q, q, Dilated([16], [1]), world_size=2))
    with pytest.raises(ValueError, match="as many queries as keys, got 16 and 32; leave out world_size"):
        explain(q[:, 16:], q, q, Dilated([16], [1]), world_size=2)
    with pytest.raises(ValueError, match="layout must be one of"):
        explain(q, q, q, Dilated([16], [1]), world_size=2, layout="spiral")
    with pytest.raises(ValueError, match="got layout='zigzag' without world_size"):
        explain(q, q, q, Dilated([16], [1]), layout="zigzag")
    with pytest.raises(ValueError, match="no torchscale_padding; use a pattern without it, or one device"):
        explain(q, q, q, Dilated([16], [1], torchscale_padding=True), world_size=2)
