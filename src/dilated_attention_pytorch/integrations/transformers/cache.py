"""``DilatedCache``: generation with transformers in memory of a fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.cache_checks import TENSORS
from dilated_attention_pytorch.integrations.transformers.pattern import pattern_of
from dilated_attention_pytorch.integrations.transformers.rows import ForwardRows
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs


class ChunkKeys(Tensor):
    """The keys of a chunk on their way from ``DilatedCacheLayer.update`` to dilated attention.

    They are the keys of the new tokens only. Every other attention would compute with them as if there were no earlier
    tokens, so every operation on them raises.
    """

    layer: DilatedCacheLayer
    rows: Tensor

    @classmethod
    def of(cls, keys: Tensor, layer: DilatedCacheLayer) -> ChunkKeys:
        """The keys (B, G, n, D) of a chunk for a layer of a cache."""
        tagged = keys.as_subclass(cls)
        tagged.layer, tagged.rows = layer, keys
        return tagged

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device and the like
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
        raise RuntimeError(
            "DilatedCache is for dilated attention: the keys that it passes on are those of the new tokens only, and must "
            f"reach dilated attention unchanged. Got the operation {getattr(func, '__name__', func)!r} on them; call "
            'apply(model, ...), load the model with attn_implementation="dilated", or use a DynamicCache'
        )


class DilatedCacheLayer(CacheLayerMixin):
    """The cache of one layer: a ``DilatedKVCache``, which is made when the first tokens arrive.

    ``update`` gives the keys of the new tokens to dilated attention, which calls ``attend``. A layer of a config with
    ``layer_types = ["dilated_attention", ...]`` is made by ``DynamicCache(config=config)`` without arguments.

    Args:
        pattern: of the layer; that of the first call by default.
        max_tokens: the most tokens of a sample, if that is known. Segments that are longer then need less memory.
        max_rollback: by how many tokens ``crop`` can go back.
    """

    _layer_type = "dilated_attention"
    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, pattern: Dilated | None = None, *, max_tokens: int | None = None, max_rollback: int = 32) -> None:
        super().__init__()
        self.pattern, self.max_tokens, self.max_rollback = pattern, max_tokens, max_rollback
        self.kv: DilatedKVCache | None = None
        self._tokens = 0  # of every sample, padding included
        self._recent: list[tuple[int, Tensor | None]] = []  # tokens of the last chunks, and which of them are valid

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the cache for keys (B, G, n, D), if the pattern is known."""
        if self.pattern is None or self.kv is not None:
            return
        batch, heads, _, head_dim = key_states.shape
        self.kv = DilatedKVCache(
            self.pattern, batch, heads, head_dim, dtype=key_states.dtype, device=key_states.device,
            max_tokens=self.max_tokens, max_rollback=self.max_rollback,
        )  # fmt: skip
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the new tokens, for dilated attention. It appends them when it has attended."""
        return ChunkKeys.of(key_states, self), value_states

    def attend(self, inputs: Inputs, pattern: Dilated, rows: ForwardRows, scale: float | None) -> Tensor:
        """Append a chunk, and return the attention of its tokens over all tokens so far, (B, n, H, D).

        ``inputs`` are (B, heads, n, D). ``rows`` are those of this forward: rows of padding are not appended.
        """
        if self.pattern is None:
            self.pattern = pattern
        if self.pattern != pattern:
            raise ValueError(f"the cache was made for {self.pattern}, got a layer with {pattern}; make a new DilatedCache")
        query, key, value = (x.transpose(1, 2) for x in inputs)
        if value.shape != key.shape:
            raise ValueError(
                f"keys and values must have the same head size, got {key.shape[-1]} and {value.shape[-1]}; "
                'call model.set_attn_implementation("sdpa") and use a DynamicCache'
            )
        if rows.past != self._tokens or rows.queries != key.shape[1]:
            raise RuntimeError(
                f"the mask is of {rows.queries} tokens behind {rows.past}, but this layer has seen {self._tokens} and got "
                f"{key.shape[1]}: an earlier forward was interrupted. Call cache.reset() and begin again"
            )
        self.lazy_initialization(*inputs[1:])
        assert self.kv is not None
        self._compare(rows, self.kv)
        chunk = rows.chunk(key.device)
        if chunk is None or chunk.source is None or chunk.inverse is None:
            out = self.kv.attend(query, key, value, scale=scale, lengths=None if chunk is None else chunk.lengths)
        else:  # samples with padding in front: their rows come first, and the padding behind is not appended
            first = (_take(x, chunk.source) for x in (query, key, value))
            out = _take(self.kv.attend(*first, scale=scale, lengths=chunk.lengths), chunk.inverse)
        self._tokens += rows.queries
        self._record(rows.queries, rows.tail(self.max_rollback))
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that a mask has, and the first one."""
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        """The number of tokens that the layer has seen, padding included."""
        return self._tokens

    def get_max_length(self) -> int:
        """The most tokens of a sample, or -1."""
        return -1 if self.max_tokens is None else self.max_tokens

    @property
    def nbytes(self) -> int:
        """The memory of the layer. It does not change with the number of tokens."""
        return 0 if self.kv is None else self.kv.nbytes

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last tokens: ``crop(-n)`` takes back ``n``, at most ``max_rollback`` of them.

        Padding among these tokens was not appended, and is not taken back.
        """
        n = -int(tokens_to_remove)
        if n < 0:
            raise ValueError(
                f"crop takes a number of tokens to remove, which is negative or 0: got {-n}; write crop({-n} - "
                f"cache.get_seq_length()) to keep {-n} tokens"
            )
        if n == 0 or self.kv is None:
            return
        known = sum(tokens for tokens, _ in self._recent)
        if n > min(known, self.max_rollback):
            raise ValueError(
                f"the cache can go back by max_rollback = {self.max_rollback} tokens, and by the {known} since the last "
                f"change of the batch: got {n}; make DilatedCache(config, max_rollback={n}), or begin again"
            )
        self.kv.rollback(self._take_back(n))
        self._tokens -= n

    def reset(self) -> None:
        """Forget all tokens. The next forward may have another batch size."""
        self.kv, self.is_initialized, self._tokens, self._recent = None, False, 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sample ``b`` continue sample ``beam_idx[b]``, for beam search."""
        if self.kv is not None:
            self.kv.reorder(beam_idx)
            self._forget_padding()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make ``repeats`` samples of each one, next to each other."""
        if self.kv is not None:
            self.kv.repeat(repeats)
            self._forget_padding()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples only."""
        if self.kv is None:
            return
        state = self.kv.state_dict()
        state |= {name: state[name][indices.to(self.kv.device)] for name in TENSORS}
        state["batch_size"] = batch = len(state["keys"])
        heads, head_dim = state["keys"].shape[1], state["keys"].shape[-1]
        self.kv = DilatedKVCache(
            self.kv.pattern, batch, heads, head_dim, dtype=self.kv.dtype, device=self.kv.device,
            max_tokens=self.max_tokens, max_rollback=self.max_rollback,
        )  # fmt: skip
        self.kv.load_state_dict(state)
        self._forget_padding()

    def offload(self) -> None:
        """Refuse: the cache is small, and dilated attention needs it on the device after ``update``."""
        raise NotImplementedError(
            "DilatedCache has a fixed size and stays on the device of its layer; pass offloading=False"
        )

    def prefetch(self) -> None:
        """Refuse, as ``offload`` does."""
        self.offload()

    def _compare(self, rows: ForwardRows, kv: DilatedKVCache) -> None:
        """Raise if a mask says something else about earlier tokens than the masks before it. Once per forward."""
        if rows.is_compared or rows.past == 0 or rows.mask is None or rows.stays_on_device:
            return
        rows.is_compared = True
        seen = [min(max(rows.past - start, 0), n) for start, n in zip(*rows.extents(), strict=True)]
        own = kv.tokens_seen.tolist()
        if seen != own:
            raise ValueError(
                f"attention_mask must keep its values for tokens that are in the cache: it has {seen} valid tokens before "
                f"this forward, and the cache has {own}; pass the mask of all tokens in every forward"
            )

    def _record(self, tokens: int, tail: Tensor | None) -> None:
        """Remember which of the last tokens are valid, as far as ``crop`` can go back."""
        self._recent.append((tokens, tail))
        while sum(count for count, _ in self._recent[1:]) >= self.max_rollback:
            del self._recent[0]

    def _forget_padding(self) -> None:
        """Samples changed their numbers, so what is known about their padding does not hold any more."""
        if any(tail is not None for _, tail in self._recent):
            self._recent = []

    def _take_back(self, n: int) -> int | list[int]:
        """The valid tokens of each sample among the last ``n``, which are removed from what is remembered."""
        counts: list[int] | int = 0
        while n:
            tokens, tail = self._recent.pop()
            count = min(n, tokens)
            valid = count if tail is None else tail[:, tail.shape[1] - count :].sum(1).tolist()
            counts = _add(counts, valid)
            if count < tokens:
                self._recent.append((tokens - count, None if tail is None else tail[:, : tail.shape[1] - count]))
            n -= count
        return counts


