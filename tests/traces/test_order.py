"""The order of requests where some have a timestamp and others have none: never another one in silence."""

import random

import pytest

from radixkv.traces import open_trace
from radixkv.traces.order import LOOKAHEAD
from tests.traces.trace_files import conversation, write_lines


def read(path, stamps, **options):
    """Writes a request for each timestamp, None for one that has none; returns the order and the trace."""
    records = [
        {"id": str(i), "prompt": "p", **({} if stamp is None else {"timestamp": stamp})}
        for i, stamp in enumerate(stamps)
    ]
    trace = open_trace(write_lines(path, *records), **options)
    return [int(request.id) for request in trace], trace


@pytest.mark.parametrize(
    ("stamps", "order"),
    [
        ([3, 1, 2.5, 1], [1, 3, 2, 0]),
        ([3, 1, 2.5, 1, None], [1, 3, 4, 2, 0]),  # behind the one before it
        ([3, None, 1, 2.5], [2, 3, 0, 1]),
        ([3, None, None, 1], [3, 0, 1, 2]),
        ([None, 3, 1], [2, 0, 1]),  # nothing before it: before the first that has one
        ([None, None, 5, 1, None], [3, 4, 0, 1, 2]),
        ([None, -7, -9], [2, 0, 1]),
        ([0, None, -1], [2, 0, 1]),
        ([None, None], [0, 1]),
        ([3, "", 1], [2, 0, 1]),  # empty text is none
        ([" ", 1], [0, 1]),
    ],
)
def test_a_request_without_a_timestamp_keeps_its_place(tmp_path, stamps, order):
    found, trace = read(tmp_path / "t", stamps)
    assert found == order
    without = [at for at, stamp in enumerate(stamps) if stamp is None or isinstance(stamp, str)]
    untimed = len(without)
    mixed = 0 < untimed < len(stamps)
    assert trace.counts.untimed.num_requests == (untimed if mixed else 0)
    assert trace.counts.unordered.num_requests == 0
    assert bool(trace.counts.remarks()) == mixed
    if mixed:
        (line,) = trace.counts.remarks()
        assert f"{tmp_path / 't'}: line {without[0] + 1}: " in line
        assert line.startswith("1 request is" if untimed == 1 else f"{untimed} requests are")


def test_one_missing_timestamp_moves_no_other_request(tmp_path):
    rng = random.Random(1)
    for case in range(60):
        stamps = [rng.choice([rng.randrange(20), rng.random() * 20]) for _ in range(rng.randrange(2, 50))]
        whole, _ = read(tmp_path / "t", stamps)
        gone = rng.randrange(len(stamps))
        found, trace = read(tmp_path / "t", [*stamps[:gone], None, *stamps[gone + 1 :]], cache_bytes=case % 2 * 2**20)
        assert [i for i in found if i != gone] == [i for i in whole if i != gone]
        if gone:  # nothing comes between it and the one before it that is not as early
            assert found.index(gone) == found.index(gone - 1) + 1
        assert trace.counts.untimed.num_requests == 1
        assert trace.counts.untimed.first.endswith(f"line {gone + 1}")


def test_timestamps_that_come_late_are_passed_over_aloud(tmp_path):
    stamps = [None] * (LOOKAHEAD - 1) + [9, 3]
    assert read(tmp_path / "t", stamps)[0] == [LOOKAHEAD, *range(LOOKAHEAD)]
    stamps = [None] * LOOKAHEAD + [9, 3]
    found, trace = read(tmp_path / "t", stamps)
    assert found == list(range(LOOKAHEAD + 2))
    assert (trace.counts.untimed.num_requests, trace.counts.unordered.num_requests) == (0, 2)
    (line,) = trace.counts.remarks()
    assert "2 requests are in the order of the file" in line and f"line {LOOKAHEAD + 1}" in line


@pytest.mark.parametrize("cache_bytes", [0, 2**28])
def test_conversations_without_timestamps_among_those_that_have_them(tmp_path, cache_bytes):
    records = [
        conversation("a", 2, timestamps=[5, 9.5]),
        conversation("none", 0),
        conversation("late", 2),
        conversation("b", 1, timestamps=[7]),
        conversation("c", 2, timestamps=[0, 7]),
    ]
    trace = open_trace(write_lines(tmp_path / "t", *records), cache_bytes=cache_bytes)
    assert [r.id for r in trace] == ["c/0", "a/0", "late/0", "late/1", "b/0", "c/1", "a/1"]
    assert (trace.counts.untimed.num_requests, trace.counts.num_without_output) == (2, 1)
    assert trace.counts.untimed.first.endswith("line 3")


@pytest.mark.parametrize("num_turns", [1, 3])
def test_without_timestamps_requests_stream_after_a_few(tmp_path, num_turns):
    """A limit is kept without reading a file to its end: what can't be read there is not met."""
    path = write_lines(tmp_path / "t", *(conversation(f"c{i}", num_turns) for i in range(LOOKAHEAD)), "{")
    assert [r.id for r in open_trace(path, limit=LOOKAHEAD)] == [f"c{i}/0" for i in range(LOOKAHEAD)]
