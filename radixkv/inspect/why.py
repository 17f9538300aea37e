"""Why a prompt does not hit: where it leaves another, what stands there, and what that costs under each cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixkv.blocks.config import CacheConfig
from radixkv.blocks.replay import Replay
from radixkv.cache.namespace import Namespace
from radixkv.cache.tokens import TOKEN_BYTES, num_common_tokens, unpack

DEFAULT_CACHES = (CacheConfig("flat_hash", 16), CacheConfig("radix", 16), CacheConfig("radix", 1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one cache makes of the second prompt after the first.

    Attributes:
        cache: which.
        num_cached_tokens: found; at least one token of a prompt is always computed.
        num_lost_tokens: equal to the first's from the start, and computed all the same.
    """

    cache: CacheConfig
    num_cached_tokens: int
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two prompts beside each other. Counts are in tokens, texts are of the tokenizer given.

    Attributes:
        num_tokens: of the first and the second.
        num_common: equal from the start; a namespace that differs makes everything after its start differ.
        before: the last text they share.
        first, second: the text with which each goes on; empty where it ends there.
        num_common_end: equal at their ends, after the difference: computed anew only for what stands before them.
        namespaces_differ: whether what ends the common start is a namespace and not a token.
        verdicts: one a cache.
    """

    num_tokens: tuple[int, int]
    num_common: int
    before: str
    first: str
    second: str
    num_common_end: int
    namespaces_differ: bool
    verdicts: tuple[Verdict, ...]


def compare_prompts(
    first: bytes,
    second: bytes,
    text_of: Callable[[bytes], str],
    *,
    namespaces: tuple[Namespace | None, Namespace | None] = (None, None),
    caches: Sequence[CacheConfig] = DEFAULT_CACHES,
    num_context: int = 24,
) -> Difference:
    """Serves one prompt and then the other through each cache, and says where they part.

    Args:
        first, second: [n >= 0] int32 packed tokens.
        text_of: packed tokens to text, such as a tokenizer's `decode`.
        namespaces: of the two.
        num_context: tokens of text to show around the difference.

    Raises:
        ValueError: a namespace is bad.
    """
    # An endless tree that shares to the token is what says how much is the same, namespaces included.
    num_common = _hit(CacheConfig("radix", 1), first, second + b"\0\0\0\0", namespaces)
    num_equal = num_common_tokens(first, second)
    at = num_common * TOKEN_BYTES
    context = num_context * TOKEN_BYTES
    rest = min(len(first), len(second)) - num_equal * TOKEN_BYTES
    num_common_end = num_common_tokens(_reversed(first)[:rest], _reversed(second)[:rest]) if rest else 0
    verdicts = []
    for cache in caches:
        hit = _hit(cache, first, second, namespaces)
        verdicts.append(Verdict(cache, hit, num_common - hit))
    return Difference(
        (len(first) // TOKEN_BYTES, len(second) // TOKEN_BYTES),
        num_common,
        text_of(first[max(at - context, 0) : at]),
        text_of(first[at : at + context]),
        text_of(second[at : at + context]),
        num_common_end,
        num_common < num_equal,
        tuple(verdicts),
    )


def _hit(
    config: CacheConfig, first: bytes, second: bytes, namespaces: tuple[Namespace | None, Namespace | None]
) -> int:
    replay = Replay(config)
    replay.feed(first, b"", namespaces[0])
    return replay.feed(second, b"", namespaces[1])


def _reversed(packed: bytes) -> bytes:
    """The tokens from the last to the first."""
    return unpack(packed)[::-1].tobytes()
