"""The softmax of the Hopper forward kernels: all keys of an item for the rows of one group, and what becomes of overflows.

With weights relative to a row's maximum so far, every block of keys waits for its own maximum, and sums are scaled again
where that has grown. Here (bfloat16) they are relative to the maximum of a row's *first* block, also where later
scores are larger: bfloat16 and float32 hold weights up to 2**127. If sums come near that, by scores that grow by 69 nats, or
overflow, by values of 1e30, the program computes all of its items again with the online softmax.

The largest weight of a row is then not 1 but any number, and rounded. A row that is all one key would be that key's
value times the rounding. So rows are divided by the sum of their rounded weights, which a product with ones adds up; the
sum before rounding gives lse.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dilated_attention_pytorch.backends.hopper.pieces import allocate_barriers, hold, product_layout, wait_held

LARGEST = gl.constexpr(2.0**100)  # sums of weights from here on are computed again


@gluon.constexpr_function
def is_online(dtype):
    """Whether the first pass has to be online: other types have not the range for weights above 1."""
    return dtype != gl.bfloat16


@gluon.jit
def allocate_ones(dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for 8 rows of ones: a product with them adds up rows."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, COLUMNS], dtype)
    ONE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    return gl.allocate_shared_memory(dtype, [8, COLUMNS], layout, gl.full([8, COLUMNS], 1.0, dtype, ONE))


@gluon.jit
def _hide(s, n, masked, columns, seen):
    """Scores of a block of keys from place ``n`` on, -inf where a row does not see them."""
    if masked:
        s = gl.where(columns[None, :] < (seen - n)[:, None], s, float("-inf"))
    return s


@gluon.jit
def _raise_maximum(s, m2, scale_log2):
    """The maximum of each row, these scores included, and the factor for what came before."""
    m2_new = gl.maximum(m2, gl.max(s, 1) * scale_log2)
    return m2_new, gl.exp2(m2 - m2_new)


@gluon.jit
def _sums_of_threads(weights, COLUMNS: gl.constexpr):
    """Sums over the columns that a thread has: (64, 4), to be added up over four threads."""
    return gl.sum(gl.sum(weights.reshape([64, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _add_up(p, values, ones, acc, sums, COLUMNS: gl.constexpr, ONLINE: gl.constexpr, O: gl.constexpr):
    """Start the products with rounded weights: with the values, and, not ONLINE, with ones in two halves.

    ``sums`` (64, 8) are the rows of weights added up, all columns the same. Returns the left sides too, for ``wait_for_sums``.
    """
    whole = gl.convert_layout(p, gl.DotOperandLayout(0, O, 2), assert_trivial=True)
    acc = warpgroup_mma(whole, values, acc, is_async=True)
    if ONLINE:
        return acc, sums, (whole,)
    else:
        L: gl.constexpr = gl.DotOperandLayout(0, product_layout(8), 2)
        first, second = p.reshape([64, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
        first = gl.convert_layout(first, L, assert_trivial=True)
        second = gl.convert_layout(second, L, assert_trivial=True)
        sums = warpgroup_mma(first, ones.permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma(second, ones.permute((1, 0)), sums, is_async=True)
        return acc, sums, (whole, first, second)


@gluon.jit
def wait_for_sums(acc, sums, left, ONLINE: gl.constexpr):
    """Products read their left sides from registers until they are done: they are named here, so that they last."""
    if ONLINE:
        acc, _ = warpgroup_mma_wait(0, deps=(acc, left[0]))
        return acc, sums
    else:
        acc, sums, _, _, _ = warpgroup_mma_wait(0, deps=(acc, sums, left[0], left[1], left[2]))
        return acc, sums


@gluon.jit
def attend_item(
    which: gl.constexpr, m2, total, seen, blocks, clear_blocks, number, counter, scale_log2, columns, none, smem, bars,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, ONLINE: gl.constexpr,
    S: gl.constexpr, O: gl.constexpr,
):  # fmt: skip
    """The softmax over all blocks of keys of an item, for the rows of one group, up to the start of the last products.

    Unless ``ONLINE``, the caller has to look for ``overflows``, and to come again with it where there are some.
    ``total`` is what the sum of weights has beside the keys (zero keys). Returns the sums of values, the rounded sums of weights
    (64, 8), the last products' left sides, maximum, sum of weights, ``total`` relative to that maximum, the stage of the last
    block, and the blocks so far.
    """
    q_smem, k_smem, v_smem, ones = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    R: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_smem.dtype
    acc = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
    sums = gl.full([64, 8], 0.0, gl.float32, product_layout(8))
    mbarrier.wait(q_full.index(which), number & 1)
    q = hold(q_smem.index(which), gl.DotOperandLayout(0, S, 2), HELD)

    # The scores of a block are computed while the values of the block before are still being added up.
    stage = counter % STAGES
    phase = counter // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if HELD:  # not before a product has read the registers: only then they are loaded for sure
        mbarrier.arrive(q_empty.index(which), count=1)
    else:  # after the last product that reads them
        mbarrier.arrive(q_empty.index(which), count=1, pred=blocks == 1)
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _hide(s, 0, clear_blocks <= 0, columns, seen)
    m2, alpha = _raise_maximum(s, m2, scale_log2)
    weights = gl.exp2(s * scale_log2 - m2[:, None])
    beside = total * alpha
    if ONLINE:
        total = beside + gl.sum(weights, 1)
    else:
        thread_sums = _sums_of_threads(weights, BLOCK_N)
    p = weights.to(dtype)
    for block in range(1, blocks):
        counter += 1
        last, last_phase = stage, phase
        stage = counter % STAGES
        phase = counter // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        acc, sums, left = _add_up(p, v_smem.index(last), ones, acc, sums, BLOCK_N, ONLINE, O)
        s, q = wait_held(1 if ONLINE else 3, s, q, HELD)
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
        p = weights.to(dtype)
        acc, sums = wait_for_sums(acc, sums, left, ONLINE)
        mbarrier.arrive(v_empty.index(last), count=1)
        if ONLINE:
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    counter += 1
    mbarrier.wait(v_full.index(stage), phase)
    acc, sums, left = _add_up(p, v_smem.index(stage), ones, acc, sums, BLOCK_N, ONLINE, O)
    if not ONLINE:
        total = beside + gl.convert_layout(gl.sum(thread_sums, 1), R)
    return acc, sums, left, m2, total, beside, stage, counter


@gluon.jit
def sums_of_weights(sums, total, beside, O: gl.constexpr, ONLINE: gl.constexpr):
    """By row: what sums of values are divided by, and the sum of weights of lse."""
    R: gl.constexpr = gl.SliceLayout(1, O)
    exact = gl.convert_layout(total, R)
    if ONLINE:
        return exact, exact
    else:
        return gl.convert_layout(gl.max(sums, 1), R) + gl.convert_layout(beside, R), exact


@gluon.jit
def overflows(seen_so_far, acc, total):
    """Add the rows whose sums are not finite, or nearly so: 0 times what is not finite is not 0."""
    return gl.where((gl.sum(acc * 0.0, 1) == 0.0) & (total < LARGEST), seen_so_far, 1)


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
    """How many items to compute again, online: all if any group has seen a sum overflow."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(flags[1].index(0), 0)
    seen = gl.sum(flags[0].index(0).load(ONE), 0) + gl.sum(flags[0].index(1).load(ONE), 0)
    return gl.where(seen > 0, items, 0)
