"""Namespaces: what the KV of a token depends on, or must be kept apart by, besides the tokens before it.

A request carries none (`None`), one, or a tuple of them. They are typed: an adapter named "x" is not a salt named "x".
The radix tree folds a namespace into the tokens (`Interner`): the token at the position where it starts is replaced by
a negative id that stands for (namespace, token), so one changed token separates all that follows, and everything before
that position stays shared. The flat hash folds the same namespaces in as extra keys (`radixkv.cache.hashing`).
"""

import sys
from collections.abc import Container, Hashable
from dataclasses import dataclass, replace

import numpy as np

from radixkv.cache.tokens import TOKEN_BYTES, has_negative, unpack

_BYTE_ORDER = sys.byteorder


@dataclass(frozen=True, slots=True)
class LoRA:
    """An adapter: all KV of the request depends on it. `version` tells reloads under one name apart."""

    name: str
    path: str = ""
    version: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Salt:
    """A tenant, or any wish to be kept apart: nothing from token `start` on is shared with another salt."""

    value: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Media:
    """The content behind placeholder tokens `start` .. `start + length`, by its digest."""

    digest: str
    start: int
    length: int


Part = LoRA | Salt | Media
Namespace = Part | tuple[Part, ...]


def parts(namespace: Namespace | None) -> tuple[Part, ...]:
    """Returns the parts of a namespace, by where they start.

    Raises:
        ValueError: something that is no LoRA, Salt or Media, or one with a field of a wrong type or range.
    """
    if namespace is None:
        return ()
    found = namespace if isinstance(namespace, tuple) else (namespace,)
    for part in found:
        _check(part)
    return tuple(sorted(found, key=lambda part: (part.start, type(part).__name__, repr(part))))


def _check(part: Part) -> None:
    if not isinstance(part, LoRA | Salt | Media):
        raise ValueError(f"namespace: expected LoRA, Salt or Media, or a tuple of them, got {part!r}")
    counts = (part.start, part.version if isinstance(part, LoRA) else part.length if isinstance(part, Media) else 0)
    for count, least in zip(counts, (0, 1 if isinstance(part, Media) else 0), strict=True):
        if type(count) is not int or count < least:
            raise ValueError(f"namespace: expected an int >= {least}, got {count!r} in {part!r}")
    for name in (part.name, part.path) if isinstance(part, LoRA) else (_name(part),):
        if not isinstance(name, str) or not _is_text(name):
            raise ValueError(f"namespace: expected a str of whole characters, got {name!r} in {part!r}")


def _name(part: Salt | Media) -> str:
    return part.value if isinstance(part, Salt) else part.digest


def _is_text(value: str) -> bool:
    """Whether it can be encoded: half a surrogate pair can't, and would fail in the middle of hashing."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def kinds(namespace: Namespace | None) -> frozenset[Part]:
    """Returns the parts of a namespace, wherever they start."""
    return frozenset(replace(part, start=0) for part in parts(namespace))


class Interner:
    """Negative ids for (namespace, token) pairs; one per cache. `sweep` forgets those that nothing holds any longer."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Hashable, int], int] = {}
        self._pairs: list[tuple[Part, int] | None] = []  # by -1 - id; None: to be given again
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def mark(self, packed: bytes, namespace: Namespace, offset: int = 0, *, add: bool = True) -> bytes:
        """Replaces the token at each part's start by the id of (part, token).

        Args:
            packed: [n] int32 packed tokens, the first of them at position `offset` of its request.
            namespace: what to fold in.
            add: whether an unknown pair gets an id. Where not, the tokens are cut before it: nothing there can match.

        Cost: O(n) bytes copied once if any part starts in these tokens.
        """
        if has_negative(packed):
            raise ValueError(f"token_ids: expected ids >= 0, got {unpack(packed).min()}")
        marked = bytearray(packed)
        for part in parts(namespace):
            at = (part.start - offset) * TOKEN_BYTES
            if not 0 <= at < len(marked):
                continue
            token = int.from_bytes(marked[at : at + TOKEN_BYTES], _BYTE_ORDER, signed=True)
            # Where a part starts is already said by the tokens before it; what it is, is what must be told apart.
            pair = (replace(part, start=0), token)
            known = self._ids.get(pair)
            if known is None:
                if not add:
                    return bytes(marked[:at])
                known = self._ids[pair] = self._new_id((part, token))
            marked[at : at + TOKEN_BYTES] = known.to_bytes(TOKEN_BYTES, _BYTE_ORDER, signed=True)
        return bytes(marked)

    def _new_id(self, pair: tuple[Part, int]) -> int:
        if self._unused:
            known = self._unused.pop()
            self._pairs[-1 - known] = pair
            return known
        self._pairs.append(pair)
        return -len(self._pairs)

    def sweep(self, held: set[int]) -> None:
        """Forgets all pairs but those with these ids, and those inside them. O(pairs)."""
        for known in list(held):
            while (known := self._pair(known)[1]) < 0:  # of several parts that start at one token
                held.add(known)
        for pair, known in list(self._ids.items()):
            if known not in held:
                del self._ids[pair]
                self._pairs[-1 - known] = None
                self._unused.append(known)

    def _pair(self, known: int) -> tuple[Part, int]:
        pair = self._pairs[-1 - known]
        assert pair is not None, f"id {known} is in use, and was forgotten"
        return pair

    def unmark(self, marked: bytes, offset: int = 0) -> tuple[bytes, tuple[Part, ...]]:
        """Undoes `mark`: returns the plain packed tokens, and the parts folded into them, with their starts.

        Args:
            marked: [n] int32 packed tokens, the first of them at position `offset` of its request.

        Cost: O(n) in numpy.
        """
        tokens = unpack(marked)
        negative = np.flatnonzero(tokens < 0).tolist()
        if not negative:
            return marked, ()
        plain, found = tokens.copy(), []
        for at in negative:
            plain[at], inside = self.resolve(int(tokens[at]))
            # The pair remembers where it was first met, which may be elsewhere in another request.
            found += [replace(part, start=offset + at) for part in inside]
        return plain.tobytes(), tuple(found)

    def first(self, marked: bytes, concerned: Container[Part]) -> int | None:
        """Returns at which token one of these parts (each with start 0) is folded in first; None where none is."""
        tokens = unpack(marked)
        for at in np.flatnonzero(tokens < 0).tolist():
            if any(replace(part, start=0) in concerned for part in self.resolve(int(tokens[at]))[1]):
                return at
        return None

    def resolve(self, token: int) -> tuple[int, tuple[Part, ...]]:
        """Returns the token that a negative id stands for, and the namespace parts folded into it."""
        return self._resolve(token, ())

    def _resolve(self, token: int, outer: tuple) -> tuple[int, tuple[Part, ...]]:
        if token >= 0:
            return token, outer
        part, inner = self._pair(token)
        return self._resolve(inner, (part, *outer))
