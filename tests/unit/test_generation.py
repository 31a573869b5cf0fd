"""Generated tokens and scores against whole forwards of the model, with samplers that are written out here."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import model_oracle
from dilated_attention_pytorch import LongNetDecoder
from dilated_attention_pytorch.models import generation
from dilated_attention_pytorch.models.generation import Decoding
from dilated_attention_pytorch.models.sampling import Sampling
from model_cases import VOCABULARY, ids, make_decoder


@pytest.fixture(scope="module", name="model")
def _model():
    return make_decoder()


def distribution(logits, history, temperature, top_k=None, top_p=None, penalty=None):
    """The probabilities of one sample as a list, by sorting and adding in Python."""
    logits = [
        x if penalty is None or i not in history else (x / penalty if x > 0 else x * penalty) for i, x in enumerate(logits)
    ]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda i: -weights[i])
    if top_k is not None and top_k < len(kept):
        kept = [i for i in kept if weights[i] >= weights[kept[top_k - 1]]]
    if top_p is not None:
        total = sum(weights[i] for i in kept)
        sums = itertools.accumulate(weights[i] / total for i in kept)
        kept = kept[: 1 + next((n for n, x in enumerate(sums) if x >= top_p), len(kept))]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def recompute(model, prompts, count, *, seed=None, temperature=0.0, eos=None, **options):
    """``count`` tokens of each sample: for every token, the whole model runs over the whole sequence of each sample."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    sequences, ended, made = [list(map(int, p)) for p in prompts], [False] * len(prompts), []
    for _ in range(count):
        with torch.no_grad():
            logits = [model(torch.tensor([own]))[0, -1].tolist() for own in sequences]
        rows = [distribution(x, own, temperature or 1.0, **options) for x, own in zip(logits, sequences, strict=True)]
        chances = torch.tensor(rows, dtype=torch.float64)
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0] if temperature else chances.argmax(-1)
        token = [eos if end else int(x) for x, end in zip(drawn, ended, strict=True)]
        for own, x, end in zip(sequences, token, ended, strict=True):
            own.extend([] if end else [x])
        ended = [end or x == eos for end, x in zip(ended, token, strict=True)]
        made.append(token)
    return torch.tensor(made).t()


@pytest.mark.parametrize("positions", ["rotary", "xpos", "none"])
def test_greedy_tokens_are_those_of_whole_forwards(positions):
    """Positions go past the ends of three long segments."""
    model, prompts = make_decoder(positions=positions), ids(2, 7)
    tokens, lengths = model.generate(prompts, max_new_tokens=34)
    assert torch.equal(tokens, recompute(model, prompts, 34))
    assert lengths.tolist() == [34, 34]
    assert tokens.unique().numel() > 2


def test_greedy_tokens_against_a_model_written_out(model):
    w, own = model_oracle.weights(model), ids(9).tolist()
    made = model.generate([own], max_new_tokens=12).tokens[0].tolist()
    for token in made:
        states = model_oracle.forward(w, model.config, torch.tensor(own), causal=True)
        assert token == int((states[-1] @ w["output_projection.weight"].T).argmax())
        own.append(token)


SAMPLERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"temperature": 1.1, "top_p": 0.6},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.7},
    "greedy penalty": {"repetition_penalty": 1.5},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "repetition_penalty": 0.8},
}


@pytest.mark.parametrize("case", SAMPLERS)
def test_drawn_tokens_are_those_of_whole_forwards(model, case):
    """The same generator draws the same tokens; the test draws by ``torch.multinomial``."""
    options = SAMPLERS[case]
    prompts = [ids(n, seed=n) for n in (13, 1, 6)]
    draws = "temperature" in options
    tokens, _ = model.generate(prompts, max_new_tokens=14, generator=3 if draws else None, **options)
    own = {name.removeprefix("repetition_"): x for name, x in options.items()}
    assert torch.equal(tokens, recompute(model, prompts, 14, seed=3 if draws else None, **own))
    if draws:
        again = model.generate(prompts, max_new_tokens=14, generator=torch.Generator().manual_seed(3), **options)
        assert torch.equal(again.tokens, tokens)
        assert not torch.equal(model.generate(prompts, max_new_tokens=14, generator=4, **options).tokens, tokens)
        torch.manual_seed(3)  # PyTorch's default generator
        assert torch.equal(model.generate(prompts, max_new_tokens=14, **options).tokens, tokens)


