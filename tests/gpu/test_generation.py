"""Generation on a GPU: tokens of whole forwards, steps in a CUDA graph, no device synchronisation."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import LongNetConfig, LongNetDecoder

pytestmark = pytest.mark.gpu
CONFIG = LongNetConfig.preset("tiny", tie_embeddings=False, segment_lengths=(16, 64), dilation_rates=(1, 4))
SAMPLERS = [{}, {"repetition_penalty": 1.3}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}]


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return LongNetDecoder(CONFIG, device="cuda", dtype=dtype).eval()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("size", [7, 50, 65536])
def test_greedy_tokens_are_those_of_whole_forwards(size):
    model, samples = make(), prompts(150, 3, 64)
    tokens, _ = model.generate(samples, max_new_tokens=80, prefill_chunk=size)
    with torch.no_grad():
        for sample, new in zip(samples, tokens, strict=True):
            whole = torch.cat([sample.cuda(), new])
            logits = model(whole[None])[0, len(sample) - 1 : -1]
            assert torch.equal(logits.argmax(-1), new)


@pytest.mark.parametrize("options", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_a_cuda_graph(options, dtype):
    """Replays give the tokens of eager steps; samples end in a graph as well."""
    model, results = make(dtype), []
    for captured in (False, True):
        torch.manual_seed(5)
        stream = model.stream(prompts(150, 3, 64), eos=[*range(0, 257, 16)], **options)
        tokens = [next(stream)]
        stream.step()
        tokens.append(stream.token.clone())
        step = stream.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                stream.step()
            step = graph.replay
        for _ in range(60):
            step()
            tokens.append(stream.token.clone())
        results.append((torch.stack(tokens), stream.lengths, stream.caches[-1].tokens_seen))
    for eager, graphed in zip(*results, strict=True):
        assert torch.equal(eager, graphed)


@pytest.mark.parametrize("options", SAMPLERS)
def test_steps_do_not_synchronise(options):
    stream = make(torch.bfloat16).stream(prompts(20, 9), eos=3, **options)
    next(stream)
    stream.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            stream.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scores_are_those_of_one_forward():
    model, (tokens,) = make(), prompts(500)
    with torch.no_grad():
        whole = model(tokens.cuda()[None]).log_softmax(-1)[0, :-1].gather(-1, tokens.cuda()[1:, None])[:, 0]
    values = torch.cat(list(model.score(torch.split(tokens, [1, 99, 200, 3, 197]))))
    torch.testing.assert_close(values, whole, rtol=1e-10, atol=1e-10)
