"""What the reports claim, demand, expect, recommend and regret, and the check of each.

A problem of a report is a requirement that the problem is gone. ``check`` is the name of a probe or of a condition.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A statement of a report."""

    kind: str  # claim, problem, fix, expected, recommended, limitation
    text: str
    check: str


@dataclass(frozen=True)
class Report:
    """A report: its title, its tables here, and its statements in order."""

    file: str
    title: str
    date: str
    tables: tuple[str, ...]
    claims: tuple[Claim, ...]


def _claims(text: str) -> tuple[Claim, ...]:
    """One statement per line: kind, check, text."""
    return tuple(Claim(kind, statement.strip(), check) for kind, check, statement in
                 (line.split(maxsplit=2) for line in text.strip().splitlines()))  # fmt: skip


REPORTS = (
    Report("000_b2c2469d49a929ff.txt", "Multi-GPU Testing Summary", "July 5, 2025", ("baseline", "hilbert"), _claims("""
        claim baseline_exact "Single GPU: 16K sequence length, working correctly"
        claim one_device "All implementations work correctly on single GPU"
        claim hilbert_speed "Hilbert ordering provides modest improvements", of speed
        claim hilbert_compact "Hilbert ordering provides modest improvements", of how compact segments are
        problem ring_module SimpleTriton "falls back to single GPU": not a true ring implementation
        problem indices "Index out of bounds: dilated indices exceed segment boundaries in multi-GPU context"
        problem indices "Same index out of bounds error" with the Triton kernel: inherited
        claim nccl "NCCL initialization works correctly"
        claim two_ranks_exact "Basic tensor operations work" across devices
        claim positions_of_ranks "KV buffers can be exchanged between GPUs"
        claim log_sums "Accumulator infrastructure is ready"
        fix indices "Dilated indices must be computed relative to local chunks"
        fix not_divisible "Boundary conditions need proper handling"
        fix uneven_shards "Offset calculations must account for ring position"
        fix many_calls "Complete the ring passing loop"
        fix log_sums "Implement proper LSE accumulation"
        fix causal "Handle causal masking across chunks"
        fix own_tests "Add unit tests for multi-GPU scenarios"
        fix odd_lengths "Test edge cases: odd sequence lengths"
        fix prime_ranks "Test edge cases: prime number of GPUs"
        fix small_overhead "Benchmark actual ring communication overhead", small sequences
        fix work_of_ranks "Benchmark actual ring communication overhead", long sequences
        recommended indices "Fix the indexing issue"
        recommended bounds "Add proper bounds checking for dilated patterns"
        recommended minimal_example "Implement a minimal working multi-GPU example"
        recommended triton_kernels "Complete the ring attention implementation" with Triton kernels
        recommended dilation_sends_less "Optimize communication patterns for limited PCIe bandwidth"
        recommended checkpointing "Consider implementing gradient checkpointing"
        limitation two_ranks_exact "Multi-GPU: implementation incomplete, indexing errors prevent execution"
        limitation gradients "For production use on multi-GPU setups, significant additional development is required"
    """)),
    Report("001_dabfcbb0d11ada46.txt", "Multi-GPU Ring Attention Analysis", "June 27, 2025", ("ring",), _claims("""
        problem not_divisible "Sequence length must be divisible by ring_size x max_segment_length"
        problem not_divisible "seq_len=4096, ring_size=2, max_segment=4096: failed"
        claim two_ranks_exact 8,192, 32,768 and 65,536 tokens on 2 GPUs succeeded
        problem ring_memory "Memory per GPU INCREASED with 2 GPUs"
        problem ring_speed "Performance got WORSE with 2 GPUs"
        problem components "The implementation is not properly distributing K/V"
        problem irregular_calls RingDilatedAttentionFixed: "The size of tensor a must match the size of tensor b"
        expected components "1/N of K, V" on each GPU
        expected by_length scores take less memory with more GPUs: they are not stored here at all
        problem two_ranks_exact "1/N of Q on each GPU results in incomplete attention computation"
        fix components "Full Q on each device": here 1/N of Q, with the complete result (the row above)
        fix positions_of_ranks "K/V chunks that rotate"
        fix log_sums "Accumulation of partial results"
        fix many_calls "Synchronized communication": failing or timing out
        recommended scheme_of_the_report the loop of ProperRingAttention, whose sum must be weighted by the lse
        recommended not_divisible "The requirement seq_len % (ring_size x max_segment) == 0 is unnecessary"
        recommended odd_lengths "Remove artificial constraints": any length
        recommended components "Track memory usage": Q, K/V, communication buffers, temporary results
        recommended one_process "Create a single-GPU simulation by processing K/V chunks sequentially"
        limitation by_ranks "Do NOT achieve O(n/ring_size) memory scaling"
        limitation a_billion "The billion-token capability remains unachievable"
    """)),
    Report("002_f6283ee01f8b1548.txt", "Ring V3 Multi-GPU Testing Report", "July 2, 2025", ("bucketed",), _claims("""
        claim bucketed_exact 64 tokens: "Both GPUs produce correct output"
        claim buckets 512 tokens, bucket_size=128: "Bucketed processing works on multiple GPUs"
        claim bucketed_exact 2,048 tokens, bucket_size=512: "Multi-GPU forward pass succeeded"
        claim positions_of_ranks "The ring passing of K,V chunks works correctly"
        claim buckets "Bucketed processing functions properly in distributed setting"
        claim components "Each GPU only stores 1/p of K,V tensors"
        claim many_calls "All ranks stay synchronized through ring iterations"
        limitation reached "Sequences > 2K tokens may timeout or OOM"
        limitation irregular_calls "Some configurations produce NaN"
        limitation extreme_values NaN from "likely numerical instability"
        limitation small_overhead "Ring communication overhead can be significant"
        claim components "Half of K,V (256 tokens each)" with 512 tokens on 2 GPUs
        claim by_ranks "Memory usage ~O(n/2) per GPU"
        claim positions_of_ranks "GPU 0 has K,V for positions 0-255, GPU 1 for 256-511"
        claim positions_of_ranks "Ring pass 0: local K,V. Ring pass 1: K,V chunks are exchanged"
        recommended irregular_calls "Thoroughly test specific sequence lengths and configurations"
        recommended all_exact "Monitor for numerical stability issues"
        recommended float32_is_better "Consider using float32 for better stability"
        recommended work_of_ranks "Profile communication overhead vs memory savings": overhead
        recommended ring_memory "Profile communication overhead vs memory savings": savings
        recommended extreme_values "Debug NaN issues in certain configurations"
        recommended ring_speed "Optimize ring communication for better performance"
        recommended mistakes_of_a_rank "Add better error handling for edge cases"
        recommended overlapped "Implement overlapped computation/communication"
    """)),
    Report("003_f351c47f35f6c2cf.txt", "Multi-GPU Capabilities Report", "July 7, 2025",
           ("data_parallel", "blocks"), _claims("""
        claim data_parallel_equal "DataParallel works correctly and outputs match single-GPU results", without GPUs
        claim data_parallel_scatter "DataParallel works correctly", over two GPUs
        claim distributed_data_parallel "DataParallel works correctly", as DistributedDataParallel over 2 ranks
        claim sequence_of_one "Benefits appear at larger sequence lengths": 1.29 x at 16,384 tokens, batch of 1
        problem batches "Communication overhead dominates for smaller sequences"
        problem equal_memory "Memory is distributed: GPU0 uses ~96MB, GPU1 uses ~8MB"
        claim usage_block_sparse "Distributed block-sparse: successfully initializes across multiple GPUs"
        claim block_patterns "Forward pass executes without errors"
        claim usage_block_sparse "Uses DistributedSparseConfig for configuration"
        claim tiers "Supports hierarchical sparse patterns optimized for distributed systems"
        limitation block_patterns "Minor issue: output shape reporting"
        claim by_length "Ring Attention: designed for O(n) memory complexity"
        claim ring_module "Handles communication internally"
        claim reached "Ideal for very long sequences (>16K tokens)"
        claim two_nodes "Can scale to multiple nodes"
        claim allocated "32,768 tokens: allocated successfully"
        claim allocated "65,536 tokens: allocated successfully"
        claim plain_scores "Sequences that would OOM on single GPU with standard attention"
        claim usage_data_parallel usage example 1: DataParallel
        claim usage_block_sparse usage example 2: distributed block-sparse
        recommended sequence_of_one "DataParallel: sequence lengths 16K-32K tokens": one sample needs its rows divided
        recommended batches "DataParallel: larger batch sizes"
        recommended blocks_exact "Distributed block-sparse: very long sequences (>32K tokens)"
        recommended two_nodes "Distributed block-sparse, ring: multi-node"
        recommended exchanged_heads "Model parallelism needed"
        recommended by_ranks "Memory constraints on single GPU"
        recommended reached "Ring Attention: extreme sequence lengths (>64K tokens)"
        recommended by_length "Ring Attention: O(n) memory requirement critical"
        claim batch_efficiency "DataParallel: ~70-80% efficiency at best"
        claim efficiency "Distributed: can achieve >90% efficiency"
        claim work_of_ranks "Ring: near-linear scaling possible", by processor time
        claim by_length "Ring attention has linear memory scaling"
        claim equal_memory "DataParallel keeps model replicated": no rank has more memory than another
        claim gradients "The implementations fully support multi-GPU training"
    """)),
    Report("004_44f2437c03de4e52.txt", "Multi-GPU Scaling Analysis - Hilbert Ring Attention", "July 4, 2025",
           ("longest", "two_devices", "far", "hilbert"), _claims("""
        claim longest_exact 237,568, 204,800 and 212,992 tokens on one GPU in fp32
        claim longest_by_memory 237,568 tokens in the memory of a GTX 1080
        claim dilation_longest "Dilation provides massive speedups"
        claim dilation_above_work "Up to 5.8x with dilation=2"
        claim segments_longest [4096,8192] "4.8x speedup", [4096,8192,16384] "5.4x speedup"
        claim half_precision "fp32 limits sequence length": fp16 needs half of the memory
        problem dense_memory memory per GPU grows 13 x from 8K to 32K tokens
        problem small_overhead "Communication overhead is significant at small sequences"
        problem dilation_on_ranks "Dilation performance degrades in distributed setting"
        problem dilation_everywhere "Dilation performance degrades in distributed setting", against one device
        problem dense_memory_two_over_one "Memory per GPU increases due to communication buffers"
        expected one_segment_of_475136 2 GPUs: 475K tokens in the memory of 237K on one, one segment
        expected far_memory 2 GPUs: 475K tokens in the memory of 237K on one, measured
        problem reached "Actual: ~64K tokens on 2 GPUs, limited by communication overhead and memory fragmentation"
        problem two_over_one_dense "Ring attention requires continuous P2P communication": 2 ranks against one device
        problem dilation_sends_less "Dilation patterns create irregular access that hurts distributed performance"
        problem no_growth "Memory fragmentation"
        recommended ring_speed "Single GPU is more efficient for sequences < 250K tokens": no longer
        recommended half_precision "Use fp16 if possible"
        recommended dilation_on_ranks "Prefer simple dilation patterns (single rate) for distributed"
        recommended ring_speed "Prefer simple dilation patterns": patterns of several rates are no slower on ranks
        recommended batch_or_sequence "Batch multiple sequences on single GPU vs distributing"
        recommended newer_gpus "Upgrade to Ampere+ GPUs: native fp16/bf16, Flash Attention 3"
        recommended checkpointing "Implement gradient checkpointing"
        recommended compressed "Use communication compression"
        recommended overlapped "Overlap computation with communication"
        recommended no_growth "Enable PyTorch memory pool fragmentation reduction"
        recommended accumulation "Use gradient accumulation for larger effective batches"
        recommended checkpointing "Implement activation checkpointing"
        claim hilbert_exact Hilbert Ring Attention: exact on one device and on 2 ranks
        claim hilbert_ranks Hilbert Ring Attention: its speed on 2 ranks
        limitation work_of_ranks "Communication overhead dominates at current sequence lengths"
        recommended segments_longest "Leverage dilation for 5-6x speedups"
        recommended exchanged_heads "Consider model parallelism instead of sequence parallelism"
    """)),
)  # fmt: skip
