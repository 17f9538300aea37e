"""A trace: files of requests, read in order, again and again, without entering memory.

`open_trace` is what `experiments.compare` and anyone with a trace of their own calls.
"""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from radixkv.traces.chat import ChatEncoder
from radixkv.traces.fields import Fields, num_chars
from radixkv.traces.formats import FORMATS, TraceFile, open_file
from radixkv.traces.order import Entry, in_order
from radixkv.traces.problems import BadRecord, ReadCounts, TraceError
from radixkv.traces.reader import Item
from radixkv.traces.request import TraceRequest
from radixkv.traces.sources import Record
from radixkv.traces.tokenizers import Tokenizer, load_tokenizer

CACHE_BYTES = 256 * 2**20

# A record takes at least so many bytes, so that bytes before it / MIN_RECORD_BYTES is a number of its own.
_MIN_RECORD_BYTES = 8

AnyPath = str | PathLike[str]


def open_trace(
    paths: AnyPath | Sequence[AnyPath],
    *,
    tokenizer: str | Tokenizer = "bytes",
    format: str | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    cache_bytes: int = CACHE_BYTES,
) -> "Trace":
    """Opens trace files for reading one after the other.

    Args:
        paths: one file or several. Each is put in order by itself.
        tokenizer: for formats with text: a name or path for `load_tokenizer`, or a tokenizer.
        format: one of FORMATS; None recognises each file's from its content.
        limit: yield at most so many requests.
        skip_bad: count records that can't be read and go on, in place of raising.
        cache_bytes: how much of parsed records may be kept; more is read from the files again.

    Raises:
        ValueError: an argument is out of range, an unknown tokenizer.
        TraceError: (a ValueError) a file is missing or of no known format.
    """
    listed = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not listed:
        raise ValueError("paths: expected at least one file, got none")
    if format is not None and format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    check_limit(limit)
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes: expected at least 0, got {cache_bytes}")
    encoder = ChatEncoder(load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer)
    files = [open_file(Path(path), format, encoder, skip_bad=skip_bad) for path in listed]
    return Trace(files, encoder.tokenizer, limit=limit, skip_bad=skip_bad, cache_bytes=cache_bytes)


class Trace:
    """The requests of some files; every `iter` reads them from the start.

    Attributes:
        name: the files' names up to the first dot, joined by "+".
        formats: the name of each file's format.
        tokenizer: what made the tokens; None if no file has text.
        tokens: what tokens are, as prints name it: the tokenizer, or what a format without text says.
        caveats: what its formats say is to be kept in mind of hits.
        sharing_known: False if a file's format does not tell what requests share: hits mean nothing.
        counts: what the latest iteration met, growing while it goes on.
    """

    def __init__(
        self, files: Sequence[TraceFile], tokenizer: Tokenizer, *, limit: int | None, skip_bad: bool, cache_bytes: int
    ) -> None:
        self._files = tuple(files)
        self._limit, self._skip_bad, self._cache_bytes = limit, skip_bad, cache_bytes
        self.name = "+".join(_name(file.source.path) for file in files)
        formats = [file.format for file in files]
        self.formats = tuple(format.name for format in formats)
        self.tokenizer = tokenizer if any(format.tokens is None for format in formats) else None
        self.tokens = ", ".join(dict.fromkeys(format.tokens or tokenizer.name for format in formats))
        self.caveats = tuple(dict.fromkeys(format.caveat for format in formats if format.caveat))
        self.sharing_known = all(format.sharing_known for format in formats)
        self.counts = ReadCounts()

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yields the requests in order.

        Raises:
            TraceError: with file, line and reason, at the first record that can't be read (all but `skip_bad=True`);
                always where a file vanishes or changes under the reading, or a JSON array breaks off.
        """
        counts = self.counts = ReadCounts()
        if self._limit == 0:
            return
        first_ordinal = 0
        for file in self._files:
            for request in _FileRun(file, counts, first_ordinal, self._skip_bad).requests(self._cache_bytes):
                counts.num_requests += 1
                counts.num_empty += not request.prompt
                yield request
                if counts.num_requests == self._limit:
                    return
            first_ordinal += file.size_bytes // _MIN_RECORD_BYTES + 1


def _name(path: Path) -> str:
    return path.name.split(".")[0] or path.name


class _FileRun:
    """One reading of one file."""

    def __init__(self, file: TraceFile, counts: ReadCounts, first_ordinal: int, skip_bad: bool) -> None:
        self._file, self._counts, self._first_ordinal, self._skip_bad = file, counts, first_ordinal, skip_bad

    def requests(self, cache_bytes: int) -> Iterator[TraceRequest]:
        for _, item, turn in in_order(self._entries(), self._load, cache_bytes, self._odd):
            yield item.request(turn)

    def _entries(self) -> Iterator[Entry]:
        records = iter(self._file.source)
        if self._file.has_header:
            next(records, None)
        for record in records:
            try:
                item = self._parse(record, self._counts)
            except BadRecord as error:
                self._bad(record.number, str(error))
                continue
            if not item.num_requests:
                self._counts.num_without_output += 1
            yield Entry(record.number, record.offset, record.size_bytes, item)

    def _parse(self, record: Record, counts: ReadCounts | None = None) -> Item:
        """Reads a record; `counts` is told of the keys in it that were not read."""
        value, reader = self._file.decode(record), self._file.reader
        try:
            fields = Fields(value, ignored=reader.ignored)
            item = reader.parse(fields, record.number, self._first_ordinal + record.number)
            if counts is not None and (unread := [(name, num_chars(of)) for name, of in fields.unread()]):
                counts.add_unread(unread, num_chars(value))
            return item
        except RecursionError:
            raise BadRecord("nested too deeply") from None

    def _load(self, number: int, offset: int, size_bytes: int, num_requests: int) -> Item:
        source = self._file.source
        reason = "the file changed while it was read"
        try:
            item = self._parse(source.read(number, offset, size_bytes))
        except BadRecord as error:
            raise TraceError(source.path, f"{source.unit} {number}", f"{reason}: {error}") from None
        if item.num_requests != num_requests:
            raise TraceError(source.path, f"{source.unit} {number}", reason)
        return item

    def _bad(self, number: int, reason: str) -> None:
        source = self._file.source
        where = f"{source.unit} {number}"
        if not self._skip_bad:
            raise TraceError(source.path, where, f"{reason} (skip_bad, --skip-bad: count such records and go on)")
        self._counts.add_bad(TraceError(source.path, where, reason))

    def _odd(self, number: int, num_requests: int, is_timed: bool) -> None:
        """Counts the requests of a record that has a timestamp where others have none, or the other way round."""
        odd = self._counts.unordered if is_timed else self._counts.untimed
        odd.add(f"{self._file.source.path}: {self._file.source.unit} {number}", num_requests)


def check_limit(limit: int | None) -> None:
    """Raises ValueError unless `limit` is None or a number of requests."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError(f"limit: expected None or an integer >= 0, got {limit!r}")
