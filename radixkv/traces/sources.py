"""Where records come from: the lines of a text file, or the elements of one JSON array. Both stream.

A source yields `Record`s in file order and can read one again from its offset, so that an order other than the file's
needs an index of offsets in memory and never the file.
"""

import gzip
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from radixkv.traces.problems import BadRecord, TraceError
from radixkv.traces.values import shown

MAX_RECORD_BYTES = 64 * 2**20

_BUFFER_BYTES = 2**20
_CHUNK_BYTES = 2**20
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

# How far before the end of the buffer a decoding error may point and still be explained by the buffer's end.
_CUT_CHARS = 16


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object. Raises BadRecord where a key stands twice: one of the values would be dropped."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRecord(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} stands twice in an object")
    return found


_STRICT_DECODER = json.JSONDecoder(object_pairs_hook=_object)


@dataclass(frozen=True, slots=True)
class Record:
    """One line or element: where it is, and its text or what is wrong with it.

    Attributes:
        number: line or element, from 1.
        offset: where its bytes start in the file.
        size_bytes: how many bytes it has there.
        text: its content; empty if `error` is set.
        error: why it can't be read; empty if it can.
        cut: it ends with the file and not with a line end, as the last line of a truncated file does.
    """

    number: int
    offset: int
    size_bytes: int
    text: str
    error: str = ""
    cut: bool = False

    def json(self) -> Any:
        """Returns the decoded JSON value. Raises BadRecord if there is none."""
        if self.error:
            raise BadRecord(self.error)
        try:
            return _STRICT_DECODER.decode(self.text)
        except BadRecord:
            raise
        except RecursionError:
            raise BadRecord("JSON nested too deeply") from None
        except ValueError as error:
            hint = " (the file ends within this line: truncated?)" if self.cut else ""
            raise BadRecord(f"no JSON: {error}{hint}") from None


