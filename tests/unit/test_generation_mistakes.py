"""Mistakes in calls of ``generate``, ``stream`` and ``score``: the rule, the values and the way out."""

from __future__ import annotations

import math

import pytest
import torch

from dilated_attention_pytorch.models import generation
from dilated_attention_pytorch.models.sampling import Sampling
from model_cases import ids, make_decoder


@pytest.fixture(scope="module", name="model")
def _model():
    return make_decoder()


ERRORS = {
    "tensor": ({"prompts": torch.zeros(3, dtype=torch.int64)}, ValueError, r"got a tensor \(3,\); prompt\[None\]"),
    "text": ({"prompts": "abc"}, TypeError, r"got str; write \[prompt\]"),
    "bytes": ({"prompts": b"abc"}, TypeError, r"got bytes; write \[prompt\]"),
    "entry": ({"prompts": ["abc"]}, TypeError, r"text.encode\(\)"),
    "one list": ({"prompts": [1, 2]}, TypeError, r"got an entry 1; write \[prompt\]"),
    "matrix": ({"prompts": [torch.zeros(1, 3, dtype=torch.int64)]}, ValueError, r"got an entry \(1, 3\)"),
    "floats": ({"prompts": torch.zeros(1, 3)}, TypeError, "token ids of torch.int64, .* got torch.float32"),
    "no sample": ({"prompts": []}, ValueError, "got no sample"),
    "empty": ({"prompts": [[1], [], []]}, ValueError, r"prompts \[1, 2\] are empty; begin with a separator"),
    "dtypes": ({"prompts": [[1], torch.tensor([1]).int()]}, ValueError, "torch.int32 on cpu, torch.int64 on cpu"),
    "vocabulary": ({"prompts": [[1, 11]]}, ValueError, "from 0 to 10, got ids from 1 to 11"),
    "negative": ({"prompts": [[1, -1]]}, ValueError, "got ids from -1 to 1"),
    "count": ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer, at least 1, got 0"),
    "no count": ({"max_new_tokens": None}, TypeError, "stream goes on without a bound"),
    "chunk": ({"prefill_chunk": 0}, ValueError, "prefill_chunk must be an integer, at least 1"),
    "eos": ({"eos": 11}, ValueError, "eos must be one or several token ids from 0 to 10, got 11"),
    "no eos": ({"eos": []}, ValueError, r"got \[\]; None never ends"),
    "eos type": ({"eos": "a"}, TypeError, "eos must be an integer"),
    "temperature": ({"temperature": -1}, ValueError, "temperature must be at least 0, got -1"),
    "temperature type": ({"temperature": True}, TypeError, "temperature must be a number, got True"),
    "infinite": ({"temperature": math.inf}, ValueError, "temperature must be finite"),
    "top_k": ({"temperature": 1, "top_k": 0}, ValueError, "top_k must be an integer, at least 1"),
    "top_p": ({"temperature": 1, "top_p": 0}, ValueError, "0 < top_p <= 1, got 0"),
    "greedy": ({"temperature": 0, "top_k": 3, "top_p": 0.5}, ValueError, "top_k and top_p select among .*temperature=0.0"),
    "penalty": ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be positive, got 0"),
    "greedy seed": ({"generator": 1}, ValueError, "generator draws tokens, but temperature=None"),
    "seed": ({"generator": "1", "temperature": 1}, TypeError, "generator, if it is not a torch.Generator, must be an int"),
    "unknown": ({"topk": 1}, TypeError, "topk"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(model, case):
    changes, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        model.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2} | changes)


def test_errors_of_models_and_devices(model, monkeypatch):
    with pytest.raises(ValueError, match=r"training mode and has dropout.*call model.eval\(\)"):
        make_decoder(dropout=0.1).train().stream([[1]])
    with pytest.raises(ValueError, match="training mode"):
        make_decoder(dropout=0.1).train().score([])
    assert make_decoder().train().generate([[1]], max_new_tokens=1).tokens.shape == (1, 1)  # nothing is dropped
    long = make_decoder(positions="xpos", segment_lengths=(4, 40000), dilation_rates=(1, 1))
    with pytest.raises(ValueError, match=r"xPos in torch\.float64 covers"):
        long.stream([[1]])
    with pytest.raises(ValueError, match="on the device of the model, cuda:1, got cpu; pass a seed"):
        generation._generator(torch.Generator(), Sampling(temperature=1.0), torch.device("cuda", 1))
    stream = model.stream([[1, 99]])
    with pytest.raises(ValueError, match="got ids from 1 to 99"):
        next(stream)
    with pytest.raises(RuntimeError, match="make a new stream"):
        next(stream)
    monkeypatch.setattr(model, "sharding", object())
    for call in (lambda: model.stream([[1]]), lambda: model.score([])):
        with pytest.raises(ValueError, match="a model without group"):
            call()


def test_errors_of_scores(model):
    with pytest.raises(TypeError, match=r"got Tensor; score\(\[tokens\]\)"):
        model.score(ids(2, 3))
    cases = [
        ([ids(1, 2, 3)], TypeError, r"token ids \(n,\) or \(B, n\), got \(1, 2, 3\)"),
        (["abc"], TypeError, "got str"),
        ([torch.zeros(3)], TypeError, "got torch.float32"),
        ([torch.tensor([1, 11])], ValueError, "from 0 to 10, got ids from 1 to 11"),
        ([ids(2, 3), ids(3, 3)], ValueError, r"the same batch size, got \[2\] and then \[3\]"),
    ]
    for chunks, kind, message in cases:
        with pytest.raises(kind, match=message):
            list(model.score(chunks))
