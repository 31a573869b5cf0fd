"""The results of a sample have the same bits, whatever stands beside it in the batch."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import BlockSparse, Dilated, attention
from neighbours import check_bits_of_a_sample
from oracle import random_inputs, with_grads

BACKENDS = ["reference", "sdpa", "eager"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_sample_and_its_document(backend):
    q, k, v = (x.detach() for x in random_inputs(3, 24, 24, 2, 2, 4))
    clean = attention(q, k, v, Dilated([8, 16], [1, 2]), backend=backend)
    for bad in (torch.nan, torch.inf):
        for x in (q, k, v):
            dirty = [y.clone() if y is x else y for y in (q, k, v)]
            next(y for y in dirty if y is not q and y is not k and y is not v)[1, 3] = bad
            out = attention(*dirty, Dilated([8, 16], [1, 2]), backend=backend)
            assert torch.equal(out[[0, 2]], clean[[0, 2]])
            assert not torch.equal(out[1], clean[1])
    q[:, 12:] = torch.nan
    packed = attention(q, k, v, Dilated([8, 16], [1, 2]), backend=backend, cu_seqlens=torch.tensor([0, 12, 24]))
    assert packed[:, :12].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [False, True])
def test_the_bits_of_a_sample_do_not_depend_on_gradients_of_others(backend, dtype, padding):
    """dlse is NaN for one sample and large for another. The others are copies of the sample, for comparison.

    The number of samples stays, because products of matrices on a CPU may round otherwise in a larger batch.
    """
    pattern = Dilated([16, 50], [1, 3], torchscale_padding=padding)
    call = lambda *x: attention(*x, pattern, backend=backend, return_lse=True)  # noqa: E731
    for tokens in (20, 37, 50, 80):
        inputs = random_inputs(3, tokens, tokens, 4, 2, 8, dtype)
        dout, dlse = (
            torch.randn(3, tokens, 4, 8),
            torch.randn(3, 4, tokens) * torch.tensor([1.0, torch.nan, 1e4])[:, None, None],
        )
        together = with_grads(call, inputs, dout, dlse)
        for b in (0, 2):
            copies = lambda x, b=b: x.detach()[b : b + 1].repeat(3, *[1] * (x.dim() - 1))  # noqa: E731
            own = [copies(x).requires_grad_() for x in inputs]
            alone = with_grads(call, own, copies(dout), copies(dlse))
            for name, found, expected in zip(("out", "lse", "dq", "dk", "dv"), together, alone, strict=True):
                assert torch.equal(found[b], expected[b]), (tokens, b, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [Dilated([16, 50], [1, 3]), BlockSparse.custom(torch.ones(3, 3).bool(), block_size=16)])
def test_the_bits_of_a_sample_do_not_depend_on_its_neighbours(backend, dtype, pattern):
    call = lambda *x: attention(*x, pattern, backend=backend, return_lse=True)  # noqa: E731
    check_bits_of_a_sample(call, n=48, heads=2, head_dim=8, dtype=dtype)
