"""Tokens for traces that carry no text: the same in every process, and equal only where the trace says so.

Token ids below 2**30 belong to block ids, those above to lengths of which nothing else is known, so that the two never
meet. Within each half, position j of key i is `(i * A + j * B) mod 2**30` with odd A: at every position different keys
have different tokens, so two blocks, or two unknown outputs, share no first token and hence nothing.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_HALF = 2**30
_KEY_STEP = np.uint32(0x9E3779B1 % _HALF)
_POSITION_STEP = np.uint32(0x85EBCA77 % _HALF)
_MASK = np.uint32(_HALF - 1)


def block_tokens(block_ids: Sequence[int | str], block_size: int) -> np.ndarray:
    """Gives every block id its own tokens.

    Args:
        block_ids: ids as the trace has them. Integers below 2**30 are exact; larger ones and strings go through a
            digest, which lets two of them agree in a first token once in 2**30 pairs (in two tokens, once in 2**60).
        block_size: tokens per block.

    Returns:
        [len(block_ids) * block_size] int32. Cost: about 1 ns a token.
    """
    keys = np.empty(len(block_ids), np.uint32)
    tweaks = np.zeros(len(block_ids), np.uint32)
    for at, block_id in enumerate(block_ids):
        if type(block_id) is int and block_id < _HALF:
            keys[at] = block_id
        else:
            digest = hashlib.blake2b(str(block_id).encode("utf-8", "surrogatepass"), digest_size=8).digest()
            keys[at] = int.from_bytes(digest[:4], "little") % _HALF
            tweaks[at] = int.from_bytes(digest[4:], "little") % _HALF
    positions = np.arange(block_size, dtype=np.uint32)
    tokens = (keys * _KEY_STEP)[:, None] + (positions * _POSITION_STEP)[None, :]
    tokens[:, 1:] += tweaks[:, None]
    return (tokens & _MASK).astype(np.int32).reshape(-1)


def unshared_tokens(ordinal: int, count: int, start: int = 0) -> bytes:
    """Gives tokens `start` .. `start + count` of the sequence that belongs to `ordinal` alone.

    Args:
        ordinal: different for every request; exact below 2**30 of them.

    Returns:
        [count] int32 packed. Cost: about 1 ns a token.
    """
    positions = np.arange(start, start + count, dtype=np.uint32)
    first = np.uint32(ordinal * int(_KEY_STEP) % _HALF)
    tokens = first + positions * _POSITION_STEP
    return ((tokens & _MASK).astype(np.int32) + np.int32(_HALF)).tobytes()
