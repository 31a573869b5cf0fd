"""``LongNetSlideModel``: Prov-GigaPath's slide encoder as a model of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import ModelOutput, can_return_tuple

from dilated_attention_pytorch.integrations.transformers.config import SlidePreTrainedConfig
from dilated_attention_pytorch.integrations.transformers.pretrained import DilatedPreTrainedModel
from dilated_attention_pytorch.integrations.transformers.states import check_kwargs
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.layers import reset_module
from dilated_attention_pytorch.models.slide import SlideBody, SlideConfig
from dilated_attention_pytorch.orders.order import Order


@dataclass
class SlideModelOutput(ModelOutput):
    """The result of ``LongNetSlideModel``.

    Attributes:
        pooler_output: (B, E), the embeddings of slides.
        layer_embeddings: the embeddings in front of the first layer and behind each layer, if ``all_layer_embed=True``.
    """

    pooler_output: Tensor | None = None
    layer_embeddings: tuple[Tensor, ...] | None = None


class LongNetSlideModel(SlideBody, DilatedPreTrainedModel):
    """Prov-GigaPath's slide encoder. The modules and files are those of ``SlideEncoder``.

    Args:
        config: a ``SlidePreTrainedConfig``.

    >>> import torch
    >>> from dilated_attention_pytorch import LongNetConfig
    >>> encoder = LongNetConfig.preset("gigapath-12x768", embed_dim=64, num_layers=2, ffn_dim=128)
    >>> model = LongNetSlideModel(SlidePreTrainedConfig.of(SlideConfig(encoder=encoder))).eval()
    >>> tiles, coordinates = torch.randn(2, 100, 1536), 256 * torch.randint(0, 400, (2, 100, 2))
    >>> model(tiles, coordinates, lengths=[100, 60]).pooler_output.shape
    torch.Size([2, 64])
    >>> model.attention_map(tiles, coordinates, lengths=[100, 60]).shape
    torch.Size([2, 100])
    """

    config: SlidePreTrainedConfig
    config_class = SlidePreTrainedConfig
    main_input_name = "tiles"
    input_modalities = "image"

    def __init__(self, config: SlidePreTrainedConfig) -> None:
        super().__init__(config)
        self.add_modules()
        self.post_init()

    @property
    def sizes(self) -> SlideConfig:
        """The sizes and options of this model."""
        return self.config.slide

    def initialise(self, name: str, module: nn.Module) -> None:
        """Draw the parameters of a module by its name in this model."""
        if name == "":
            nn.init.normal_(self.cls_token, std=0.02)
        elif name == "patch_embed.proj" and isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        else:
            reset_module(name, module, self.sizes.encoder)

    @can_return_tuple
    def forward(
        self, tiles: Tensor, coordinates: Tensor, lengths: Lengths | None = None, order: Order | bool | None = None,
        all_layer_embed: bool = False, check_coordinates: bool = True, **kwargs: Any,
    ) -> SlideModelOutput:  # fmt: skip
        """The embeddings of slides.

        Args:
            tiles, coordinates, lengths, order, check_coordinates: see ``SlideEncoder.forward``. Padding is behind the
                tiles of a slide, and ``lengths`` says how many there are: there is no ``attention_mask``.
            all_layer_embed: return ``layer_embeddings`` as well. They are without ``encoder.layer_norm``, as in the
                authors' code.
            kwargs: ``return_dict``. Others are refused by name: there are no ``hidden_states`` of tokens.
        """
        self.check_implementation()
        check_kwargs(self, kwargs)
        pooled, every = self.embeddings(
            tiles, coordinates, lengths=lengths, order=order, all_layer_embed=all_layer_embed,
            check_coordinates=check_coordinates,
        )  # fmt: skip
        return SlideModelOutput(pooler_output=pooled, layer_embeddings=tuple(every) if all_layer_embed else None)
