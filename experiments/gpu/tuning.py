"""Times tile shapes on the GPU at hand and keeps the fastest: the middle part of `gpu_kernels`.

Only shapes that compile without spills and give a right answer are timed. An entry serves decode and prefill alike (so
that both give the same bits), so it is chosen by the geometric mean of both times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from radixkv_kernels import paged_attention, triton_impl
from radixkv_kernels.triton_impl.config import CONFIG_DIR, Config, Key, tables, write_table
from radixkv_kernels.triton_impl.feasible import candidates, feasible

from experiments.gpu.timing import Case, make_batch
from experiments.lab.harness import Row

KEYS = (Key(128, "bf16", False, False), Key(128, "bf16", True, False), Key(64, "bf16", False, False))
MAX_CANDIDATES = 8


def tune(
    sizes: Any,
    measure: Callable[[dict[str, Callable[[], Any]]], dict[str, float]],
    write: bool,
    in_time: Callable[[], bool],
) -> Iterator[Row]:
    """A row a timed shape and one a choice; with `write` puts choices (float16 as bfloat16) into the shipped table."""
    arch = triton_impl.device_arch(torch.device("cuda"))
    table = tables()[arch]
    chosen: dict[Key, Config] = {}
    for key in KEYS:
        if not in_time():
            break
        shape = dataclasses.replace(sizes, head_dim=key.head_block)
        calls = {
            "decode": make_batch(shape, Case(32, 0, 4096), fp8=key.fp8).call,
            "prefill": make_batch(shape, Case(1, 0, 4096), 2048, fp8=key.fp8).call,
        }
        shipped = table.entries[key]
        expected = {name: paged_attention(**call) for name, call in calls.items()}
        best = (math.inf, shipped)
        tried = 0
        for config in dict.fromkeys((shipped, *candidates(table.arch, key))):
            if tried >= MAX_CANDIDATES or not in_time():
                break
            if config != shipped and not feasible(table.arch, key, config):
                continue
            tried += 1
            functions = {name: with_config(call, config) for name, call in calls.items()}
            errors = [relative(functions[name](), of) for name, of in expected.items()]
            row: Row = {"part": "tune", "name": f"{key}", "config": dataclasses.asdict(config), "error": max(errors)}
            if max(errors) > 1e-2:
                yield row | {"passed": False}
                continue
            took = measure(functions)
            score = math.sqrt(took["decode"] * took["prefill"])
            best = min(best, (score, config), key=lambda pair: pair[0])
            yield row | {"ms": took}
        chosen[key] = best[1]
        yield {"part": "tuned", "name": f"{key}", "config": dataclasses.asdict(best[1]), "shipped": best[1] == shipped}
    if write and chosen:
        halves = {dataclasses.replace(key, dtype="fp16"): config for key, config in chosen.items()}
        halves = {key: config for key, config in halves.items() if feasible(table.arch, key, config)}
        origin = f"{len(chosen)} entries timed on {torch.cuda.get_device_name()}; the others: {table.origin}"
        new = dataclasses.replace(table, entries=table.entries | chosen | halves, origin=origin)
        write_table(CONFIG_DIR / f"{table.arch}.json", new)


def with_config(call: dict[str, Any], config: Config) -> Callable[[], torch.Tensor]:
    """The call with another tile shape instead of the table's."""

    def function() -> torch.Tensor:
        original = triton_impl.find_config
        triton_impl.find_config = lambda spec, tensors: config
        try:
            out = paged_attention(**call)
        finally:
            triton_impl.find_config = original
        assert isinstance(out, torch.Tensor)
        return out

    return function


def relative(got: torch.Tensor, expected: Any) -> float:
    """Norm of the difference over the norm."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())
