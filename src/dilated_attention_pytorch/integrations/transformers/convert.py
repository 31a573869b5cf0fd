"""Dilated attention for transformers models: register the functions, turn a model into a dilated one and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from dilated_attention_pytorch.integrations.transformers.attention import dilated_attention_forward
from dilated_attention_pytorch.integrations.transformers.pattern import ENTRY, entry_of
from dilated_attention_pytorch.integrations.transformers.rows import dilated_mask
from dilated_attention_pytorch.patterns.dilated import Dilated

if TYPE_CHECKING:  # a process without a group does not need torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dilated_attention_pytorch.call import Sharding

NAME = "dilated"
_RECORD = "_before_dilated"
HOOK = "_shard_hook"  # the attribute of a model whose sequences are sharded over a group
Model = TypeVar("Model", bound=PreTrainedModel)


class Before(NamedTuple):
    """What a config was before ``apply``."""

    config: PretrainedConfig
    implementation: str | None
    entry: Any


def register(name: str = NAME) -> None:
    """Register the attention function and the mask function, so that ``attn_implementation=name`` is dilated attention.

    Importing this package registers the name ``"dilated"``. The pattern of a model is in ``config.dilated_attention``.
    It is saved with the model, and the name of the implementation is not. So a model must be loaded with the name. Without
    it, transformers takes sdpa, and the model is dense.

    >>> import tempfile
    >>> from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4)
    >>> model = apply(LlamaForCausalLM(config), segment_lengths=[8, 32], dilation_rates=[1, 4])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     dilated = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilated")
    ...     dense = AutoModelForCausalLM.from_pretrained(folder)
    >>> dilated.config._attn_implementation, dense.config._attn_implementation
    ('dilated', 'sdpa')
    >>> dense.config.dilated_attention["segment_lengths"]
    [8, 32]
    """
    taken = AttentionInterface._global_mapping.get(name, dilated_attention_forward)
    if name == "eager" or taken is not dilated_attention_forward:
        raise ValueError(f"{name!r} is the name of another attention implementation of transformers; choose another one")
    AttentionInterface.register(name, dilated_attention_forward)
    AttentionMaskInterface.register(name, dilated_mask)


def apply(
    model: Model,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offsets: str | Sequence[int] = "interleaved",
    torchscale_padding: bool = False,
    group: ProcessGroup | DeviceMesh | Sharding | None = None,
) -> Model:
    """Turn a transformers model into one with dilated attention, and return it. Parameters do not change.

    The pattern is written to ``config.dilated_attention`` of the model and of the models inside it. ``remove`` restores
    what they were. A model inside another one (``model.language_model``) can be turned by itself.

    Args:
        model: a ``PreTrainedModel`` whose attention is called through transformers' ``AttentionInterface``: Llama, Qwen3,
            Mistral, GPT-2, BERT, ViT and most others.
        segment_lengths, dilation_rates, offsets, torchscale_padding: the pattern, as in ``Dilated``.
        group: the ranks over which sequences are sharded: a process group, a device mesh of one dimension or with a
            dimension named ``"cp"``, or a ``Sharding``. All ranks of the group are given the same batch of whole
            sequences. Each one computes its rows, and outputs are its rows. ``sharding.ShardHook`` describes it.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> tokens = torch.arange(40).unsqueeze(0)
    >>> dense = model(tokens).logits
    >>> dilated = apply(model, segment_lengths=[8, 32], dilation_rates=[1, 4])(tokens).logits
    >>> one_segment = apply(model, segment_lengths=[40], dilation_rates=[1])(tokens).logits
    >>> torch.allclose(dilated, dense, atol=1e-5), torch.allclose(one_segment, dense, atol=1e-5)
    (False, True)
    >>> remove(model)(tokens).logits.equal(dense)
    True
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"apply takes a PreTrainedModel of transformers, got {type(model).__name__}")
    if not type(model)._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not call its attention through transformers' AttentionInterface, so it cannot be "
            "changed from outside; use a model that does"
        )
    entry = entry_of(Dilated(segment_lengths, dilation_rates, offsets, torchscale_padding))
    hook = None
    if group is not None:
        from dilated_attention_pytorch.integrations.transformers.sharding import ShardHook  # imports torch.distributed

        hook = ShardHook(model, group)
    register()
    before = [Before(config, config._attn_implementation, getattr(config, ENTRY, None)) for config in _configs(model)]
    model.set_attn_implementation(NAME)
    others = [config for config, *_ in before if config._attn_implementation != NAME]
    if others:
        _restore(before)
        raise ValueError(
            f"attention of {type(others[0]).__name__} cannot be set; apply to the other models inside this one"
        )
    for config, *_ in before:
        setattr(config, ENTRY, dict(entry))
    if not hasattr(model, _RECORD):
        setattr(model, _RECORD, before)
    _detach_hook(model)
    if hook is not None:
        setattr(model, HOOK, hook.attach(model))
    return model


def remove(model: Model) -> Model:
    """Undo ``apply``: restore the attention implementations and the configs, and return the model."""
    before = getattr(model, _RECORD, None)
    if before is None:
        raise ValueError(
            f"remove undoes apply(model, ...), which was not called for this {type(model).__name__}; call "
            'model.set_attn_implementation("sdpa") for a model that was loaded with attn_implementation="dilated"'
        )
    _restore(before)
    delattr(model, _RECORD)
    _detach_hook(model)
    return model


def _detach_hook(model: PreTrainedModel) -> None:
    hook = getattr(model, HOOK, None)
    if hook is not None:
        hook.detach()
        delattr(model, HOOK)


def _restore(before: list[Before]) -> None:
    for config, implementation, entry in before:
        config._attn_implementation_internal = implementation
        if entry is not None:
            setattr(config, ENTRY, entry)
        elif hasattr(config, ENTRY):
            delattr(config, ENTRY)


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    """The configs of a model and of the models inside it, each one once."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield module.config
