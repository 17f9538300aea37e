"""Compiles every shipped kernel ahead of time and checks the result: `python -m radixkv_kernels.aot`. Needs no GPU.

For each architecture that has a table, each entry of it in each variant that a launch could ask for, and the small
kernels: registers, spills, shared memory and the kind of matrix instruction. Exit status 1 where a kernel spills, takes
more shared memory than the architecture has, lays warps across columns, or lacks a tensor-core instruction that it
should have; AMD architectures are reported and don't count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

INTERPRET = "TRITON_INTERPRET"
_COLUMNS = ("arch", "kernel", "tile", "warps", "stages", "registers", "spills", "shared KB", "mma", "problems")


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled kernel of the table."""

    arch: str
    kernel: str
    tile: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared_bytes: int
    mma: str
    problems: tuple[str, ...]

    @property
    def gates(self) -> bool:
        """Whether a problem of this row counts."""
        return not self.arch.startswith("gfx")

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of the columns."""
        shared = f"{self.shared_bytes / 1024:.0f}"
        numbers = (str(self.warps), str(self.stages), str(self.registers), str(self.spills), shared)
        return (self.arch, self.kernel, self.tile, *numbers, self.mma, "; ".join(self.problems) or "-")


def shipped_archs() -> list[str]:
    """Architectures that have a table of their own."""
    from .triton_impl.config import tables

    return sorted({table.arch for table in tables().values()})


def compile_shipped(arch: str, *, quick: bool = False) -> Iterator[Row]:
    """Rows of one architecture, each as soon as it is compiled (about a second a row, cached by triton).

    quick: only 128-wide heads in bfloat16, one variant an entry (of the plainest also a plan's), and the small kernels.
    """
    from .triton_impl.config import tables
    from .triton_impl.feasible import compile_variant, problems
    from .triton_impl.variants import attention_variants, cache_variants, reduce_variants

    table = next(table for table in tables().values() if table.arch == arch)
    work = []
    for key, config in sorted(table.entries.items()):
        if quick and (key.head_block, key.dtype) != (128, "bf16"):
            continue
        features = ("fp8 " if key.fp8 else "") + ("softcap " if key.softcap else "")
        tile = f"{config.block_m}x{config.block_n}x{config.block_v}"
        variants = list(attention_variants(key, config))
        last = 1 if key.fp8 or key.softcap else 2
        for variant in variants[-last:] if quick else variants:
            work.append((f"attention d{key.head_block} {key.dtype} {features}{variant.name}", tile, variant))
    for head_dim in (128,) if quick else (32, 64, 128, 256):
        for variant in (*reduce_variants(head_dim, "bf16"), *cache_variants(head_dim, "bf16")):
            work.append((f"{variant.name} d{head_dim}", "", variant))
    for name, tile, variant in work:
        made = compile_variant(arch, variant)
        found = tuple(problems(arch, variant, made))
        yield Row(
            arch, name, tile, variant.warps, variant.stages, made.registers, made.spills, made.shared_bytes, made.mma,
            found,
        )  # fmt: skip


def format_table(rows: Sequence[Row]) -> str:
    """Rows as an aligned text table."""
    cells = [_COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 where a row that gates has a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m radixkv_kernels.aot",
        description="Compile every shipped kernel without a GPU and print registers, spills, shared memory and the "
        "matrix instructions used. Exit status 1 where a kernel must not be shipped (AMD is reported only).",
    )
    parser.add_argument("--arch", nargs="+", help="architectures, such as sm_90; default: all that have a table")
    parser.add_argument("--quick", action="store_true", help="128-wide heads in bfloat16 only: under a minute")
    options = parser.parse_args(arguments)
    if os.environ.get(INTERPRET, "0") not in ("", "0"):
        # Triton decides at import whether it compiles: start over in a process without the variable.
        environment = {name: value for name, value in os.environ.items() if name != INTERPRET}
        command = [sys.executable, "-m", "radixkv_kernels.aot", *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(command, env=environment, check=False).returncode
    archs = options.arch or shipped_archs()
    unknown = sorted(set(archs) - set(shipped_archs()))
    if unknown:
        parser.error(f"--arch: expected some of {shipped_archs()}, got {unknown}")
    rows = []
    for arch in archs:
        for row in compile_shipped(arch, quick=options.quick):
            rows.append(row)
            print(f"\r{len(rows):4} compiled, {arch}: {row.kernel:<60}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(format_table(rows))
    failed = [row for row in rows if row.problems and row.gates]
    print(f"\n{len(rows)} kernels, {len(failed)} that must not be shipped")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
