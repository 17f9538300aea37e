"""Records come out of files whole, numbered and re-readable, or with an error that says why not."""

import gzip
import json
import tracemalloc

import pytest

from radixkv.traces.problems import BadRecord, TraceError
from radixkv.traces.sources import JsonArray, Lines


def reread(source):
    return [source.read(r.number, r.offset, r.size_bytes).text for r in source]


def test_lines_keep_their_numbers_across_blank_ones(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf\n  \r\n{}\r\n\n[1]\n7")
    records = list(Lines(path))
    assert [(r.number, r.json()) for r in records] == [(3, {}), (5, [1]), (6, 7)]
    assert reread(Lines(path)) == [r.text for r in records]


def test_byte_order_mark_before_the_first_record_is_no_part_of_it(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b'\xef\xbb\xbf{"a":"\xc3\xa9"}\r\n')
    assert [r.json() for r in Lines(path)] == [{"a": "é"}]
    assert reread(Lines(path)) == ['{"a":"é"}\r\n']


@pytest.mark.parametrize("tail", [b"\n{}\n", b""])
def test_a_long_line_is_an_error_of_its_own(tmp_path, tail):
    path = tmp_path / "t"
    path.write_bytes(b"{}\n" + b"x" * 5000 + tail)
    records = list(Lines(path, max_bytes=100))
    assert records[1].error == "longer than 100 bytes"
    assert [r.number for r in records] == ([1, 2, 3] if tail else [1, 2])
    if tail:
        assert Lines(path).read(3, records[2].offset, records[2].size_bytes).json() == {}


def test_a_hundred_megabyte_line_neither_enters_memory_nor_hides_the_next(tmp_path):
    path = tmp_path / "t"
    with path.open("wb") as file:
        file.seek(100 * 2**20)
        file.write(b"\n{}\n")
    tracemalloc.start()
    records = list(Lines(path, max_bytes=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [r.number for r in records] == [1, 2] and records[0].error and records[1].json() == {}
    assert peak < 8 * 2**20


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": "\xff"}\n', "no UTF-8"),
        (b'{"a": ', "truncated"),
        (b"{'a': 1}\n", "no JSON"),
        (b"\x00\x01\x02\n", "no JSON"),
        (b"[" * 200_000 + b"\n", "nested too deeply"),
        (b"9" * 5000 + b"\n", "no JSON"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path, data, reason):
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(BadRecord, match=reason):
        next(iter(Lines(path))).json()


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_array_elements_stream_whatever_the_chunks(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr("radixkv.traces.sources._CHUNK_BYTES", chunk)
    values = [{"a": "é" * n, "b": [n, -1.5e3, None, True, '\\"']} for n in range(9)] + ["…", 12345, []]
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf " + json.dumps(values, indent=indent, ensure_ascii=False).encode() + b" \n")
    source = JsonArray(path)
    assert [r.json() for r in source] == values
    assert [r.number for r in source] == list(range(1, len(values) + 1))
    assert [json.loads(text) for text in reread(source)] == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{}, {]", "element 2: no JSON"),
        ("[{} {}]", "expected a comma or the array's end after element 1"),
        ("[{}, {}", "expected a comma"),
        ("[{}, ", "element 2: no JSON"),
        ("[{}] []", "more after the array"),
        ('[{"a": "' + "x" * 100, "no JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("[" + "9" * 5000 + "]", "no JSON"),
        ("{}", "expected the start of an array"),
    ],
)
def test_a_broken_array_ends_the_reading(tmp_path, text, reason):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=reason):
        list(JsonArray(path))


def test_a_long_element_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("radixkv.traces.sources._CHUNK_BYTES", 64)
    path = tmp_path / "t"
    path.write_text('["' + "x" * 10_000 + '"]')
    with pytest.raises(TraceError, match="longer than 1000 bytes"):
        list(JsonArray(path, max_bytes=1000))


def test_an_array_that_is_no_utf8(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b'["a\xff' + b"b" * 50 + b'"]')
    with pytest.raises(TraceError, match="no UTF-8 near byte 3"):
        list(JsonArray(path))


@pytest.mark.parametrize("source", [Lines, JsonArray])
def test_no_file(tmp_path, source):
    with pytest.raises(TraceError, match="no such file"):
        list(source(tmp_path / "none"))
    with pytest.raises(TraceError, match="not a regular file"):
        list(source(tmp_path))


@pytest.mark.parametrize("source", [Lines, JsonArray])
def test_a_file_that_shrinks_under_the_reading(tmp_path, source):
    path = tmp_path / "t"
    path.write_text("[{}]")
    record = next(iter(source(path)))
    path.write_text("")
    with pytest.raises(TraceError, match="became shorter"):
        source(path).read(record.number, record.offset, record.size_bytes)


# ---- gzip


def test_a_packed_file_reads_as_what_is_in_it(tmp_path):
    lines = b"".join(b'{"n": %d}\n' % n for n in range(3000))
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    assert [record.json()["n"] for record in Lines(path)] == list(range(3000))
    assert reread(Lines(path)) == [line + "\n" for line in lines.decode().splitlines()]
    path.write_bytes(gzip.compress(b"[1, 2]"))  # the same name, another content
    assert [record.json() for record in JsonArray(path)] == [1, 2]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + b"\0\0\0" + data[43:]])
def test_a_packed_file_that_is_damaged_is_an_error(tmp_path, damage):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(damage(gzip.compress(json.dumps([{"n": n * n} for n in range(500)]).encode())))
    with pytest.raises(TraceError, match="gzip"):
        list(Lines(path))
