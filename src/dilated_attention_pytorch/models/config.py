"""``LongNetConfig``: the sizes and options of a LongNet model, as plain values that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dilated_attention_pytorch.checks import as_bool, as_number
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.models.presets import PRESETS
from dilated_attention_pytorch.patterns.dilated import Dilated

ACTIVATIONS = ("gelu", "swiglu")
POSITIONS = ("rotary", "xpos", "none")
_PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "drop_path")
_FLAGS = ("torchscale_padding", "sub_norm", "final_norm", "tie_embeddings", "checkpoint_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """The sizes and options of ``LongNetEncoder`` and ``LongNetDecoder``. Every field is checked.

    Args:
        embed_dim: the width E of the model.
        num_layers: layers.
        num_heads: query heads; the head size is ``embed_dim // num_heads``.
        num_kv_heads: key heads, a divisor of ``num_heads``; as many as query heads if None.
        ffn_dim: the width inside feed-forward networks.
        vocab_size: the number of token ids; None for an encoder of embeddings.
        segment_lengths, dilation_rates, offsets, torchscale_padding: the pattern, see ``Dilated``.
        activation: ``"gelu"``, or ``"swiglu"``: ``silu(fc1(x)) * gate(x)``.
        positions: ``"rotary"``, ``"xpos"`` (see ``models.positions`` for its bound) or ``"none"``.
        rotary_base: of the wavelengths of both.
        xpos_scale_base: the distance in which xPos decays by one power of its scale.
        dropout: of embeddings and of the result of every sublayer.
        attention_dropout: of attention weights.
        activation_dropout: inside feed-forward networks.
        drop_path: the probability with which the last layer's sublayers are left out, per sample or document. It grows
            linearly over the layers, from 0 in the first one, so that a single layer has none.
        sub_norm: the norms in front of ``out_proj`` and ``fc2``, and the initialisation that goes with them (MAGNETO).
        final_norm: the norm behind the last layer.
        layer_norm_eps: of every norm.
        tie_embeddings: the output projection of a decoder is its embedding.
        checkpoint_layers: recompute the activations of each layer in the backward.

    >>> config = LongNetConfig.preset("tiny")
    >>> LongNetConfig.from_json(config.to_json()) == config
    True
    >>> config.pattern.branches
    ((64, 1), (256, 4), (1024, 16))
    """

    embed_dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    offsets: str | tuple[int, ...] = "interleaved"
    torchscale_padding: bool = False
    activation: str = "gelu"
    positions: str = "rotary"
    rotary_base: float = 10000.0
    xpos_scale_base: float = 512.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    drop_path: float = 0.0
    sub_norm: bool = True
    final_norm: bool = True
    layer_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_layers", "num_heads", "ffn_dim", "num_kv_heads", "vocab_size"):
            value = getattr(self, name)
            if value is not None or name not in ("num_kv_heads", "vocab_size"):
                self._set(name, as_integer(name, value, 1))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
            self._set(name, as_bool(name, getattr(self, name)))
        for name in _PROBABILITIES:
            value = self._number(name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is a probability, 0 <= {name} < 1, got {value}")
        for name in ("layer_norm_eps", "rotary_base", "xpos_scale_base"):
            value = self._number(name)
            if value <= 0.0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name, known in (("activation", ACTIVATIONS), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        self._check_heads()
        pattern = Dilated(self.segment_lengths, self.dilation_rates, self.offsets, self.torchscale_padding)
        pattern.check_key_heads(self.key_heads)
        for name in ("segment_lengths", "dilation_rates", "offsets"):
            self._set(name, getattr(pattern, name))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str) -> float:
        number = as_number(name, getattr(self, name))
        if number is None or isinstance(number, bool):
            raise TypeError(f"{name} must be a number, got {getattr(self, name)!r}")
        self._set(name, float(number))
        return float(number)

    def _check_heads(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {self.embed_dim} and {self.num_heads}; the head size is "
                "their quotient"
            )
        if self.num_heads % self.key_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads (grouped-query attention), got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.positions != "none" and self.head_dim % 2:
            raise ValueError(
                f"positions={self.positions!r} turns pairs of numbers, so the head size must be even: got "
                f"{self.head_dim} = {self.embed_dim} / {self.num_heads}; use positions='none' or another num_heads"
            )

    @property
    def head_dim(self) -> int:
        """The head size."""
        return self.embed_dim // self.num_heads

    @property
    def key_heads(self) -> int:
        """The number of key heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def pattern(self) -> Dilated:
        """The pattern of every layer."""
        return Dilated(self.segment_lengths, self.dilation_rates, self.offsets, self.torchscale_padding)

    @staticmethod
    def preset(name: str, **changes: Any) -> LongNetConfig:
        """A configuration by its name, with other values for some fields.

        >>> LongNetConfig.preset("small", segment_lengths=(2048, 65536), dilation_rates=(1, 32)).pattern.branches
        ((2048, 1), (65536, 32))
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; presets are {', '.join(PRESETS)}")
        return LongNetConfig.from_dict(PRESETS[name] | changes)

    def replace(self, **changes: Any) -> LongNetConfig:
        """The same configuration with other values for some fields."""
        _check_names(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name. Tuples become lists, so that the dictionary is what JSON gives back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LongNetConfig:
        """The configuration with these fields. Unknown and missing fields raise and are listed."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a configuration is a dictionary of its fields, got {type(values).__name__}")
        _check_names(values)
        needed = [field.name for field in fields(LongNetConfig)][:6]
        missing = [name for name in needed if name not in values]
        if missing:
            raise ValueError(f"a configuration needs the fields {', '.join(needed)}; missing: {', '.join(missing)}")
        return LongNetConfig(**values)

    def to_json(self) -> str:
        """The fields as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> LongNetConfig:
        """The configuration that ``to_json`` wrote."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # also of integers with too many digits
            raise ValueError(f"a configuration must be JSON: {error}") from None
        return LongNetConfig.from_dict(values)


def _check_names(values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(LongNetConfig)]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise ValueError(f"LongNetConfig has no fields {', '.join(unknown)}; its fields are {', '.join(known)}")
