"""Compiled kernels called directly: only where Triton itself would call the same one."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.gpu import launch as launching
from dilated_attention_pytorch.backends.gpu import tables
from dilated_attention_pytorch.backends.gpu.launch import KernelLaunch, launch, launch_one
from dilated_attention_pytorch.backends.gpu.launch_plan import find_launch_plan
from dilated_attention_pytorch.backends.gpu.tables import FAMILY_COLUMNS
from dilated_attention_pytorch.plan.problem import Problem


class Kernel:
    """Stands for a kernel; notes what is compiled and what is called."""

    arg_names = ("X", "n", "scale", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.compiled, self.called, self.streams = [], [], []

    def __getitem__(self, grid):
        def first_call(*values, **constants):
            self.compiled.append((grid, values, constants))
            return Compiled(self, len(self.compiled))

        return first_call


class Compiled:
    def __init__(self, kernel, name) -> None:
        self.kernel, self.name = kernel, name

    def __getitem__(self, grid):
        def run(*values, stream):
            self.kernel.called.append((self.name, grid, values))
            self.kernel.streams.append(stream)

        return run


def test_later_calls_go_to_what_the_first_compiled():
    kernel, x = Kernel(), torch.zeros(64)
    constants = {"num_warps": 4, "FLAG": True, "BLOCK": 32}  # options are no parameters; constants in any order
    launch_one(kernel, 3, (x,), (32, 0.5), constants)
    launch_one(kernel, 3, (x[4:],), (32, 0.5), constants)
    assert [grid for grid, *_ in kernel.compiled] == [(3,)]
    assert kernel.called == [(1, (3, 1, 1), (x[4:].data_ptr(), 32, 0.5, 32, True))]


def test_launches_are_kept_up_to_a_number(monkeypatch):
    kernel, x = Kernel(), torch.zeros(64)
    monkeypatch.setattr(launching, "launch_cache", launching._LaunchCache(maxsize=2))
    for programs in (1, 2, 3, 3, 2, 1):  # the third takes the room of the first
        launch_one(kernel, programs, (x,), (32, 0.5), {"FLAG": True, "BLOCK": 32})
        assert len(launching.launch_cache) <= 2
    assert [grid for grid, *_ in kernel.compiled] == [(1,), (2,), (3,), (1,)]
    launching.launch_cache.cache_clear()
    assert len(launching.launch_cache) == 0


def test_calls_over_tables_go_over_the_same_tensors():
    kernel, x, tables = Kernel(), torch.zeros(64), torch.zeros(2, 64)
    kernel.arg_names = ("X", "TABLE", "n", "BLOCK")
    calls = [KernelLaunch(kernel, 3 + i, (tables[i],), (7,), {"BLOCK": 32}) for i in range(2)]
    launch(calls, (x,))
    assert [(grid, [y.data_ptr() for y in values[:2]]) for grid, values, _ in kernel.compiled] == [
        ((3 + i,), [x.data_ptr(), tables[i].data_ptr()]) for i in range(2)
    ]
    assert not kernel.called
    launch(calls, (x[4:],))
    assert kernel.called == [(1 + i, (3 + i, 1, 1), (x[4:].data_ptr(), tables[i].data_ptr(), 7, 32)) for i in range(2)]


def test_what_triton_may_tell_apart_is_compiled_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    kernel, x = Kernel(), torch.zeros(64)
    constants = {"num_warps": 4, "FLAG": True, "BLOCK": 32}
    for tensor in (x, x[1:], x[4:], x.half(), x.half()[4:]):
        for number in (0, 1, -1, 16, 17, 2**31 - 1, 2**31, 2**40):
            launch_one(kernel, 3, (tensor,), (number, 0.5), constants)
            kinds = tuple(native_specialize_impl(CUDABackend, x, False, True, True) for x in (tensor, number))
            launch_one(kernel, 3, (tensor,), (number, 0.5), constants)
            name = kernel.called[-1][0]
            _, (tensor_then, number_then, _), _ = kernel.compiled[name - 1]
            then = tuple(native_specialize_impl(CUDABackend, x, False, True, True) for x in (tensor_then, number_then))
            assert then == kinds
    before = len(kernel.compiled)
    launch_one(kernel, 3, (x,), (16, 0.5), constants | {"BLOCK": 64})
    launch_one(kernel, 3, (x,), (16, 0.5), constants | {"num_warps": 8})
    assert len(kernel.compiled) == before + 2


def test_what_triton_may_tell_apart_in_changing_numbers_is_compiled_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    kernel, x = Kernel(), torch.zeros(64)
    one = KernelLaunch(kernel, 3, (), (0.5,), {"FLAG": True, "BLOCK": 32})
    for number in (0, 1, -1, 16, 17, 1600, 1700):
        for _ in range(2):
            launch((one,), (x,), (number,))
        name, _, values = kernel.called[-1]
        assert values == (x.data_ptr(), number, 0.5, 32, True)
        number_then = kernel.compiled[name - 1][1][1]
        kinds = [native_specialize_impl(CUDABackend, x, False, True, True) for x in (number, number_then)]
        assert kinds[0] == kinds[1]
    assert len(kernel.compiled) == 3


def test_launches_have_scratch_memory_of_their_own(monkeypatch):
    """Programs of the next launch begin before the last of this one are done."""
    import triton

    from dilated_attention_pytorch.backends.hopper import persistent

    taken: list[tuple[int, int]] = []
    memory: list[weakref.ref] = []
    empty = torch.empty

    def noted(*arguments, **options):
        memory.append(weakref.ref(tensor := empty(*arguments, **options)))
        return tensor

    def launches():
        assert len(memory) == 1  # taken before the first launch
        for programs in (3, 132, 1, 132):
            begin = allocator[-1](programs * 1024, 128, 0)
            taken.append((begin, begin + programs * 1024))
        kept = memory[0]()
        assert kept is not None
        assert all(kept.data_ptr() <= begin and end <= kept.data_ptr() + kept.numel() for begin, end in taken)
        assert all((begin - kept.data_ptr()) % 128 == 0 for begin, _ in taken)

    allocator: list = []
    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(triton, "set_allocator", allocator.append)
    persistent.with_scratch(launches, 3 + 132 + 1 + 132, torch.device("cpu"))
    assert len(memory) == 1
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(taken)))


class OnSecondGpu:
    """Stands for a tensor on another GPU than the current one."""

    device, dtype = torch.device("cuda", 1), torch.float32

    def data_ptr(self):
        return 4096


def test_kernels_are_launched_on_the_stream_of_their_tensors(monkeypatch):
    kernel, x = Kernel(), OnSecondGpu()
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: f"stream of {index}"))
    monkeypatch.setattr(launching, "driver", streams)
    call = KernelLaunch(kernel, 3, (), (32, 0.5), {"FLAG": True, "BLOCK": 32})
    launch((call,), (x,))
    launch((call,), (x,))
    assert kernel.streams == ["stream of 1"]


@pytest.mark.parametrize(
    ("package", "which"),
    [*product(["hopper", "triton"], ["forward", "dq", "dkv"]), ("hopper", "joint")],
)
@pytest.mark.parametrize("queries", [200, 7])
def test_arguments_of_calls_have_the_places_of_parameters(package, which, queries, monkeypatch):
    """By the names that kernels give them. With 7 queries, parts of dk and dv are added up at the end."""
    from dilated_attention_pytorch.backends.gpu import portable
    from dilated_attention_pytorch.backends.hopper import block_run
    from dilated_attention_pytorch.backends.hopper import run as hopper

    for module in (hopper, block_run):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    problem = Problem(Dilated([64, 128], [1, 2]), False, 2, queries, 200, 6, 3, None, None)
    by_keys, device = which in ("dkv", "joint"), torch.device("cpu")
    plan = find_launch_plan(problem, block=64, by_keys=by_keys, head_dim=64, device=device)
    launches = tuple(replace(one, order=torch.arange(5 + i)) for i, one in enumerate(plan.launches))
    plan = replace(plan, launches=launches, kept={})
    read = ("q", "k", "v") if which == "forward" else ("q", "k", "v", "dout")
    strides = tuple((1000 * i + 3, 1000 * i + 2, 1000 * i + 1, 1) for i in range(1, len(read) + 1))
    if package == "hopper":
        how = hopper.ItemOptions(64, strides, hopper.configs(64).dq, 0.25)
        mode = (which == "joint",) if by_keys else ()
        calls = dict(getattr(hopper, f"_{'dkv' if by_keys else which}_launches")(plan, how, *mode).runs)
        attend, add_parts = calls[True], calls.get(False, ())
    else:
        how = portable.TileOptions(64, strides, portable.SUM, scale=0.25)
        attend, add_parts = (), getattr(portable, f"{which}_launches")(plan, how)
    assert len(attend) + len(add_parts) == len(plan.launches)
    # The first reads what other kernels wrote: it begins when these are done. The others begin earlier.
    assert [call.constants["launch_pdl"] for call in attend] == [i > 0 for i in range(len(attend))]
    expected = {"N": queries, "M": 200, "H": 6, "G": 3, "group": 2, "parts": plan.bundles, "q_shift": 200 - queries}
    for name, each in zip(read, strides, strict=True):
        expected |= {f"{name}_stride_{axis}": stride for axis, stride in zip("bnh", each, strict=False)}
    for call, one in zip((*attend, *add_parts), plan.launches, strict=True):
        names, arguments = call.kernel.arg_names, (*call.tables, *call.numbers)
        first = names.index("TABLE")
        bound = dict(zip(names[first:], arguments, strict=False))
        assert bound["TABLE"] is one.table
        assert bound["LAYOUT"] is plan.layout
        assert bound["OFFSETS"] is plan.offsets
        if "ORDER" in names:
            assert bound["ORDER"] is one.order
            assert bound["ordered"] == len(one.order)
        numbers = expected | {"families": len(one.table), "items": one.programs}
        if "number" in names:
            numbers["number"] = attend.index(call)
        if call in attend or package == "triton":
            numbers["scale_log2"] = pytest.approx(0.25 / math.log(2))
        checked = [name for name in names if name in numbers]
        assert len(checked) >= 7 + 3 * len(read)
        assert [bound[name] for name in checked] == [numbers[name] for name in checked]
        options = {"num_warps", "num_stages", "maxnreg", "launch_pdl"}
        assert set(names[first + len(arguments) :]) == set(call.constants) - options


WIDE = 2**20  # the stride of samples
LINES = (WIDE, 512, 64, 1)
# Pattern, tokens, head size, strides of the queries, fields of the problem, and whether one descriptor serves each tensor.
SHARED = {
    "whole blocks": (Dilated([256], [1]), 512, 64, LINES, {}, True),
    "whole blocks, causal": (Dilated([256], [1]), 512, 64, LINES, {"is_causal": True}, True),
    "whole lengths": (Dilated([256], [1]), 512, 64, LINES, {"lengths": (512, 128)}, True),
    "two tails": (Dilated([256], [1]), 512, 64, LINES, {"lengths": (512, 130)}, False),
    "one tail": (Dilated([256], [1]), 600, 64, LINES, {}, False),
    "short tiles": (Dilated([64], [1]), 512, 64, LINES, {}, False),
    "rows apart": (Dilated([256], [2]), 512, 64, LINES, {}, False),
    "partial results": (Dilated([256, 512], [1, 1]), 512, 64, LINES, {}, False),
    "long tiles": (Dilated([2048], [1]), 2048, 64, LINES, {}, False),
    "long tiles of wide heads": (Dilated([2048], [1]), 2048, 128, (WIDE, 512, 128, 1), {}, True),
    "narrow heads": (Dilated([256], [1]), 512, 32, (WIDE, 512, 32, 1), {}, False),
    "odd heads": (Dilated([256], [1]), 512, 56, (WIDE, 512, 56, 1), {}, False),
    "rows of one sample beside those of another": (Dilated([256], [1]), 512, 64, (512, 1024, 64, 1), {}, False),
    "one sample": (Dilated([256], [1]), 512, 64, (512, 1024, 64, 1), {"batch": 1}, True),
    "all samples in one place": (Dilated([256], [1]), 512, 64, (0, 512, 64, 1), {}, True),
    "heads apart": (Dilated([256], [1]), 512, 64, (4 * WIDE, 64, WIDE, 1), {}, False),
    "all heads in one place": (Dilated([256], [1]), 512, 64, (WIDE, 64, 0, 1), {}, True),
    "too many rows": (Dilated([256], [1]), 512, 64, (512 * 2**30, 512, 64, 1), {}, False),
    "too long rows": (Dilated([256], [1]), 512, 64, (2**32, 2**31, 64, 1), {}, False),
}


@pytest.mark.parametrize("name", SHARED)
def test_tiles_that_share_descriptors(name, monkeypatch):
    """The forward kernel over one descriptor of each tensor, by the constant WHOLE."""
    from dilated_attention_pytorch.backends.hopper import run as hopper

    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    pattern, n, head_dim, strides, fields, expected = SHARED[name]
    sizes = {"is_causal": False, "batch": 2, "queries": n, "keys": n, "heads": 4, "key_heads": 2}
    problem = Problem(pattern, **(sizes | fields))
    plan = find_launch_plan(problem, block=128, by_keys=False, head_dim=head_dim, device=torch.device("cpu"))
    keys = (WIDE, 2 * head_dim, head_dim, 1)
    how = hopper.ItemOptions(head_dim, (strides, keys, keys), hopper.configs(head_dim).forward, 0.25)
    (launches, *_), *_ = hopper._forward_launches(plan, how)
    attends, calls = launches
    assert attends
    assert {call.constants["WHOLE"] for call in calls} == {expected}


@dataclass
class OnGpu:
    """Stands for a tensor on a GPU; notes which streams read it."""

    device: torch.device
    streams: list[str] = field(default_factory=list)

    def record_stream(self, stream) -> None:
        self.streams.append(stream)


@pytest.mark.parametrize("capturing", [False, True])
def test_tables_are_kept_for_the_gpu_that_reads_them(capturing, monkeypatch):
    """Tables of an adaptive pattern have a member that is a shape and nothing else."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    captured: list[object] = []
    monkeypatch.setattr(tables, "_CAPTURED", captured)
    owner, kept = object(), [OnGpu(torch.device("cuda", 0)) for _ in range(2)]
    for _ in range(2):
        tables.keep_for_device(owner, (kept[0], torch.empty(3, device="meta"), torch.empty(3), kept[1]))
    assert [x.streams for x in kept] == [["stream of cuda:0"] * 2] * 2
    assert captured == ([owner] if capturing else [])
    tables.keep_for_device(object(), (torch.empty(3),))
    assert captured == ([owner] if capturing else [])


