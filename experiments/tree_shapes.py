"""Batches that share prefixes in the ways that workloads do, as block tables: for `tree_attention.py`.

Layered trees after the experiments of PAT (2511.22333), not its list: levels of equal fan-out and length.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np

Segments = list[tuple[int, int]]
"""A sequence: (segment, tokens) from the root on; equal numbers are the same tokens."""


def layered(fan_outs: tuple[int, ...], tokens: tuple[int, ...], rng: random.Random, own: int = 256) -> list[Segments]:
    """A regular tree: level i has fan_outs[i] children a node, each of tokens[i] tokens; then up to `own` of a leaf."""
    fresh = itertools.count()
    paths: list[Segments] = [[]]
    for fan_out, length in zip(fan_outs, tokens, strict=True):
        paths = [[*path, (next(fresh), length)] for path in paths for _ in range(fan_out)]
    return [[*path, (next(fresh), rng.randint(1, own))] for path in paths]


def agents(rng: random.Random, num_seqs: int) -> list[Segments]:
    """A system prompt, some task prompts, and conversations that branch at ragged turns."""
    fresh = itertools.count()
    live: list[Segments] = [[(next(fresh), 1500 + rng.randint(0, 1000))]]
    while len(live) < num_seqs:
        parent = rng.choice(live)
        kept = parent[: rng.randint(1, len(parent))]
        live.append([*kept, *((next(fresh), rng.randint(20, 900)) for _ in range(rng.randint(1, 3)))])
    return [[*path, (next(fresh), rng.randint(1, 60))] for path in live]


def beams(rng: random.Random, width: int, prompt: int, steps: int) -> list[Segments]:
    """Beam search: each step every survivor is an extension of a random survivor of the step before."""
    fresh = itertools.count()
    live: list[Segments] = [[(next(fresh), prompt)]] * width
    for _ in range(steps):
        parents = [rng.choice(live) for _ in range(width)]
        live = [[*parent, (next(fresh), rng.randint(8, 40))] for parent in parents]
    return live


def _regular() -> Iterator[tuple[str, Callable[[random.Random], list[Segments]]]]:
    for fan_outs, tokens in (
        ((1, 2), (128, 128)),
        ((1, 8), (128, 128)),
        ((1, 64), (128, 128)),
        ((1, 16), (1024, 256)),
        ((1, 64), (1024, 128)),
        ((1, 4), (4096, 512)),
        ((1, 32), (4096, 128)),
        ((1, 64), (8192, 512)),
        ((2, 8), (1024, 512)),
        ((4, 16), (2048, 256)),
        ((1, 2, 4), (512, 256, 128)),
        ((1, 4, 4), (1024, 512, 256)),
        ((1, 8, 8), (2048, 256, 128)),
        ((1, 16, 2), (4096, 1024, 256)),
        ((1, 2, 32), (128, 2048, 128)),
        ((2, 2, 16), (8192, 1024, 128)),
        ((1, 2, 2, 2), (512, 512, 512, 512)),
        ((1, 4, 4, 4), (1024, 256, 256, 128)),
        ((1, 2, 4, 8), (2048, 1024, 512, 256)),
        ((1, 8, 2, 4), (200, 1000, 300, 700)),
    ):
        label = f"{'x'.join(map(str, fan_outs))} of {'/'.join(map(str, tokens))}"
        yield label, lambda rng, f=fan_outs, t=tokens: layered(f, t, rng)  # type: ignore[misc]


SHAPES: dict[str, Callable[[random.Random], list[Segments]]] = {
    **dict(_regular()),
    "agents, 16": lambda rng: agents(rng, 16),
    "agents, 64": lambda rng: agents(rng, 64),
    "agents, 256": lambda rng: agents(rng, 256),
    "beam search": lambda rng: beams(rng, 16, 1000, 40),
    "beam search, wide": lambda rng: beams(rng, 64, 300, 60),
    "self-consistency, n = 100": lambda rng: layered((1, 100), (2000, 1), rng, own=1000),
    "self-consistency, long prompt": lambda rng: layered((1, 100), (7777, 1), rng, own=1000),
    "nothing shared": lambda rng: layered((32,), (2000,), rng),
}


def make_tables(name: str, block_size: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Block tables [num_seqs, max_blocks] int32 and lengths [num_seqs] of one of SHAPES, sequences shuffled.

    Whole blocks of a common prefix are the same; the block in which sequences part is each one's own, as in a cache.
    """
    sequences = SHAPES[name](rng)
    rng.shuffle(sequences)
    ids: dict[tuple[object, ...], int] = {}
    rows = []
    for path in sequences:
        filled = 0
        blocks: list[tuple[int, tuple[object, ...]]] = []
        key: tuple[object, ...] = ()
        for segment, tokens in path:
            end = filled + tokens
            key = (*key, segment)
            while len(blocks) < end // block_size:
                blocks.append((len(blocks), key))
            filled = end
        if filled % block_size:
            blocks.append((len(blocks), key))
        row = [ids.setdefault(block, len(ids)) for block in blocks]
        rows.append((row, filled))
    table = np.full((len(rows), max(len(row) for row, _ in rows)), -1, dtype=np.int32)
    for s, (row, _) in enumerate(rows):
        table[s, : len(row)] = row
    names = np.random.default_rng(rng.randrange(1 << 30)).permutation(len(ids))
    lens = np.array([filled for _, filled in rows])
    return np.where(table >= 0, names[table], -1).astype(np.int32), lens