class Lines:
    """The lines of a text file that are not blank. UTF-8, with or without a byte order mark; LF or CRLF."""

    unit = "line"

    def __init__(self, path: Path, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[Record]:
        """Yields every line in order; one that is too long or no UTF-8 with its error. Cost: O(one line) memory."""
        with open_binary(self.path) as file:
            offset = number = 0
            while data := file.readline(self._max_bytes + 1):
                number += 1
                start, size = offset, len(data)
                offset += size
                if size > self._max_bytes:
                    offset += _skip_line(file, data)
                    yield Record(number, start, size, "", f"longer than {self._max_bytes} bytes")
                    continue
                if number == 1 and data.startswith(_UTF8_BOM):
                    data = data[len(_UTF8_BOM) :]
                    start, size = start + len(_UTF8_BOM), size - len(_UTF8_BOM)
                if data and not data.isspace():
                    yield _record(number, start, data)

    def read(self, number: int, offset: int, size_bytes: int) -> Record:
        """Reads a line again. Raises TraceError if the file no longer has so many bytes."""
        return _read_again(self.path, self.unit, number, offset, size_bytes)


class JsonArray:
    """The elements of a file that is one JSON array, each decoded when its turn comes.

    After a syntax error it is not known where the next element starts, so it ends the reading with a TraceError,
    whether or not bad records are skipped.
    """

    unit = "element"

    def __init__(self, path: Path, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[Record]:
        """Yields every element in order. Raises TraceError at a syntax error. Cost: O(one element) memory."""
        with open_binary(self.path) as file:
            buffer = _TextBuffer(self.path, file, self._max_bytes)
            buffer.expect("[", "the start of an array")
            number = 0
            if buffer.take("]"):
                buffer.expect_end()
                return
            while True:
                number += 1
                offset, text = buffer.take_value(number)
                yield Record(number, offset, len(text.encode()), text)
                if buffer.take("]"):
                    buffer.expect_end()
                    return
                buffer.expect(",", f"a comma or the array's end after element {number}")

    def read(self, number: int, offset: int, size_bytes: int) -> Record:
        """Reads an element again. Raises TraceError if the file no longer has so many bytes."""
        return _read_again(self.path, self.unit, number, offset, size_bytes)


class _TextBuffer:
    """A window of text on a UTF-8 file that grows until a JSON value fits, and knows its byte offset."""

    def __init__(self, path: Path, file: BinaryIO, max_bytes: int) -> None:
        self._path, self._file, self._max_bytes = path, file, max_bytes
        self._text, self._at, self._offset, self._pending = "", 0, 0, b""
        self._ended = False
        while not self._text and not self._ended:
            self._grow()
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def take(self, char: str) -> bool:
        """Steps over `char` if it comes next, white space aside."""
        self._skip_space()
        if not self._text.startswith(char, self._at):
            return False
        self._advance(self._at + 1)
        return True

    def expect(self, char: str, what: str) -> None:
        if not self.take(char):
            self._fail(f"expected {what}, found {self._text[self._at : self._at + 20]!r}")

    def expect_end(self) -> None:
        self._skip_space()
        if self._at < len(self._text):
            self._fail(f"more after the array: {self._text[self._at : self._at + 20]!r}")

    def take_value(self, number: int) -> tuple[int, str]:
        """Steps over one JSON value; returns its byte offset and its text."""
        self._skip_space()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:
                    break
            except RecursionError:
                self._fail(f"element {number}: JSON nested too deeply")
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _CUT_CHARS or error.msg.startswith("Unterminated string")
                if self._ended or not cut:
                    self._fail(f"element {number}: no JSON: {error.msg}")
            except ValueError as error:  # an integer of too many digits
                self._fail(f"element {number}: no JSON: {error}")
            if len(self._text) - self._at > self._max_bytes:
                self._fail(f"element {number}: longer than {self._max_bytes} bytes")
            self._grow()
        offset, text = self._offset, self._text[self._at : end]
        self._advance(end)
        return offset, text

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._text, self._at)
            self._advance(match.end() if match else self._at)
            if self._at < len(self._text) or self._ended:
                return
            self._grow()

    def _grow(self) -> None:
        """Drops what was stepped over and doubles the rest, so that a long value is decoded O(log length) times."""
        self._text, self._at = self._text[self._at :], 0
        data = self._file.read(max(_CHUNK_BYTES, len(self._text)))
        self._ended = not data
        data = self._pending + data
        try:
            added = data.decode()
        except UnicodeDecodeError as error:
            # A character cut by the end of the chunk is no error yet.
            if self._ended or len(data) - error.start > 3:
                self._fail(f"no UTF-8 near byte {self._offset + len(self._text) + error.start}")
            added = data[: error.start].decode()
        self._pending = data[len(added.encode()) :]
        self._text += added

    def _advance(self, to: int) -> None:
        self._offset += len(self._text[self._at : to].encode())
        self._at = to

    def _fail(self, reason: str) -> None:
        where = f"near byte {self._offset} of the JSON array"
        raise TraceError(self._path, where, f"{reason}; nothing after it can be read")


def open_binary(path: Path) -> BinaryIO:
    """Opens a regular file, or what gzip packed into it. Raises TraceError if it is none or can't be opened."""
    if not path.is_file():
        raise TraceError(path, "", "no such file" if not path.exists() else "not a regular file")
    try:
        file = path.open("rb", buffering=_BUFFER_BYTES)
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        if not is_packed:
            return file
        file.close()
        status = path.stat()
        return Path(_unpacked(path, status.st_mtime_ns, status.st_size).name).open("rb", buffering=_BUFFER_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path, "", f"no whole gzip file: {error}") from None
    except OSError as error:
        raise TraceError(path, "", f"can't be opened: {error.strerror}") from None


@lru_cache(maxsize=8)
def _unpacked(path: Path, mtime_ns: int, size_bytes: int) -> "tempfile._TemporaryFileWrapper[bytes]":
    """Unpacks a gzip file, as records are read by their offsets; it is deleted with the last reference."""
    unpacked = tempfile.NamedTemporaryFile()  # noqa: SIM115  it stays as long as this cache
    with gzip.open(path) as file:
        shutil.copyfileobj(file, unpacked, _BUFFER_BYTES)
    unpacked.flush()
    return unpacked


def _read_again(path: Path, unit: str, number: int, offset: int, size_bytes: int) -> Record:
    with open_binary(path) as file:
        file.seek(offset)
        data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise TraceError(path, f"{unit} {number}", "the file became shorter while it was read")
    return _record(number, offset, data)


def _record(number: int, offset: int, data: bytes) -> Record:
    try:
        return Record(number, offset, len(data), data.decode(), cut=not data.endswith(b"\n"))
    except UnicodeDecodeError as error:
        return Record(number, offset, len(data), "", f"no UTF-8 at byte {error.start} of the line: {error.reason}")


def _skip_line(file: BinaryIO, data: bytes) -> int:
    """Reads on to the end of a line; returns the bytes read."""
    skipped = 0
    while data and not data.endswith(b"\n"):
        data = file.readline(_CHUNK_BYTES)
        skipped += len(data)
    return skipped
