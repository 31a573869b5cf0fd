"""All caches of the library, in one place.

Every cache is bounded: the oldest entry goes when a new one finds no room. ``clear_caches`` empties them, for example to
free launch tables on a device. What a captured CUDA graph reads stays alive until the process ends.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cache:
    """A module-level function or object with ``cache_clear()``."""

    module: str
    name: str
    holds: str


CACHES = (
    Cache("shards", "_shards", "shards by their lengths and layout, eight entries"),
    Cache("patterns.dilated", "Dilated.from_spec", "dilated patterns by their string"),
    Cache("patterns.blocks", "SparsePatternConfig.from_spec", "block-sparse configurations by their string"),
    Cache("patterns.blocks", "_digest", "hashes of masks, which ranks compare"),
    Cache("patterns.tiers", "_pattern", "patterns of ranks by configuration and shards"),
    Cache("orders.hilbert", "_copies", "how a Hilbert curve is made of smaller ones, two entries"),
    Cache("plan.tiles", "_head_runs", "arithmetic progressions of key heads by their offsets"),
    Cache("plan.tiles", "compile_plan", "plans by pattern, length and key heads"),
    Cache("plan.held", "HeldRows.of", "where a key-value cache stores rows, by pattern and key heads"),
    Cache("plan.problem", "find_problem", "problems by their fields"),
    Cache("plan.problem", "_plans", "the plans of a problem's sequences"),
    Cache("plan.lists", "_given_rule", "given block lists by the identity of their tensors"),
    Cache("plan.lists", "_static_lists", "block lists by configuration and length"),
    Cache("execute.strided", "_calls", "calls of a stock kernel by plan and sizes, 64 entries"),
    Cache("backends.targets", "_capability", "the compute capability of a device"),
    Cache("backends.gpu.launch_plan", "_launch_plan", "launch tables on a device, with the launches over them"),
    Cache("backends.gpu.launch_plan", "_running_plan", "launch tables of messages, and of pairs of a rank's chunks"),
    Cache("backends.gpu.block_tables", "_tables", "block tables on a device"),
    Cache("backends.gpu.block_tables", "_running_tables", "block tables of messages, and of a rank's own chunks"),
    Cache("backends.gpu.slots", "kept_slots", "sorted rows of causal calls by order, four problems each"),
    Cache("backends.gpu.launch", "launch_cache", "launches without tables, by kernel and arguments"),
    Cache("backends.hopper.configs", "_extent", "pairs and rows of a problem, by which the joint backward is chosen"),
    Cache("backends.gpu.launch", "multiprocessors", "the number of multiprocessors of a device"),
    Cache("backends.gpu.decoding", "_table", "segment lengths, rates and offsets of a pattern on a device"),
    Cache("backends.gpu.decoding", "_launch_of", "launches of decoding steps by their sizes"),
    Cache("cache_operators", "_tokens_module", "what computes decoding steps, by device, dtype and head size"),
    Cache("known_calls", "known_calls", "the arguments of the operator by sizes and options of a call"),
    Cache("distributed.agreement", "_known_arguments", "the arguments of calls and their hashes, 64 entries"),
    Cache("distributed.traffic", "_held", "the chunks of shards as tensors, eight entries"),
    Cache("distributed.rank_plans", "dilated_plan", "plans of a rank in dilated attention, at most 64 MiB"),
    Cache("distributed.rank_plans", "static_block_plan", "plans of a rank in block-sparse attention, at most 64 MiB"),
    Cache("distributed.own_rows", "_plans", "the plans of a rank's own rows, four entries"),
    Cache("distributed.own_rows", "_plans_of_chunks", "the same for several chunks"),
    Cache("distributed.own_rows", "_messages", "the tiles of a rank's queries with the rows of a message"),
    Cache("distributed.own_rows", "_across", "the tiles between different chunks of a rank"),
    Cache("distributed.own_rows", "_own_blocks", "the block lists of a rank's queries with its own keys"),
    Cache("distributed.own_rows", "_begin_with_blocks", "whether chunks begin with blocks"),
    Cache("workbench.plan_ranks", "rank_work", "the work of ranks by the settings of a plan"),
    Cache("workbench.peers", "_flex_mask", "masks of FlexAttention by pattern and sizes, four entries"),
    Cache("workbench.peers", "_compiled_flex", "the compiled FlexAttention"),
    Cache("workbench.peers_cudnn", "_graph", "graphs of cuDNN by problem, four entries"),
    Cache("training.data", "_epoch", "the order of the windows of an epoch"),
    Cache("integrations.transformers.config", "_longnet", "configurations by the values of their fields"),
)


def clear_caches() -> None:
    """Empty every cache of the library in this process.

    Results do not change. The next calls plan again and copy their launch tables to the device again.

    >>> clear_caches()
    """
    for cache in CACHES:
        found = sys.modules.get(f"dilated_attention_pytorch.{cache.module}")
        if found is None:  # never imported, so nothing is cached
            continue
        for attribute in cache.name.split("."):
            found = getattr(found, attribute)
        found.cache_clear()
