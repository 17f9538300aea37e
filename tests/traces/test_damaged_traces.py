"""Good traces, damaged as files get damaged: an error with file and line, or the same requests; never fewer."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.traces import TraceError, open_trace

GOOD = {
    "requests": [{"prompt": f"prompt {i} äö", "output": "yes", "session": str(i % 2)} for i in range(4)],
    "conversations": [
        {"messages": [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "ü"}]}
        for i in range(3)
    ],
    "mooncake": [{"timestamp": i, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2 + i]} for i in range(4)],
    "azure": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,3,4", "2023-11-16 18:15:50.0,9,1"],
}


def lines_of(kind):
    return [(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)).encode() for line in GOOD[kind]]


def read(path, **options):
    """The requests as (prompt, output); None where the trace was refused."""
    try:
        return [(request.prompt, request.output) for request in open_trace(path, **options)]
    except TraceError as error:
        assert str(error).startswith(f"{path}: ") and error.reason
        return None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged") / "t.jsonl"


SAME = {
    "a byte order mark": lambda lines: b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n",
    "CRLF": lambda lines: b"\r\n".join(lines) + b"\r\n",
    "no last newline": lambda lines: b"\n".join(lines),
    "blank lines": lambda lines: b"\n\n".join(lines) + b"\n\n\n",
    "both": lambda lines: b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines),
}


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("how", SAME)
def test_the_same_requests_however_lines_end(scratch, kind, how):
    scratch.write_bytes(b"\n".join(lines_of(kind)) + b"\n")
    wanted = read(scratch)
    assert wanted
    scratch.write_bytes(SAME[how](lines_of(kind)))
    found = read(scratch)
    if kind in ("mooncake", "azure"):  # no text: fresh tokens for each line of the file, by its number
        wanted = [(len(prompt), len(output)) for prompt, output in wanted]
        found = [(len(prompt), len(output)) for prompt, output in found]
    assert found == wanted


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_other_encodings_are_refused(scratch, kind, encoding):
    text = b"\n".join(lines_of(kind)).decode()
    scratch.write_bytes(text.encode(encoding))
    if text.isascii() and encoding == "latin-1":
        assert read(scratch)
    else:
        assert read(scratch) is None


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(GOOD)), skip=st.booleans())
def test_cut_and_overwritten_anywhere(scratch, data, kind, skip):
    good = b"\n".join(lines_of(kind)) + b"\n"
    bad = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if bad:
            at = data.draw(st.integers(0, len(bad) - 1))
            bad[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    scratch.write_bytes(bytes(bad))
    read(scratch, skip_bad=skip)


def paths(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


@pytest.mark.parametrize("kind", ["requests", "conversations", "mooncake"])
@pytest.mark.parametrize("wrong", [None, [], {}, [None], {"a": None}, -1, 1e308, "x", True, [[[[None]]]]])
def test_null_and_other_kinds_in_every_place(scratch, kind, wrong):
    record = GOOD[kind][0]
    for path in paths(record):
        changed = json.loads(json.dumps(record))
        holder = {"root": changed}
        *above, last = ("root", *path)
        inside = holder
        for key in above:
            inside = inside[key]
        inside[last] = wrong
        scratch.write_text(json.dumps(holder["root"]) + "\n")
        read(scratch, format=kind)
        read(scratch, format=kind, skip_bad=True)


def long_line(path, num_bytes):
    """A good record, a line that is not closed, a good record; returns what reading it takes in memory."""
    with path.open("wb") as file:
        file.write(
            lines_of("requests")[0]
            + b"\n"
            + b'{"prompt": "'
            + b"a" * num_bytes
            + b"\n"
            + lines_of("requests")[1]
            + b"\n"
        )
    tracemalloc.start()
    found = read(path, skip_bad=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None and len(found) == 2
    return peak


def test_a_long_line_that_is_broken(tmp_path):
    assert long_line(tmp_path / "t.jsonl", 4 * 2**20) < 60 * 2**20


@pytest.mark.slow
def test_a_line_of_100_megabytes(tmp_path):
    assert long_line(tmp_path / "t.jsonl", 100 * 2**20) < 800 * 2**20
