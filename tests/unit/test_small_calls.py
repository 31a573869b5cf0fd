"""What small calls find in caches is what they would make, and merges of rows without keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.backends.targets import _capability, capability_of
from dilated_attention_pytorch.call import Sharding, make_call
from dilated_attention_pytorch.distributed import Shards
from dilated_attention_pytorch.distributed.agreement import Arguments, _known_arguments, arguments_of
from dilated_attention_pytorch.execute.merge import merge_


def arguments(**options) -> Arguments:
    x, sharding = torch.zeros(2, 16, 2, 8), Sharding(None, options.pop("layout", "contiguous"))
    call, inputs = make_call(x, x, x, Dilated([8, 16], [1, 2]), **options)
    return arguments_of(replace(call, sharding=sharding), inputs)


@pytest.mark.parametrize(
    "options",
    [
        ({"return_lse": True}, {"return_lse": 1}),
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"lengths": [3, 4]}, {"lengths": [3, 5]}, {}),
        ({"dropout_p": 0.5, "seed": 3}, {"dropout_p": 0.5, "seed": 4}, {"seed": 4}),
        ({"layout": Shards.of([16, 3], "contiguous")}, {"layout": Shards.of([16, 4], "contiguous")}),
    ],
    ids=lambda options: next(iter(options[0])),
)
def test_the_hash_of_arguments_does_not_depend_on_earlier_calls(options) -> None:
    """Ranks may have made different calls before; equal arguments must have equal hashes on all of them."""
    fresh = []
    for x in options:
        _known_arguments.cache_clear()
        fresh.append(arguments(**x).hash)
    assert len(set(fresh)) == len(options)
    _known_arguments.cache_clear()
    assert [arguments(**x).hash for x in (*options, *reversed(options))] == [*fresh, *reversed(fresh)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_keys_merge_to_those_with_keys(dtype) -> None:
    """-inf is the logarithm of an empty sum, on either side and on both."""
    empty, some = -torch.inf, torch.tensor([2.0, -3.0], dtype=dtype)
    out = torch.stack([torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype), some])
    lse = torch.tensor([empty, empty, 0.5], dtype=dtype)
    partial, partial_lse = out.flip(0).clone(), torch.tensor([0.5, empty, empty], dtype=dtype)
    merge_(out, lse, partial, partial_lse)
    assert out.equal(torch.stack([some, torch.zeros(2, dtype=dtype), some]))
    assert lse.equal(torch.tensor([0.5, empty, 0.5], dtype=dtype))


def test_the_capability_of_a_gpu_is_read_once(monkeypatch) -> None:
    """The current device may change, so that it is read each time."""
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0))
    _capability.cache_clear()
    for name in ("cuda:0", "cuda:1", "cuda"):
        for _ in range(3):
            assert capability_of(torch.device(name)) == (9, 0)
    _capability.cache_clear()
    assert [str(device) for device in asked] == ["cuda:0", "cuda:1", *["cuda"] * 3]
