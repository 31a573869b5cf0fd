"""The table of GPUs and links: complete, plausible, and read by everything that names a GPU."""

from __future__ import annotations

import pytest

from dilated_attention_pytorch.backends import targets
from dilated_attention_pytorch.hardware import GPUS, LINKS, find_gpu, find_link, reported_gpu

NAMES = (
    "v100", "t4", "a100", "a100-80", "a10", "a40", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "h100", "h100-pcie",
    "h100-nvl", "h200", "gh200", "b200", "b300", "gtx1080",
)  # fmt: skip


def test_the_table_has_the_gpus_with_a_source_each():
    assert sorted(GPUS) == sorted(NAMES)
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.half >= gpu.tf32 >= gpu.float32 / 2
        assert 10**9 < gpu.bandwidth < 10**13
        assert gpu.memory % 10**9 == 0
        assert gpu.pcie in LINKS
        assert gpu.nvlink is None or gpu.nvlink in LINKS
        # Tensor cores do so many operations per clock and multiprocessor; a wrong unit is off by powers of ten.
        assert 100 <= gpu.half / gpu.multiprocessors / gpu.clock <= 9000, gpu.name
    assert all(link.source and 1e9 < link.bandwidth < 1e12 and 0 < link.latency < 1e-3 for link in LINKS.values())


def test_targets_read_the_table():
    assert {name: gpu.capability for name, gpu in GPUS.items()} == targets.GPUS
    assert targets.find_target("cuda:rtx5090").capability == (12, 0)


def test_names_of_the_driver():
    for reported, name in (
        ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"), ("NVIDIA L40", None), ("NVIDIA A10G", None), ("Tesla T4", "t4"),
        ("NVIDIA GeForce GTX 1080", "gtx1080"),
    ):  # fmt: skip
        found = reported_gpu(reported)
        assert (None if found is None else found.name) == name, reported


def test_an_unknown_name_lists_the_others():
    with pytest.raises(ValueError, match=r"v100, t4, .*got 'h300'; .*--gpu-memory 80GB --gpu-tflops 500"):
        find_gpu("h300")
    with pytest.raises(ValueError, match=r"nvlink2, .*got 'token ring'"):
        find_link("token ring")


def test_float32_products_are_three_in_tf32_where_that_is_faster():
    assert find_gpu("h200").matmul("float32") == pytest.approx(494.7e12 / 3)
    assert find_gpu("gtx1080").matmul("float32") == 8.9e12
