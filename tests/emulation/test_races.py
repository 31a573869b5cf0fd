"""What gluon_races finds: orders that nobody guarantees, in small programs and in Hopper kernels with a mistake."""

from __future__ import annotations

import importlib.util
import threading
import types

import pytest
import torch

from dilated_attention_pytorch import Dilated, attention

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton's interpreter is off"),
]


def in_threads(*functions):
    """One after the other, each in a thread that knows nothing of the others. What they raise."""
    import gluon_races as races

    raised = []

    def work(function):
        races.begin()
        try:
            function()
        except AssertionError as error:
            raised.append(str(error))

    for function in functions:
        thread = threading.Thread(target=work, args=(function,))
        thread.start()
        thread.join()
    return raised


def test_accesses_have_to_know_of_one_another():
    import gluon_races as races

    def fresh(*functions):
        memory, clock = races.Memory(), {}
        return in_threads(*(lambda f=f: f(memory, clock) for f in functions))

    write = lambda memory, _: memory.writes([0])  # noqa: E731
    read = lambda memory, _: memory.reads([0])  # noqa: E731
    elsewhere = lambda memory, _: memory.writes([1])  # noqa: E731
    assert fresh(write, elsewhere) == fresh(lambda *x: (write(*x), read(*x))) == []
    assert fresh(read) == ["read before it is written"]
    assert fresh(write, read) == ["read while it may still be written"]
    assert fresh(write, write) == ["written twice at the same time"]

    def first(act):
        return lambda memory, clock: (act(memory, clock), races.leave(clock))

    def then(act):
        return lambda memory, clock: (races.take_up(clock), act(memory, clock))

    assert fresh(first(write), then(read)) == fresh(first(write), then(write)) == []
    assert fresh(first(write), then(first(read)), then(write)) == []
    assert fresh(first(write), then(read), then(write)) == ["written while it may still be read"]
    # What a thread does after it has arrived is not known by the one who waited.
    late = lambda memory, clock: (races.leave(clock), write(memory, clock))  # noqa: E731
    assert fresh(late, then(read)) == ["read while it may still be written"]
    # Through a third.
    pass_on = lambda _, clock: (races.take_up(clock), races.leave(clock))  # noqa: E731
    assert fresh(first(write), pass_on, then(read)) == []


def test_copies_products_and_fences():
    import gluon_races as races

    memory, clock, copy = races.Memory(), {}, races.Copy

    def load(memory, cell, clock):
        started = copy()
        memory.writes([cell], started)
        races.leave(clock, (started,))

    def multiply(memory, cell):
        races.start_product([(memory, [cell])])

    # Rows that were asked for are not there before the barrier says so, not even for the one who asked.
    assert in_threads(lambda: (load(memory, 0, clock), memory.reads([0]))) == ["read while it may still be written"]
    assert in_threads(lambda: (load(memory, 1, clock), races.take_up(clock), memory.reads([1]))) == []
    # What a thread stores is there for products after a fence.
    store = lambda cell: memory.writes([cell])  # noqa: E731
    assert in_threads(lambda: (store(2), multiply(memory, 2))) == ["no fence between a store and what reads it"]
    fenced = lambda cell: (store(cell), races.fence(), multiply(memory, cell))  # noqa: E731
    # A product reads until it was waited for.
    clock = {}
    early = lambda: (fenced(3), races.leave(clock), races.done_reading(0))  # noqa: E731
    assert in_threads(early, lambda: (races.take_up(clock), load(memory, 3, {}))) == ["written while it may still be read"]
    clock = {}
    right = lambda: (fenced(4), races.done_reading(0), races.leave(clock))  # noqa: E731
    assert in_threads(right, lambda: (races.take_up(clock), load(memory, 4, {}))) == []
    assert in_threads(lambda: (fenced(5), store(5))) == ["written while an own product may still read it"]
    assert in_threads(lambda: (fenced(6), races.end())) == ["products that nobody waited for"]


