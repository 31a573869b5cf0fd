"""What models, arguments and outputs must be, so that a rank can compute its rows by itself."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.utils.generic import ModelOutput

OF_ROWS = ("input_ids", "inputs_embeds", "token_type_ids", "labels", "shift_labels")  # (B, N, ...)
OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_READ = ("attention_mask", "position_ids", "num_items_in_batch", *OF_DOCUMENTS)
_REASONS = {
    "past_key_values": "a sharded sequence has no cache; leave it out, and generate with a model without a group",
    "use_cache": "a sharded sequence has no cache; pass use_cache=False, and generate with a model without a group",
    "output_attentions": "weights of pairs on different ranks exist on no rank; use a model without a group",
    "output_router_logits": "the loss of the router is a mean over all rows, which no rank has; leave it out",
    "logits_to_keep": "a rank has other rows than the last ones of the sequence; leave it out and choose from its rows",
    "encoder_hidden_states": "dilated attention is self-attention; leave it out",
}
_COUNTS_TOKENS = re.compile(r"create_position_ids|mask\b[^\n]*\.cumsum\(|cumsum\(\s*(attention_)?mask\b")


def check_model(model: PreTrainedModel, signature: inspect.Signature) -> None:
    """Raise for models that cannot compute a shard by itself."""
    name, way_out = type(model).__name__, "apply without group"
    if "position_ids" not in signature.parameters:
        raise ValueError(
            f"a rank passes the positions of its rows as position_ids, which {name}.forward does not take: its rows would "
            f"be those of a shorter sequence; {way_out}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and a decoder, and a group shards one sequence; {way_out}")
    for module in model.modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or []
        others = [kind for kind in kinds if kind != "full_attention"]
        if others or isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
            raise ValueError(
                f"rows of other ranks reach a rank through dilated attention only: {name} has layers of the kind "
                f"{others[0] if others else type(module).__name__!r}, which mix rows as well; {way_out}"
            )


def counts_tokens(model: PreTrainedModel) -> bool:
    """Whether a model makes position_ids from its tokens or its mask, and not from the number of rows."""
    sources = {sys.modules[type(x).__module__] for x in model.modules() if isinstance(x, PreTrainedModel)}
    return any(_COUNTS_TOKENS.search(_source(source)) for source in sources)


def _source(x: Any) -> str:
    """The source of a module or a function; nothing for one that was typed at a prompt."""
    try:
        return inspect.getsource(x)
    except (OSError, TypeError):
        return ""


def check_arguments(model: str, given: dict[str, Any]) -> None:
    """Raise for arguments that have no meaning for a rank, and for tensors that are not those of whole sequences."""
    for name, x in given.items():
        if name in _REASONS and (isinstance(x, Tensor) or x):
            raise ValueError(f"{model} has a group and does not take {name}: {_REASONS[name]}")
        if isinstance(x, Tensor) and name not in OF_ROWS + _READ:
            raise ValueError(
                f"{model} has a group, which knows how to shard {', '.join(OF_ROWS)}, attention_mask and "
                f"position_ids: got the tensor {name} as well; use a model without a group"
            )
    _check_shapes(given)


def _check_shapes(given: dict[str, Any]) -> None:
    """Raise if the tensors are not those of whole sequences."""
    inputs = [given[name] for name in ("input_ids", "inputs_embeds") if name in given]
    if len(inputs) != 1:
        raise ValueError(f"pass either input_ids or inputs_embeds, got {len(inputs)} of them")
    size = tuple(inputs[0].shape[:2])
    for name in (*OF_ROWS, "attention_mask"):
        x = given.get(name)
        if x is not None and (
            not isinstance(x, Tensor) or tuple(x.shape[:2]) != size or (name not in OF_ROWS and x.dim() != 2)
        ):
            got = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(
                f"a model with a group takes tensors of whole sequences, {size} for this batch: got {name} {got}; pass "
                "the same tensors as to a model without a group"
            )
    positions = given.get("position_ids")
    if positions is not None and positions.shape[-1] != size[1]:
        raise ValueError(f"position_ids must be those of the whole sequences, {size}: got {tuple(positions.shape)}")


def check_output(model: PreTrainedModel, output: Any, shape: tuple[int, int]) -> None:
    """Raise if an output is not one of a rank's rows."""
    if not isinstance(output, ModelOutput):
        raise TypeError(f"a model with a group returns a ModelOutput, got {type(output).__name__}; pass return_dict=True")
    for name in ("last_hidden_state", "logits"):
        x = output.get(name)
        if x is not None and (x.dim() != 3 or tuple(x.shape[:2]) != shape):
            raise ValueError(
                f"a rank has {shape[1]} rows of the sequence, so outputs of a model with a group must be outputs of rows, "
                f"{(*shape, 'features')}: {type(model).__name__} returned {name} {tuple(x.shape)}; apply without group"
            )
    for name in ("pooler_output", "aux_loss"):
        if output.get(name) is not None:
            raise ValueError(
                f"{name} is computed from rows that a rank may not have; make {type(model).__name__} without it "
                "(add_pooling_layer=False), or apply without group"
            )


def loss_is_shifted(model: PreTrainedModel) -> bool:
    """Whether row ``i`` predicts the label of row ``i + 1``; raise if the loss is not a mean over rows."""
    function = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)))
    if function is ForCausalLMLoss and "loss_function" in _source(inspect.unwrap(type(model).forward)):
        return True
    if function in (ForMaskedLMLoss, ForTokenClassification) and not hasattr(model, "_loss_function"):
        return False
    raise ValueError(
        f"{type(model).__name__} has a group, and its loss is not known to be a mean over rows; leave out labels, and "
        "compute the loss from the rows of the ranks"
    )