class DilatedCache(Cache):
    """A cache for models with dilated attention: memory of a fixed size, however many tokens are generated.

    Each layer has a ``DilatedKVCache``. Results are those of ``DynamicCache``. Layers with a sliding window keep the cache
    that they have in ``DynamicCache``. The first forward with another attention implementation raises.

    The size of the cache is bounded, that of a forward is not: ``prefill_chunk_size`` of ``generate`` bounds the keys of a
    long prompt.

    Args:
        config: of the model, with its pattern in ``config.dilated_attention``.
        max_tokens: the most tokens of a sample, if that is known. Segments that are longer then need less memory.
        max_rollback: by how many tokens ``crop`` can go back, which assisted decoding and prompt lookup need.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch.integrations.transformers import DilatedCache, apply
    >>> sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None)
    >>> model = apply(LlamaForCausalLM(config).eval(), segment_lengths=[8, 32], dilation_rates=[1, 4])
    >>> cache = DilatedCache(model.config)
    >>> tokens = model.generate(torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=60, do_sample=False)
    >>> again = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=60, do_sample=False)
    >>> tokens.equal(again), cache.get_seq_length()
    (True, 62)
    """

    def __init__(self, config: PretrainedConfig, *, max_tokens: int | None = None, max_rollback: int = 32) -> None:
        config = config.get_text_config(decoder=True)
        pattern = pattern_of(config)
        layers = [
            DilatedCacheLayer(pattern, max_tokens=max_tokens, max_rollback=max_rollback)
            if type(layer) in (DynamicLayer, DilatedCacheLayer)
            else layer
            for layer in DynamicCache(config=config).layers
        ]
        if layers and not any(isinstance(layer, DilatedCacheLayer) for layer in layers):
            raise ValueError(
                f"no layer of this {type(config).__name__} is dilated: all of them have a sliding window or chunks. Set "
                "config.sliding_window to None before apply, or leave the cache out"
            )
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """The memory of all dilated layers. It does not change with the number of tokens."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, DilatedCacheLayer))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (B, n) of each sample of ``x`` (B, n, heads, D)."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), index]


def _add(a: int | list[int], b: int | list[int]) -> int | list[int]:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    n = len(a) if isinstance(a, list) else len(b) if isinstance(b, list) else 0
    left, right = ([x] * n if isinstance(x, int) else x for x in (a, b))
    return [x + y for x, y in zip(left, right, strict=True)]
