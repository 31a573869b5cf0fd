"""The softmax of the Hopper forward kernels: all keys of an item for the rows of one warp group, and overflows.

With weights relative to a row's maximum so far, every block of keys waits for its own maximum, and sums are scaled again
where that has grown. Here (bfloat16) they are relative to the maximum of a row's *first* block, also where later scores are
larger. Where a row has running sums of earlier keys, the maximum of these counts as well. bfloat16 and float32 hold weights
up to 2**127. If sums come near that, by scores that grow by 69 nats, or overflow, by values of 1e30, the program computes
all of its items again with the online softmax, and stores the rows that did. Other rows keep their bits, whatever the batch
holds beside them.

The largest weight of a row is then not 1 but any number, and rounded. Of many keys the roundings even out; a row that is
all one key would be that key's value times the rounding of its weight, see ``_divisor``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dilated_attention_pytorch.backends.hopper.kernels.common import allocate_barriers
from dilated_attention_pytorch.backends.hopper.kernels.products import (
    as_weights,
    hold,
    no_sums,
    scale_rows,
    start_scores,
    start_sums,
    wait_scores,
    wait_sums,
)

LARGEST = gl.constexpr(2.0**100)  # sums of weights from here on are computed again


@gluon.constexpr_function
def is_online(dtype):
    """Whether the first pass has to be online: other types have not the range for weights above 1."""
    return dtype != gl.bfloat16


@gluon.jit
def _hide(s, n, masked, columns, seen):
    """Scores of a block of keys from place ``n`` on, -inf where a row does not see them."""
    if masked:
        s = gl.where(columns[None, :] < (seen - n)[:, None], s, float("-inf"))
    return s


@gluon.jit
def _raise_maximum(s, m2, scale_log2):
    """The maximum of each row, including these scores, and the factor for the sums so far."""
    m2_new = gl.maximum(m2, gl.max(s, 1) * scale_log2)
    return m2_new, gl.exp2(m2 - m2_new)


@gluon.jit
def _sums_of_threads(weights, COLUMNS: gl.constexpr):
    """Sums over the columns that a thread has: (64, 4), to be added up over four threads."""
    return gl.sum(gl.sum(weights.reshape([64, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _divisor(total, largest, dtype: gl.constexpr):
    """What sums of values are divided by: the sum of weights, with that of a key that outweighs the others as rounded.

    ``largest`` is the largest of the four sums that threads have of a row, ``total`` the sum of all weights. If twice the
    other three would not change how ``largest`` is rounded to bfloat16, it is taken for one weight, which was rounded like
    that: where the others are nothing, the row is that key's value bit for bit, and its queries have no gradient. If several
    keys of one thread are all there is, the divisor is off by a second rounding.
    """
    others = total - largest
    rounded = largest.to(dtype).to(gl.float32)
    # Some weight is 1: that of the maximum of the first block, of zero keys, or of earlier keys. It may lie in the same
    # thread. So below 512 there is no such key, but for that 1, which is exact.
    alone = (largest - 2.0 * gl.maximum(others, 1.0)).to(dtype).to(gl.float32) == rounded
    return gl.where(alone, rounded + others, total)


@gluon.jit
def attend_item(
    which: gl.constexpr, m2, total, sums, seen, blocks, clear_blocks, number, counter, scale_log2, columns, none, smem, bars,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    ONLINE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The softmax over all blocks of keys of an item, for the rows of one group, up to the start of the last products.

    Unless ``ONLINE``, the caller has to look for ``overflows``, and to come again with it where there are some.
    ``m2``, ``total`` and ``sums`` are the maximum, the sum of weights and the sums of values of what rows see besides these
    keys: zero keys, or earlier keys. ``sums`` is () if all sums of values are 0. Returns the sums of values, the last weights as rounded,
    maximum, sum of weights, what to divide by, the stage of the last block, and the blocks so far.
    """
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    R: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_smem.dtype
    mbarrier.wait(q_full.index(which), number & 1)
    q = hold(q_smem.index(which), S, D, HELD)

    # The scores of a block are computed while the values of the block before are still being added up.
    stage = counter % STAGES
    phase = counter // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = start_scores(q, k_smem.index(stage), none, D)
    s, q = wait_scores(0, s, q, D, BLOCK_D, HELD)
    if HELD:  # not before a product has read the registers: only then they are loaded for sure
        mbarrier.arrive(q_empty.index(which), count=1)
    else:  # after the last product that reads them
        mbarrier.arrive(q_empty.index(which), count=1, pred=blocks == 1)
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _hide(s, 0, clear_blocks <= 0, columns, seen)
    m2, alpha = _raise_maximum(s, m2, scale_log2)
    weights = gl.exp2(s * scale_log2 - m2[:, None])
    total = total * alpha
    if ONLINE:
        total += gl.sum(weights, 1)
    else:
        thread_sums = _sums_of_threads(weights, BLOCK_N)
    p = as_weights(weights, dtype, D, BLOCK_D)
    sums = no_sums(D, BLOCK_D) if len(sums) == 0 else scale_rows(sums, alpha, D, BLOCK_D)
    for block in range(1, blocks):
        counter += 1
        last, last_phase = stage, phase
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = start_scores(q, k_smem.index(stage), none, D)
        mbarrier.wait(v_full.index(last), last_phase)
        last_p = p
        sums = start_sums(last_p, v_smem.index(last), sums, D)
        s, q = wait_scores(1, s, q, D, BLOCK_D, HELD)
        if not HELD:
            mbarrier.arrive(q_empty.index(which), count=1, pred=block == blocks - 1)
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _hide(s, block * BLOCK_N, block >= clear_blocks, columns, seen)
        if ONLINE:
            m2, alpha = _raise_maximum(s, m2, scale_log2)
        weights = gl.exp2(s * scale_log2 - m2[:, None])
        if ONLINE:
            total = total * alpha + gl.sum(weights, 1)
        else:
            thread_sums += _sums_of_threads(weights, BLOCK_N)
        p = as_weights(weights, dtype, D, BLOCK_D)
        sums = wait_sums(sums, last_p, D, BLOCK_D)
        mbarrier.arrive(v_empty.index(last), count=1)
        if ONLINE:
            sums = scale_rows(sums, alpha, D, BLOCK_D)
    counter += 1
    mbarrier.wait(v_full.index(stage), phase)
    sums = start_sums(p, v_smem.index(stage), sums, D)
    if ONLINE:
        return sums, p, m2, total, total, stage, counter
    else:
        total += gl.convert_layout(gl.sum(thread_sums, 1), R)
        divisor = _divisor(total, gl.convert_layout(gl.max(thread_sums, 1), R), dtype)
        return sums, p, m2, total, divisor, stage, counter


