"""What the events of PyTorch's profiler say: which components have how much memory, and which operators ran when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilated_attention_pytorch.workbench.profile_values import (
    CommunicationTime,
    MemoryCurve,
    OperatorSpan,
    OperatorTime,
)

FORWARD, BACKWARD, UPDATE = "profile: forward", "profile: backward", "profile: update"
PHASES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "update"}
KEPT = "kept for the backward"
KERNELS = "in attention operators"
FREED = "made before, freed"
# Parts of the names of operators in which an allocation is a partial result or a workspace of attention.
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")
_LANES = 8


@dataclass(slots=True)
class _Block:
    """A piece of memory that was allocated in the call."""

    start: int  # nanoseconds
    size: int
    pointer: int
    parents: tuple[str, ...]
    end: int | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    time: int
    size: int
    block: _Block | None  # None for memory that was made before the call


def memory_curve(tree: Sequence[Any], device: str, known: Mapping[int, str]) -> MemoryCurve:
    """The memory of a device ("cpu" or "cuda") by component.

    ``known`` are the components of tensors that exist at the end, by the address of their storage. Other memory is named
    by when it was allocated and released, and by the operators in which it was allocated.
    """
    nodes = list(_walk(tree, ()))
    phases = [(x.start_time_ns, x.end_time_ns, x.name) for x, _ in nodes if x.name in PHASES]
    forward_end = next((end for _, end, name in phases if name == FORWARD), None)
    has_backward = any(name == BACKWARD for _, _, name in phases)
    changes = _changes(nodes, device)
    begin = min((start for start, _, _ in phases), default=0)

    def name_of(block: _Block | None) -> str:
        if block is None:
            return FREED
        if block.end is None and block.pointer in known:
            return known[block.pointer]
        in_forward = forward_end is not None and block.start <= forward_end
        if in_forward and has_backward and (block.end is None or block.end > (forward_end or 0)):
            return KEPT
        if any(part in parent for parent in block.parents for part in _ATTENTION):
            return KERNELS
        phase = next((PHASES[name] for start, end, name in phases if start <= block.start <= end), "call")
        return f"temporary, {phase}"

    named = [(change, name_of(change.block)) for change in changes]
    names = tuple(dict.fromkeys([*(x for x in known.values() if x in {y for _, y in named}), *(y for _, y in named)]))
    in_use, sizes, seconds = dict.fromkeys(names, 0), [], []
    for change, name in named:
        in_use[name] += change.size
        sizes.append(tuple(in_use.values()))
        seconds.append((change.time - begin) / 1e9)
    return MemoryCurve(names, tuple(seconds), tuple(sizes))


def _walk(nodes: Sequence[Any], parents: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    stack = [(node, parents) for node in reversed(nodes)]
    while stack:
        node, above = stack.pop()
        yield node, above
        stack += [(child, (*above, node.name)) for child in reversed(node.children)]


def _changes(nodes: Sequence[tuple[Any, tuple[str, ...]]], device: str) -> list[_Change]:
    """Allocations and releases of a device in the order of time."""
    found, live = [], dict[int, _Block]()
    events = [(x.start_time_ns, x.typed[1], parents) for x, parents in nodes if x.typed[0].name == "Allocation"]
    for time, fields, parents in sorted(events, key=lambda x: x[0]):
        if fields.device.type != device:
            continue
        if fields.alloc_size > 0:
            block: _Block | None = _Block(time, fields.alloc_size, fields.ptr, parents)
            assert block is not None
            live[fields.ptr] = block
        else:
            block = live.pop(fields.ptr, None)
            if block is not None:
                block.end = time
        found.append(_Change(time, fields.alloc_size, block))
    return found


def operator_times(averages: Sequence[Any], device: str, count: int) -> tuple[OperatorTime, ...]:
    """The operators with the longest times of their own; on a GPU the kernels and copies."""
    found: dict[str, OperatorTime] = {}
    for x in averages:
        if not _ran_on(x, device) or _is_ours(x.key) or _is_message(x.key):
            continue
        name = short_name(x.key)
        known = found.get(name, OperatorTime(name, 0, 0.0))
        seconds = (x.self_device_time_total if device == "cuda" else x.self_cpu_time_total) / 1e6
        found[name] = OperatorTime(name, known.calls + x.count, known.seconds + seconds)
    return tuple(sorted((x for x in found.values() if x.seconds > 0), key=lambda x: -x.seconds)[:count])


def _ran_on(event: Any, device: str) -> bool:
    """Whether an event is one of the device: the time of a kernel also belongs to the operator that launched it."""
    return bool(device != "cuda" or event.device_type.name == "CUDA")


def short_name(name: str) -> str:
    """The name of a kernel of C++ without its arguments.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, float*)")
    'at::native::vectorized_elementwise_kernel'
    >>> short_name("aten::mul"), short_name("Memcpy DtoD (Device -> Device)")
    ('aten::mul', 'Memcpy DtoD (Device -> Device)')
    """
    is_cpp = name.startswith("void ") or "::" in name
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return plain.partition("<")[0].partition("(")[0] if is_cpp else name


def _is_ours(name: str) -> bool:
    return name in PHASES or name == "[memory]"


def _is_message(name: str) -> bool:
    return name.startswith(("gloo:", "nccl:")) or "ncclDevKernel" in name


def operator_spans(
    events: Sequence[Any], operators: Sequence[OperatorTime], device: str
) -> tuple[OperatorSpan, ...]:  # fmt: skip
    """When the longest operators ran, and when messages were in flight, from the events of a profiler."""
    lanes = {x.name for x in operators[:_LANES]}
    begin = min((x.time_range.start for x in events if x.name in PHASES), default=0.0)
    return tuple(
        OperatorSpan(name, (x.time_range.start - begin) / 1e6, (x.time_range.end - x.time_range.start) / 1e6)
        for x, name in ((x, x.name if _is_message(x.name) else short_name(x.name)) for x in events)
        if _is_message(x.name) or (name in lanes and _ran_on(x, device))
    )


def communication_of(events: Sequence[Any], device: str) -> CommunicationTime | None:
    """The messages of the call; None if there were none.

    On a GPU, the kernels are what messages overlap with.
    """
    wanted = "CUDA" if device == "cuda" else "CPU"
    messages = [x for x in events if _is_message(x.name)]
    work = [
        x
        for x in events
        if x.device_type.name == wanted and not _is_message(x.name) and (wanted == "CUDA" or x.name.startswith("aten::"))
    ]
    if not messages:
        return None
    flying, working = (_union([(x.time_range.start, x.time_range.end) for x in y]) for y in (messages, work))
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in flying for c, d in working)
    return CommunicationTime(len(messages), sum(b - a for a, b in flying) / 1e6, both / 1e6)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as intervals that do not overlap.

    >>> _union([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
