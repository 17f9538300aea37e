"""Tile shapes of the attention kernel: a table a GPU architecture, shipped as data in `configs/<arch>.json`.

A table is frozen: what is in it decides the order of every sum, so changing an entry changes bits (not errors). It is
made by `tuner.py` and checked by `radixkv_kernels.aot`. `attention.py` looks an entry up by head size, dtype and
feature only, never by batch or length.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

CONFIG_DIR = pathlib.Path(__file__).parent.parent / "configs"
HEAD_BLOCKS = (32, 64, 128, 256)
DTYPES = ("fp32", "fp16", "bf16")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    """What an entry of a table is found by; all of it constant over the calls of a model's layer."""

    head_block: int
    """The larger of head_dim and v_head_dim, rounded up to one of HEAD_BLOCKS."""
    dtype: str
    """q's dtype, one of DTYPES; KV is of it too, or fp8."""
    fp8: bool
    softcap: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """One entry: tile sizes in rows, KV tokens and value columns, and how the compiler is to lay them out."""

    block_m: int
    block_n: int
    block_v: int
    num_warps: int
    num_stages: int
    precision: str
    """tl.dot's input_precision; "ieee" is float32 without tensor cores."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of one architecture, and which others it serves."""

    arch: str
    serves: tuple[str, ...]
    shared_limit_bytes: int
    origin: str
    """How the table was made, for people."""
    entries: dict[Key, Config]

    def lookup(self, key: Key) -> Config | None:
        """The entry for key, or None. O(1)."""
        return self.entries.get(key)


def head_block(head_dim: int, v_head_dim: int) -> int:
    """The smallest of HEAD_BLOCKS that holds both; ValueError where none does."""
    for block in HEAD_BLOCKS:
        if max(head_dim, v_head_dim) <= block:
            return block
    raise ValueError(f"head_dim: expected at most {HEAD_BLOCKS[-1]}, got {max(head_dim, v_head_dim)}")


def read_table(path: pathlib.Path) -> Table:
    """Reads a table; ValueError where an entry is missing a field or appears twice."""
    data = json.loads(path.read_text())
    entries: dict[Key, Config] = {}
    for row in data["entries"]:
        key = Key(**{field.name: row[field.name] for field in dataclasses.fields(Key)})
        if key in entries:
            raise ValueError(f"{path.name}: expected each key once, got {key} twice")
        entries[key] = Config(**{field.name: row[field.name] for field in dataclasses.fields(Config)})
    return Table(data["arch"], tuple(data["serves"]), data["shared_limit_bytes"], data["origin"], entries)


def write_table(path: pathlib.Path, table: Table) -> None:
    """Writes a table, one entry a line, sorted by key."""
    entries = sorted(table.entries.items())
    rows = [json.dumps(dataclasses.asdict(key) | dataclasses.asdict(config)) for key, config in entries]
    head = {
        "arch": table.arch,
        "serves": list(table.serves),
        "shared_limit_bytes": table.shared_limit_bytes,
        "origin": table.origin,
    }
    text = json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    path.write_text(text)


@functools.cache
def tables() -> dict[str, Table]:
    """Every shipped table, by each architecture that it serves."""
    shipped = [read_table(path) for path in sorted(CONFIG_DIR.glob("*.json"))]
    return {arch: table for table in shipped for arch in table.serves}
