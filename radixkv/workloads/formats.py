"""Which format a trace file has, from its content, and the source and reader that go with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any

from radixkv.workloads.block_ids import BAILIAN_BLOCK_SIZE, MOONCAKE_BLOCK_SIZE, BlockIdReader
from radixkv.workloads.chat import ChatEncoder
from radixkv.workloads.conversations import ConversationReader
from radixkv.workloads.lengths import LengthReader, is_header
from radixkv.workloads.problems import BadRecord, TraceError
from radixkv.workloads.reader import Reader
from radixkv.workloads.requests import RequestReader
from radixkv.workloads.sources import JsonArray, Lines, Record, open_binary
from radixkv.workloads.values import object_of, shown

CONVERSATIONS, REQUESTS, MOONCAKE, BAILIAN, AZURE = "conversations", "requests", "mooncake", "bailian", "azure"
FORMATS = (CONVERSATIONS, REQUESTS, MOONCAKE, BAILIAN, AZURE)

# What only a log of single requests has beside `messages`.
_REQUEST_KEYS = ("output", "output_token_ids", "response", "session", "timestamp", "cache_salt")
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
        has_header: the first record names the columns.
    """

    format: str
    source: Lines | JsonArray
    reader: Reader
    size_bytes: int
    has_header: bool


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
        return TraceFile(found, source, _length_reader(path, source), size, has_header=True)
    return TraceFile(found, source, _json_reader(found, encoder), size, has_header=False)


def _json_reader(format: str, encoder: ChatEncoder) -> Reader:
    if format == CONVERSATIONS:
        return ConversationReader(encoder)
    if format == REQUESTS:
        return RequestReader(encoder)
    if format == MOONCAKE:
        return BlockIdReader(MOONCAKE_BLOCK_SIZE, timestamp_unit_s=1e-3)
    return BlockIdReader(BAILIAN_BLOCK_SIZE, timestamp_unit_s=1.0)


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


def _awaits_answer(messages: Any, is_call: bool) -> bool:
    """Whether messages are a request's: the last is not the assistant's. Else they are a conversation with its answers.

    Conversations of tools and simulated users may end with somebody else's word too; what has answers in it and is no
    API call (it names no model) is taken for one.
    """
    roles = [m.get("role") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    return bool(roles) and roles[-1] != "assistant" and (is_call or roles.count("assistant") < 2)


def _format_of(record: Record) -> str:
    if not record.error and is_header(record.text):
        return AZURE
    keys: Mapping[str, Any] = object_of(record.json())
    if "hash_ids" in keys:
        return BAILIAN if "chat_id" in keys else MOONCAKE
    if any(keys.get(key) is not None for key in ("prompt", "prompt_token_ids", "body", "request")):
        return REQUESTS
    if "conversations" in keys:
        return CONVERSATIONS
    if "messages" in keys:
        is_request = any(key in keys for key in _REQUEST_KEYS) or _awaits_answer(keys["messages"], "model" in keys)
        return REQUESTS if is_request else CONVERSATIONS
    seen = ", ".join(shown(key) for key in list(keys)[:8]) or "none"
    raise BadRecord(
        "format not recognised: expected the keys messages, conversations, prompt, prompt_token_ids, body or hash_ids, "
        f"or a header with ContextTokens; got the keys {seen}"
    )