def test_launches_of_one_branch_each():
    """Rates 4 and 6 are of one level: their tiles have the same rows of queries."""
    problem = Problem(Dilated([64, 128, 240], [1, 4, 6]), False, 2, 480, 480, 6, 3, None, None)
    together, apart = (
        find_launch_plan(problem, block=64, by_keys=True, head_dim=64, device=torch.device("cpu"), separate=x)
        for x in (False, True)
    )
    branches = FAMILY_COLUMNS.index("branch")
    assert [set(one.table[:, branches].tolist()) for one in together.launches] == [{1, 2}, {0}]
    assert [set(one.table[:, branches].tolist()) for one in apart.launches] == [{2}, {1}, {0}]
    assert sum(one.programs for one in apart.launches) == sum(one.programs for one in together.launches)
    assert [one.children for one in apart.launches] == [0, 0, 2]


@pytest.mark.parametrize(
    ("tokens", "w", "head_dim", "at_once", "is_causal"),
    [
        (2**13, 2048, 40, True, False),
        (2**13, 2048, 64, True, True),
        (2**15, 2048, 128, True, False),
        (2**14, 2048, 128, False, False),
        (2**17, 1024, 128, True, False),
        (2**17, 1023, 128, False, False),
        (2**20, 2048, 80, False, False),
        (2**13, 2048, 32, False, False),
        (2**12, 2048, 64, False, False),
        (2**20, 256, 64, True, False),
        (2**20, 128, 64, False, False),
    ],
)
def test_gradients_at_once_where_they_pay(tokens, w, head_dim, at_once, is_causal):
    """16 heads: 2**28 pairs and 256 keys up to head size 64, 2**30 and 1,024 above. 32 and 80 have no such kernel."""
    from dilated_attention_pytorch.backends.hopper.configs import joint_config

    problem = Problem(Dilated([w], [1]), is_causal, 1, tokens, tokens, 16, 16, None, None)
    assert (joint_config(problem, head_dim) is not None) is at_once
    most = 8 if head_dim > 64 else 32
    for branches in (most, most + 1):
        many = Dilated([max(w, 2048)] * branches, [1] * branches)
        config = joint_config(Problem(many, is_causal, 1, 2**20, 2**20, 16, 16, None, None), head_dim)
        assert (config is not None) is (branches == most and head_dim not in (32, 80))


