"""What can be asked of `experiments.compare`: its config, and the options that make one."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.harness import parser
from radixkv.blocks.replay import CACHES, CacheConfig
from radixkv.cache.contract import check_block_size
from radixkv.cache.hashing import ALGORITHMS
from radixkv.cache.radix.policies import POLICIES
from radixkv.simulate.model_shapes import MODEL_SHAPES
from radixkv.traces import FORMATS, WORKLOADS

EMBEDDED = "embedded"
SMOKE_REQUESTS = 200
# Where nothing else is asked for, so that there is something to see: pools in tokens, at two sizes of block.
EMBEDDED_BLOCK_SIZES = (16, 128)
EMBEDDED_POOLS = (16_384, 65_536, 262_144)


@dataclass(frozen=True)
class Config:
    """What was asked for; goes into the JSON as it is."""

    trace: tuple[str, ...] = ()
    join: bool = False
    format: str | None = None
    workload: str | None = None
    tokenizer: str = "bytes"
    cache: tuple[str, ...] = CACHES
    block_size: tuple[int, ...] = (16,)
    partial_blocks: tuple[bool, ...] = (True,)
    num_blocks: tuple[int | None, ...] = (None,)
    pool_tokens: tuple[int, ...] = ()
    policy: tuple[str, ...] = ("lru",)
    hash_algorithm: str = "sha256"
    cache_outputs: bool = False
    seed: int = 0
    limit: int | None = None
    skip_bad: bool = False
    model_shape: str = "llama-3-8b"
    serve: bool = False

    def caches(self) -> list[CacheConfig]:
        """Returns every cache asked for; what an option does not concern is not repeated for it."""
        configs = [
            CacheConfig(
                cache,
                block_size,
                partial_blocks=cache == "radix" and partial and block_size > 1,
                num_blocks=num_blocks if cache != "null" else None,
                policy=policy if cache == "radix" else "lru",
                hash_algorithm=self.hash_algorithm,
            )
            for block_size in self.block_size
            for cache in self.cache
            for partial in self.partial_blocks
            for policy in self.policy
            for num_blocks in (*(tokens // block_size for tokens in self.pool_tokens), *self.num_blocks)
        ]
        return list(dict.fromkeys(configs))


def read_options(description: str | None, arguments: Sequence[str] | None) -> tuple[Path, Config]:
    """Returns the folder for results, and the config."""
    options = parser("compare", description, "compare.json and compare.png")
    add = options.add_argument
    source = options.add_mutually_exclusive_group()
    source.add_argument(
        "--trace", nargs="+", default=[], metavar="FILE", help="trace files, each a trace of its own; format recognised"
    )
    add("--join", action="store_true", help="the files are one trace, one after the other")
    add("--format", choices=FORMATS, help="where the format is not to be recognised from the content")
    source.add_argument(
        "--workload", choices=sorted(WORKLOADS), help=f"a synthetic workload (default without --trace: {EMBEDDED})"
    )
    add(
        "--tokenizer",
        default="bytes",
        metavar="bytes|NAME|PATH",
        help="of text: UTF-8 bytes (default), qwen3, o200k, cl100k, llama3, or a tokenizer.json; chats become ChatML",
    )
    add("--cache", nargs="+", choices=CACHES, default=CACHES, help="default: all")
    add("--block-size", nargs="+", type=_block_size, metavar="N", help="tokens in a block, 1 to 1024 (16)")
    add("--partial-blocks", nargs="+", choices=("on", "off"), default=["on"], help="radix shares to the token (on)")
    add("--num-blocks", nargs="+", type=_num_blocks, metavar="N|unbounded", help="blocks in the pool (unbounded)")
    add("--policy", nargs="+", choices=sorted(POLICIES), default=["lru"], help="eviction of radix (lru)")
    add("--hash-algorithm", choices=ALGORITHMS, default="sha256", help="of the flat hash (sha256)")
    add(
        "--cache-outputs",
        choices=("on", "off"),
        default="off",
        help="cache outputs too, as an engine does; off (default): what prompts share with prompts",
    )
    add("--seed", type=int, default=0, help="of synthetic workloads")
    add("--limit", type=int, help="read at most so many requests of each trace")
    add("--skip-bad", action="store_true", help="count lines that can't be read, and go on")
    add("--model-shape", choices=sorted(MODEL_SHAPES), default="llama-3-8b", help="whose KV bytes to report")
    add(
        "--serve", choices=("on", "off"), default="on", help="then serve part of the embedded workload on tiny_gpt (on)"
    )
    given: dict[str, Any] = vars(options.parse_args(arguments))
    out = given.pop("out")
    given.pop("full")
    if given.pop("smoke"):
        given["limit"], given["serve"] = given["limit"] or SMOKE_REQUESTS, "off"
    is_embedded = given["workload"] in (None, EMBEDDED) and not given["trace"]
    given["pool_tokens"] = EMBEDDED_POOLS if is_embedded and given["num_blocks"] is None else ()
    given["num_blocks"] = given["num_blocks"] or (None,)
    given["block_size"] = given["block_size"] or (EMBEDDED_BLOCK_SIZES if is_embedded else (16,))
    given["partial_blocks"] = [choice == "on" for choice in given["partial_blocks"]]
    given["cache_outputs"] = given["cache_outputs"] == "on"
    given["serve"] = given["serve"] == "on" and is_embedded
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return out, Config(**given)


def _block_size(text: str) -> int:
    try:
        return check_block_size(int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _num_blocks(text: str) -> int | None:
    if text == "unbounded":
        return None
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of blocks or 'unbounded', got {text!r}")
    return int(text)
