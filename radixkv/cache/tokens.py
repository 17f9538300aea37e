"""Packed token ids: int32 in one `bytes`, so that a comparison of spans is a memcmp.

Every part of radixkv that stores or compares tokens takes them packed; `pack` is called once per request. Token ids
are 0 .. 2**31 - 1. Negative ids are the caches' own (see `radixkv.cache.namespace`).
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np

TOKEN_BYTES = 4
TokenIds = bytes | np.ndarray | Sequence[int]

_SHORT_BYTES = 512
_SIGN_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


def pack(token_ids: TokenIds) -> bytes:
    """Packs token ids into bytes, four per token, in the machine's byte order.

    Args:
        token_ids: [n] packed bytes (returned as they are, their ids unseen), an integer array, or a sequence of ints.

    Raises:
        ValueError: an id is negative, does not fit an int32 or is no integer; bytes that are no whole number of tokens.

    Cost: O(n); nothing for bytes.
    """
    if type(token_ids) is np.ndarray and token_ids.dtype == np.int32 and token_ids.ndim == 1:  # no copy but the last
        packed = token_ids.tobytes()
        if has_negative(packed):
            raise ValueError(f"token_ids: expected ids >= 0, got {token_ids.min()}")
        return packed
    if isinstance(token_ids, bytearray | memoryview):
        token_ids = bytes(token_ids)
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(f"token_ids: expected a multiple of {TOKEN_BYTES} packed bytes, got {len(token_ids)}")
        return token_ids
    if type(token_ids) is list and token_ids and type(token_ids[0]) is int and array("i").itemsize == TOKEN_BYTES:
        try:
            packed = array("i", token_ids).tobytes()  # quicker than numpy
        except (TypeError, OverflowError):
            packed = b""  # the way below says what is wrong
        if packed and not has_negative(packed):
            return packed
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor that is not on the CPU
        raise ValueError(f"token_ids: expected integers, got {type(token_ids).__name__} ({error})") from None
    if ids.ndim != 1:
        raise ValueError(f"token_ids: expected one dimension, got shape {ids.shape}")
    if not ids.size:
        return b""
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token_ids: expected integers, got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > 0x7FFFFFFF:
        raise ValueError(f"token_ids: expected ids in 0..{0x7FFFFFFF}, got {low if low < 0 else high}")
    return ids.astype(np.int32, copy=False).tobytes()


def has_negative(packed: bytes) -> bool:
    """Whether one of the packed ids is below zero. O(n); of few, their sign bytes alone are looked at."""
    if len(packed) <= _SHORT_BYTES:
        return not packed[_SIGN_BYTE::TOKEN_BYTES].isascii()
    return bool(np.minimum.reduce(np.frombuffer(packed, np.int32)) < 0)


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
