"""What `experiments.index_cost` asks of a cache: prompts that grow, leaves, and admitting and publishing them."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from radixkv.blocks.config import CacheConfig
from radixkv.cache.contract import PrefixCache, take_over
from radixkv.cache.tokens import TOKEN_BYTES


def chats(num_conversations: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields ([n] prompt, [m] prompt and output) int32: conversations of 2,000 to 8,000 tokens in four turns."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 32_000, 512, dtype=np.int32) for _ in range(8)]
    texts = []
    for i in range(num_conversations):
        length = int(rng.integers(2_000, 8_001))
        texts.append(np.concatenate([systems[i % 8], rng.integers(0, 32_000, length - 512, dtype=np.int32)]))
    for turn in range(4):
        for text in texts:
            before, end = (512 + (len(text) - 512) * share // 4 for share in (turn, turn + 1))
            yield text[: end - min(200, end - before - 1)], text[:end]


def leaf(index: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Returns [length] int32 tokens, the first of them nobody else's."""
    tokens = rng.integers(0, 32_000, length, dtype=np.int32)
    tokens[0] = 32_000 + index
    return tokens


def make(cache: str, block_size: int) -> Any:
    """Returns a cache as an engine has it: its owner answers for block ids."""
    if cache.startswith("radix"):
        made = CacheConfig("radix", block_size, partial_blocks=cache == "radix").make()
    else:
        made = CacheConfig(cache, block_size).make()
    take_over(made, "cache", made)
    return made


def admit(cache: PrefixCache, key: bytes) -> int:
    lease = cache.acquire(key)
    matched = len(lease.block_ids) * cache.block_size
    cache.release(lease)
    return matched


def insert(cache: PrefixCache, key: bytes, blocks: np.ndarray) -> None:
    lease = cache.acquire(key)
    done = lease.num_tokens
    cache.insert(lease, key[done * TOKEN_BYTES :], blocks[done // cache.block_size :])
    cache.commit()
    cache.release(lease)


class Blocks:
    """Hands out block ids that were never used."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, num_blocks: int) -> np.ndarray:
        self.next += num_blocks
        return np.arange(self.next - num_blocks, self.next, dtype=np.int32)
