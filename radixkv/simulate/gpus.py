"""Accelerators as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        flops_per_s: of dense bf16 matrix products (float8 weights: the same is assumed).
        bytes_per_s: reading its memory.
        link_bytes_per_s: to the others of its node, one direction.
        source: of these numbers, which are peaks.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    l2_bytes: float
    link_bytes_per_s: float
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-sxm", 989.4e12, 3.35e12, 80e9, 50e6, 450e9, "NVIDIA H100 datasheet; L2: Hopper whitepaper"),
        Gpu("h200", 989.4e12, 4.8e12, 141e9, 50e6, 450e9, "NVIDIA H200 datasheet; L2: as H100"),
        Gpu("a100-80gb-sxm", 312e12, 2.039e12, 80e9, 40e6, 300e9, "NVIDIA A100 datasheet; L2: Ampere whitepaper"),
        Gpu("a10g", 70e12, 600e9, 24e9, 6e6, 32e9, "NVIDIA A10G datasheet as AWS gives it for g5; PCIe 4.0 x16"),
    )
}
