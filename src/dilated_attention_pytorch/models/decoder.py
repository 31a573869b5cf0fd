"""``LongNetDecoder``: a causal LongNet with a language-model head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.jagged import unpack
from dilated_attention_pytorch.lengths import Lengths
from dilated_attention_pytorch.models.body import attention_dtype
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.encoder import LongNetBase
from dilated_attention_pytorch.models.generation import CHUNK, Decoding, Generated, Prompts, generate, score
from dilated_attention_pytorch.models.positions import check_xpos
from dilated_attention_pytorch.models.sampling import Sampling, SamplingOptions
from dilated_attention_pytorch.models.sequences import ModelRows, RowOptions, cached_rows, unpacked
from dilated_attention_pytorch.models.torchscale import from_torchscale
from dilated_attention_pytorch.shards import Shards

if TYPE_CHECKING:  # a process without a group never imports torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100  # the target of a row that has none, as in ``cross_entropy``
_LOGITS = 2**24  # the most logits that exist at a time in a loss
_HEAD = "output_projection.weight"


class LongNetDecoder(LongNetBase):
    """LongNet's decoder: causal dilated attention, and logits of the next token.

    Args:
        config: sizes and options; ``vocab_size`` must be set.
        group, layout: see ``attention``. Tokens are this rank's rows, and positions are those of the whole sequence.
        device, dtype: of the parameters.

    >>> model = LongNetDecoder(LongNetConfig.preset("tiny"))
    >>> tokens = torch.randint(0, 256, (2, 1001))
    >>> model(tokens[:, :-1]).shape
    torch.Size([2, 1000, 257])
    >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()

    With caches, a sequence is continued chunk by chunk, with the same results:

    >>> with torch.no_grad():
    ...     caches = model.new_caches(batch_size=2)
    ...     prompt, step = model(tokens[:, :900], caches=caches), model(tokens[:, 900:901], caches=caches)
    ...     torch.testing.assert_close(step, model(tokens)[:, 900:901])
    """

    def __init__(
        self, config: LongNetConfig, *, group: ProcessGroup | DeviceMesh | Sharding | None = None,
        layout: str | Shards | None = None, device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, group=group, layout=layout, dtype=dtype)
        if config.vocab_size is None:
            raise ValueError("a decoder needs a vocabulary: set vocab_size in the config, 257 for bytes and a separator")
        factory: dict[str, Any] = {"device": "meta", "dtype": dtype}
        tied = config.tie_embeddings
        self.output_projection = None if tied else nn.Linear(config.embed_dim, config.vocab_size, False, **factory)
        self.materialise(device)

    @property
    def head_weight(self) -> Tensor:
        """The matrix (vocabulary, E) of the output projection."""
        head = self.embed_tokens if self.output_projection is None else self.output_projection
        assert head is not None
        return head.weight

    def forward(
        self, tokens: Tensor, *, lengths: Lengths | None = None, starts: Lengths | None = None,
        cu_seqlens: Lengths | None = None, caches: Sequence[DilatedKVCache] | None = None, targets: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        """The logits (B, N, vocabulary) of the token behind each token, or the loss if ``targets`` are given.

        Args:
            tokens: ids (B, N), or a jagged nested tensor (B, sequence).
            lengths, starts, cu_seqlens: see ``attention``. Positions count from the start of each sample or document.
            caches: of ``new_caches``: the tokens continue the sequences that the caches have seen, and are appended.
                ``lengths`` are then the numbers of tokens of this chunk. Not with ``starts`` and ``cu_seqlens``.
            targets, reduction: see ``loss``. Wrappers such as DDP call ``forward`` only.

        Logits of padding rows are 0. Their ids have no effect, but must be in the vocabulary.
        """
        rows: RowOptions = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens}
        states, call, offsets = self._states(tokens, rows, caches)
        if targets is None:
            if reduction != "mean":
                raise ValueError(f"reduction={reduction!r} is that of a loss, which needs targets")
            result = F.linear(states, self.head_weight)
        else:
            own = targets if offsets is None else _packed_targets(targets, offsets)
            result = self._losses(states, _checked_targets(own, states, call), reduction)
        return result if offsets is None or result.dim() == 0 else unpack(result, offsets)

    def features(
        self, tokens: Tensor, *, lengths: Lengths | None = None, starts: Lengths | None = None,
        cu_seqlens: Lengths | None = None, caches: Sequence[DilatedKVCache] | None = None,
    ) -> Tensor:  # fmt: skip
        """The states (B, N, E) behind the last norm. ``F.linear(states, model.head_weight)`` are the logits."""
        rows: RowOptions = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens}
        states, _, offsets = self._states(tokens, rows, caches)
        return states if offsets is None else unpack(states, offsets)

    def loss(
        self, tokens: Tensor, targets: Tensor, *, lengths: Lengths | None = None, starts: Lengths | None = None,
        cu_seqlens: Lengths | None = None, reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        """The cross entropy of ``targets``, in nats. Logits exist for a few rows at a time, also in the backward.

        Args:
            tokens: see ``forward``.
            targets: ids (B, N): the token behind each token. Rows with -100 and padding rows do not count.
            lengths, starts, cu_seqlens: see ``forward``.
            reduction: ``"mean"`` over the targets, ``"sum"``, or ``"none"`` for (B, N) with 0 in rows that do not count.
                With ``group``, ``"mean"`` is the sum over this rank's rows, times the number of ranks, divided by the
                targets of all ranks: the mean of all ranks' losses is the mean over all targets, as DDP and FSDP need it.
        """
        rows: dict[str, Any] = {"lengths": lengths, "starts": starts, "cu_seqlens": cu_seqlens}
        result: Tensor = self(tokens, targets=targets, reduction=reduction, **rows)
        return result

    def new_caches(
        self, batch_size: int, *, max_tokens: int | None = None, max_rollback: int = 32, dtype: torch.dtype | None = None
    ) -> list[DilatedKVCache]:
        """One cache per layer, on the device of the model. Their size does not grow with the tokens.

        ``dtype`` is that of the queries: by default autocast's if it is enabled, else that of the parameters. See
        ``DilatedKVCache`` for the other arguments.
        """
        config, device = self.config, self.head_weight.device
        dtype = attention_dtype(self.layers) if dtype is None else dtype
        check_xpos(config, max_tokens, dtype)
        return [
            DilatedKVCache(
                config.pattern, batch_size, config.key_heads, config.head_dim, dtype=dtype, device=device,
                max_tokens=max_tokens, max_rollback=max_rollback,
            )
            for _ in range(config.num_layers)
        ]  # fmt: skip

    def generate(
        self, prompts: Prompts, *, max_new_tokens: int, eos: int | Sequence[int] | None = None,
        generator: torch.Generator | int | None = None, prefill_chunk: int = CHUNK, **sampling: Unpack[SamplingOptions],
    ) -> Generated:  # fmt: skip
        """Continue prompts. The tokens are those that a forward over the whole sequence gives for each token.

        Args:
            prompts: ids (B, N), a jagged nested tensor, or a list with a sequence of ids for each sample. Each sample has
                its own positions, so that prompts of different lengths need no padding. They may be on another device.
            max_new_tokens: the most tokens of each sample.
            eos: the id that ends a sample, or several ids. With it, one value is read from the device for each token, and
                the last step is that in which all samples have ended. Without it, no token needs a device synchronisation.
            generator: of the tokens that are drawn, or the seed of a new one; PyTorch's default generator if None.
            prefill_chunk: the tokens of each prompt that are computed at a time. Memory does not depend on the prompts.
            sampling: ``temperature``, ``top_k``, ``top_p`` and ``repetition_penalty``, see ``Sampling``. Without a
                temperature the most probable token is taken.

        Returns:
            ``(tokens, lengths)``: the new tokens (B, n), and how many each sample has (B,), its eos included. Behind the
            end of a sample, tokens are the first eos.

        >>> model = LongNetDecoder(LongNetConfig.preset("tiny")).eval()
        >>> tokens, lengths = model.generate([b"import torch", b"def "], max_new_tokens=5, eos=256)
        >>> tokens.shape, lengths.shape
        (torch.Size([2, 5]), torch.Size([2]))
        """
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos": eos, "generator": generator}
        return generate(self.stream(prompts, prefill_chunk=prefill_chunk, **options, **sampling))

    def stream(
        self, prompts: Prompts, *, max_new_tokens: int | None = None, eos: int | Sequence[int] | None = None,
        generator: torch.Generator | int | None = None, prefill_chunk: int = CHUNK, **sampling: Unpack[SamplingOptions],
    ) -> Decoding:  # fmt: skip
        """The tokens of ``generate`` as they come: an iterator of tensors (B,) on the device of the model.

        The arguments are those of ``generate``. Without ``max_new_tokens`` it goes on until all samples have ended, in
        memory of a fixed size.

        >>> model = LongNetDecoder(LongNetConfig.preset("tiny")).eval()
        >>> [token.shape for token in model.stream([b"import "], max_new_tokens=2, temperature=0.8, top_p=0.9)]
        [torch.Size([1]), torch.Size([1])]
        """
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos": eos, "generator": generator}
        return Decoding(self, prompts, Sampling(**sampling), prefill_chunk=prefill_chunk, **options)

    def score(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """The log-probability of each token given all tokens before it, in nats, for an input of any length.

        Args:
            chunks: consecutive tokens of the sequences: ids (B, n) or (n,) with any n. They may be on another device.

        Yields:
            (B, n) or (n,), float32 (float64 for a float64 model), for each chunk. The first token of the sequence has no
            probability, so that the first result has one value less. Results do not depend on where chunks end.

        Memory does not grow with the input. Chunks of more than 65,536 tokens are computed in several calls.

        >>> model = LongNetDecoder(LongNetConfig.preset("tiny")).eval()
        >>> chunks = (torch.randint(0, 256, (1000,)) for _ in range(3))
        >>> [values.shape for values in model.score(chunks)]
        [torch.Size([999]), torch.Size([1000]), torch.Size([1000])]
        """
        return score(self, chunks)

    def log_probabilities(self, states: Tensor, targets: Tensor) -> Tensor:
        """The log-probabilities (B, N) of ``targets`` (B, N) behind the states (B, N, E) of ``features``, in nats."""
        return -self._losses(states, targets, "none")

    def _states(
        self, tokens: Tensor, rows: RowOptions, caches: Sequence[DilatedKVCache] | None
    ) -> tuple[Tensor, ModelRows, Tensor | None]:  # fmt: skip
        """The states behind the last norm, their rows, and the offsets of a nested tensor."""
        tokens, rows, offsets = unpacked(tokens, rows)
        if caches is not None:
            self._check_caches(caches, rows)
        embeddings = self.embed(tokens)
        if caches is None:
            call = self.rows_of(embeddings, rows)
        else:
            seen, dtype = caches[0].tokens_seen, caches[0].dtype
            call = cached_rows(self.config, embeddings, rows.get("lengths"), seen, dtype)
        states = self.enter(embeddings, call)
        for number in range(len(self.layers)):
            states = self.layers.run(number, states, call, True, None if caches is None else caches[number])
        return self.leave(states, call), call, offsets

    def _check_caches(self, caches: Sequence[DilatedKVCache], rows: RowOptions) -> None:
        if len(caches) != self.config.num_layers:
            raise ValueError(f"caches are one per layer, {self.config.num_layers}, got {len(caches)}; use new_caches")
        if any(one is other for i, one in enumerate(caches) for other in caches[:i]):
            raise ValueError("caches are one per layer, got the same cache for several layers; use new_caches")
        if self.sharding is not None:
            raise ValueError("a sharded sequence has no caches; decode on one device, with a model without group")
        given = [name for name in ("starts", "cu_seqlens") if rows.get(name) is not None]
        if given:
            raise ValueError(
                f"a cache takes the tokens of each sample at the front of a chunk and their numbers as lengths: got "
                f"{', '.join(given)}; move the padding behind the tokens"
            )
        if self.training and (self.config.attention_dropout or self.config.drop_path):
            raise ValueError("a cache has no dropout of attention and no drop-path; call model.eval() first")

    def _losses(self, states: Tensor, targets: Tensor, reduction: str) -> Tensor:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
        weight = self.head_weight
        kind = "none" if reduction == "none" else "sum"
        total = token_losses(states, lambda own: F.linear(own, weight), len(weight), targets, kind)
        if reduction != "mean":
            return total
        count = (targets != IGNORED).sum()
        if self.sharding is None:
            return total / count
        from dilated_attention_pytorch.models.ranks import mean_share  # imports torch.distributed

        share: Tensor = mean_share(total, count, self.sharding)
        return share

    def adapt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names that this model has: a tied head may be stored once, under either name, or twice."""
        if self.output_projection is not None or _HEAD not in tensors:
            return tensors
        head = tensors.pop(_HEAD)
        own = tensors.setdefault("embed_tokens.weight", head)
        if own is not head and not torch.equal(own, head):
            raise ValueError(
                f"tie_embeddings=True means that {_HEAD} is embed_tokens.weight, but these tensors differ; use a config "
                "with tie_embeddings=False"
            )
        return tensors

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take a tied head under either name, as ``adapt`` does."""
        names = [name for name in ("embed_tokens.weight", _HEAD) if prefix + name in state_dict]
        own = self.adapt({name: state_dict.pop(prefix + name) for name in names})
        state_dict.update({prefix + name: x for name, x in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def from_torchscale(cls, state_dict: Mapping[str, Tensor], args: Any, **options: Any) -> Self:
        """The decoder with the weights of the authors' code.

        Args:
            state_dict: its tensors. The prefixes of DDP and fairscale are removed.
            args: a ``DecoderConfig`` of the authors' code, or a dictionary of its fields. Strings such as
                ``"[2048,4096]"`` are parsed and never evaluated. Options that would change results and that this model does
                not have raise. Options of other parts of that code are not read.
            options: ``group``, ``layout``, ``device`` and ``dtype`` of the model.
        """
        config, tensors = from_torchscale("decoder", state_dict, args)
        return cls.from_tensors(config, tensors, "the state dict", **options)


def _packed_targets(targets: Tensor, offsets: Tensor) -> Tensor:
    """The rows of nested targets, which have the lengths of the tokens."""
    packed, _, own = unpacked(targets, {})
    if own is None or not torch.equal(own.to(offsets), offsets):
        lengths = offsets.diff().tolist()
        got = tuple(targets.shape) if own is None else own.diff().tolist()
        raise ValueError(f"targets must be a nested tensor with the lengths of the tokens, {lengths}, got {got}")
    return packed


def _checked_targets(targets: Tensor, states: Tensor, rows: ModelRows) -> Tensor:
    """The targets, with -100 in padding rows."""
    if targets.shape != states.shape[:2] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be one int64 token id for each token, {tuple(states.shape[:2])}, got {tuple(targets.shape)} "
            f"of {targets.dtype}; -100 stands for rows without a target"
        )
    return targets if rows.valid is None else targets.masked_fill(~rows.valid.squeeze(-1), IGNORED)


def token_losses(
    states: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, targets: Tensor, reduction: str
) -> Tensor:
    """The cross entropy of ``targets`` (B, N), in nats: the sum, or (B, N) with ``reduction="none"``.

    ``head`` gives the logits (..., vocabulary) of states (B, N, E). They exist for a few rows at a time, also in the
    backward. Targets of -100 do not count.
    """
    flat, wanted = states.flatten(0, 1), targets.flatten()
    rows = max(1, _LOGITS // vocabulary)
    losses = [
        checkpoint(_cross_entropy, own, head, ids, reduction, use_reentrant=False)
        for own, ids in zip(torch.split(flat, rows), torch.split(wanted, rows), strict=True)
    ]
    return torch.cat(losses).view(targets.shape) if reduction == "none" else torch.stack(losses).sum()


def _cross_entropy(states: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, reduction: str) -> Tensor:
    logits = head(states)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)
