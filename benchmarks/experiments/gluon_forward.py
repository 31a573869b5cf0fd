"""A warp-specialised forward for Hopper over launch tables: one producer warp, two consumer groups of 64 query rows.

Rows are read through descriptors that each program makes for its own tile, so any stride, offset and ragged end is served.
The tables, the parts and their layout are those of ``dilated_attention_pytorch.backends.triton``.

**An experiment, not part of the library**: it compiles for sm_90 with Triton 3.6 and 3.9 and has not been run on a GPU yet. See docs/kernels.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 renamed it.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
COLUMNS = gl.constexpr(23)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _find_family(table, families, program):
    low = families * 0
    high = families - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = gl.load(table + middle * COLUMNS)
        low = gl.where(first <= program, middle, low)
        high = gl.where(first <= program, high, middle - 1)
    return table + low * COLUMNS


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, first, blocks,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for c in gl.static_range(2):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tma_load(q_desc, [first + c * 64, 0], q_full.index(c), q_smem.index(c))
    for i in range(blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma_load(k_desc, [i * BLOCK_N, 0], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [i * BLOCK_N, 0], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _merge(out, lse2, part_out, part_lse2):
    larger2 = gl.maximum(lse2, part_lse2)
    weight = gl.exp2(lse2 - larger2)
    part_weight = gl.exp2(part_lse2 - larger2)
    both = weight + part_weight
    out = out * (weight / both)[:, None] + part_out * (part_weight / both)[:, None]
    return out, larger2 + gl.log2(both)


@gluon.jit
def _softmax_step(s, m2, scale_log2, n, masked, rows, columns, k_rows, causal):
    if masked:
        visible = ((columns + n) < k_rows)[None, :] & (((columns + n)[None, :] <= rows[:, None]) | (not causal))
        s = gl.where(visible, s, float("-inf"))
    m2_new = gl.maximum(m2, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m2_new[:, None])
    return p, m2_new


@gluon.jit
def _consume(
    cid: gl.constexpr, PARTS, PARTS_LSE2, OUT, LSE, LAYOUT, OFFSETS, row, q_smem, k_smem, v_smem, q_full, k_full, k_empty,
    v_full, v_empty, first, blocks, whole_blocks, q_start, q_rows, k_rows, stride, causal, own_sample, sample, head,
    key_head, tile, N, H, G, parts, scale_log2,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    dtype: gl.constexpr = q_smem.dtype
    rows = first + cid * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    # zero keys: logit 0, value 0
    zero_keys = gl.load(row + 14).to(gl.float32)
    m2 = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + gl.where(zero_keys > 0, 0.0, float("-inf"))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S)) + zero_keys
    acc = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
    none = gl.full([64, BLOCK_N], 0.0, gl.float32, S)
    mbarrier.wait(q_full.index(cid), 0)
    q = q_smem.index(cid)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m2_new = _softmax_step(s, m2, scale_log2, 0, whole_blocks <= 0, rows, columns, k_rows, causal)
    total = total * gl.exp2(m2 - m2_new) + gl.sum(p, 1)
    m2 = m2_new
    for i in range(1, blocks):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        last = (i - 1) % STAGES
        last_phase = ((i - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P), v_smem.index(last), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, m2_new = _softmax_step(s, m2, scale_log2, i * BLOCK_N, i >= whole_blocks, rows, columns, k_rows, causal)
        alpha = gl.exp2(m2 - m2_new)
        total = total * alpha + gl.sum(p, 1)
        m2 = m2_new
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    last = (blocks - 1) % STAGES
    last_phase = ((blocks - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(last), last_phase)
    acc = warpgroup_mma(gl.convert_layout(p.to(dtype), P), v_smem.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, O))[:, None]
    lse2 = m2 + gl.log2(total)

    # rows of 16 bytes per thread from here on
    B: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_D, BLOCK_D // 4], [4, 1], [1, 0])
    out = gl.convert_layout(acc, B)
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, B))
    numbers = gl.arange(0, 64, gl.SliceLayout(1, B))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, B))
    begin = first + cid * 64
    inside = (begin + numbers) < q_rows
    mask = inside[:, None] & (d < D)[None, :]
    if FINAL:
        first_row = q_start + begin * stride
        positions = (first_row + gl.load(row + 17)).to(gl.int32) + numbers * stride.to(gl.int32)
        sequence = gl.load(row + 16)
        for part in range(parts):
            entry = LAYOUT + (sequence * parts + part) * 7
            w = gl.load(entry + 3).to(gl.int32)
            r = gl.load(entry + 4).to(gl.int32)
            offset = gl.load(OFFSETS + part * G + key_head).to(gl.int32)
            segment = positions // w
            within = positions - segment * w - offset
            number = within // r
            there = (within >= 0) & (within == number * r) & inside
            capacity = gl.load(entry + 2)
            start = gl.load(entry) + ((own_sample * H + head) * gl.load(entry + 1) - gl.load(entry + 5)) * capacity
            places = start + segment.to(gl.int64) * capacity + number - gl.load(entry + 6)
            part_lse2 = gl.load(PARTS_LSE2 + places, mask=there, other=float("-inf"))
            part_mask = (part_lse2 > float("-inf"))[:, None] & (d < D)[None, :]
            part_out = gl.load(PARTS + places[:, None] * D + d[None, :], mask=part_mask, other=0.0)
            out, lse2 = _merge(out, lse2, part_out, part_lse2)
        gl.store(LSE + (sample * H + head) * N + first_row + numbers * stride.to(gl.int32), lse2 * LN_2, mask=inside)
        pointers = OUT + ((sample * N + first_row) * H + head) * D
        offsets = numbers[:, None] * (stride * H * D).to(gl.int32) + d[None, :]
        gl.store(pointers + offsets, out.to(dtype), mask=mask)
    else:
        segment = (own_sample * H + head) * gl.load(row + 19) + gl.load(row + 21) + tile
        place = gl.load(row + 18) + segment * gl.load(row + 20) + gl.load(row + 22) + begin
        gl.store(PARTS_LSE2 + place + numbers, lse2, mask=inside)
        gl.store(PARTS + place * D + (numbers[:, None] * D + d[None, :]), out, mask=mask)


@gluon.jit
def forward_kernel(
    Q, K, V, PARTS, PARTS_LSE2, OUT, LSE, TABLE, LAYOUT, OFFSETS, families,
    q_stride_b, q_stride_n, q_stride_h, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    N, H, G, group, parts, scale_log2,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    row = _find_family(TABLE, families, program)
    index = program - gl.load(row)
    q_rows = gl.load(row + 9).to(gl.int32)
    k_rows = gl.load(row + 11).to(gl.int32)
    row_blocks = (q_rows + 127) // 128
    first = ((row_blocks - 1 - index % row_blocks) * 128).to(gl.int32)
    index = index // row_blocks
    member = index % group
    index = index // group
    heads = gl.load(row + 4)
    a = index % heads
    index = index // heads
    tiles = gl.load(row + 2)
    tile = index % tiles
    own_sample = index // tiles
    sample = gl.load(row + 1) + own_sample
    key_head = gl.load(row + 5) + a * gl.load(row + 6)
    head = key_head * group + member
    shift = tile * gl.load(row + 3) + a * gl.load(row + 7)
    q_start = gl.load(row + 8) + shift
    k_start = gl.load(row + 10) + shift
    stride = gl.load(row + 12)
    causal = gl.load(row + 13) != 0
    seen = gl.where(causal, gl.minimum(first + 128, k_rows), k_rows)
    blocks = (seen + BLOCK_N - 1) // BLOCK_N
    whole_blocks = gl.where(causal, gl.minimum(first, k_rows), k_rows) // BLOCK_N

    dtype: gl.constexpr = Q.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    q_desc = tma.make_tensor_descriptor(
        Q + sample * q_stride_b + q_start * q_stride_n + head * q_stride_h, [q_rows, D], [stride * q_stride_n, 1],
        [64, BLOCK_D], q_layout,
    )  # fmt: skip
    k_desc = tma.make_tensor_descriptor(
        K + sample * k_stride_b + k_start * k_stride_n + key_head * k_stride_h, [k_rows, D], [stride * k_stride_n, 1],
        [BLOCK_N, BLOCK_D], kv_layout,
    )  # fmt: skip
    v_desc = tma.make_tensor_descriptor(
        V + sample * v_stride_b + k_start * v_stride_n + key_head * v_stride_h, [k_rows, D], [stride * v_stride_n, 1],
        [BLOCK_N, BLOCK_D], kv_layout,
    )  # fmt: skip
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], kv_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(q_full.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (gl.constexpr(0), PARTS, PARTS_LSE2, OUT, LSE, LAYOUT, OFFSETS, row, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, first, blocks, whole_blocks, q_start, q_rows, k_rows, stride, causal, own_sample, sample, head, key_head, tile, N, H, G, parts, scale_log2, D, BLOCK_D, BLOCK_N, STAGES, FINAL)),
        (_consume, (gl.constexpr(1), PARTS, PARTS_LSE2, OUT, LSE, LAYOUT, OFFSETS, row, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, first, blocks, whole_blocks, q_start, q_rows, k_rows, stride, causal, own_sample, sample, head, key_head, tile, N, H, G, parts, scale_log2, D, BLOCK_D, BLOCK_N, STAGES, FINAL)),
        (_produce, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, first, blocks, BLOCK_N, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, 24])  # fmt: skip