# What is wrong: module and function of the kernels, what it calls, what stands for that, and whether in the backward.
MISTAKES = {
    "keys are loaded over those in use": ("common", "load_keys", "mbarrier", "no waits", False),
    "keys are used before they are there": ("softmax", "attend_item", "mbarrier", "no waits", False),
    "facts are read before they are there": ("forward", "_produce_pass", "mbarrier", "no waits", False),
    "keys are given back too early": ("products", "wait_scores", "warpgroup_mma_wait", "no wait for products", False),
    "values are given back too early": ("products", "wait_sums", "warpgroup_mma_wait", "no wait for products", False),
    "queries are loaded over those in use": ("dkv", "_load_unit", "mbarrier", "no waits", True),
    "gradients of scores are stored over those in use": ("dkv", "_hand_over", "mbarrier", "no waits", True),
    "gradients of scores without a fence": ("dkv", "_hand_over", "fence_async_shared", "nothing", True),
    "dq without a fence": ("joint", "_multiply", "fence_async_shared", "nothing", True),
    "dq is stored over what is being added": ("joint", "_add", "wait_additions", "until done alone", True),
    "turns are passed before additions are done": ("joint", "_add", "wait_additions", "only at the end", True),
    "nobody waits for a turn": ("joint", "_add", "wait_turn", "nothing", True),
    "turns are passed without what was done": ("turns", "pass_turn", "gl", "relaxed counters", True),
}
# Of head size 128, where the groups that store gradients of scores also multiply with them.
SHARED_MISTAKES = {
    "gradients of scores are stored over shared ones": ("dkv", "_hand_over", "mbarrier", "no waits", True),
    "gradients of scores of the other group are used early": ("dkv", "_start_dq", "mbarrier", "no waits", True),
    "shared gradients of scores are given back too early": (
        "products",
        "wait_dq",
        "warpgroup_mma_wait",
        "no wait for products",
        True,
    ),
    "half of dq is stored over what is being added": ("dkv", "_finish_dq", "mbarrier", "no waits", True),
    "half of dq without a fence": ("dkv", "_finish_dq", "fence_async_shared", "nothing", True),
}


def replacement(kind):
    import gluon_on_cpu as fakes

    def only_at_the_end(pending, read):
        if read or pending == 0:
            fakes._wait_additions(pending, read)

    others = {x: getattr(fakes._Mbarrier, x) for x in ("init", "arrive", "expect")}
    relaxed = lambda pointer, x, sem: fakes._atomic_xchg(pointer, x, "relaxed")  # noqa: E731
    return {
        "nothing": lambda *_: None,
        "no waits": types.SimpleNamespace(**others, wait=lambda _at, _phase: None),
        "no wait for products": lambda _pending, deps: deps[0] if len(deps) == 1 else deps,
        "until done alone": lambda pending, read: None if read else fakes._wait_additions(pending, False),
        "only at the end": only_at_the_end,
        "relaxed counters": types.SimpleNamespace(**{**vars(fakes.GL), "atomic_xchg": relaxed}),
    }[kind]


@pytest.mark.parametrize(
    ("module", "function", "replaced", "by", "backward", "head_dim"),
    [*((*x, 64) for x in MISTAKES.values()), *((*x, 128) for x in SHARED_MISTAKES.values())],
    ids=[*MISTAKES, *SHARED_MISTAKES],
)
def test_mistakes_in_the_kernels_are_found(module, function, replaced, by, backward, head_dim, monkeypatch):
    import gluon_on_cpu
    from dilated_attention_pytorch.backends.hopper import configs, run

    gluon_on_cpu.installed(monkeypatch, programs=2, element="bfloat16")
    monkeypatch.setattr(run, "joint_config", lambda _, head_dim: configs.configs(head_dim).joint)
    inputs = [torch.randn(1, 520, 1, head_dim).requires_grad_() for _ in range(3)]
    call = lambda: attention(*inputs, Dilated([520], [1]), backend="hopper")  # noqa: E731
    out = call() if backward else None
    source = importlib.import_module(f"dilated_attention_pytorch.backends.hopper.kernels.{module}")
    monkeypatch.setitem(gluon_on_cpu.on_cpu(getattr(source, function)).__globals__, replaced, replacement(by))
    # By whichever thread comes first. A barrier that is passed too early may also be one that is arrived at too often.
    found = "read before|may still be|at the same time|no fence|nobody waited|more arrivals"

    def run_often() -> None:
        for _ in range(20):  # some orders of the threads hide a mistake
            out.sum().backward(retain_graph=True) if backward else call()

    with pytest.raises(AssertionError, match=found):
        run_often()
