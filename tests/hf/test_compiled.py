"""Compiled models: the results of the models themselves, for several lengths."""

from __future__ import annotations

import pytest
import torch

import hf_models
from hf_models import PACKED, assert_layers_close, dilated, documents, padded, positions_of, tokens


def compiled(model, backend="eager"):
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=True)


def logits(model, *args, **more):
    with torch.no_grad():
        return model(*args, use_cache=False, **more).logits


@pytest.fixture(autouse=True)
def _reset_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.hf
def test_compiled_without_a_mask():
    model = dilated(hf_models.gpt2(n_layer=1))
    fast = compiled(model, "aot_eager")
    for n in (41, 30):
        x = tokens(2, n)
        assert_layers_close([logits(fast, x)], [logits(model, x)])


@pytest.mark.hf
def test_compiled_with_padding():
    model = dilated(hf_models.llama())
    fast = compiled(model)
    for side, lengths in (("left", [41, 17]), ("right", [30, 22])):
        x, mask, rows = padded(side, lengths)
        more = {"attention_mask": mask, "position_ids": positions_of(mask)}
        found, expected = logits(fast, x, **more), logits(model, x, **more)
        for b, r in enumerate(rows):
            torch.testing.assert_close(found[b, r], expected[b, r], rtol=1e-5, atol=1e-5)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="sample 0 has 1 masked rows between rows 0 and 29"):
        logits(fast, x, **more)


@pytest.mark.hf
def test_compiled_documents_need_cu_seq_lens():
    model, x = dilated(hf_models.gpt2(n_layer=1)), tokens(1, 41)
    fast, positions, bounds = compiled(model), documents(PACKED), torch.tensor([0, 9, 10, 30, 41])
    with pytest.raises(ValueError, match=r"cannot find packed documents in position_ids.* cu_seq_lens_q"):
        logits(fast, x, position_ids=positions)
    more = {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert_layers_close([logits(fast, x, **more)], [logits(model, x, **more)])
