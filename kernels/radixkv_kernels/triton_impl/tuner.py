"""Makes a table of tile shapes: `python -m radixkv_kernels.triton_impl.tuner sm_90`.

Without a GPU an entry is the first candidate that compiles without spills (about five minutes an architecture on one
core); `experiments/gpu_kernels.py` times the candidates that compile and writes the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator

from .config import CONFIG_DIR, DTYPES, HEAD_BLOCKS, Config, Key, Table, write_table
from .feasible import SHARED_LIMIT_BYTES, candidates, feasible

SERVES = {"sm_120": ("sm_86", "sm_89", "sm_120", "sm_121"), "sm_100": ("sm_100", "sm_103")}
"""Architectures that run another's table: those with 99 KB of shared memory share one."""


def keys() -> Iterator[Key]:
    """Every key that a complete table has."""
    for head_block in HEAD_BLOCKS:
        for dtype in reversed(DTYPES):
            for fp8 in (False, True):
                for softcap in (False, True):
                    yield Key(head_block, dtype, fp8, softcap)


def first_feasible(arch: str, key: Key, preferred: tuple[Config, ...] = ()) -> Config | None:
    """The first of `preferred` and then of the candidates that compiles for arch without a problem; None if none."""
    for config in (*preferred, *candidates(arch, key)):
        if feasible(arch, key, config):
            return config
    return None


def build_table(arch: str, report: Callable[[str], None]) -> Table:
    """A table for arch by compilation alone; `report` gets a line an entry. Minutes."""
    entries: dict[Key, Config] = {}
    for key in keys():
        # float16 mostly compiles as bfloat16 does; trying its entry first saves the search.
        twin = entries.get(dataclasses.replace(key, dtype="bf16")) if key.dtype == "fp16" else None
        config = first_feasible(arch, key, (twin,) if twin else ())
        if config is None:
            report(f"{arch} {key}: nothing compiles without a problem; left out")
        else:
            entries[key] = config
            report(f"{arch} {key}: {config}")
    origin = "first candidate that compiles without spills; not timed"
    return Table(arch, SERVES.get(arch, (arch,)), SHARED_LIMIT_BYTES[arch], origin, entries)


def main(arguments: list[str] | None = None) -> int:
    """Builds and writes the tables asked for."""
    parser = argparse.ArgumentParser(description="Build tables of tile shapes by compilation, without a GPU.")
    parser.add_argument("arch", nargs="+", choices=sorted(SHARED_LIMIT_BYTES), help="architectures to build for")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: kernels can't be compiled in this process")
    for arch in options.arch:
        table = build_table(arch, lambda line: print(line, file=sys.stderr, flush=True))
        write_table(CONFIG_DIR / f"{arch}.json", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
