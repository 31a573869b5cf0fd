"""The code of docs/orders.md as it is: on one device, compiled, and on two ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from dilated_attention_pytorch import DilatedAttention

PAGE = (Path(__file__).parents[2] / "docs" / "orders.md").read_text()


def blocks() -> list[str]:
    """The ranks of a test have a process group, so the blocks must not make and destroy one."""
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return [re.sub(r"^dist\.(init|destroy)_process_group\(.*\)\n", "", block, flags=re.MULTILINE) for block in code]


def names_of_page() -> dict:
    """After the page's first code; numbers are double precision."""
    torch.set_default_dtype(torch.float64)
    names: dict = {}
    try:
        exec(blocks()[0], names)
    finally:
        torch.set_default_dtype(torch.float32)
    return names


def per_call(names: dict):
    """The page's model with an order around every attention instead."""
    model = copy.deepcopy(names["model"])
    for layer in model.layers:
        layer.attend = DilatedAttention([16, 64], [1, 2], order=names["order"])
    model.put_in_order = model.undo = lambda x: x
    return model


def out_and_gradients(model, patches) -> list[torch.Tensor]:
    out = model(patches)
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


def test_page():
    names = names_of_page()
    expected = out_and_gradients(per_call(names), names["patches"])
    for a, e in zip(out_and_gradients(names["model"], names["patches"]), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
    assert torch.equal(names["predicted"], names["model"](names["patches"]))
    # Causal by original position: what comes after a patch does not change what is predicted of it.
    changed = names["patches"].clone()
    changed[:, 40:] += 1
    before, after = (names["model"](x)[:, :40] for x in (names["patches"], changed))
    torch.testing.assert_close(after, before)


def test_compiled_model():
    names = names_of_page()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(names["model"], fullgraph=True, backend=counter)
    for _ in range(2):
        patches = torch.randn(2, 63, 12, dtype=torch.float64)
        expected = out_and_gradients(names["model"], patches)
        for a, e in zip(out_and_gradients(compiled, patches), expected, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


def check_ranks(group) -> None:
    rank = dist.get_rank()
    names = names_of_page()
    torch.set_default_dtype(torch.float64)
    exec(blocks()[2], names)
    expected = out_and_gradients(per_call(names), names["patches"])
    torch.testing.assert_close(names["whole"], expected[0], rtol=1e-10, atol=1e-10)
    early, late = ((0, 16), (47, 63)) if rank == 0 else ((16, 32), (32, 47))  # 63 rows, zigzag
    places = [*range(*early), *range(*late)]
    assert names["mine"].tolist() == [names["order"].positions.tolist()[place] for place in places]
    compiled = torch.compile(names["sharded"], backend="aot_eager")
    for model in (names["sharded"], copy.deepcopy(names["sharded"]), compiled):
        out, *grads = out_and_gradients(model, names["patches"])
        torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
        for a, e in zip(grads, expected[1:], strict=True):
            dist.all_reduce(a)  # every rank has computed the loss of the whole
            torch.testing.assert_close(a / dist.get_world_size(), e, rtol=1e-9, atol=1e-9)


def test_page_on_ranks(on_ranks):
    on_ranks(2, check_ranks)
