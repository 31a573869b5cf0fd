"""FlexAttention's ``BlockMask`` as lists of blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_MAX_PAIRS = 2**22  # pairs of positions for which a mask_mod is evaluated at a time


def read_block_mask(block_mask: BlockMask) -> tuple[Tensor, int, bool]:
    """Return the mask (S, L, Q, K), the block size, and whether blocks on the diagonal are causal inside."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask of FlexAttention, got {type(block_mask).__name__}")
    rows, columns = block_mask.BLOCK_SIZE
    n, m = block_mask.seq_lengths
    if rows != columns or n != m:
        raise ValueError(
            f"a BlockMask must have square blocks and as many queries as keys: got blocks of {rows} x {columns} and {n} x "
            f"{m} positions; use create_block_mask(..., BLOCK_SIZE=128), or BlockSparse.custom(mask) for other lengths"
        )
    key_blocks = -(-m // columns)
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, key_blocks)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, key_blocks)
    size, where = int(rows), partial.nonzero()
    all_seen, triangle = _kinds(block_mask, where, size, n)
    diagonal = where[:, 2] == where[:, 3]
    odd = ~all_seen & ~(triangle & diagonal)
    if bool(odd.any()):
        b, h, q, k = where[odd][0].tolist()
        raise ValueError(
            f"the blocks of a BlockMask must be full, or causal on the diagonal: got {int(odd.sum())} other block(s), "
            f"the first one query block {q}, key block {k} (sample {b}, head {h}); use FlexAttention for such masks"
        )
    # A block of one position is both full and causal.
    causal, whole = diagonal & ~all_seen, diagonal & all_seen & ~triangle
    seen = partial | full
    ahead = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).triu_(1)
    several = -(-(n - 1) // size)  # blocks of more than one position
    full_diagonal = bool(whole.any()) or bool(full.diagonal(dim1=-2, dim2=-1)[..., :several].any())
    if bool(causal.any()) and (full_diagonal or bool((seen & ahead).any())):
        raise ValueError(
            "if a BlockMask has causal blocks on the diagonal, all blocks on the diagonal must be causal and none may be "
            "above it: got full ones too; use FlexAttention for such masks"
        )
    return seen, size, bool(causal.any())


def _table(counts: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
    """The lists as a boolean tensor (S, L, Q, K). Entries beyond the count of a list are ignored."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    table = torch.zeros((*counts.shape, key_blocks), dtype=torch.int32, device=indices.device)
    return table.scatter_add_(-1, torch.where(valid, indices, 0).long(), valid.to(torch.int32)) > 0


def _kinds(block_mask: BlockMask, where: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return for each partial block whether all its pairs meet, and whether exactly those with ``j <= i`` meet."""
    inside = torch.arange(size, device=where.device)
    all_seen, triangle = [torch.ones(0, dtype=torch.bool, device=where.device)], []
    for chunk in torch.split(where, max(1, _MAX_PAIRS // size**2)):
        b, h, q, k = (x.view(-1, 1, 1) for x in chunk.unbind(1))
        i, j = q * size + inside[:, None], k * size + inside[None, :]
        met = block_mask.mask_mod(b, h, i.clamp(max=length - 1), j.clamp(max=length - 1)).expand(len(chunk), size, size)
        outside = (i >= length) | (j >= length)
        all_seen.append((met | outside).flatten(1).all(1))
        triangle.append(((met == (j <= i)) | outside).flatten(1).all(1))
    return torch.cat(all_seen), torch.cat([all_seen[0], *triangle])