def test_rules_of_sampling_by_hand():
    """Hand-made logits with ties, one of them at the boundary of each rule."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    occurred = torch.tensor([[True, False, True, False]])

    def probabilities(logits=logits, occurred=None, **options):
        return Sampling(**{"temperature": 1.0} | options).probabilities(logits, occurred)[0].tolist()

    approx = pytest.approx
    assert probabilities() == approx([0.5, 0.25, 0.125, 0.125])
    assert probabilities(temperature=0.5) == approx([8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11])
    assert probabilities(temperature=1e-300) == [1, 0, 0, 0]
    assert probabilities(top_k=2) == approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(top_k=3) == approx([0.5, 0.25, 0.125, 0.125])  # the fourth is as probable as the third
    assert probabilities(top_k=99) == approx([0.5, 0.25, 0.125, 0.125])
    assert probabilities(top_p=0.1) == approx([1, 0, 0, 0])
    assert probabilities(top_p=0.5) == approx([1, 0, 0, 0])
    assert probabilities(top_p=0.51) == approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(top_p=0.8) == approx([4 / 7, 2 / 7, 1 / 7, 0])  # of equal ones, the smaller id
    assert probabilities(top_p=1.0) == approx([0.5, 0.25, 0.125, 0.125])
    assert probabilities(top_k=2, top_p=0.66) == approx([1, 0, 0, 0])  # sums are over what top-k keeps
    ids_of = torch.tensor([[2.0, 1.0, -1.0, 0.0]], dtype=torch.float64)
    changed = torch.tensor([1.0, 1.0, -2.0, 0.0], dtype=torch.float64).softmax(-1).tolist()
    assert probabilities(ids_of, occurred, repetition_penalty=2.0) == approx(changed)
    greedy = Sampling(repetition_penalty=2.5)
    assert greedy.choose(ids_of, occurred, None).tolist() == [1]
    assert greedy.choose(ids_of, torch.zeros_like(occurred), None).tolist() == [0]
    assert Sampling(temperature=1).choose(ids_of.bfloat16(), None, None).dtype == torch.int64


def test_draws_have_the_probabilities():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(20000, 4)
    drawn = Sampling(temperature=1.0, top_k=3).choose(logits, None, torch.Generator().manual_seed(0))
    shares = drawn.bincount(minlength=4) / 20000
    torch.testing.assert_close(shares, torch.tensor([4 / 9, 3 / 9, 2 / 9, 0]), atol=0.015, rtol=0)


LENGTHS = (5, 1, 29, 12, 13)


@pytest.mark.parametrize("size", [1, 4, 8, 9, 12, 100])
def test_prompts_of_different_lengths_are_each_by_itself(model, size):
    """Chunks of prompts end before, at and behind segments; samples have no tokens in later chunks."""
    prompts = [ids(n, seed=n) for n in LENGTHS]
    options = {"max_new_tokens": 15, "repetition_penalty": 1.3}
    expected = torch.cat([model.generate(own[None], **options).tokens for own in prompts])
    assert torch.equal(model.generate(prompts, prefill_chunk=size, **options).tokens, expected)


def test_forms_of_prompts(model):
    prompts = [ids(n, seed=n) for n in LENGTHS]
    expected = model.generate(prompts, max_new_tokens=4).tokens
    forms = [
        [own.tolist() for own in prompts],
        [bytes(own.tolist()) for own in prompts],
        tuple(own.to(torch.uint8) for own in prompts),
        torch.nested.nested_tensor(prompts, layout=torch.jagged),
    ]
    for form in forms:
        assert torch.equal(model.generate(form, max_new_tokens=4).tokens, expected)
    together = torch.stack([prompts[3], prompts[4][:12]])
    assert torch.equal(
        model.generate(together.int(), max_new_tokens=4).tokens, model.generate([*together], max_new_tokens=4).tokens
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 1.4, "generator": 11}])
def test_samples_end_with_eos(model, options):
    prompts = [ids(n, seed=n + 40) for n in (13, 3, 6, 8)]
    free = model.generate(prompts, max_new_tokens=25, **options).tokens
    firsts = {x: {row.tolist().index(x) if x in row else 25 for row in free} for x in range(VOCABULARY)}
    eos = max(firsts, key=lambda x: len(firsts[x]))  # samples end in different steps
    own = {name.replace("generator", "seed"): x for name, x in options.items()}
    expected = recompute(model, prompts, 25, eos=eos, **own)
    tokens, lengths = model.generate(prompts, max_new_tokens=25, eos=eos, **options)
    assert torch.equal(tokens, expected[:, : max(lengths)])
    assert tokens.shape[1] == 25 or (expected[:, max(lengths) - 1 :] == eos).all()
    for row, whole, n in zip(tokens, free, lengths.tolist(), strict=True):
        assert torch.equal(row[:n], whole[:n])
        assert (row[n:] == eos).all()
        assert n == 25 or (row[n - 1] == eos and not (row[: n - 1] == eos).any())
    assert lengths.unique().numel() > 1


def test_generation_stops_when_all_samples_ended(model):
    prompts = [ids(n, seed=n + 40) for n in (13, 3)]
    free = model.generate(prompts, max_new_tokens=25).tokens
    ends = [int(free[0, 2]), int(free[1, 4])]
    first = [min(row.tolist().index(x) for x in ends if x in row) for row in free]
    decoding = model.stream(prompts, max_new_tokens=25, eos=ends)
    tokens, lengths = model.generate(prompts, max_new_tokens=25, eos=ends)
    assert lengths.tolist() == [n + 1 for n in first]
    assert tokens.shape == (2, max(first) + 1)
    assert torch.equal(torch.stack([*decoding], 1), tokens)
    # The eos of a sample, and what comes behind it, are not appended.
    assert decoding.caches[0].tokens_seen.tolist() == [13 + first[0], 3 + first[1]]
    assert decoding.active.tolist() == [False, False]


def test_tokens_are_streamed_as_they_come(model):
    """An endless stream: a token does not wait for later ones, and earlier ones keep their values."""
    prompts = ids(2, 9)
    expected = model.generate(prompts, max_new_tokens=40).tokens
    stream = model.stream(prompts)
    assert stream.caches[0].tokens_seen.tolist() == [0, 0]
    tokens = []
    for number, token in enumerate(itertools.islice(stream, 40)):
        assert stream.caches[0].tokens_seen.tolist() == [9 + number] * 2
        assert stream.lengths.tolist() == [number + 1] * 2
        tokens.append(token)
    assert torch.equal(torch.stack(tokens, 1), expected)
    sizes = [cache.nbytes for cache in stream.caches]
    next(stream)
    assert [cache.nbytes for cache in stream.caches] == sizes
    assert not any(token.requires_grad for token in tokens)


def test_prompts_are_computed_in_chunks_of_bounded_size(model, monkeypatch):
    """Neither states nor logits exist for more than a chunk, and only the last states go through the head."""
    shapes, heads, linear = [], [], torch.nn.functional.linear
    features = model.features
    monkeypatch.setattr(model, "features", lambda x, **options: shapes.append(x.shape) or features(x, **options))
    head = model.head_weight

    def recorded(x, weight, *bias):
        heads.extend([tuple(x.shape)] if weight is head else [])
        return linear(x, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    model.generate([ids(100), ids(33)], max_new_tokens=2, prefill_chunk=30)
    assert [tuple(x) for x in shapes] == [(2, 30), (2, 30), (2, 30), (2, 10)]
    assert heads == [(2, 16), (2, 1, 16)]


def test_a_step_reads_no_values():
    """Tensors without values: a step that read one on the host would raise."""
    sampling = Sampling(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.2)
    model = make_decoder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoding = Decoding(model, [[1, 2, 3]], sampling)
        decoding.step()
        assert decoding.token.shape == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.2)])
def test_steps_share_one_graph(model, sampling):
    """``fullgraph`` refuses what reads a value. The graph serves all positions, and it changes tensors in place."""
    torch._dynamo.reset()
    prompts = [ids(13), ids(4)]
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = (Decoding(model, prompts, sampling, max_new_tokens=30, eos=[7, 10]) for _ in range(2))
    address, results = compiled.token.data_ptr(), []
    for decoding, step in (
        (eager, eager.step),
        (compiled, torch.compile(compiled.step, backend=counter, fullgraph=True)),
    ):
        torch.manual_seed(1)
        next(decoding)
        tokens = [decoding.token.clone()]
        for _ in range(20):
            step()
            tokens.append(decoding.token.clone())
        results.append((torch.stack(tokens).tolist(), decoding.lengths.tolist(), decoding.caches[1].tokens_seen.tolist()))
    assert results[0] == results[1]
    assert counter.frame_count == 1
    assert compiled.token.data_ptr() == address


@pytest.mark.parametrize("chunks", [(41,), (1,) * 41, (12, 12, 12, 5), (3, 0, 20, 1, 17), (0, 1, 40)])
@pytest.mark.parametrize("positions", ["rotary", "xpos"])
def test_scores_are_those_of_one_forward(chunks, positions):
    model, tokens = make_decoder(positions=positions), ids(2, 41)
    with torch.no_grad():
        whole = model(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    results = list(model.score(torch.split(tokens, list(chunks), 1)))
    torch.testing.assert_close(torch.cat(results, 1), whole, rtol=1e-10, atol=1e-10)
    ends = [0, *itertools.accumulate(chunks)]
    widths = [max(stop, 1) - max(start, 1) for start, stop in itertools.pairwise(ends)]
    assert [x.shape[1] for x in results] == widths
    row = list(model.score(iter(torch.split(tokens[1].to(torch.uint8), list(chunks)))))
    torch.testing.assert_close(torch.cat(row), whole[1], rtol=1e-10, atol=1e-10)


def test_scores_need_bounded_memory(model, monkeypatch):
    """A long chunk is computed in several calls, with few logits at a time, and nothing waits for later chunks."""
    expected = torch.cat(list(model.score([ids(70)])))
    monkeypatch.setattr(generation, "CHUNK", 16)
    monkeypatch.setattr("dilated_attention_pytorch.models.decoder._LOGITS", 5 * VOCABULARY)
    sizes, linear, head = [], torch.nn.functional.linear, model.head_weight

    def recorded(x, weight, *bias):
        sizes.extend([len(x)] if weight is head else [])
        return linear(x, weight, *bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    scores = model.score(itertools.chain([ids(70)], itertools.cycle([ids(10)])))
    torch.testing.assert_close(next(scores), expected, rtol=1e-10, atol=1e-10)
    assert max(sizes) == 5
    assert sum(sizes) == 69
    assert next(scores).shape == (10,)
    assert not next(scores).requires_grad


def test_half_precision_and_autocast():
    model = LongNetDecoder(make_decoder().config).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(ids(1, 20), max_new_tokens=3).tokens.shape == (1, 3)
        (values,) = model.score([ids(20)])
    assert values.dtype == torch.float32
    whole = next(model.double().score([ids(20)]))
    torch.testing.assert_close(values.double(), whole, rtol=0.1, atol=0.1)
