"""Chained block hashes and their extra keys: what a flat hash map of KV blocks uses as its keys.

`h_i = H((h_{i-1}, token_ids_i, extra_keys_i or None))` over full blocks, as vLLM builds them (automatic prefix caching,
`vllm/v1/core/kv_cache_utils.py`), so the digests can be compared with an engine's.

`xxhash` and `cbor2` are optional (`pip install radixkv[hashes]`); importing this module needs neither.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import repeat
from struct import Struct
from typing import Any

from radixkv.cache.contract import check_block_size
from radixkv.cache.namespace import LoRA, Media, Salt

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")

Parts = tuple[LoRA | Salt | Media, ...]
ExtraKeys = tuple[tuple[Any, ...], ...] | None

_SEED = "vllm-none-hash"
_KINDS = (LoRA, Media, Salt)  # in the order of their extra keys


class BlockHasher:
    """Hashes the blocks of a request, each over the hash of the block before it.

    Attributes:
        digest: from a Python object to its digest, `digest_bits` long (whole bytes, the unused low bits zero).
        seed: the parent of block 0.
    """

    def __init__(self, algorithm: str, block_size: int, *, digest_bits: int | None = None) -> None:
        """Makes a hasher.

        Args:
            algorithm: "sha256" or "xxhash" over pickled objects; "sha256_cbor" or "xxhash_cbor" over canonical CBOR,
                which other languages can reproduce.
            block_size: tokens per block.
            digest_bits: keep only that many bits of each digest, so that collisions can be had at will.

        Raises:
            ValueError: an unknown algorithm, a bad block_size, or digest_bits outside of what the digest has.
            ImportError: the algorithm's library is not installed; names the extra.
        """
        self.algorithm = algorithm
        self.block_size = check_block_size(block_size)
        self.digest = _truncated(_digest_function(algorithm), digest_bits)
        self.seed = self.digest(_SEED)
        self._tokens = Struct(f"={block_size}i")

    def chain(
        self, parent: bytes, token_ids: bytes | memoryview, parts: Parts = (), position: int = 0
    ) -> Iterator[bytes]:
        """Yields the hash of each full block, lazily: a caller that stops early hashes only the blocks it consumed.

        Args:
            parent: the hash of the block before, or `seed`.
            token_ids: [n] int32 packed; an incomplete last block is ignored.
            parts: the namespace parts of the whole request.
            position: of the first token in its request, a multiple of block_size.

        Cost: one digest over about 3 bytes per token, per block.
        """
        digest = self.digest
        num_bytes = len(token_ids) - len(token_ids) % self._tokens.size
        # iter_unpack yields tuples of plain ints: what an engine hashes is exactly that, and pickle tells apart.
        blocks = self._tokens.iter_unpack(memoryview(token_ids)[:num_bytes])
        for tokens, keys in zip(blocks, extra_keys(parts, position, self.block_size), strict=False):
            parent = digest((parent, tokens, keys))
            yield parent


def extra_keys(parts: Parts, position: int, block_size: int) -> Iterator[ExtraKeys]:
    """Yields the extra keys of each block from `position` (a multiple of block_size) on, without end.

    In this order: ("lora", name, path) on every block an adapter reaches, ("mm", digest, start - block_start) on every
    block that the content overlaps, ("cache_salt", value) on the block where the salt starts. An adapter's version is
    appended unless 0; so is the place in the block where an adapter or a salt starts unless it is the first, because
    equal tokens on either side of it must not meet. A Media's digest has to imply its length.

    Cost: O(parts) per block; nothing without parts.
    """
    return _extra_keys(parts, position, block_size) if parts else repeat(None)


def _extra_keys(parts: Parts, position: int, block_size: int) -> Iterator[ExtraKeys]:
    # pickle writes a string that it meets twice as a back reference, and goes by identity. One object for equal
    # strings makes the bytes depend on the values alone.
    once: dict[str, str] = {}
    ordered = [part for kind in _KINDS for part in parts if isinstance(part, kind)]
    names = [tuple(once.setdefault(name, name) for name in _names(part)) for part in ordered]
    while True:
        end = position + block_size
        keys: list[tuple[Any, ...]] = []
        for part, name in zip(ordered, names, strict=True):
            offset = part.start - position
            if isinstance(part, LoRA):
                if part.start < end:
                    inside = max(offset, 0)
                    keys.append(name + ((part.version, inside) if inside else (part.version,) if part.version else ()))
            elif isinstance(part, Media):
                if part.start < end and part.start + part.length > position:
                    keys.append((*name, offset))
            elif 0 <= offset < block_size:
                keys.append((*name, offset) if offset else name)
        yield tuple(keys) or None
        position = end


def _names(part: LoRA | Salt | Media) -> tuple[str, ...]:
    if isinstance(part, LoRA):
        return ("lora", part.name, part.path)
    return ("mm", part.digest) if isinstance(part, Media) else ("cache_salt", part.value)


def lora_name(keys: ExtraKeys) -> str | None:
    """Returns the name of the first adapter in a block's extra keys."""
    return next((key[1] for key in keys or () if key[0] == "lora"), None)


def _digest_function(algorithm: str) -> Callable[[Any], bytes]:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"hash_algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    sha256, dumps, protocol = hashlib.sha256, pickle.dumps, pickle.HIGHEST_PROTOCOL
    if algorithm == "sha256":
        return lambda value: sha256(dumps(value, protocol)).digest()
    if algorithm == "xxhash":
        xxh3_128 = _optional("xxhash", algorithm).xxh3_128_digest
        return lambda value: xxh3_128(dumps(value, protocol))
    cbor = _optional("cbor2", algorithm).dumps
    if algorithm == "sha256_cbor":
        return lambda value: sha256(cbor(value, canonical=True)).digest()
    xxh3_128 = _optional("xxhash", algorithm).xxh3_128_digest
    return lambda value: xxh3_128(cbor(value, canonical=True))


def _optional(library: str, algorithm: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise ImportError(
            f"hash_algorithm {algorithm!r} needs {library}, which is not installed: pip install radixkv[hashes]"
        ) from error


def _truncated(digest: Callable[[Any], bytes], num_bits: int | None) -> Callable[[Any], bytes]:
    if num_bits is None:
        return digest
    most = 8 * len(digest(_SEED))
    if isinstance(num_bits, bool) or not isinstance(num_bits, int) or not 1 <= num_bits <= most:
        raise ValueError(f"digest_bits: expected an int in 1..{most}, got {num_bits!r}")
    num_bytes = -(-num_bits // 8)
    drop = 8 * num_bytes - num_bits

    def truncated(value: Any) -> bytes:
        kept = int.from_bytes(digest(value)[:num_bytes], "big") >> drop << drop
        return kept.to_bytes(num_bytes, "big")

    return truncated
