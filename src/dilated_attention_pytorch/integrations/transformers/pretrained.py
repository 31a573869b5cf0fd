"""What the models of this library do differently from other models of transformers: they refuse instead of guessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dilated_attention_pytorch.models.layers import LayerStack

NAME = "dilated"  # of the attention implementation


class DilatedPreTrainedModel(PreTrainedModel):
    """A ``PreTrainedModel`` whose attention is dilated, and whose files are complete.

    * Another ``attn_implementation`` is refused by ``from_pretrained``, ``from_config`` and ``set_attn_implementation``.
    * ``from_pretrained`` raises for missing, unexpected and misshapen tensors, and lists all of them. transformers
      initialises missing ones and prints a report.
    * There are no buffers. What other models compute in their constructor is computed from the config in the forward.
    """

    supports_gradient_checkpointing = True
    _no_split_modules = ["LongNetLayer"]  # noqa: RUF012  # transformers makes a set of it in each model

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> str:
        return _checked(type(self), attn_implementation)

    def get_correct_attn_implementation(self, requested_attention: Any, is_init_check: bool = False) -> str:
        """The name of dilated attention; raise for others."""
        return _checked(type(self), requested_attention)

    def set_attn_implementation(self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Raise unless the name is that of dilated attention."""
        asked = attn_implementation.values() if isinstance(attn_implementation, Mapping) else [attn_implementation]
        for name in asked:
            _checked(type(self), name)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The model of a folder or of the Hub, see ``PreTrainedModel.from_pretrained``.

        Missing, unexpected and misshapen tensors raise a ValueError that lists them. ``ignore_mismatched_sizes=True``
        initialises misshapen ones, as for all models of transformers.
        """
        wants_report, accepts_sizes = (kwargs.pop(x, False) for x in ("output_loading_info", "ignore_mismatched_sizes"))
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        found: Any = super().from_pretrained(*args, **kwargs)
        model, report = found
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        _check_report(model, report, source, accepts_sizes)
        return (model, report) if wants_report else model

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        for stack in self.modules():
            if isinstance(stack, LayerStack):
                stack.gradient_checkpointing, stack.checkpoint_every = enable, every_n_layers
                stack.checkpoint_function = gradient_checkpointing_func

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters of one module, as the models of this library do, except those that were loaded."""
        own = dict(module.named_parameters(recurse=False))
        loaded = {name: x.clone() for name, x in own.items() if getattr(x, "_is_hf_initialized", False)}
        name = next(name for name, other in self.named_modules() if other is module)
        self.initialise(name, module)
        for name, x in loaded.items():
            own[name].copy_(x)

    def initialise(self, name: str, module: nn.Module) -> None:
        """Draw the parameters of a module by its name in this model."""
        raise NotImplementedError

    def check_implementation(self) -> None:
        """Raise if the config asks for another attention than this model computes."""
        _checked(type(self), self.config._attn_implementation)


def _checked(model: type, name: Any) -> str:
    if name is not None and name != NAME:
        raise ValueError(
            f"{model.__name__} computes dilated attention only, attn_implementation={NAME!r}: got {name!r}. Leave "
            "attn_implementation out. A pattern of one segment as long as the sequence is dense: segment_lengths=[n], "
            "dilation_rates=[1] in the config"
        )
    return NAME


def _check_report(model: PreTrainedModel, report: Mapping[str, Any], source: Any, accepts_sizes: bool) -> None:
    """Raise unless the tensors of the files are those of the model."""
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    misshapen = {str(entry[0]): entry[1:] for entry in report["mismatched_keys"]}
    missing = sorted(set(report["missing_keys"]) - misshapen.keys())
    problems = [f"missing: {name} {shapes.get(name, '')}" for name in missing]
    problems += [f"unexpected: {name}" for name in sorted(report["unexpected_keys"])]
    if not accepts_sizes:
        problems += [
            f"misshapen: {name} is {tuple(own)}, the model has {tuple(needed)}"
            for name, (own, needed) in sorted(misshapen.items())
        ]
    others = {k: v for k, v in report.items() if v and k not in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    problems += [f"{name}: {value}" for name, value in others.items()]
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if getattr(model.config, "tie_word_embeddings", False):
        pairs = {target: [model.get_parameter(name) for name in (target, source)] for target, source in tied.items()}
        problems += [
            f"differing: {target} and {tied[target]}, which tie_embeddings=True in the config says are one"
            for target, (own, other) in pairs.items()
            if own is not other
        ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{source} does not have the tensors of this {type(model).__name__}:\n{lines}")
