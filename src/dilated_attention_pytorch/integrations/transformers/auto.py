"""LongNet models in the Auto classes of transformers."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from dilated_attention_pytorch.integrations.transformers.config import LongNetPreTrainedConfig, SlidePreTrainedConfig
from dilated_attention_pytorch.integrations.transformers.modeling import (
    LongNetForCausalLM,
    LongNetForMaskedLM,
    LongNetModel,
)
from dilated_attention_pytorch.integrations.transformers.slide import LongNetSlideModel


def register_models() -> None:
    """Let ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM`` and ``AutoModelForMaskedLM`` find the models.

    Importing ``dilated_attention_pytorch.integrations.transformers`` does it. Without the import, transformers says that it
    does not know the model type ``longnet``. Calling it again changes nothing.
    """
    for config in (LongNetPreTrainedConfig, SlidePreTrainedConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(LongNetPreTrainedConfig, LongNetModel, exist_ok=True)
    AutoModelForCausalLM.register(LongNetPreTrainedConfig, LongNetForCausalLM, exist_ok=True)
    AutoModelForMaskedLM.register(LongNetPreTrainedConfig, LongNetForMaskedLM, exist_ok=True)
    AutoModel.register(SlidePreTrainedConfig, LongNetSlideModel, exist_ok=True)
