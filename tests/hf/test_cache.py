"""``DilatedCache``: chunks of any length are exact, memory is bounded, and no other attention can use it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

import hf_models
from dilated_attention_pytorch import Dilated, DilatedKVCache
from dilated_attention_pytorch.integrations.transformers import DilatedCache, DilatedCacheLayer, apply
from dilated_attention_pytorch.integrations.transformers.cache import ChunkKeys
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows
from hf_models import PATTERN, RATES, SEGMENTS, assert_layers_close, dilated, error, run, tokens


def gpt2(**more):
    """Positions by a table and LayerNorm: nothing is rounded to float32."""
    return dilated(hf_models.gpt2(**more))


def in_chunks(model, x, sizes, cache, **more):
    """The results of all layers for one forward per chunk. Masks and positions are cut as the tokens are."""
    outputs, seen = [], 0
    for n in sizes:
        cut = {name: y[:, seen : seen + n] if name == "position_ids" else y[:, : seen + n] for name, y in more.items()}
        outputs.append(run(model, x[:, seen : seen + n], past_key_values=cache, **cut))
        seen += n
    return [torch.cat([chunk[i] for chunk in outputs], 1) for i in range(len(outputs[0]))]


CHUNKS = [[1] * 100, [64, 36], [3, 70, 5, 8, 14], [100], [9, 8, 7, 76]]


@pytest.mark.parametrize("sizes", CHUNKS, ids=lambda sizes: f"{len(sizes)} chunks")
def test_chunks_are_one_call(sizes):
    model, x = gpt2(), tokens(2, 100)
    cache = DilatedCache(model.config)
    assert_layers_close(in_chunks(model, x, sizes, cache), run(model, x, use_cache=False), 1e-10)
    assert cache.get_seq_length() == 100
    assert all(layer.kv.tokens_seen.tolist() == [100, 100] for layer in cache.layers)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_models_with_rotary_positions(name):
    model, x = dilated(hf_models.DECODERS[name]()), tokens(2, 60)
    found = in_chunks(model, x, [17, 1, 1, 30, 11], DilatedCache(model.config))
    dynamic = in_chunks(model, x, [17, 1, 1, 30, 11], DynamicCache(config=model.config))
    assert_layers_close(found, dynamic, 1e-6)  # norms round to float32, so later layers differ by that
    assert_layers_close(found[:1], dynamic[:1], 1e-12)
    other = apply(model, SEGMENTS[:2], RATES[:2])
    assert error(found, in_chunks(other, x, [17, 1, 1, 30, 11], DilatedCache(other.config))) > 0.1


def padded(lengths, side="left"):
    n = max(lengths)
    mask = torch.zeros(len(lengths), n, dtype=torch.int64)
    rows = [slice(n - m, n) if side == "left" else slice(0, m) for m in lengths]
    for b, r in enumerate(rows):
        mask[b, r] = 1
    return tokens(len(lengths), n), mask, rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "sizes", [[60], [7] * 8 + [4], [1] * 60, [30, 1, 1, 28], [5, 9, 3, 43]], ids=lambda x: f"{len(x)} chunks"
)
def test_padding_in_chunks(side, sizes):
    """Chunks that are all padding, partly padding in front or behind, and all valid."""
    model = gpt2()
    x, mask, rows = padded([60, 33, 5, 52], side)
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    found = in_chunks(model, x, sizes, DilatedCache(model.config), **more)
    for b, r in enumerate(rows):
        assert_layers_close([y[b : b + 1, r] for y in found], run(model, x[b : b + 1, r]), 1e-10)
        assert all(not y[b][mask[b] == 0].any() for y in found)


def test_masks_on_a_device_are_not_read(monkeypatch):
    """Few tokens with a mask that is not on the CPU: the same results by tensors."""
    monkeypatch.setattr(ForwardRows, "stays_on_device", property(lambda self: self.mask is not None and self.queries <= 8))
    model = gpt2()
    for side in ("left", "right"):
        x, mask, rows = padded([40, 23, 5], side)
        more = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        found = in_chunks(model, x, [7, 1, 5, 20, 3, 1, 3], DilatedCache(model.config), **more)
        for b, r in enumerate(rows):
            assert_layers_close([y[b : b + 1, r] for y in found], run(model, x[b : b + 1, r]), 1e-10)


def test_holes_in_a_mask_on_a_device(monkeypatch):
    """They cannot be refused without reading the mask. Masked rows are left out."""
    monkeypatch.setattr(ForwardRows, "stays_on_device", property(lambda self: self.mask is not None and self.queries <= 8))
    model, x = gpt2(), tokens(1, 8)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = run(model, x, attention_mask=mask, position_ids=positions, past_key_values=DilatedCache(model.config))
    valid = mask[0].bool()
    assert_layers_close([y[:, valid] for y in found], run(model, x[:, valid]), 1e-10)
    assert all(not y[:, ~valid].any() for y in found)


class NoReads(torch.overrides.TorchFunctionMode):
    """Raise for whatever would wait for a device."""

    NAMES = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "cpu")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.NAMES, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


def test_a_decoding_step_reads_no_value():
    """Nothing in a step without a mask waits for the device. A long chunk does, so the check can fail."""
    model = gpt2()
    cache = DilatedCache(model.config)
    run(model, tokens(2, 20), past_key_values=cache)
    with NoReads():
        run(model, tokens(2, 1), past_key_values=cache)
    with pytest.raises(AssertionError, match="reads a value"), NoReads():
        run(model, tokens(2, 20), past_key_values=cache)


def test_memory_is_bounded():
    model = dilated(hf_models.llama())
    cache = DilatedCache(model.config)
    assert cache.nbytes == 0
    sizes = set()
    for seed in range(12):
        run(model, tokens(2, 30, seed), past_key_values=cache)
        sizes.add(cache.nbytes)
    per_layer = DilatedKVCache.max_nbytes(PATTERN, 2, 2, 8, dtype=torch.float64)
    assert sizes == {2 * per_layer}
    assert [layer.nbytes for layer in cache.layers] == [per_layer] * 2
    assert cache.get_seq_length() == 360
    dynamic = DynamicCache(config=model.config)
    for seed in range(12):
        run(model, tokens(2, 30, seed), past_key_values=dynamic)
    assert sum(x.keys.nbytes + x.values.nbytes for x in dynamic.layers) > 4 * cache.nbytes


def test_max_tokens():
    model = dilated(hf_models.llama())
    small, large = (DilatedCache(model.config, max_tokens=n) for n in (20, None))
    for cache in (small, large):
        run(model, tokens(1, 20), past_key_values=cache)
    assert small.nbytes < large.nbytes
    assert (small.get_max_length(), large.get_max_length()) == (20, -1)
    with pytest.raises(ValueError, match="max_tokens = 20"):
        run(model, tokens(1, 1), past_key_values=small)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("n", [1, 9])
def test_another_implementation_raises_at_the_first_forward(implementation, n):
    model = dilated(hf_models.llama())
    cache = DilatedCache(model.config)
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=r"DilatedCache is for dilated attention.*attn_implementation=.dilated"):
        model(tokens(1, n), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(RuntimeError, match="DilatedCache is for dilated attention"):
        model.generate(tokens(1, n), past_key_values=cache, max_new_tokens=2)
    model.set_attn_implementation("dilated")
    run(model, tokens(1, n), past_key_values=cache)
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match="DilatedCache is for dilated attention"):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("change", [torch.clone, lambda x: x.to(torch.float32), lambda x: x.contiguous(), lambda x: x * 2])
def test_keys_must_reach_attention_unchanged(change):
    keys = ChunkKeys.of(torch.randn(1, 2, 3, 8), DilatedCacheLayer())
    assert keys.shape == (1, 2, 3, 8)
    assert keys.dtype == torch.float32
    with pytest.raises(RuntimeError, match="must reach dilated attention unchanged"):
        change(keys)


@pytest.mark.parametrize("back", [0, 1, 5, 17])
def test_crop_is_a_rollback(back):
    model, x, other = gpt2(), tokens(2, 60), tokens(2, 40, seed=1)
    cache = DilatedCache(model.config)
    run(model, x[:, :50], past_key_values=cache)
    run(model, x[:, 50:], past_key_values=cache)
    cache.crop(torch.tensor(-back) if back == 5 else -back)  # versions pass integers or tensors
    assert cache.get_seq_length() == 60 - back
    found = run(model, other, past_key_values=cache)
    expected = run(model, torch.cat((x[:, : 60 - back], other), 1), use_cache=False)
    assert_layers_close(found, [y[:, 60 - back :] for y in expected], 1e-10)


def test_crop_with_padding():
    """Padding was not appended, so it is not taken back."""
    model = gpt2()
    x, mask, _ = padded([40, 23, 2])
    cache, later = DilatedCache(model.config), torch.ones(3, 12, dtype=torch.int64)
    more = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    in_chunks(model, x, [20, 17, 3], cache, **more)
    cache.crop(-2)
    cache.crop(-3)
    assert cache.layers[0].kv.tokens_seen.tolist() == [35, 18, 0]
    y = tokens(3, 12, seed=1)
    full = torch.cat((mask[:, :35], later), 1)
    positions = (full.cumsum(1) - 1).clamp(min=0)[:, 35:]
    found = run(model, y, past_key_values=cache, attention_mask=full, position_ids=positions)
    for b, tokens_before in enumerate((35, 18, 0)):
        single = torch.cat((x[b : b + 1, 35 - tokens_before : 35], y[b : b + 1]), 1)
        expected = run(model, single, use_cache=False)
        assert_layers_close([z[b : b + 1] for z in found], [z[:, tokens_before:] for z in expected], 1e-10)


def test_crop_has_rules():
    model = dilated(hf_models.llama())
    cache = DilatedCache(model.config, max_rollback=4)
    cache.crop(-3)  # nothing is there yet
    run(model, tokens(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match=r"negative or 0: got 12; write crop\(12 - cache.get_seq_length\(\)\)"):
        cache.crop(12)
    with pytest.raises(ValueError, match=r"max_rollback = 4 tokens.*got 5; make DilatedCache"):
        cache.crop(-5)
    cache.crop(-4)
    assert cache.get_seq_length() == 16


def test_samples_of_a_batch_can_change():
    model, x = gpt2(), tokens(3, 40)
    y = tokens(3, 12, seed=1)
    whole = run(model, torch.cat((x, y), 1), use_cache=False)

    def continued(cache, samples, tokens_of):
        chosen = torch.cat((x[samples], y[tokens_of]), 1)
        found = run(model, y[tokens_of], past_key_values=cache)
        assert_layers_close(found, [z[:, 40:] for z in run(model, chosen, use_cache=False)], 1e-10)

    cache = DilatedCache(model.config)
    run(model, x, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    continued(copy.deepcopy(cache), [2, 0, 0], [0, 1, 2])
    cache.batch_select_indices(torch.tensor([0, 1]))
    continued(copy.deepcopy(cache), [2, 0], [0, 1])
    cache.batch_repeat_interleave(2)
    continued(cache, [2, 2, 0, 0], [0, 1, 2, 0])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].kv is None
    found = run(model, torch.cat((x, y), 1)[:2], past_key_values=cache)  # another batch size
    assert_layers_close(found, [z[:2] for z in whole], 1e-10)


def test_crop_after_a_change_of_the_batch():
    model = gpt2()
    x, mask, _ = padded([20, 9])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DilatedCache(model.config)
    run(model, x, past_key_values=cache, attention_mask=mask, position_ids=positions)
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="by the 0 since the last change of the batch: got 1"):
        cache.crop(-1)


def test_masks_must_not_change():
    model = gpt2()
    x, mask, _ = padded([20, 9])
    cache = DilatedCache(model.config)
    run(model, x, past_key_values=cache, attention_mask=mask)
    with pytest.raises(
        ValueError, match=r"it has \[20, 20\] valid tokens before this forward, and the cache has \[20, 9\]"
    ):
        model(tokens(2, 1), past_key_values=cache, attention_mask=torch.ones(2, 21))


def test_what_a_cache_cannot_do():
    model = dilated(hf_models.llama(attention_dropout=0.1))
    x, cache = tokens(1, 9), DilatedCache(model.config)
    with pytest.raises(ValueError, match="output_attentions=True has nothing to compute weights from"):
        model(x, past_key_values=cache, output_attentions=True)
    packed = torch.cat((torch.arange(4), torch.arange(5))).unsqueeze(0)
    with pytest.raises(ValueError, match="one sequence per sample, got packed documents"):
        model(x, past_key_values=cache, position_ids=packed)
    with pytest.raises(ValueError, match="one sequence per sample, got packed documents"):
        model(x, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 4, 9]), cu_seq_lens_k=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match="a cache has no gradients"):
        model(x, past_key_values=cache)
    with pytest.raises(ValueError, match=r"no dropout, got dropout=0.1; call model.eval\(\)"):
        model.train()(x, past_key_values=cache)
    model.eval()
    with pytest.raises(NotImplementedError, match="fixed size and stays on the device"):
        cache.layers[0].offload()
    assert cache.get_seq_length() == 0
    run(model, x, past_key_values=cache)
    apply(model, [8], [1])
    with pytest.raises(ValueError, match=r"the cache was made for Dilated.*make a new DilatedCache"):
        run(model, x, past_key_values=cache)
    with pytest.raises(ValueError, match="LlamaConfig has no 'dilated_attention'"):
        DilatedCache(LlamaConfig())


def test_a_forward_that_was_interrupted():
    model = dilated(hf_models.llama())
    cache = DilatedCache(model.config)

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, tokens(1, 9), past_key_values=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"this layer has seen 0 and got 1: an earlier forward was interrupted"):
        run(model, tokens(1, 1), past_key_values=cache)
    cache.reset()
    run(model, tokens(1, 9), past_key_values=cache)


def test_layers_by_their_type():
    """``DynamicCache(config=...)`` makes dilated layers for a config with this layer type. They get the pattern later."""
    model = dilated(hf_models.llama())
    config = copy.deepcopy(model.config)
    config.layer_types = ["dilated_attention"] * 2
    x, cache = tokens(2, 30), DynamicCache(config=config)
    assert [type(layer) for layer in cache.layers] == [DilatedCacheLayer] * 2
    found = in_chunks(model, x, [20, 10], cache)
    assert_layers_close(found, in_chunks(model, x, [20, 10], DilatedCache(model.config)), 0.0)
    assert cache.layers[0].kv.pattern == PATTERN


def test_a_model_without_dilated_layers():
    model = dilated(hf_models.mistral(sliding_window=4096))
    with pytest.raises(ValueError, match=r"no layer of this MistralConfig is dilated.*sliding_window to None"):
        DilatedCache(model.config)
    model.config.sliding_window = None  # what the message says
    x = tokens(1, 41)
    cache, expected = DilatedCache(model.config), run(dilated(hf_models.mistral()), x)
    assert_layers_close(run(model, x, past_key_values=cache)[:1], expected[:1])
    assert cache.get_seq_length() == 41


def test_hybrid_models_keep_their_sliding_layers():
    types = ["full_attention", "sliding_attention"] * 2
    model = dilated(hf_models.qwen3(num_hidden_layers=4, use_sliding_window=True, sliding_window=12, layer_types=types))
    cache, x = DilatedCache(model.config), tokens(2, 60)
    assert [layer.is_sliding for layer in cache.layers] == [False, True, False, True]
    found = in_chunks(model, x, [20, 1, 39], cache)
    assert_layers_close(found, run(model, x, use_cache=False), 1e-6)
    assert cache.nbytes == 2 * DilatedKVCache.max_nbytes(Dilated(SEGMENTS, RATES), 2, 2, 8, dtype=torch.float64)