@gluon.jit
def release_blocks(blocks, counter, bars, STAGES: gl.constexpr):
    """Release the buffers of the next blocks, which only the other group reads. Returns the number of blocks so far."""
    k_full, k_empty, v_full, v_empty = bars
    for _ in range(blocks):
        stage = counter % STAGES
        phase = counter // STAGES & 1
        # The wait for the load is needed: until then, the other group may not have released the buffer's last block.
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        counter += 1
    return counter


@gluon.jit
def overflows(acc, total):
    """1 for rows whose sums are not finite, or nearly so: 0 times what is not finite is not 0."""
    return gl.where((gl.sum(acc * 0.0, 1) == 0.0) & (total < LARGEST), 0, 1)


@gluon.jit
def allocate_flags():
    """Whether a group has seen a sum overflow, and the barrier at which both have said so."""
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), allocate_barriers(1, 2)


@gluon.jit
def raise_flag(flags, which: gl.constexpr, seen):
    """Say whether this group has seen a sum overflow."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flags[0].index(which).store(gl.full([1], 0, gl.int32, ONE) + gl.max(seen, 0))
    mbarrier.arrive(flags[1].index(0), count=1)


@gluon.jit
def again(items, flags, WARPS: gl.constexpr):
    """What is to be computed again, online: all ``items`` if any group has seen a sum overflow, else 0."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(flags[1].index(0), 0)
    seen = gl.sum(flags[0].index(0).load(ONE), 0) + gl.sum(flags[0].index(1).load(ONE), 0)
    return gl.where(seen > 0, items, 0)
