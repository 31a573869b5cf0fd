"""Bad input: the rule, the values, the way out, before anything is computed."""

from __future__ import annotations

import re

import pytest
import torch

from dilated_attention_pytorch import Dilated, SparsePatternConfig, attention, attention_weights

PATTERN = Dilated([8, 16], [1, 2])


def call(q=(2, 20, 4, 8), k=(2, 20, 4, 8), v=None, pattern=PATTERN, **options):
    shapes = (q, k, k if v is None else v)
    tensors = [torch.zeros(x) if isinstance(x, tuple) else x for x in shapes]
    return attention(*tensors, pattern, **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": (20, 4, 8)}, ValueError, "query must be (batch, sequence, heads, head size), got 3 dimensions: (20, 4, 8)"),
        ({"k": (2, 20, 32)}, ValueError, "key must be (batch, sequence, heads, head size)"),
        ({"q": [1.0]}, TypeError, "query must be a torch.Tensor, got list"),
        ({"k": (2, 20, 3, 8)}, ValueError, "got 4 query heads and 3 key heads"),
        ({"k": (2, 20, 8, 8)}, ValueError, "multiple of the key heads"),
        ({"k": (2, 20, 4, 9)}, ValueError, "same head size, at least 1, got 8 and 9"),
        ({"k": (3, 20, 4, 8)}, ValueError, "same batch size, got 2 and 3"),
        ({"v": (2, 21, 4, 8)}, ValueError, "key and value must have the same shape"),
        ({"k": (2, 19, 4, 8)}, ValueError, "got 20 queries and 19 keys"),
        ({"q": torch.zeros(2, 20, 4, 8).double()}, TypeError, "one dtype, got torch.float64, torch.float32"),
        ({"q": torch.zeros(2, 20, 4, 8, device="meta")}, ValueError, "on one device, got meta, cpu and cpu"),
        ({"pattern": ([8], [1])}, TypeError, "pattern must be a Dilated or a BlockSparse, got tuple"),
        ({"pattern": SparsePatternConfig("adaptive", 0.1)}, TypeError, "BlockSparse.from_config(SparsePatternConfig(...))"),
        ({"pattern": Dilated([8], [4], [0, 1])}, ValueError, "got 2 offsets (0, 1) for 4 key heads"),
        ({"backend": "magic"}, ValueError, "one of 'auto', 'hopper', 'triton', 'sdpa', 'eager', 'reference', got 'magic'"),
        ({"mixing_gradient": "none"}, ValueError, "'exact' or 'detached', got 'none'"),
        ({"dropout_p": 1.0}, ValueError, "0 <= dropout_p < 1, got 1.0"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"scale": torch.ones(())}, TypeError, "multiply the query by a learned scale"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number, got str"),
        ({"is_causal": "no"}, TypeError, "True or False, got 'no'"),
        ({"seed": 1.5}, ValueError, "integer of 64 bits, got 1.5"),
        ({"seed": torch.arange(3)}, ValueError, "one integer, got a tensor of shape (3,)"),
        ({"lengths": torch.ones(2, 20, dtype=torch.bool)}, ValueError, "the lengths of a mask are mask.sum(-1)"),
        ({"lengths": [20, 2.5]}, TypeError, "lengths must be integers, as a tensor, a tuple or a list, got [20, 2.5]"),
        ({"lengths": "20"}, TypeError, "lengths must be integers, as a tensor, a tuple or a list, got '20'"),
        ({"lengths": torch.tensor([20, 21])}, ValueError, "between 0 and the 20 positions of the sequence, got [20, 21]"),
        ({"lengths": torch.tensor([20, -1])}, ValueError, "between 0 and the 20 positions of the sequence, got [20, -1]"),
        ({"lengths": torch.tensor([20])}, ValueError, "got 1 entries for a batch of 2"),
        ({"lengths": torch.tensor([20.0, 20.0])}, ValueError, "int32 or int64, got 1 dimensions of torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 12, 8, 20])}, ValueError, "must rise from 0 to the 20 positions of the sequence"),
        ({"cu_seqlens": torch.tensor([0, 12])}, ValueError, "must rise from 0 to the 20"),
        ({"cu_seqlens": torch.tensor([1, 20])}, ValueError, "must rise from 0 to the 20"),
        ({"cu_seqlens": torch.tensor([20])}, ValueError, "at least two entries"),
        ({"cu_seqlens": torch.tensor([0, 20]), "q": (2, 5, 4, 8)}, ValueError, "as many queries as keys, got 5 and 20"),
        ({"cu_seqlens": torch.tensor([0, 20]), "lengths": torch.tensor([20, 20])}, ValueError, "exclude one another"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_bad_arguments(arguments, error, message, backend):
    with pytest.raises(error, match=re.escape(message)):
        call(**{"backend": backend} | arguments)


def test_integers_are_no_floating_point_type():
    x = torch.zeros(1, 4, 2, 8, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"torch.float64, torch.float32, torch.bfloat16, torch.float16, got torch.int32"):
        attention(x, x, x, PATTERN)


def test_a_backend_that_cannot_lists_every_reason():
    """A device that none of the fused operators knows."""
    x = torch.zeros(1, 4, 2, 8, device="meta")
    with pytest.raises(ValueError, match=r"sdpa: CPU flash runs on CPU tensors, got meta\n(.*\n)*.*memory-efficient"):
        attention(x, x, x, PATTERN, backend="sdpa")


def test_the_reference_refuses_what_would_not_fit():
    x = torch.zeros(1, 40_000, 1, 1)
    with pytest.raises(ValueError, match="at most 1073741824"):
        attention(x, x, x, PATTERN, backend="reference")


def test_forward_mode_derivatives_are_refused_not_dropped():
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    for backend in ("sdpa", "eager"):
        with pytest.raises(NotImplementedError, match="backend='reference'"):
            torch.func.jvp(lambda x: attention(x, k, v, PATTERN, backend=backend), (q,), (q,))  # noqa: B023
    _, tangent = torch.func.jvp(lambda x: attention(x, k, v, PATTERN, backend="reference"), (q,), (q,))
    assert tangent.abs().sum() > 0


def test_rows_of_weights_must_be_integers():
    x = torch.zeros(1, 10, 2, 8)
    for rows in (torch.ones(10, dtype=torch.bool), [3.9], "all", None, slice(3)):
        with pytest.raises(TypeError, match="query_rows must be"):
            attention_weights(x, x, PATTERN, rows)


def test_rows_of_weights_must_exist():
    x = torch.zeros(1, 10, 2, 8)
    for rows in ([10], [-11], [[0]]):
        with pytest.raises(ValueError, match="row numbers from -10 to 9"):
            attention_weights(x, x, PATTERN, rows)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "reference"])
@pytest.mark.parametrize("shape", [(0, 20, 4, 8), (2, 0, 4, 8), (0, 0, 4, 8)])
def test_empty_batches_and_sequences(shape, backend):
    q, k, v = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    out, lse = attention(q, k, v, PATTERN, backend=backend, return_lse=True)
    assert out.shape == shape
    assert lse.shape == (shape[0], 4, shape[1])
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == shape
