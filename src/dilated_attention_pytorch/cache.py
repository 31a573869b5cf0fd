"""``DilatedKVCache``: the keys and values that causal dilated attention still needs, in memory of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dilated_attention_pytorch import cache_operators
from dilated_attention_pytorch.cache_checks import (
    TENSORS,
    cache_sizes,
    check_chunk,
    checked_state,
    keys_nbytes,
    sample_numbers,
    sample_vector,
)
from dilated_attention_pytorch.checks import as_number, check_index_vector
from dilated_attention_pytorch.execute.step import CacheTensors, counters, held_tables
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.lengths import Lengths, index_tensor
from dilated_attention_pytorch.patterns.dilated import Dilated
from dilated_attention_pytorch.values import Inputs

_FORMAT = 1  # of state dicts


class DilatedKVCache:
    """The keys and values that causal dilated attention still needs, in memory of a fixed size.

    A later position meets only rows of its own segments. So a branch ``(w, r)`` needs at most ``ceil(w / r)`` rows of each
    key head, however long the sequence is. ``attend`` takes a chunk of any length: one token when decoding, a prompt, or a
    section of a prompt. The results are those of one causal call over the whole sequence, whatever the chunks were.

    The samples of the batch are independent: each has its own position. A cache belongs to one attention layer.

    Args:
        pattern: a ``Dilated``. The pattern is always used causally.
        batch_size: samples.
        num_kv_heads: key heads, G.
        head_dim: head size, D.
        dtype: of keys and values, and of the queries; PyTorch's default dtype if None.
        device: of the storage; PyTorch's default device if None.
        max_tokens: the most tokens of any sample, if that is known. Branches with longer segments then need less memory.
            More tokens are refused. On a GPU, decoding steps do not read positions on the host. There, a token beyond
            ``max_tokens`` is not appended, and its result is NaN.
        max_rollback: by how many tokens ``rollback`` can go back. The storage is larger by about the rows of that many
            tokens in each branch.

    >>> pattern = Dilated([256, 1024], [1, 4])
    >>> q, k, v = torch.randn(3, 2, 1500, 4, 16).unbind(0)
    >>> cache = DilatedKVCache(pattern, batch_size=2, num_kv_heads=4, head_dim=16)
    >>> prompt = cache.attend(q[:, :1400], k[:, :1400], v[:, :1400])
    >>> tokens = [cache.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]) for i in range(1400, 1500)]

    The results are those of one call over all 1,500 tokens.

    >>> from dilated_attention_pytorch import attention
    >>> whole = attention(q, k, v, pattern, is_causal=True)
    >>> torch.testing.assert_close(torch.cat([prompt, *tokens], 1), whole)

    Of each key head, 339 rows are held: 220 of the segment that starts at 1,280, and every fourth of the one that starts at
    1,024.

    >>> cache.tokens_seen.tolist(), cache.rows_held[0].tolist()
    ([1500, 1500], [339, 339, 339, 339])
    """

    def __init__(
        self,
        pattern: Dilated,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        max_tokens: int | None = None,
        max_rollback: int = 32,
    ) -> None:
        self._held, shape, dtype = cache_sizes(
            pattern, batch_size, num_kv_heads, head_dim, dtype=dtype, max_tokens=max_tokens, max_rollback=max_rollback
        )
        with torch.inference_mode(False):  # the tensors are changed in other modes as well
            try:
                keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in TENSORS[:2])
            except RuntimeError as error:
                error.add_note(
                    f"This cache takes {2 * keys_nbytes(shape, dtype):,} bytes for {shape[2]:,} rows of each key head and "
                    f"sample. max_tokens={max_tokens} bounds the rows of long segments: pass the most tokens of a sample."
                )
                raise
            counts = torch.zeros(2, shape[0], dtype=torch.int64, device=keys.device)
            tokens_seen, rolled_back = (x.clone() for x in counts)
            tables = held_tables(self._held, keys.device)
            self._storage = CacheTensors(keys, values, tokens_seen, rolled_back, *tables, counters(keys))
        self._host = cache_operators.HostPositions([0] * shape[0])

    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = ..., lengths: Lengths | None = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = ..., lengths: Lengths | None = ...,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        lengths: Lengths | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Append a chunk, and return the causal attention of its tokens over all tokens so far.

        At most 8 tokens are computed one after the other, without a device synchronisation and with static shapes. So a
        decoding step can be compiled and captured in a CUDA graph. Longer chunks read the positions on the host once.

        Args:
            query: (B, n, H, D) with ``H % G == 0``; query head ``h`` reads key head ``h // (H // G)``.
            key, value: (B, n, G, D).
            scale: of the scores; ``D ** -0.5`` by default.
            lengths: (B,), the number of valid rows at the front of each sample in this chunk; 0 for a sample that has
                finished or starts later. Rows behind are not appended and give 0 (lse -inf). The values of a tensor on a
                GPU are not checked if there are at most 8 tokens. Larger ones count as n.
            return_lse: return ``(out, lse)`` with lse (B, H, n), float32 (float64 for float64 inputs).

        Returns:
            (B, n, H, D), exactly 0 (lse -inf) in rows that meet no key.
        """
        check_chunk(query, key, value, self._storage.keys)
        own, scale = self._lengths(lengths), as_number("scale", scale)
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        out, lse = cache_operators.run_attend(self._held, self._storage, Inputs(query, key, value), own, scale, self._host)
        return (out, lse) if return_lse else out

    def append(self, key: Tensor, value: Tensor, *, lengths: Lengths | None = None) -> None:
        """Append a chunk without queries; the arguments are those of ``attend``."""
        check_chunk(None, key, value, self._storage.keys)
        cache_operators.run_append(self._held, self._storage, key, value, self._lengths(lengths), self._host)

    @property
    def tokens_seen(self) -> Tensor:
        """The number of tokens of each sample, (B,) int64: the position of its next token. It is a copy."""
        return self._storage.tokens_seen.clone()

    @property
    def rows_held(self) -> Tensor:
        """The rows of the open segments, (B, G) int64. A row that two branches hold counts twice."""
        table = self._storage.table
        (w, r), offsets = table[:2], table[5:]
        inside = (self._storage.tokens_seen.unsqueeze(-1) % w).unsqueeze(1)
        rows: Tensor = (inside - offsets + r - 1) // r
        return rows.clamp_(min=0).sum(-1)

    @property
    def nbytes(self) -> int:
        """The memory of the cache. It does not change with the number of tokens."""
        return sum(x.nbytes for x in self._storage)

    @staticmethod
    def max_nbytes(
        pattern: Dilated,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        max_rollback: int = 32,
    ) -> int:
        """The memory that a cache of these sizes takes, without making it.

        >>> DilatedKVCache.max_nbytes(Dilated([2048, 2**20], [1, 512]), 1, 8, 64, dtype=torch.bfloat16)
        8470916
        """
        held, shape, dtype = cache_sizes(
            pattern, batch_size, num_kv_heads, head_dim, dtype=dtype, max_tokens=max_tokens, max_rollback=max_rollback
        )
        integers = 2 * shape[0] + (5 + held.key_heads) * len(held.branches)
        return 2 * keys_nbytes(shape, dtype) + 8 * integers + 4 * (held.rows + shape[0] * (shape[1] + 1))

    def reset(self, samples: int | Sequence[int] | Sequence[bool] | Tensor | None = None) -> None:
        """Forget all tokens of these samples, given by number or by a mask (B,), or of all samples if None.

        The next tokens of these samples begin at position 0.
        """
        counts = self._storage[2:4]
        if samples is None:
            self._host.start_again(self.batch_size)
            for x in counts:
                x.zero_()
            return
        self._host.forget()
        index = sample_numbers(samples, self._storage.keys)
        for x in counts:
            x.index_fill_(0, index, 0)

    def reorder(self, index: Lengths) -> None:
        """Let sample ``b`` continue sample ``index[b]``, for the beams of a search. The tensors keep their addresses."""
        given = sample_vector("index", index, self._storage.keys, self.batch_size - 1)
        chosen = given.to(self.device, torch.int64)
        self._host.forget()
        selected = [x.index_select(0, chosen) for x in self._storage[:4]]
        for x, new in zip(self._storage, selected, strict=False):
            x.copy_(new)

    def repeat(self, n: int) -> None:
        """Make ``n`` samples of each one, next to each other as ``repeat_interleave`` does. The tensors are new ones."""
        n = as_integer("n", n, 1)
        self._host.forget()
        with torch.inference_mode(False):
            repeated = {name: x.repeat_interleave(n, 0) for name, x in zip(TENSORS, self._storage, strict=False)}
            self._storage = self._storage._replace(**repeated, arrived=counters(repeated["keys"]))

    def rollback(self, n: int | Lengths) -> None:
        """Take back the last ``n`` tokens of every sample, or ``n[b]`` of sample ``b``, as speculative decoding needs it.

        A sample can go back to at most ``max_rollback`` tokens before the furthest position that it has reached, over any
        number of chunks. The counts are checked on the host.
        """
        batch, most = self.batch_size, self._held.max_rollback
        if isinstance(n, Tensor | Sequence):
            counts = sample_vector("n", n, self._storage.keys).tolist()
        else:
            counts = [as_integer("n", n, 0)] * batch
        seen, before = (x.tolist() for x in self._storage[2:4])
        for sample, (count, tokens, back) in enumerate(zip(counts, seen, before, strict=True)):
            if count < 0 or count > tokens or count + back > most:
                raise ValueError(
                    f"rollback takes back 0 or more tokens, at most the tokens of a sample ({tokens}), and ends at most "
                    f"max_rollback = {most} tokens before its furthest position ({tokens + back}): got {count} for sample "
                    f"{sample}; "
                    "make a cache with a larger max_rollback, or load an earlier state_dict"
                )
        self._host.forget()
        change = torch.tensor(counts, dtype=torch.int64, device="cpu").to(self.device)
        self._storage.tokens_seen.sub_(change)
        self._storage.rolled_back.add_(change)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: tensors, integers and strings, which ``torch.load(weights_only=True)`` reads."""
        tensors = dict(zip(TENSORS, self._storage, strict=False))
        return self._description() | {name: x.clone() for name, x in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a cache of the same pattern, sizes and dtype, on any device.

        The tensors of the cache keep their addresses. A state for another pattern, size or dtype is refused.
        """
        tensors = checked_state(state, self._description(), self._storage)
        self._host.forget()
        for x, name in zip(self._storage, TENSORS, strict=False):
            x.copy_(tensors[name])

    def to(self, device: torch.device | str | int) -> DilatedKVCache:
        """Move the tensors to a device; return the cache itself."""
        with torch.inference_mode(False):
            self._storage = CacheTensors(*(x.to(device) for x in self._storage))
        return self

    @property
    def pattern(self) -> Dilated:
        """The pattern."""
        return self._held.pattern

    @property
    def batch_size(self) -> int:
        """The number of samples."""
        return self._storage.keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._storage.keys.dtype

    @property
    def device(self) -> torch.device:
        """The device of the storage."""
        return self._storage.keys.device

    def __repr__(self) -> str:
        batch, heads, rows, head_dim = self._storage.keys.shape
        return (
            f"DilatedKVCache({self.pattern}, batch_size={batch}, num_kv_heads={heads}, head_dim={head_dim}, "
            f"dtype={self.dtype}, device={str(self.device)!r}, max_tokens={self._held.max_tokens}, "
            f"max_rollback={self._held.max_rollback}): {rows:,} rows, {self.nbytes:,} bytes"
        )

    def _lengths(self, lengths: Lengths | None) -> Tensor | None:
        if lengths is None:
            return None
        own = index_tensor("lengths", lengths)
        check_index_vector("lengths", own, self.batch_size, self.device)
        return own

    def _description(self) -> dict[str, Any]:
        """What two caches must have in common to exchange their states."""
        batch, heads, _, head_dim = self._storage.keys.shape
        return {
            "format": _FORMAT, "pattern": self.pattern.spec, "batch_size": batch, "num_kv_heads": heads,
            "head_dim": head_dim, "dtype": str(self.dtype), "max_tokens": self._held.max_tokens,
            "max_rollback": self._held.max_rollback,
        }  # fmt: skip
