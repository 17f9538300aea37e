"""Candidate tile shapes, best guess first, and which of them compile without spills: the GPU-free half of the tuner."""

from __future__ import annotations

from collections.abc import Iterator

from .compile import Report, compile_kernel
from .config import Config, Key
from .variants import Variant, attention_variants

SHARED_LIMIT_BYTES = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
"""What one program may have at most."""


def candidates(arch: str, key: Key) -> Iterator[Config]:
    """Tile shapes worth trying, best guess first: whole value heads before slices (which compute scores again), large
    KV tiles before small ones, deep pipelines before shallow ones."""
    if key.dtype == "fp32":
        for block_n, warps, stages in ((32, 4, 2), (32, 8, 1), (64, 8, 1), (16, 4, 1)):
            yield Config(16, block_n, 32, warps, stages, "ieee")
        return
    for block_v in dict.fromkeys(min(key.head_block, v) for v in (128, 64, 32)):
        for block_n, stages in ((128, 2), (64, 3), (64, 2), (32, 3), (32, 2), (16, 3), (16, 2), (32, 1)):
            for block_m, warps in row_tiles(arch):
                # mma.sync lays warps along M only where a tile has at least as many rows as value columns.
                if arch.startswith(("sm_90", "sm_100")) or block_m >= block_v:
                    yield Config(block_m, block_n, block_v, warps, stages, "tf32")


def row_tiles(arch: str) -> tuple[tuple[int, int], ...]:
    """(rows, warps) of a tile, 16 rows a warp: 64 rows first, for decode's sake, except where they always spill."""
    return ((128, 8), (64, 4)) if arch == "sm_100" else ((64, 4), (128, 8))


def problems(arch: str, variant: Variant, report: Report) -> list[str]:
    """Why a compiled kernel must not be shipped for arch; empty where it may."""
    found = []
    if report.spills:
        found.append(f"{report.spills} spill instructions")
    if report.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        found.append(f"{report.shared_bytes} bytes of shared memory, over {SHARED_LIMIT_BYTES[arch]}")
    if variant.needs_mma and report.mma in ("fma", "none"):
        found.append("no tensor-core instruction")
    if variant.needs_mma and any(any(n > 1 for n in layout[1:]) for layout in report.warps):
        found.append(f"warps not along M only: {report.warps}")
    return found


def compile_variant(arch: str, variant: Variant) -> Report:
    """Compiles one variant for arch, in about a second."""
    return compile_kernel(
        variant.kernel, variant.types, variant.constants, variant.aligned, arch, variant.warps, variant.stages
    )


def feasible(arch: str, key: Key, config: Config) -> bool:
    """Whether every variant of an entry compiles for arch without a problem. Stops at the first that does not."""
    for variant in reversed(list(attention_variants(key, config))):  # the last is the likeliest to spill
        if problems(arch, variant, compile_variant(arch, variant)):
            return False
    return True
