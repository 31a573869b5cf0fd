"""The parameters of ``nn.MultiheadAttention``: names, shapes, initial values and state dicts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dilated_attention_pytorch.integers import as_integer

SEPARATE = ("q_proj", "k_proj", "v_proj")  # linear layers, in the order of the rows of ``in_proj_weight``


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The options of the projections. ``ProjectedAttention`` documents them."""

    num_kv_heads: int | None = None
    bias: bool = True
    layer_norm: bool = False
    layer_norm_eps: float = 1e-5
    gamma_init: float = 1.0
    batch_first: bool = True
    kdim: int | None = None
    vdim: int | None = None

    def __post_init__(self) -> None:
        for name in ("bias", "layer_norm", "batch_first"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("layer_norm_eps", "gamma_init"):
            number: Any = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{name} must be a number, got {number!r}; leave it out for the default")
            if not 0 < float(number) < inf:
                raise ValueError(f"{name} must be positive and finite, got {number}; leave it out for the default")


class HeadProjections(nn.Module):
    """Query, key, value and output projections, with the parameters of ``nn.MultiheadAttention``.

    ``in_proj_weight`` and ``in_proj_bias`` hold the rows of query, key and value. If ``kdim`` or ``vdim`` is not
    ``embed_dim``, ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight`` replace ``in_proj_weight``. With fewer key
    heads than query heads, keys and values have ``num_kv_heads * head_dim`` rows each.

    The constructor and ``reset_parameters`` draw the values of ``nn.MultiheadAttention`` from the generator.

    ``load_state_dict`` takes the state of ``nn.MultiheadAttention``. It also takes the state of three linear layers
    ``q_proj``, ``k_proj`` and ``v_proj``, which the paper authors' checkpoints have.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None

    def __init__(
        self, embed_dim: int, num_heads: int, head_options: HeadOptions, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"the weights must have a floating-point dtype, got {dtype}")
        bias, num_kv_heads = head_options.bias, head_options.num_kv_heads
        kdim, vdim = head_options.kdim, head_options.vdim
        self.embed_dim, self.num_heads = as_integer("embed_dim", embed_dim, 1), as_integer("num_heads", num_heads, 1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim=}, {num_heads=}")
        self.num_kv_heads = self.num_heads if num_kv_heads is None else as_integer("num_kv_heads", num_kv_heads, 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads=}, {num_kv_heads=}")
        self.kdim = self.embed_dim if kdim is None else as_integer("kdim", kdim, 1)
        self.vdim = self.embed_dim if vdim is None else as_integer("vdim", vdim, 1)
        self.head_dim, self.batch_first = self.embed_dim // self.num_heads, head_options.batch_first
        self.gamma_init = float(head_options.gamma_init)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        columns = {"q_proj_weight": self.embed_dim, "k_proj_weight": self.kdim, "v_proj_weight": self.vdim}
        packed = self.kdim == self.embed_dim and self.vdim == self.embed_dim
        shape = (sum(self._rows), self.embed_dim)
        self.register_parameter("in_proj_weight", nn.Parameter(torch.empty(shape, **options)) if packed else None)
        for (name, size), rows in zip(columns.items(), self._rows, strict=True):
            self.register_parameter(name, None if packed else nn.Parameter(torch.empty(rows, size, **options)))
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(shape[0], **options)) if bias else None)
        # Its class is that of ``nn.MultiheadAttention``. It draws its values before the other projections draw theirs.
        self.out_proj = NonDynamicallyQuantizableLinear(self.embed_dim, self.embed_dim, bias=bias, **options)
        self.inner_attn_ln = None
        if head_options.layer_norm:
            self.inner_attn_ln = nn.LayerNorm(self.embed_dim, eps=float(head_options.layer_norm_eps), **options)
        self._reset_input_projections()

    @property
    def _rows(self) -> list[int]:
        """The rows of the projections of query, key and value."""
        return [self.embed_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim]

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False: the layers of ``torch.nn`` then call this module.

        In evaluation, ``nn.TransformerEncoderLayer`` otherwise computes dense attention from the parameters of the module.
        ``nn.TransformerEncoder`` reads the attribute in its constructor.
        """
        return False

    def reset_parameters(self) -> None:
        """Draw new values, as the constructor does.

        They are those of ``nn.MultiheadAttention`` if ``gamma_init`` is 1. Otherwise, the projections of values and of the
        output are Xavier-uniform with this gain, each by its own shape (MAGNETO).
        """
        self.out_proj.reset_parameters()
        self._reset_input_projections()
        if self.inner_attn_ln is not None:
            self.inner_attn_ln.reset_parameters()

    def _reset_input_projections(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.gamma_init != 1:
            nn.init.xavier_uniform_(self._weights_and_biases()["value"][0].detach(), gain=self.gamma_init)
            nn.init.xavier_uniform_(self.out_proj.weight, gain=self.gamma_init)

    def _weights_and_biases(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The weight and the bias by which each embedding is projected."""
        if self.in_proj_weight is not None:
            weights: tuple[Any, ...] = torch.split(self.in_proj_weight, self._rows)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if self.in_proj_bias is None else torch.split(self.in_proj_bias, self._rows)
        return dict(zip(("query", "key", "value"), zip(weights, biases, strict=True), strict=True))

    def _project(self, embeddings: dict[str, Tensor]) -> list[Tensor]:
        """Check embeddings by their names and project them to (B, N, heads, head size).

        One matrix product gives query, key and value if they are projected from one tensor.
        """
        self._check_embeddings(embeddings)
        query = embeddings["query"]
        if self.in_proj_weight is not None and len(embeddings) == 3 and all(x is query for x in embeddings.values()):
            packed = F.linear(self._batched(query), self.in_proj_weight, self.in_proj_bias)
            projected = list(torch.split(packed, self._rows, -1))
        else:
            parameters = self._weights_and_biases()
            projected = [F.linear(self._batched(x), *parameters[name]) for name, x in embeddings.items()]
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        batch_first = (y if self.batch_first else y.transpose(0, 1) for y in projected)
        return [y.view(*y.shape[:2], h, self.head_dim) for y, h in zip(batch_first, heads, strict=False)]

    def _batched(self, x: Tensor) -> Tensor:
        """The same tensor with a batch dimension, of one sample if it has none."""
        return x if x.dim() == 3 else x.unsqueeze(0 if self.batch_first else 1)

    def _check_embeddings(self, embeddings: dict[str, Tensor]) -> None:
        dims, query = "batch, sequence" if self.batch_first else "sequence, batch", embeddings["query"]
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        weight = self._weights_and_biases()["query"][0]
        for name, x in embeddings.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.layout != torch.strided:
                raise TypeError(f"{name} must be a dense tensor, got one that is {x.layout}; use x.to_dense()")
            size, shape = sizes[name], tuple(x.shape)
            if x.dim() not in (2, 3) or shape[-1] != size:
                raise ValueError(f"{name} must be ({dims}, {size}), or (sequence, {size}) for one sample; got {shape}")
            if x.dim() != query.dim():
                raise ValueError(f"{name} must have as many dimensions as query, got {shape} and {tuple(query.shape)}")
            if not x.is_floating_point():
                raise TypeError(f"{name} must hold floating-point embeddings, got {x.dtype}; use .to({weight.dtype})")
            if _linear_dtype(x) != _linear_dtype(weight):
                # Autocast leaves float64 as it is.
                autocast = "" if torch.float64 in (x.dtype, weight.dtype) else ", or torch.autocast"
                raise TypeError(
                    f"{name} must have the dtype of the module's weights, got {x.dtype} and {weight.dtype}; use "
                    f"{name}.to({weight.dtype}) or module.to({x.dtype}){autocast}"
                )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load the state of ``nn.MultiheadAttention``, or that of linear layers ``q_proj``, ``k_proj`` and ``v_proj``.

        Tensors of the second form are concatenated. If some are absent, their names are reported as missing and the names
        of the others as unexpected, and nothing is loaded from them.
        """
        absent: dict[str, list[str]] = {}  # by the parameter that needs them
        wrong: list[str] = []
        if any(f"{prefix}{name}.{kind}" in state_dict for name in SEPARATE for kind in ("weight", "bias")):
            for parameter, sources in self._sources().items():
                key, shapes = prefix + parameter, {prefix + source: shape for source, shape in sources.items()}
                absent[key] = [name for name in shapes if name not in state_dict]
                if absent[key] or key in state_dict:
                    continue
                tensors = {name: state_dict.pop(name) for name in shapes}
                errors = [_mismatch(name, x, shapes[name]) for name, x in tensors.items()]
                if any(errors):
                    wrong.append(key)
                    error_msgs.extend(filter(None, errors))
                else:
                    with torch.no_grad():
                        state_dict[key] = torch.cat([*tensors.values()]) if len(tensors) > 1 else tensors.popitem()[1]
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        for key in missing:
            if key not in wrong:
                missing_keys.extend(absent.get(key) or [key])

    def _sources(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The tensors of three linear layers, and their shapes, of which each parameter of the module consists."""
        rows = dict(zip(SEPARATE, self._rows, strict=True))
        columns = dict(zip(SEPARATE, (self.embed_dim, self.kdim, self.vdim), strict=True))
        weights = {f"{name}.weight": (rows[name], columns[name]) for name in SEPARATE}
        sources: dict[str, dict[str, tuple[int, ...]]]
        if self.in_proj_weight is not None:
            sources = {"in_proj_weight": {**weights}}
        else:
            sources = {f"{name}_weight": {f"{name}.weight": weights[f"{name}.weight"]} for name in SEPARATE}
        if self.in_proj_bias is not None:
            sources["in_proj_bias"] = {f"{name}.bias": (rows[name],) for name in SEPARATE}
        return sources

    def extra_repr(self) -> str:
        """The sizes, for ``print(module)``."""
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        other = "" if self.in_proj_weight is not None else f", kdim={self.kdim}, vdim={self.vdim}"
        return f"{sizes}{other}, bias={self.in_proj_bias is not None}, batch_first={self.batch_first}"


def _linear_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer reads the tensor: autocast converts it, except float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def _mismatch(name: str, x: Any, shape: tuple[int, ...]) -> str | None:
    """The error if this tensor of a state dict has not the expected shape, in the words of ``load_state_dict``."""
    if not isinstance(x, Tensor):
        return f'While copying the parameter named "{name}", expected torch.Tensor, but received {type(x)}'
    if tuple(x.shape) != shape:
        got = f"copying a param with shape {x.shape} from checkpoint, the shape in current model is {torch.Size(shape)}."
        return f"size mismatch for {name}: {got}"
    return None
