"""Which format a trace file has, from its content, and the source and reader that go with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from os import SEEK_END
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from radixkv.traces import readers
from radixkv.traces.chat import ChatEncoder
from radixkv.traces.problems import BadRecord, TraceError
from radixkv.traces.reader import Format, JsonFormat, Reader, RowFormat, RowReader
from radixkv.traces.sources import JsonArray, Lines, Record, open_binary
from radixkv.traces.values import kind, shown_keys


def _registered() -> Iterator[Format]:
    """Every Format that a module of `radixkv.traces.readers` defines."""
    for module in iter_modules(readers.__path__):
        values = vars(import_module(f"{readers.__name__}.{module.name}")).values()
        yield from (value for value in values if isinstance(value, Format))


_FORMATS: dict[str, Format] = {format.name: format for format in _registered()}
# In the order in which they are asked whether a record is theirs.
_JSON_FORMATS = sorted((f for f in _FORMATS.values() if isinstance(f, JsonFormat)), key=lambda format: format.rank)
_ROW_FORMATS = [format for format in _FORMATS.values() if isinstance(format, RowFormat)]
FORMATS = (*(json.name for json in _JSON_FORMATS), *(rows.name for rows in _ROW_FORMATS))

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
        format: what it was recognised as.
        source: its records.
        reader: what understands them.
        size_bytes: the file's length.
        has_header: the first record names the columns.
        decode: of a record, what the reader reads.
    """

    format: Format
    source: Lines | JsonArray
    reader: Reader
    size_bytes: int
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
    found = _FORMATS[format] if format else _recognise(path, source, skip_bad)
    if isinstance(found, JsonFormat):
        return TraceFile(found, source, found.make(encoder), size, has_header=False, decode=Record.json)
    reader = _row_reader(found, path, source)
    return TraceFile(found, source, reader, size, has_header=True, decode=_row(reader))


def _row(reader: RowReader) -> Callable[[Record], Any]:
    def decode(record: Record) -> Any:
        if record.error:
            raise BadRecord(record.error)
        return reader.decode(record.text)

    return decode


def _row_reader(format: RowFormat, path: Path, source: Lines | JsonArray) -> RowReader:
    for record in source:
        try:
            if record.error:
                raise BadRecord(record.error)
            return format.make(record.text)
        except BadRecord as error:
            raise TraceError(path, f"{source.unit} {record.number}", str(error)) from None
    raise TraceError(path, "", "the file is empty, without even a header")


def _recognise(path: Path, source: Lines | JsonArray, skip_bad: bool) -> Format:
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


def _format_of(record: Record) -> Format:
    if not record.error:
        for rows in _ROW_FORMATS:
            if rows.recognises(record.text):
                return rows
    keys = record.json()
    if not isinstance(keys, dict):
        raise BadRecord(f"expected a JSON object, got {kind(keys)}")
    for format in _JSON_FORMATS:
        if format.recognises(keys):
            return format
    known = ", ".join(dict.fromkeys(key for format in _JSON_FORMATS for key in format.keys))
    columns = " or ".join(rows.column for rows in _ROW_FORMATS)
    raise BadRecord(
        f"format not recognised: expected a key of {known}, or a header with {columns}; got {shown_keys(keys)}"
    )
