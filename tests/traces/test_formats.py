"""Formats are recognised from content; what is none is refused with a reason, and never anything but TraceError."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.traces import FORMATS, TraceError, open_trace
from tests.traces.trace_files import conversation, write_lines


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no record in it"),
        (b"\n \r\n", "no record in it"),
        (b"\x1f\x8b\x08abc", "no whole gzip file"),
        (b"\xff\xfe{\x00}\x00", "this is UTF-16"),
        (b"PAR1", "this is Parquet"),
        (b"\x7fELF\x02\x01\x00\x00\n", "line 1: no JSON"),
        (b"hello\n", "line 1: no JSON"),
        (b'{"text": 1}\n', "line 1: format not recognised: .* got the keys 'text'"),
        (b"{}\n", "line 1: format not recognised: .* got an empty object"),
        (b"null\n", "line 1: expected a JSON object, got null"),
        (b"[]", "no record in it"),
        (b"[1]", "element 1: expected a JSON object, got a number"),
        (b'{"a":' * 100_000, "line 1: JSON nested too deeply"),
    ],
)
def test_no_trace(tmp_path, data, reason):
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=f"^{path}: {reason}"):
        open_trace(path)


def test_skip_bad_looks_further_for_the_format(tmp_path):
    path = write_lines(tmp_path / "t", b"\xff", "{", {"x": 1}, conversation("a", 1))
    with pytest.raises(TraceError, match="line 1: no UTF-8"):
        open_trace(path)
    trace = open_trace(path, skip_bad=True)
    assert [r.id for r in trace] == ["a/0"]
    assert trace.counts.num_bad == 3
    assert [error.where for error in trace.counts.examples] == ["line 1", "line 2", "line 3"]
    path = write_lines(tmp_path / "t", "nothing", "here")
    with pytest.raises(TraceError, match="line 1: no record can be read, the first because: no JSON"):
        open_trace(path, skip_bad=True)


def test_counts_start_anew_with_every_iteration(tmp_path):
    path = write_lines(tmp_path / "t", conversation("a", 2), "{", conversation("b", 0))
    trace = open_trace(path, skip_bad=True)
    for _ in range(2):
        assert len(list(trace)) == 2
        assert (trace.counts.num_requests, trace.counts.num_bad, trace.counts.num_without_output) == (2, 1, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "csv"}, f"format: expected one of {', '.join(FORMATS)}, got 'csv'"),
        ({"limit": -1}, "limit: expected"),
        ({"limit": True}, "limit: expected"),
        ({"cache_bytes": -1}, "cache_bytes: expected"),
        ({"tokenizer": "words"}, "tokenizer: expected 'bytes'"),
    ],
)
def test_bad_arguments(tmp_path, options, reason):
    path = write_lines(tmp_path / "t", {"prompt": "x"})
    with pytest.raises(ValueError, match=reason):
        open_trace(path, **options)


def test_no_paths():
    with pytest.raises(ValueError, match="paths: expected at least one"):
        open_trace([])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "image_url", "document"]) | JSON},
    optional={
        "text": JSON,
        "thinking": JSON,
        "name": JSON,
        "input": JSON,
        "content": JSON,
        "image_url": JSON | st.fixed_dictionaries({"url": st.text() | st.text().map("data:;base64,".__add__)}),
        "source": JSON | st.fixed_dictionaries({"type": JSON, "data": JSON}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.text() | JSON | st.lists(PART),
        "from": st.sampled_from(["human", "gpt"]) | JSON,
        "value": JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({"function": JSON}), max_size=2) | JSON,
        "name": JSON,
        "reasoning": JSON,
        "images": st.lists(st.text(), max_size=2) | JSON,
    },
)
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "messages": st.lists(MESSAGE, max_size=4) | JSON,
        "conversations": st.lists(MESSAGE, max_size=4) | JSON,
        "timestamps": st.lists(st.floats() | st.integers(), max_size=2) | JSON,
        "prompt": JSON,
        "prompt_token_ids": st.lists(st.integers()) | JSON,
        "body": st.fixed_dictionaries({}, optional={"messages": st.lists(MESSAGE), "prompt": JSON}) | JSON,
        "output": JSON,
        "response": JSON,
        "timestamp": JSON,
        "hash_ids": st.lists(st.integers(0, 5) | st.integers(), max_size=3) | JSON,
        "input_length": st.integers(1, 20) | JSON,
        "output_length": st.integers(0, 3) | JSON,
        "chat_id": JSON,
        "system": JSON | st.lists(PART, max_size=2),
        "tools": st.lists(JSON, max_size=2) | JSON,
        "documents": JSON,
        "response_format": JSON,
        "suffix": JSON,
        "model": JSON,
        "lora_request": JSON,
    },
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"", b","])
LINE = st.one_of(
    st.binary(max_size=40),
    RECORD.map(lambda record: json.dumps(record).encode()),
    RECORD.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")[:-1]),
    st.sampled_from(
        [
            json.dumps(conversation("a", 2)).encode(),
            b"TIMESTAMP,ContextTokens,GeneratedTokens",
            b"2023-11-16 18:15:46.68,3,4",
            b"2023-11-16,-3,4",
            b"\xef\xbb\xbf",
            b"[",
            b"]",
        ]
    ),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "t"


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(st.tuples(LINE, ENDS), max_size=6), format=st.none() | st.sampled_from(FORMATS), skip=st.booleans()
)
def test_arbitrary_bytes_never_raise_anything_but_trace_error(scratch, lines, format, skip):
    scratch.write_bytes(b"".join(line + end for line, end in lines))
    try:
        trace = open_trace(scratch, format=format, skip_bad=skip, cache_bytes=500)
        for request in trace:
            assert len(request.prompt) % 4 == 0 and len(request.output) % 4 == 0
    except TraceError as error:
        assert str(error).startswith(f"{scratch}: ")
        assert error.reason


@settings(max_examples=100, deadline=None)
@given(records=st.lists(RECORD, max_size=5), cut=st.integers(0, 200))
def test_arrays_of_anything_and_cut_anywhere(scratch, records, cut):
    data = json.dumps(records).encode()
    scratch.write_bytes(data[: max(0, len(data) - cut)] if cut % 2 else data)
    try:
        list(open_trace(scratch, skip_bad=True))
    except TraceError as error:
        assert str(error).startswith(f"{scratch}: ")


@settings(max_examples=100, deadline=None)
@given(bad=st.lists(st.binary(max_size=30).filter(lambda line: line.strip() and b"\n" not in line), max_size=4))
def test_skipped_and_good_lines_add_up(scratch, bad):
    bad = [line for line in bad if not line.isspace() and not line.startswith(b"\xef\xbb\xbf")]
    write_lines(scratch, {"prompt": "first"}, *bad, {"prompt": "last"})
    trace = open_trace(scratch, format="requests", skip_bad=True)
    assert len(list(trace)) == 2
    assert trace.counts.num_bad == len(bad)


@pytest.mark.parametrize("kind", ["requests", "conversations", "array", "mooncake"])
def test_a_large_trace_does_not_enter_memory(tmp_path, kind):
    """24 MB of text, or of block ids once they are decoded; 1 MB of cache allowed."""
    path = tmp_path / "t"
    num_records = 600 if kind == "mooncake" else 2400
    with path.open("w") as file:
        for i in range(num_records):
            if kind == "requests":
                file.write(json.dumps({"prompt": f"{i} " + "x" * 10_000}) + "\n")
            elif kind == "mooncake":
                ids = list(range(i * 1000, i * 1000 + 1000))
                record = {"timestamp": i, "input_length": 512_000, "output_length": 1, "hash_ids": ids}
                file.write(json.dumps(record) + "\n")
            else:
                file.write("[\n" if not i and kind == "array" else ",\n" if kind == "array" else "")
                file.write(json.dumps(conversation(f"{i} " + "x" * 2_500, 2)) + "\n")
        file.write("]" if kind == "array" else "")
    assert path.stat().st_size > (4e6 if kind == "mooncake" else 20e6)
    tracemalloc.start()
    trace = open_trace(path, cache_bytes=2**20, limit=100 if kind == "mooncake" else None)
    num_requests = sum(1 for _ in trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_requests == {"requests": 2400, "mooncake": 100}.get(kind, 4800)
    assert peak < 12 * 2**20
