"""Packed token ids: int32 in one `bytes`, so that a comparison of spans is a memcmp.

Every part of radixkv that stores or compares tokens takes them packed; `pack` is called once per request. Token ids
are 0 .. 2**31 - 1. Negative ids are the caches' own (see `radixkv.cache.namespace`).
"""

from collections.abc import Sequence

import numpy as np

TOKEN_BYTES = 4
TokenIds = bytes | np.ndarray | Sequence[int]

_SHORT_BYTES = 512


def pack(token_ids: TokenIds) -> bytes:
    """Packs token ids into bytes, four per token, in the machine's byte order.

    Args:
        token_ids: [n] packed bytes (returned as they are), an integer array, or a sequence of ints.

    Raises:
        ValueError: an id is negative, does not fit an int32 or is no integer; bytes that are no whole number of tokens.

    Cost: O(n); nothing for bytes.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(f"token_ids: expected a multiple of {TOKEN_BYTES} packed bytes, got {len(token_ids)}")
        return token_ids
    array = np.asarray(token_ids)
    if array.ndim != 1:
        raise ValueError(f"token_ids: expected one dimension, got shape {array.shape}")
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        raise ValueError(f"token_ids: expected integers, got {array.dtype}")
    low = int(array.min())
    high = int(array.max()) if array.dtype != np.int32 else low
    if low < 0 or high > 0x7FFFFFFF:
        raise ValueError(f"token_ids: expected ids in 0..{0x7FFFFFFF}, got {low if low < 0 else high}")
    return array.astype(np.int32, copy=False).tobytes()


def unpack(packed: bytes) -> np.ndarray:
    """Returns [n] int32, a read-only view of the packed bytes. Cost: O(1)."""
    return np.frombuffer(packed, np.int32)


def num_common_tokens(a: bytes, b: bytes, a_start: int = 0, b_start: int = 0) -> int:
    """Counts the tokens that `a` from byte `a_start` on and `b` from byte `b_start` on have in common.

    Cost: O(common tokens) in numpy; below 128 tokens one big-integer exclusive or, which has less overhead.
    """
    length = min(len(a) - a_start, len(b) - b_start)
    if length <= _SHORT_BYTES:
        difference = int.from_bytes(a[a_start : a_start + length], "little") ^ int.from_bytes(
            b[b_start : b_start + length], "little"
        )
        if not difference:
            return length // TOKEN_BYTES
        lowest_bit = (difference & -difference).bit_length() - 1
        return lowest_bit // (8 * TOKEN_BYTES)
    count = length // TOKEN_BYTES
    unequal = np.frombuffer(a, np.int32, count, a_start) != np.frombuffer(b, np.int32, count, b_start)
    first = int(unequal.argmax())
    return first if unequal[first] else count