@pytest.mark.parametrize(
    ("w", "r", "head_dim", "is_causal", "short"),
    [
        ([128, 256, 512], [1, 2, 4], 64, False, True),
        ([256], [1], 48, False, True),
        ([128, 257], [1, 1], 64, False, False),
        ([257], [2], 64, False, True),
        ([512], [1], 64, True, True),
        ([513], [1], 64, True, False),
        ([128], [1], 128, False, False),
        ([512], [1], 128, True, True),
        ([128], [1], 80, True, False),
        ([128], [1], 32, False, False),
    ],
)
def test_forward_of_short_tiles(w, r, head_dim, is_causal, short):
    """Up to 256 rows, or 512 causal ones: the pattern decides, however short or long the sequences are."""
    from dilated_attention_pytorch.backends.hopper.configs import configs, forward_config

    known = configs(head_dim)
    for n, lengths in ((40, None), (2**16, (0, 40, 2**16))):
        config = forward_config(Problem(Dilated(w, r), is_causal, 1, n, n, 4, 4, None, lengths), head_dim)
        assert config is (known.short.config if short else known.forward)


def test_forward_of_many_branches_of_short_tiles():
    """Layout entries of partial results take the memory of stages. Many would leave none to two programs."""
    from dilated_attention_pytorch.backends.hopper import run
    from dilated_attention_pytorch.backends.hopper.configs import configs, forward_config

    known = configs(64)
    for branches, partials, config in ((128, 128, known.short.config), (129, 256, known.forward)):
        problem = Problem(Dilated([128] * branches, [1] * branches), False, 1, 300, 300, 4, 4)
        assert forward_config(problem, 64) is config
        assert run.stages(config, 64, partials) >= 3


def test_gradients_of_few_rows_are_not_added_up_in_turns():
    """All items of 2**16 keys would wait for one another at 300 queries; so would the 16 of a document of 2 heads."""
    from dilated_attention_pytorch.backends.hopper.configs import joint_config

    def problem(queries, keys, heads, cu_seqlens=None):
        return Problem(Dilated([keys], [1]), False, 1, queries, keys, heads, heads, None, cu_seqlens)

    assert joint_config(problem(2**16, 2**16, 16), 64) is not None
    assert joint_config(problem(300, 2**16, 16), 64) is None
    documents = tuple(range(0, 2**17 + 1, 2048))
    assert joint_config(problem(2**17, 2**17, 12, documents), 64) is not None
    assert joint_config(problem(2**17, 2**17, 2, documents), 64) is None
