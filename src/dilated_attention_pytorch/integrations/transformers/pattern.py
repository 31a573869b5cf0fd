"""The pattern of a transformers model: an entry of its config, which is saved with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from dilated_attention_pytorch.patterns.dilated import Dilated

ENTRY = "dilated_attention"
_REQUIRED = ("segment_lengths", "dilation_rates")
_OPTIONAL = ("offsets", "torchscale_padding")
_EXAMPLE = 'config.dilated_attention = {"segment_lengths": [2048, 4096], "dilation_rates": [1, 2]}'


def pattern_of(config: PretrainedConfig) -> Dilated:
    """The pattern that ``config.dilated_attention`` describes.

    The entry has the keys ``segment_lengths`` and ``dilation_rates``, and may have ``offsets`` and
    ``torchscale_padding``. They are the arguments of ``Dilated``.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(dilated_attention={"segment_lengths": [4, 8], "dilation_rates": [1, 2]})
    >>> pattern_of(config)
    Dilated(segment_lengths=(4, 8), dilation_rates=(1, 2), offsets='interleaved', torchscale_padding=False)
    """
    entry = getattr(config, ENTRY, None)
    if entry is None:
        raise ValueError(
            f"the config of a dilated model holds its pattern, but {type(config).__name__} has no {ENTRY!r}; write "
            f"{_EXAMPLE}, or call apply(model, segment_lengths, dilation_rates)"
        )
    if not isinstance(entry, Mapping):
        raise TypeError(f"config.{ENTRY} must be a dict, got {entry!r}; write {_EXAMPLE}")
    missing = [name for name in _REQUIRED if name not in entry]
    unknown = [str(name) for name in entry if name not in _REQUIRED + _OPTIONAL]
    if missing or unknown:
        raise ValueError(
            f"config.{ENTRY} has the keys {', '.join(_REQUIRED)} and may have {', '.join(_OPTIONAL)}: missing {missing}, "
            f"unknown {unknown}; write {_EXAMPLE}"
        )
    try:
        return Dilated(**entry)
    except (TypeError, ValueError) as error:
        error.add_note(f"This is the pattern of config.{ENTRY} = {dict(entry)!r}.")
        raise


def entry_of(pattern: Dilated) -> dict[str, Any]:
    """The entry ``dilated_attention`` of a config for this pattern, which JSON can hold.

    >>> entry_of(Dilated([4, 8], [1, 2], offsets=[0, 1]))
    {'segment_lengths': [4, 8], 'dilation_rates': [1, 2], 'offsets': [0, 1]}
    """
    entry: dict[str, Any] = {
        "segment_lengths": list(pattern.segment_lengths),
        "dilation_rates": list(pattern.dilation_rates),
        "offsets": pattern.offsets if isinstance(pattern.offsets, str) else list(pattern.offsets),
    }
    return entry | {"torchscale_padding": True} if pattern.torchscale_padding else entry
