"""LongNet as models of transformers, with the modules, parameter names and files of this library's own models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from dilated_attention_pytorch.integrations.transformers.config import DECODER, ENCODER, LongNetPreTrainedConfig
from dilated_attention_pytorch.integrations.transformers.states import (
    Context,
    LongNetPreTrainedModel,
    States,
    asks_for_states,
    check_kwargs,
    document_bounds,
    kept_rows,
)
from dilated_attention_pytorch.models.decoder import IGNORED, token_losses
from dilated_attention_pytorch.models.generation import CHUNK


class LongNetModel(LongNetPreTrainedModel):
    """LongNet without a head: embeddings of all tokens. It is causal if ``config.architecture`` is a decoder.

    ``AutoModel.from_pretrained`` makes it from a folder of ``LongNetEncoder``, ``LongNetDecoder`` or of the classes of this
    file. The output projection of a decoder is left out.

    Args:
        config: a ``LongNetPreTrainedConfig``.

    >>> from dilated_attention_pytorch import LongNetConfig
    >>> config = LongNetPreTrainedConfig.of(LongNetConfig.preset("tiny"), architecture="LongNetEncoder")
    >>> model = LongNetModel(config).eval()
    >>> model(torch.arange(200).view(2, 100)).last_hidden_state.shape
    torch.Size([2, 100, 64])
    """

    _keys_to_ignore_on_load_unexpected = [r"^output_projection\.weight$"]  # noqa: RUF012

    def __init__(self, config: LongNetPreTrainedConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """The states of all tokens.

        Args:
            input_ids: (B, N).
            attention_mask: (B, N), or (B, tokens in the cache + N): 0 for padding, in front of a sample or behind it. Its
                values are read once. States of padding are 0.
            position_ids: (B, N). Positions count from the first token of each sample, and these say only where packed
                documents begin: where they do not go up by one.
            past_key_values: a ``DilatedCache``, for causal models. The tokens continue those that it has seen.
            inputs_embeds: (B, N, E) instead of ``input_ids``.
            use_cache: make a cache if there is none. By default there is none: it has no gradients.
            output_hidden_states: return the states in front of the first layer and behind each layer. The last ones are
                behind the last norm.
            cu_seq_lens_q, cu_seq_lens_k: the boundaries of packed documents in the tokens of all samples.
            kwargs: ``return_dict``, and the sizes of ``DataCollatorWithFlattening``. Others are refused by name.
        """
        check_kwargs(self, kwargs)
        cache = self.new_cache(past_key_values, use_cache)
        context = Context(
            attention_mask,
            position_ids,
            document_bounds(cu_seq_lens_q, cu_seq_lens_k),
            cache,
            asks_for_states(self, output_hidden_states),
        )
        states = self.states_of(input_ids, inputs_embeds, context)
        return BaseModelOutputWithPast(
            last_hidden_state=states.last, past_key_values=cache, hidden_states=states.every
        )  # fmt: skip


class _WithHead(LongNetPreTrainedModel):
    """A LongNet with an output projection, which may be its embedding."""

    _tied_weights_keys = {"output_projection.weight": "embed_tokens.weight"}  # noqa: RUF012
    architecture: str

    def __init__(self, config: LongNetPreTrainedConfig) -> None:
        super().__init__(config)
        if config.architecture != self.architecture:
            raise ValueError(
                f"{type(self).__name__} has the modules of a {self.architecture}, but the config is of a "
                f"{config.architecture}; set architecture={self.architecture!r} in a new config, or load the folder with "
                "AutoModel"
            )
        if config.vocab_size is None:
            raise ValueError(f"{type(self).__name__} needs a vocabulary: set vocab_size in the config")
        self.output_projection = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The output projection."""
        return self.output_projection

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output projection."""
        self.output_projection = new_embeddings  # type: ignore[assignment]

    def loss_of(self, states: States, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """The mean cross entropy of ``targets`` (B, N). Logits exist for a few rows at a time, also in the backward."""
        targets = targets.to(states.last.device)
        if targets.shape != states.last.shape[:2]:
            raise ValueError(
                f"labels must be one token id for each token, {tuple(states.last.shape[:2])}, got {tuple(targets.shape)}; "
                "-100 stands for tokens that do not count"
            )
        if states.valid is not None:
            targets = targets.masked_fill(~states.valid.to(targets.device), IGNORED)
        total = token_losses(states.last, self.output_projection, self.sizes.vocab_size or 0, targets, "sum")
        if num_items_in_batch is None:
            return total / (targets != IGNORED).sum().to(total.device)
        return total / torch.as_tensor(num_items_in_batch).to(total.device)


class LongNetForCausalLM(_WithHead, GenerationMixin):
    """LongNet's decoder: logits of the next token. The modules and files are those of ``LongNetDecoder``.

    ``generate`` uses a cache of a fixed size by itself. It computes prompts in chunks of 65,536 tokens, or of
    ``prefill_chunk_size``, so that its memory does not grow with the prompt, except for ``input_ids`` and the mask.
    Assisted decoding and ``inputs_embeds`` compute a prompt at once, as transformers does for all models.

    Args:
        config: a ``LongNetPreTrainedConfig`` with ``architecture="LongNetDecoder"`` and a vocabulary.

    One folder serves this class and ``LongNetDecoder``:

    >>> import tempfile
    >>> from transformers import AutoModelForCausalLM
    >>> from dilated_attention_pytorch import LongNetConfig, LongNetDecoder
    >>> plain, tokens = LongNetDecoder(LongNetConfig.preset("tiny")).eval(), torch.arange(100).unsqueeze(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plain.save_pretrained(folder)
    ...     model = AutoModelForCausalLM.from_pretrained(folder)
    ...     model.save_pretrained(folder)
    ...     again = LongNetDecoder.from_pretrained(folder).eval()
    >>> model(tokens).logits.equal(plain(tokens)), again(tokens).equal(plain(tokens))
    (True, True)

    Prompts of different lengths are padded on the left:

    >>> prompts, mask = torch.tensor([[0, 0, 7], [4, 5, 6]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    >>> both = model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    >>> plain.generate([[7], [4, 5, 6]], max_new_tokens=8).tokens.equal(both[:, 3:])
    True
    """

    architecture = DECODER

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, output_hidden_states: bool | None = None, logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits of the token behind each token, and the loss if there are labels.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds: see ``LongNetModel.forward``.
            labels: (B, N), the ids of the tokens themselves: the logits of token ``i`` predict label ``i + 1``. Labels of
                -100 do not count, and neither do predictions from padding.
            use_cache, output_hidden_states, cu_seq_lens_q, cu_seq_lens_k: see ``LongNetModel.forward``.
            logits_to_keep: compute the logits of the last so many tokens, or of the tokens with these numbers. 0 is all.
            skip_logits: return no logits, if there are labels. The loss does not need them at the same time: it computes
                those of a few tokens at a time. With long sequences and large vocabularies, logits need most of the memory.
            num_items_in_batch: divide the sum of losses by it, instead of by the number of labels. ``Trainer`` passes it.
            kwargs: see ``LongNetModel.forward``.
        """
        check_kwargs(self, kwargs)
        cache = self.new_cache(past_key_values, use_cache)
        context = Context(
            attention_mask,
            position_ids,
            document_bounds(cu_seq_lens_q, cu_seq_lens_k),
            cache,
            asks_for_states(self, output_hidden_states),
        )
        states = self.states_of(input_ids, inputs_embeds, context)
        loss = None
        if labels is not None:
            loss = self.loss_of(states, F.pad(labels, (0, 1), value=IGNORED)[:, 1:], num_items_in_batch)
        elif skip_logits:
            raise ValueError("skip_logits=True returns the loss only, which needs labels; pass labels")
        logits = None if skip_logits else self.output_projection(kept_rows(states.last, logits_to_keep))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states.every)

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The output of a prompt. Without ``prefill_chunk_size``, all but its last tokens go to the cache in chunks."""
        cache = model_kwargs.get("past_key_values")
        if generation_config.prefill_chunk_size is None and cache is not None and model_kwargs.get("inputs_embeds") is None:
            input_ids = self._append_front(input_ids, model_kwargs.get("attention_mask"), cache)
        base: Any = super()  # annotated there for a type of its own
        return base._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _append_front(self, input_ids: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """Append tokens to a cache until a chunk is left, and return this chunk. Fewer tokens are returned as they are.

        ``input_ids`` are the tokens behind those of the cache, or all tokens. The mask is of all tokens.
        """
        seen = cache.get_seq_length()
        total = input_ids.shape[1] if mask is None else mask.shape[1]
        new = input_ids[:, seen:] if total == input_ids.shape[1] else input_ids
        while new.shape[1] > CHUNK:
            chunk, new, seen = new[:, :CHUNK], new[:, CHUNK:], seen + CHUNK
            own = None if mask is None else mask[:, :seen]
            self(input_ids=chunk, attention_mask=own, past_key_values=cache, logits_to_keep=1)
            input_ids = new
        return input_ids


class LongNetForMaskedLM(_WithHead):
    """LongNet's encoder with an output projection: logits of the tokens themselves.

    With ``tie_embeddings=True`` its folders are also those of ``LongNetEncoder``. Otherwise that class refuses the tensor
    of the output projection.

    Args:
        config: a ``LongNetPreTrainedConfig`` with ``architecture="LongNetEncoder"`` and a vocabulary.

    >>> from dilated_attention_pytorch import LongNetConfig
    >>> config = LongNetPreTrainedConfig.of(LongNetConfig.preset("tiny"), architecture="LongNetEncoder")
    >>> model, tokens = LongNetForMaskedLM(config), torch.arange(200).view(2, 100)
    >>> labels = torch.where(torch.arange(100) % 7 == 0, tokens, -100)
    >>> output = model(tokens.masked_fill(labels >= 0, 256), labels=labels)
    >>> output.logits.shape, output.loss.shape
    (torch.Size([2, 100, 257]), torch.Size([]))
    """

    architecture = ENCODER

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, output_hidden_states: bool | None = None,
        skip_logits: bool = False, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, **kwargs: Any,
    ) -> MaskedLMOutput:  # fmt: skip
        """The logits of all tokens, and the loss if there are labels.

        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: see ``LongNetModel.forward``.
            labels: (B, N), the ids that the logits predict. Labels of -100 do not count, and neither does padding.
            output_hidden_states, cu_seq_lens_q, cu_seq_lens_k: see ``LongNetModel.forward``.
            skip_logits, num_items_in_batch: see ``LongNetForCausalLM.forward``.
            kwargs: see ``LongNetModel.forward``.
        """
        check_kwargs(self, kwargs)
        context = Context(
            attention_mask,
            position_ids,
            document_bounds(cu_seq_lens_q, cu_seq_lens_k),
            None,
            asks_for_states(self, output_hidden_states),
        )
        states = self.states_of(input_ids, inputs_embeds, context)
        loss = None if labels is None else self.loss_of(states, labels, num_items_in_batch)
        if skip_logits and labels is None:
            raise ValueError("skip_logits=True returns the loss only, which needs labels; pass labels")
        logits = None if skip_logits else self.output_projection(states.last)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=states.every)
