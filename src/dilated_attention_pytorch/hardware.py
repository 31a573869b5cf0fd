"""GPUs and links as tables of numbers, each with the vendor's document that states it.

Nothing here was measured. Rates of matrix products are those without sparsity. ``benchmarks/plan_check.py`` compares what
follows from these numbers with measurements on an H200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    half: float  # FLOP/s of dense matrix products in bfloat16, or float16 where there is no bfloat16
    tf32: float  # the same in TF32; float32 where there is no TF32
    float32: float  # FLOP/s outside of tensor cores
    multiprocessors: int
    clock: float  # Hz under load: the boost clock that belongs to ``half``
    nvlink: str | None  # a name of LINKS, None if the GPU has none
    pcie: str  # a name of LINKS
    pattern: str  # a regular expression for the name that the driver reports
    source: str

    @property
    def exponentials(self) -> float:
        """Exponentials per second: 16 per clock and multiprocessor (CUDA C++ Programming Guide, arithmetic throughput)."""
        return 16 * self.multiprocessors * self.clock

    def matmul(self, dtype: str) -> float:
        """FLOP/s of dense matrix products in a type; those of float32 are three TF32 products each.

        >>> find_gpu("h200").matmul("bfloat16") == 989e12
        True
        """
        return {"float32": max(self.tf32 / 3, self.float32), "float64": self.float32 / 2}.get(dtype, self.half)


@dataclass(frozen=True, slots=True)
class Link:
    """A connection, as one GPU sees it in one direction."""

    name: str
    bandwidth: float  # bytes/s in one direction
    latency: float  # s, of a message with what it costs to post it
    source: str


_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper"

# Where a vendor has several models of a name, the SXM module is meant unless the name says otherwise. Names that contain
# others come first for the expressions: "H100 PCIe" before "H100".
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100", (7, 0), 32 * 10**9, 900e9, 125e12, 15.7e12, 15.7e12, 80, 1.53e9, "nvlink2", "pcie3", "V100",
            "NVIDIA V100 Tensor Core GPU data sheet (SXM2, 32 GB)"),
        Gpu("t4", (7, 5), 16 * 10**9, 320e9, 65e12, 8.1e12, 8.1e12, 40, 1.59e9, None, "pcie3", "T4",
            "NVIDIA T4 Tensor Core GPU data sheet"),
        Gpu("a100", (8, 0), 40 * 10**9, 1555e9, 312e12, 156e12, 19.5e12, 108, 1.41e9, "nvlink3", "pcie4",
            "A100.*40GB", _A100 + " (40 GB)"),
        Gpu("a100-80", (8, 0), 80 * 10**9, 2039e9, 312e12, 156e12, 19.5e12, 108, 1.41e9, "nvlink3", "pcie4",
            "A100|A800", _A100 + " (80 GB SXM)"),
        Gpu("a10", (8, 6), 24 * 10**9, 600e9, 125e12, 62.5e12, 31.2e12, 72, 1.695e9, None, "pcie4", "A10",
            "NVIDIA A10 Tensor Core GPU data sheet"),
        Gpu("a40", (8, 6), 48 * 10**9, 696e9, 149.7e12, 74.8e12, 37.4e12, 84, 1.74e9, "nvlink-bridge", "pcie4", "A40",
            "NVIDIA A40 data sheet"),
        Gpu("rtx3090", (8, 6), 24 * 10**9, 936e9, 71e12, 35.6e12, 35.6e12, 82, 1.695e9, "nvlink-bridge", "pcie4",
            "RTX 3090", _GA102 + " (rates that accumulate in float32)"),
        Gpu("l40s", (8, 9), 48 * 10**9, 864e9, 362e12, 183e12, 91.6e12, 142, 2.52e9, None, "pcie4", "L40S",
            "NVIDIA L40S data sheet"),
        Gpu("l4", (8, 9), 24 * 10**9, 300e9, 121e12, 60e12, 30.3e12, 58, 2.04e9, None, "pcie4", "L4",
            "NVIDIA L4 Tensor Core GPU data sheet (half of the rates with sparsity)"),
        Gpu("rtx4090", (8, 9), 24 * 10**9, 1008e9, 165.2e12, 82.6e12, 82.6e12, 128, 2.52e9, None, "pcie4",
            "RTX 4090", _ADA + " (rates that accumulate in float32)"),
        Gpu("h100-pcie", (9, 0), 80 * 10**9, 2000e9, 756e12, 378e12, 51e12, 114, 1.62e9, "nvlink4-bridge", "pcie5",
            "H100 PCIe", _H100),
        Gpu("h100-nvl", (9, 0), 94 * 10**9, 3900e9, 835e12, 417.5e12, 60e12, 132, 1.545e9, "nvlink4-bridge", "pcie5",
            "H100 NVL", _H100),
        Gpu("gh200", (9, 0), 96 * 10**9, 4000e9, 989e12, 494.7e12, 67e12, 132, 1.83e9, "nvlink4", "pcie5", "GH200",
            "NVIDIA GH200 Grace Hopper Superchip data sheet (96 GB HBM3)"),
        Gpu("h100", (9, 0), 80 * 10**9, 3350e9, 989e12, 494.7e12, 67e12, 132, 1.83e9, "nvlink4", "pcie5", "H100",
            _H100 + " (SXM)"),
        Gpu("h200", (9, 0), 141 * 10**9, 4800e9, 989e12, 494.7e12, 67e12, 132, 1.83e9, "nvlink4", "pcie5", "H200",
            "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
        Gpu("b200", (10, 0), 180 * 10**9, 7700e9, 2250e12, 1125e12, 75e12, 148, 1.85e9, "nvlink5", "pcie5", "B200",
            "NVIDIA Blackwell Architecture Technical Brief, table 3 (HGX)"),
        Gpu("b300", (10, 3), 288 * 10**9, 8000e9, 2250e12, 1125e12, 75e12, 148, 1.85e9, "nvlink5", "pcie5", "B300",
            "NVIDIA HGX B300 data sheet; clock and multiprocessors as of the B200"),
        Gpu("rtx5090", (12, 0), 32 * 10**9, 1792e9, 209.5e12, 104.8e12, 104.8e12, 170, 2.41e9, None, "pcie5",
            "RTX 5090", "NVIDIA RTX Blackwell GPU architecture white paper (rates that accumulate in float32)"),
        Gpu("gtx1080", (6, 1), 8 * 10**9, 320e9, 8.9e12, 8.9e12, 8.9e12, 20, 1.733e9, None, "pcie3", "GTX 1080",
            "NVIDIA GeForce GTX 1080 white paper; half precision is computed in float32"),
    )
}  # fmt: skip

# Latencies are of a message between GPUs with its launch. The data sheets have none for NVLink and PCIe.
_NCCL = "; latency: order of magnitude of a small NCCL send, not in the data sheet"
LINKS = {
    link.name: link
    for link in (
        Link("nvlink2", 150e9, 10e-6, "NVIDIA V100 data sheet: 300 GB/s in both directions" + _NCCL),
        Link("nvlink3", 300e9, 10e-6, "NVIDIA A100 data sheet: 600 GB/s in both directions" + _NCCL),
        Link("nvlink4", 450e9, 10e-6, "NVIDIA H100 data sheet: 900 GB/s in both directions" + _NCCL),
        Link("nvlink5", 900e9, 10e-6, "NVIDIA Blackwell Technical Brief: 1,800 GB/s in both directions" + _NCCL),
        Link("nvlink-bridge", 56.25e9, 10e-6, "NVIDIA A40 data sheet: bridge of 112.5 GB/s in both directions" + _NCCL),
        Link("nvlink4-bridge", 300e9, 10e-6, "NVIDIA H100 data sheet: bridge of 600 GB/s in both directions" + _NCCL),
        Link("pcie3", 15.75e9, 15e-6, "PCI Express 3.0 base specification, x16" + _NCCL),
        Link("pcie4", 31.5e9, 15e-6, "PCI Express 4.0 base specification, x16" + _NCCL),
        Link("pcie5", 63e9, 15e-6, "PCI Express 5.0 base specification, x16" + _NCCL),
        Link("hdr", 25e9, 20e-6, "NVIDIA ConnectX-6 data sheet: HDR InfiniBand, 200 Gb/s for a GPU" + _NCCL),
        Link("ndr", 50e9, 20e-6, "NVIDIA ConnectX-7 data sheet: NDR InfiniBand, 400 Gb/s for a GPU" + _NCCL),
        Link("ethernet100", 12.5e9, 50e-6, "IEEE 802.3ba: 100 Gb/s Ethernet" + _NCCL),
        Link("ethernet10", 1.25e9, 50e-6, "IEEE 802.3ae: 10 Gb/s Ethernet" + _NCCL),
    )
}


def find_gpu(name: str) -> Gpu:
    """A GPU of the table by its name, in any case.

    >>> find_gpu("H100").capability
    (9, 0)
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(
            f"the GPU must be one of {', '.join(GPUS)}, got {name!r}; for another one, give its numbers, for example "
            "--gpu-memory 80GB --gpu-tflops 500 --gpu-bandwidth 3.3TB"
        )
    return found


def reported_gpu(name: str) -> Gpu | None:
    """The GPU of the table that the driver reports by this name; None for others.

    >>> reported_gpu("NVIDIA H100 PCIe").name, reported_gpu("NVIDIA A100-SXM4-80GB").name, reported_gpu("Radeon")
    ('h100-pcie', 'a100-80', None)
    """
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b(?:{gpu.pattern})\b", name)), None)


def find_link(name: str) -> Link:
    """A link of the table by its name, in any case.

    >>> find_link("NDR").bandwidth
    50000000000.0
    """
    found = LINKS.get(name.lower())
    if found is None:
        raise ValueError(f"the link must be one of {', '.join(LINKS)}, got {name!r}")
    return found
