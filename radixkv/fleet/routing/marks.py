"""Namespaces in a fleet's index: the first token of a block in which a part starts is replaced by a negative digest.

The digest is of the part's extra keys and that token, the same from a request's namespace and from an event's extra
keys, so no table of names grows. A collision (2**-31 for equal tokens) costs a detour, not a wrong answer: replicas
compare for themselves.
"""

import sys
from hashlib import blake2b
from typing import Any

from radixkv.cache.hashing import ExtraKeys, extra_keys
from radixkv.cache.namespace import LoRA, Namespace, parts
from radixkv.cache.tokens import TOKEN_BYTES

Adapters = tuple[tuple[Any, ...], ...]  # name and path of each that a block depends on


def mark_request(key: bytes, namespace: Namespace, block_size: int) -> bytes:
    """Returns the packed tokens of a request with its namespace folded in. O(n) bytes copied, O(parts)."""
    found = parts(namespace)
    marked = bytearray(key)
    for start in sorted({part.start // block_size * block_size for part in found}):
        before = tuple((part.name, part.path) for part in found if isinstance(part, LoRA) and part.start < start)
        _mark(marked, start * TOKEN_BYTES, next(extra_keys(found, start, block_size)), before, block_size)
    return bytes(marked)


def mark_run(token_ids: bytes, keys: tuple[ExtraKeys, ...] | None, before: Adapters, block_size: int) -> bytes:
    """Returns the packed tokens of a run of blocks with their extra keys folded in.

    Args:
        before: the adapters of the block before the run.
    """
    if keys is None:
        return token_ids
    marked = bytearray(token_ids)
    for i, of_block in enumerate(keys):
        _mark(marked, i * block_size * TOKEN_BYTES, of_block, before, block_size)
        before = adapters_of(of_block)
    return bytes(marked)


def adapters_of(keys: ExtraKeys) -> Adapters:
    """Returns name and path of the adapters in a block's extra keys."""
    return tuple(key[1:3] for key in keys or () if key[0] == "lora")


def _mark(marked: bytearray, at: int, keys: ExtraKeys, before: Adapters, block_size: int) -> None:
    starting = tuple(key for key in keys or () if _starts_here(key, before))
    if starting and at + block_size * TOKEN_BYTES <= len(marked):
        token = bytes(marked[at : at + TOKEN_BYTES])
        digest = blake2b(repr((starting, token)).encode(), digest_size=TOKEN_BYTES).digest()
        number = int.from_bytes(digest, "little") | 1 << 31
        marked[at : at + TOKEN_BYTES] = number.to_bytes(TOKEN_BYTES, sys.byteorder)


def _starts_here(key: tuple[Any, ...], before: Adapters) -> bool:
    """Whether what an extra key stands for starts in its block; adapters reach on, media may."""
    if key[0] == "lora":
        return key[1:3] not in before
    return key[0] != "mm" or key[2] >= 0
