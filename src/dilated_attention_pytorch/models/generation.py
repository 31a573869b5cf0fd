"""Tokens that a decoder generates, and log-probabilities of an endless input, both in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.cache import DilatedKVCache
from dilated_attention_pytorch.call import Sharding
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.jagged import is_jagged
from dilated_attention_pytorch.lengths import Lengths, few, index_tensor
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.sampling import Sampling

Prompts = Tensor | Sequence[Tensor | Sequence[int]]
CHUNK = 65536  # tokens of each sample that are computed at a time
_TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CachedDecoder(Protocol):
    """What generation needs of a model: ``LongNetDecoder`` has it."""

    config: LongNetConfig
    sharding: Sharding | None
    training: bool

    @property
    def head_weight(self) -> Tensor:
        """The matrix (vocabulary, E) of the output projection."""
        ...

    def __call__(self, tokens: Tensor, *, caches: Sequence[DilatedKVCache], lengths: Lengths | None) -> Tensor:
        """Append a chunk (B, N) to the caches, and return its logits (B, N, vocabulary)."""
        ...

    def features(
        self, tokens: Tensor, *, caches: Sequence[DilatedKVCache] | None = None, lengths: Lengths | None = None
    ) -> Tensor:
        """The states (B, N, E) behind the last norm, for the same arguments."""
        ...

    def log_probabilities(self, states: Tensor, targets: Tensor) -> Tensor:
        """The log-probabilities (B, N) of targets (B, N) behind these states."""
        ...

    def new_caches(self, batch_size: int, *, max_tokens: int | None = None, max_rollback: int = 32) -> list[DilatedKVCache]:
        """One cache per layer."""
        ...


class Generated(NamedTuple):
    """The result of ``LongNetDecoder.generate``."""

    tokens: Tensor  # (B, n): the tokens behind each prompt. Behind the end of a sample, they are the first eos.
    lengths: Tensor  # (B,): the number of tokens of each sample, its eos included


class Decoding:
    """Samples that are continued token by token: an iterator of tokens (B,). ``LongNetDecoder.stream`` makes it.

    The first ``next`` computes the prompts. Every further one is a ``step``. A step has static shapes, reads no value on
    the host, and changes tensors in place. So it can be compiled, and captured in a CUDA graph.

    Attributes:
        token: (B,), the last token of each sample.
        lengths: (B,), how many tokens each sample has so far, its eos included.
        active: (B,) bool, whether a sample has had no eos so far.
        caches: of the layers.
    """

    def __init__(
        self, model: CachedDecoder, prompts: Prompts, sampling: Sampling, *, max_new_tokens: int | None = None,
        eos: int | Sequence[int] | None = None, generator: torch.Generator | int | None = None, prefill_chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        check_inference(model)
        self.model, self.sampling, device = model, sampling, model.head_weight.device
        self.vocabulary = model.head_weight.shape[0]
        self.max_new_tokens = None if max_new_tokens is None else as_integer("max_new_tokens", max_new_tokens, 1)
        self.prefill_chunk = as_integer("prefill_chunk", prefill_chunk, 1)
        self.generator = _generator(generator, sampling, device)
        ends = _ends(eos, self.vocabulary)
        self._prompts: list[Tensor] | None = _prompts(prompts)
        batch, longest = len(self._prompts), max(map(len, self._prompts))
        most = None if self.max_new_tokens is None else longest + self.max_new_tokens - 1  # the last one is not appended
        self.caches = model.new_caches(batch, max_tokens=most, max_rollback=0)
        self._made = 0
        with torch.inference_mode(False):  # the tensors are changed in other modes as well
            self.token = torch.zeros(batch, dtype=torch.int64, device=device)
            self.lengths = torch.zeros_like(self.token)
            self.active = torch.ones_like(self.token, dtype=torch.bool)
            self._eos = None if ends is None else torch.tensor(ends, device=device)
            penalised = sampling.repetition_penalty is not None
            shape = (batch, self.vocabulary)
            self._occurred = torch.zeros(shape, dtype=torch.bool, device=device) if penalised else None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        """The next token of each sample, a new tensor. With ``eos``, this reads on the host whether all samples ended."""
        ended = self._made and self._eos is not None and not self.active.any()
        if ended or self._made == self.max_new_tokens:
            raise StopIteration
        if self._made == 0:
            self._begin()
        else:
            self.step()
        self._made += 1
        return self.token.clone()

    @torch.no_grad()
    def step(self) -> None:
        """Append the last token of each sample to the caches, and choose the next one. Samples that ended do not change."""
        lengths = None if self._eos is None else self.active.long()
        self._choose(self.model(self.token.unsqueeze(1), caches=self.caches, lengths=lengths)[:, 0])

    @torch.no_grad()
    def _begin(self) -> None:
        """Compute the prompts chunk by chunk, and choose the first tokens."""
        if self._prompts is None:
            raise RuntimeError("the prompts were not computed, because an error was raised; make a new stream")
        prompts, self._prompts = self._prompts, None
        counts, size = [len(prompt) for prompt in prompts], self.prefill_chunk
        last = [self.token] * len(prompts)  # replaced by the states of the last tokens
        for start in range(0, max(counts), size):
            own = [min(max(count - start, 0), size) for count in counts]
            chunk = check_tokens("prompts", _padded(prompts, start, own), self.vocabulary)
            chunk = chunk.to(self.token.device, torch.int64)
            states = self.model.features(chunk, caches=self.caches, lengths=None if len({*own}) == 1 else own)
            for sample, count in enumerate(counts):
                if start < count <= start + size:
                    last[sample] = states[sample, count - start - 1].clone()  # not a view that keeps the whole chunk
            if self._occurred is not None:
                self._occurred.scatter_(1, chunk, True)
        self._choose(torch.nn.functional.linear(torch.stack(last), self.model.head_weight))

    def _choose(self, logits: Tensor) -> None:
        token = self.sampling.choose(logits, self._occurred, self.generator)
        if self._eos is not None:
            token = torch.where(self.active, token, self._eos[0])
        if self._occurred is not None:
            self._occurred.scatter_(1, token.unsqueeze(1), True)
        self.token.copy_(token)
        self.lengths.add_(self.active)
        if self._eos is not None:
            self.active.logical_and_((token.unsqueeze(1) != self._eos).all(1))


def generate(decoding: Decoding) -> Generated:
    """All tokens of a decoding with ``max_new_tokens``."""
    if decoding.max_new_tokens is None:
        raise TypeError("max_new_tokens must be an integer, at least 1, got None; stream goes on without a bound")
    tokens = decoding.token.new_empty(len(decoding.token), decoding.max_new_tokens)
    made = 0
    for made, token in enumerate(decoding, 1):
        tokens[:, made - 1] = token
    return Generated(tokens[:, :made].clone() if made < tokens.shape[1] else tokens, decoding.lengths.clone())


def score(model: CachedDecoder, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """See ``LongNetDecoder.score``. The model is checked now, and chunks when they are read."""
    check_inference(model)
    if isinstance(chunks, Tensor) or not isinstance(chunks, Iterable):
        raise TypeError(
            f"chunks must be an iterable of tensors, got {type(chunks).__name__}; score([tokens]) takes one tensor"
        )
    return _scores(model, chunks)


@torch.no_grad()
def _scores(model: CachedDecoder, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    caches: list[DilatedKVCache] | None = None
    last: Tensor | None = None  # the state of the token in front of the chunk
    shape: torch.Size | None = None
    for given in chunks:
        if not isinstance(given, Tensor) or given.dim() not in (1, 2):
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"chunks must be tensors of token ids (n,) or (B, n), got {got}")
        tokens = check_tokens("chunks", given, model.head_weight.shape[0])
        if shape is not None and tokens.shape[:-1] != shape:
            raise ValueError(f"all chunks must have the same batch size, got {[*shape]} and then {[*tokens.shape[:-1]]}")
        shape = tokens.shape[:-1]
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        if caches is None:
            caches = model.new_caches(len(tokens), max_rollback=0)
        values = []
        for own in torch.split(tokens, CHUNK, 1):
            if own.shape[1] == 0:
                continue
            own = own.to(model.head_weight.device, torch.int64)
            states = model.features(own, caches=caches)
            before = states[:, :-1] if last is None else torch.cat((last, states[:, :-1]), 1)
            values.append(model.log_probabilities(before, own[:, own.shape[1] - before.shape[1] :]))
            last = states[:, -1:].clone()  # not a view that keeps the whole chunk
        found = torch.cat(values, 1) if values else model.log_probabilities(*_no_rows(model, len(tokens)))
        yield found.view(*shape, -1)


def _no_rows(model: CachedDecoder, batch: int) -> tuple[Tensor, Tensor]:
    weight = model.head_weight
    return weight.new_empty(batch, 0, weight.shape[1]), weight.new_empty(batch, 0, dtype=torch.int64)


def check_inference(model: CachedDecoder) -> None:
    """Raise if the model cannot be used with caches, or would drop activations."""
    if model.sharding is not None:
        raise ValueError("a sharded sequence has no caches; decode on one device, with a model without group")
    config = model.config
    if model.training and any((config.dropout, config.attention_dropout, config.activation_dropout, config.drop_path)):
        raise ValueError(
            "the model is in training mode and has dropout, so that results would be random; call model.eval()"
        )


def check_tokens(name: str, x: Tensor, vocabulary: int) -> Tensor:
    """The ids; raise if they are not in the vocabulary. This is one device synchronisation for ids on a GPU."""
    if x.dtype not in _TOKEN_DTYPES:
        raise TypeError(f"{name} must be token ids of {', '.join(map(str, _TOKEN_DTYPES))}, got {x.dtype}")
    if x.numel():
        least, most = (int(value) for value in x.aminmax())
        if least < 0 or most >= vocabulary:
            raise ValueError(
                f"{name} must be token ids from 0 to {vocabulary - 1}, got ids from {least} to {most}; vocab_size of the "
                f"config is {vocabulary}"
            )
    return x


def _prompts(prompts: Any) -> list[Tensor]:
    """One vector of token ids per sample, on one device. Ids of tensors are checked later, chunk by chunk."""
    rule = "prompts must be token ids (B, N), or a list with a sequence of token ids for each sample"
    if isinstance(prompts, Tensor) and not is_jagged(prompts):
        if prompts.dim() != 2:
            raise ValueError(f"{rule}, got a tensor {tuple(prompts.shape)}; prompt[None] is a batch of one")
        rows = [*prompts.unbind(0)]
    elif isinstance(prompts, Tensor):
        rows = [*prompts.unbind(0)]
    elif isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes):
        rows = [_prompt(rule, own) for own in prompts]
    else:
        raise TypeError(f"{rule}, got {type(prompts).__name__}; write [prompt] for a batch of one")
    if not rows:
        raise ValueError(f"{rule}, got no sample")
    empty = [number for number, own in enumerate(rows) if len(own) == 0]
    if empty:
        raise ValueError(
            f"a prompt has at least one token, because the next token is predicted from it: prompts {few(empty)} are "
            "empty; begin with a separator"
        )
    kinds = {(own.device, own.dtype) for own in rows}
    if len(kinds) > 1:
        got = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(f"all prompts must have one dtype and one device, got {got}; use .to()")
    if rows[0].dtype not in _TOKEN_DTYPES:
        raise TypeError(f"prompts must be token ids of {', '.join(map(str, _TOKEN_DTYPES))}, got {rows[0].dtype}")
    return rows


def _prompt(rule: str, own: Any) -> Tensor:
    if isinstance(own, str) or not isinstance(own, Tensor | Sequence):
        raise TypeError(f"{rule}, got an entry {own!r}; write [prompt] for a batch of one, and text.encode() for bytes")
    vector = index_tensor("prompts", own)
    assert vector is not None
    if vector.dim() != 1:
        raise ValueError(f"{rule}, got an entry {tuple(vector.shape)}; a batch of one is prompt[0]")
    return vector


def _padded(prompts: list[Tensor], start: int, counts: list[int]) -> Tensor:
    """The tokens from ``start`` on, ``counts[b]`` of sample ``b``. Padding is the sample's own first token.

    Tokens of the padding have therefore occurred in the sample, so that a repetition penalty needs no mask.
    """
    if len({*counts}) == 1:
        return torch.stack([own[start : start + counts[0]] for own in prompts])
    chunk = torch.stack([own[0] for own in prompts]).unsqueeze(1).repeat(1, max(counts))
    for row, own, count in zip(chunk, prompts, counts, strict=True):
        row[:count] = own[start : start + count]
    return chunk


def _ends(eos: Any, vocabulary: int) -> list[int] | None:
    """The ids that end a sample."""
    if eos is None:
        return None
    many = isinstance(eos, Sequence) and not isinstance(eos, str | bytes)
    ends = [as_integer("eos", value, 0) for value in (eos if many else [eos])]
    if not ends or max(ends) >= vocabulary:
        raise ValueError(f"eos must be one or several token ids from 0 to {vocabulary - 1}, got {eos!r}; None never ends")
    return ends


def _generator(given: Any, sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """The generator, or a new one if its seed is given."""
    if given is None:
        return None
    if sampling.is_greedy:
        raise ValueError(
            f"generator draws tokens, but temperature={sampling.temperature} takes the most probable one; pass a "
            "temperature, or leave generator out"
        )
    if not isinstance(given, torch.Generator):
        return torch.Generator(device).manual_seed(as_integer("generator, if it is not a torch.Generator,", given))
    if given.device.type != device.type or (given.device.index or 0) != (device.index or 0):
        raise ValueError(f"generator must be on the device of the model, {device}, got {given.device}; pass a seed instead")
    return given
