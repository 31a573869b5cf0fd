"""Configurations of LongNet models for transformers: the fields of this library's own configurations, in the same file."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from dilated_attention_pytorch.integrations.transformers.pattern import entry_of
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.slide import SlideConfig

DECODER, ENCODER, SLIDE = "LongNetDecoder", "LongNetEncoder", "SlideEncoder"
LAYER_TYPE = "dilated_attention"
# Arguments of PreTrainedConfig that are not fields of it.
_OF_TRANSFORMERS = (
    "model_type", "torch_dtype", "num_labels", "name_or_path", "attn_implementation", "experts_implementation",
    "output_attentions", "quantization_config", "auto_map", "gradient_checkpointing", "use_cache",
)  # fmt: skip


class _CheckedConfig(PreTrainedConfig):
    """A config whose unknown arguments raise. ``PreTrainedConfig`` would keep them, and a misspelt field has no effect."""

    def __post_init__(self, **kwargs: Any) -> None:
        named = {*_OF_TRANSFORMERS, *self.attribute_map}
        unknown = [name for name in kwargs if name not in named and not name.startswith("_")]
        if unknown:
            common = {field.name for field in fields(PreTrainedConfig)}
            known = ", ".join(field.name for field in fields(self) if field.name not in common)
            raise ValueError(f"{type(self).__name__} has no fields {', '.join(unknown)}; its fields are {known}")
        kwargs.pop("use_cache", None)  # Trainer writes it. It is an option of generation, not of a model.
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raise if a field has a value that the model cannot have."""
        raise NotImplementedError


@strict
class LongNetPreTrainedConfig(_CheckedConfig):
    """The config of ``LongNetModel``, ``LongNetForCausalLM`` and ``LongNetForMaskedLM``.

    The fields are those of ``LongNetConfig``, which checks them. ``config.json`` is the same file for both. The names of
    transformers are aliases: ``hidden_size`` is ``embed_dim``, ``num_hidden_layers`` is ``num_layers``, and so on.

    Args:
        architecture: the class of this library with these parameters: ``"LongNetDecoder"`` (causal) or
            ``"LongNetEncoder"``. ``LongNetForCausalLM`` needs the first, ``LongNetForMaskedLM`` the second, and
            ``LongNetModel`` takes both.
        bos_token_id, eos_token_id, pad_token_id: of the tokenizer, for generation.
        Other fields: see ``LongNetConfig``.

    >>> config = LongNetPreTrainedConfig.of(LongNetConfig.preset("tiny"))
    >>> config.hidden_size, config.num_hidden_layers, config.architecture
    (64, 2, 'LongNetDecoder')
    >>> config.longnet == LongNetConfig.preset("tiny")
    True
    """

    model_type: ClassVar[str] = "longnet"
    has_no_defaults_at_init: ClassVar[bool] = True
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "embed_dim", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_dim", "tie_word_embeddings": "tie_embeddings",
    }  # fmt: skip

    embed_dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    segment_lengths: list[int] | tuple[int, ...]
    dilation_rates: list[int] | tuple[int, ...]
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    offsets: str | list[int] | tuple[int, ...] = "interleaved"
    torchscale_padding: bool = False
    activation: str = "gelu"
    positions: str = "rotary"
    rotary_base: float | int = 10000.0
    xpos_scale_base: float | int = 512.0
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    drop_path: float | int = 0.0
    sub_norm: bool = True
    final_norm: bool = True
    layer_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    checkpoint_layers: bool = False
    architecture: str = DECODER
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def of(cls, config: LongNetConfig, **options: Any) -> LongNetPreTrainedConfig:
        """The config with the fields of a ``LongNetConfig``. ``options`` are the fields that it does not have."""
        return cls(**config.to_dict(), **options)

    @property
    def longnet(self) -> LongNetConfig:
        """The fields as a ``LongNetConfig``."""
        values = (getattr(self, field.name) for field in fields(LongNetConfig))
        return _longnet(*(tuple(x) if isinstance(x, list) else x for x in values))

    def check(self) -> None:
        """Raise if a field has a value that the model cannot have."""
        if self.architecture not in (DECODER, ENCODER):
            raise ValueError(f"architecture must be {DECODER!r} or {ENCODER!r}, got {self.architecture!r}")
        for name, value in self.longnet.to_dict().items():  # numbers as floats, tuples as lists
            setattr(self, name, value)

    @property
    def is_causal(self) -> bool:
        """Whether tokens meet earlier tokens only."""
        return self.architecture == DECODER

    @property
    def head_dim(self) -> int:
        """The head size."""
        return self.embed_dim // self.num_heads

    @property
    def dilated_attention(self) -> dict[str, Any]:
        """The pattern, as configs of other models hold it."""
        return entry_of(self.longnet.pattern)

    @dilated_attention.setter
    def dilated_attention(self, entry: Any) -> None:
        raise ValueError(
            "the pattern of a LongNet is in segment_lengths, dilation_rates and offsets, and its layers are made with it: "
            f"got dilated_attention={entry!r}; make a new config and a new model, and load the state dict of this one"
        )

    @property
    def layer_types(self) -> list[str]:
        """The type of every layer. By this, ``DynamicCache(config=config)`` has layers of a fixed size."""
        return [LAYER_TYPE] * self.num_layers

    def validate_layer_type(self) -> None:
        """Nothing: the types of layers are a property. transformers has a closed list of types, without this one."""


@lru_cache(maxsize=256)
def _longnet(*values: Any) -> LongNetConfig:
    """The configuration with these values of its fields. A model asks for it several times in each forward."""
    return LongNetConfig(**dict(zip((field.name for field in fields(LongNetConfig)), values, strict=True)))


@strict
class SlidePreTrainedConfig(_CheckedConfig):
    """The config of ``LongNetSlideModel``. The fields are those of ``SlideConfig``, in the same ``config.json``.

    >>> config = SlidePreTrainedConfig.of(SlideConfig.gigapath(768))
    >>> config.slide == SlideConfig.gigapath(768), config.hidden_size
    (True, 768)
    """

    model_type: ClassVar[str] = "longnet_slide"
    has_no_defaults_at_init: ClassVar[bool] = True

    encoder: dict[str, Any]
    in_chans: int = 1536
    tile_size: int = 256
    slide_ngrids: int = 1000
    pooling: str = "cls"
    norm_eps: float = 1e-6
    architecture: str = SLIDE

    @classmethod
    def of(cls, config: SlideConfig, **options: Any) -> SlidePreTrainedConfig:
        """The config with the fields of a ``SlideConfig``."""
        return cls(**config.to_dict(), **options)

    @property
    def slide(self) -> SlideConfig:
        """The fields as a ``SlideConfig``."""
        return SlideConfig.from_dict({field.name: getattr(self, field.name) for field in fields(SlideConfig)})

    def check(self) -> None:
        """Raise if a field has a value that the model cannot have."""
        if self.architecture != SLIDE:
            raise ValueError(f"architecture must be {SLIDE!r}, got {self.architecture!r}")
        self.encoder = self.slide.encoder.to_dict()

    @property
    def hidden_size(self) -> int:
        """The width of the model."""
        return int(self.encoder["embed_dim"])

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        return int(self.encoder["num_layers"])
