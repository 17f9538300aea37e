"""What bytes each token stands for, and text from tokens, one at a time. Used by `tokenizer`, which makes these.

Text is put together from bytes, never from decoded pieces: a character that spans tokens comes out whole, with the last
of them, and the parts that `Detokenizer.push` returns join to exactly `Vocabulary.decode` of all the tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Vocabulary:
    """Bytes by token id.

    Args:
        token_bytes: of every token; ids that are not in it stand for nothing.
        special_ids: tokens that mark something and are not text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], special_ids: Iterable[int]) -> None:
        self.special_ids = frozenset(special_ids)
        self._bytes = {token: text for token, text in token_bytes.items() if token not in self.special_ids}

    def bytes_of(self, token_id: int) -> bytes:
        """Nothing for special tokens and for ids that only pad the model's vocabulary. O(1)."""
        return self._bytes.get(token_id, b"")

    def decode(self, token_ids: Iterable[int]) -> str:
        """All the text; bytes that are no UTF-8 become U+FFFD. O(tokens)."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> Detokenizer:
        """For one sequence of tokens."""
        return Detokenizer(self)


class Detokenizer:
    """Text of a growing sequence: each part as soon as its characters are whole."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished. O(1)."""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got whole, else ""."""
        return self._decoder.decode(b"", final=True)


def byte_level_bytes(piece: str) -> bytes:
    """A piece of a byte-level vocabulary (GPT-2's): one character stands for one byte. Others: their own UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """A piece of a SentencePiece vocabulary: U+2581 is a space, <0x0A> a byte."""
    byte = _BYTE_PIECE.match(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Printable bytes of Latin-1 stand for themselves; the others are the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_level_alphabet()
