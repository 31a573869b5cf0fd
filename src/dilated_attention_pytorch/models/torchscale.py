"""Checkpoints of the authors' code (torchscale): its options as a ``LongNetConfig``, its tensors without prefixes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.checks import as_bool
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.models.config import LongNetConfig

# Wrappers of DDP, FSDP and fairscale put these into names.
_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
# Options that change what is computed, with the values for which this library computes the same.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "deepnorm": (False,), "multiway": (False,), "rel_pos_buckets": (0,), "max_rel_pos": (0,), "moe_freq": (0,),
    "use_xmoe": (False,), "layernorm_embedding": (False,), "no_scale_embedding": (True,),
    "encoder_normalize_before": (True,), "decoder_normalize_before": (True,), "activation_fn": ("gelu",),
}  # fmt: skip
_REASONS = {
    "encoder_normalize_before": "post-norm", "decoder_normalize_before": "post-norm", "moe_freq": "mixture of experts",
    "rel_pos_buckets": "relative position buckets", "max_rel_pos": "relative position buckets",
}  # fmt: skip


def from_torchscale(
    kind: str, state_dict: Mapping[str, Tensor], args: Any
) -> tuple[LongNetConfig, dict[str, Tensor]]:  # fmt: skip
    """The config and the tensors of an ``"encoder"`` or a ``"decoder"`` of the authors' code.

    An option that is None has its default.
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        raise TypeError(f"args must be a dictionary, or an object with attributes, got {type(args).__name__}")
    values = dict(args) if isinstance(args, Mapping) else dict(vars(args))
    config, tensors = _config(kind, {name: x for name, x in values.items() if x is not None}), stripped(state_dict)
    if kind == "encoder" and "embed_tokens.weight" not in tensors:  # it was given embeddings, whatever its vocab_size was
        config = config.replace(vocab_size=None)
    return config, _without_xpos(config, tensors)


def stripped(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors without the prefixes of wrappers in their names.

    >>> list(stripped({"module.layers.0._fsdp_wrapped_module.ffn.fc1.bias": torch.zeros(1)}))
    ['layers.0.ffn.fc1.bias']
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict holds tensors by name, got {type(state_dict).__name__}; load the file first")
    tensors: dict[str, Tensor] = {}
    for name, x in state_dict.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                f"a state dict holds tensors, {name} is a {type(x).__name__}; pass the entry of the checkpoint that is the "
                'state dict, for example checkpoint["model"]'
            )
        own = name
        for wrapper in _WRAPPERS:
            own = own.replace(f".{wrapper}", ".")
            while own.startswith(_WRAPPERS):
                own = own[own.index(".") + 1 :]
        if own in tensors:
            raise ValueError(f"the state dict has two tensors named {own} without prefixes, one of them {name}")
        tensors[own] = x
    return tensors


def integers_of(name: str, value: Any) -> list[int]:
    """A list of integers, also from a string such as ``"[2048,4096]"``. Strings are parsed and never evaluated.

    >>> integers_of("segment_length", "[2048, 4096]")
    [2048, 4096]
    """
    rule = f"{name} must be a list of integers, or a string such as '[2048, 4096]', got {value!r}"
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{rule}; strings are parsed and never evaluated") from None
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        raise ValueError(rule)
    return list(value)


def _config(kind: str, args: dict[str, Any]) -> LongNetConfig:
    names = {"embed_dim": "embed_dim", "num_heads": "attention_heads", "ffn_dim": "ffn_embed_dim", "num_layers": "layers"}
    missing = [f"{kind}_{name}" for name in names.values() if f"{kind}_{name}" not in args]
    missing += [name for name in ("segment_length", "dilated_ratio") if args.get(name, "") == ""]
    if missing:
        raise ValueError(f"the args of a LongNet {kind} need {', '.join(missing)}")
    for name, allowed in _REFUSED.items():
        value = args.get(name, allowed[0])
        if value not in allowed:
            reason = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise ValueError(f"this library has no LongNet with {name}={value!r}{reason}; it needs {name}={allowed[0]!r}")
    vocabulary = as_integer("vocab_size", args.get("vocab_size", -1))  # theirs is -1 without a vocabulary
    flags = {"subln": True, "normalize_output": True, "xpos_rel_pos": False, "checkpoint_activations": False}
    flags[f"share_{kind}_input_output_embed"] = False
    for name, default in flags.items():
        flags[name] = as_bool(name, args.get(name, default))
    return LongNetConfig(
        **{own: args[f"{kind}_{name}"] for own, name in names.items()},
        segment_lengths=tuple(integers_of("segment_length", args["segment_length"])),
        dilation_rates=tuple(integers_of("dilated_ratio", args["dilated_ratio"])),
        offsets="blocked", torchscale_padding=kind == "encoder", vocab_size=vocabulary if vocabulary > 0 else None,
        positions="xpos" if flags["xpos_rel_pos"] else "none", xpos_scale_base=args.get("xpos_scale_base", 512),
        dropout=args.get("dropout", 0.0), attention_dropout=args.get("attention_dropout", 0.0),
        activation_dropout=args.get("activation_dropout", 0.0), drop_path=args.get("drop_path_rate", 0.0),
        sub_norm=flags["subln"], layer_norm_eps=args.get("layernorm_eps", 1e-5),
        final_norm=flags["normalize_output"] or kind == "decoder",
        tie_embeddings=flags[f"share_{kind}_input_output_embed"],
        checkpoint_layers=flags["checkpoint_activations"],
    )  # fmt: skip


def _without_xpos(config: LongNetConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the buffers of xPos, which follow from the config. Other values raise."""
    kept, half = {}, torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    scale = (half + 0.4 * config.head_dim) / (1.4 * config.head_dim)
    for name, x in tensors.items():
        if not name.endswith("self_attn.xpos.scale"):
            kept[name] = x
        elif config.positions != "xpos":
            raise ValueError(f"the state dict has {name}, args say xpos_rel_pos=False; pass the args of this checkpoint")
        elif x.shape != scale.shape or not torch.allclose(x.double().cpu(), scale, rtol=1e-2 if x.itemsize == 2 else 1e-5):
            raise ValueError(f"{name} is not the scale of xPos for a head size of {config.head_dim}, got {x}")
    return kept
