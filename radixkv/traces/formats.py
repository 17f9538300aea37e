"""Which format a trace file has, from its content, and the source and reader that go with it."""

from collections.abc import Callable
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any

from radixkv.traces.block_ids import BAILIAN, MOONCAKE
from radixkv.traces.chat import ChatEncoder
from radixkv.traces.conversations import CONVERSATIONS
from radixkv.traces.lengths import LengthReader, is_header
from radixkv.traces.problems import BadRecord, TraceError
from radixkv.traces.reader import Reader
from radixkv.traces.requests import REQUESTS
from radixkv.traces.sources import JsonArray, Lines, Record, open_binary
from radixkv.traces.values import kind, shown_keys

AZURE = "azure"
# Of JSON, in the order in which they are asked whether a record is theirs.
_JSON_FORMATS = {format.name: format for format in (BAILIAN, MOONCAKE, REQUESTS, CONVERSATIONS)}
FORMATS = (*_JSON_FORMATS, AZURE)

_FOREIGN_STARTS = {
    b"\x28\xb5\x2f\xfd": "zstd; decompress it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "Parquet; export it as JSONL first",
    b"\xff\xfe": "UTF-16; convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16; convert it to UTF-8 first",
}
_PEEK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file whose format is known.

    Attributes:
        format: one of FORMATS.
        source: its records.
        reader: what understands them.
        size_bytes: the file's length.
        has_text: its tokens are the encoder's.
        has_header: the first record names the columns.
        decode: of a record, what the reader reads.
    """

    format: str
    source: Lines | JsonArray
    reader: Reader
    size_bytes: int
    has_text: bool
    has_header: bool
    decode: Callable[[Record], Any]


def open_file(path: Path, format: str | None, encoder: ChatEncoder, *, skip_bad: bool) -> TraceFile:
    """Recognises a file and sets up its reading.

    Args:
        path: the file.
        format: one of FORMATS, or None to recognise it from the first record.
        encoder: for formats that have text.
        skip_bad: look for the format in the first record that can be read, not in the first.

    Raises:
        TraceError: no such file, no text, no record, or none of a known format.
    """
    with open_binary(path) as file:
        start = file.read(_PEEK_BYTES)
        size = file.seek(0, SEEK_END)
    for magic, what in _FOREIGN_STARTS.items():
        if start.startswith(magic):
            raise TraceError(path, "", f"this is {what}")
    is_array = start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    source: Lines | JsonArray = JsonArray(path) if is_array else Lines(path)
    found = format or _recognise(path, source, skip_bad)
    if found == AZURE:
        reader = _length_reader(path, source)
        return TraceFile(found, source, reader, size, has_text=False, has_header=True, decode=_row(reader))
    known = _JSON_FORMATS[found]
    return TraceFile(found, source, known.make(encoder), size, known.has_text, has_header=False, decode=Record.json)


def _row(reader: LengthReader) -> Callable[[Record], Any]:
    def decode(record: Record) -> Any:
        if record.error:
            raise BadRecord(record.error)
        return reader.decode(record.text)

    return decode


def _length_reader(path: Path, source: Lines | JsonArray) -> LengthReader:
    for record in source:
        try:
            if record.error:
                raise BadRecord(record.error)
            return LengthReader(record.text)
        except BadRecord as error:
            raise TraceError(path, f"{source.unit} {record.number}", str(error)) from None
    raise TraceError(path, "", "the file is empty, without even a header")


def _recognise(path: Path, source: Lines | JsonArray, skip_bad: bool) -> str:
    first_error: TraceError | None = None
    for record in source:
        try:
            return _format_of(record)
        except BadRecord as error:
            found = TraceError(path, f"{source.unit} {record.number}", str(error))
            if not skip_bad:
                raise found from None
            first_error = first_error or found
    if first_error is not None:
        raise TraceError(path, first_error.where, f"no record can be read, the first because: {first_error.reason}")
    raise TraceError(path, "", "no record in it, so its format can't be recognised; name one with format= (--format)")


def _format_of(record: Record) -> str:
    if not record.error and is_header(record.text):
        return AZURE
    keys = record.json()
    if not isinstance(keys, dict):
        raise BadRecord(f"expected a JSON object, got {kind(keys)}")
    for name, format in _JSON_FORMATS.items():
        if format.recognises(keys):
            return name
    raise BadRecord(
        "format not recognised: expected the keys messages, conversations, prompt, prompt_token_ids, body or hash_ids, "
        f"or a header with ContextTokens; got {shown_keys(keys)}"
    )
