"""Conversations: which requests they hold, in which order, with which text."""

import json

import pytest

from radixkv.cache.namespace import Media
from radixkv.traces import TraceError, open_trace
from tests.traces.trace_files import conversation, read_texts, text_of, write_lines


def test_every_assistant_message_is_a_request(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "tool", "content": "é"},
        {"role": "assistant", "content": "Bye"},
        {"role": "user", "content": "unanswered"},
    ]
    path = write_lines(tmp_path / "chat.conversations.jsonl", {"id": "a", "messages": messages})
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert read_texts(path) == [
        ("a/0", start, "Hello<|im_end|>\n"),
        (
            "a/1",
            start + "Hello<|im_end|>\n<|im_start|>tool\né<|im_end|>\n<|im_start|>assistant\n",
            "Bye<|im_end|>\n",
        ),
    ]
    trace = open_trace(path)
    assert (trace.name, trace.formats, trace.sharing_known) == ("chat", ("conversations",), True)
    assert [r.session for r in trace] == ["a", "a"]
    assert trace.counts.num_requests == 2


def test_conversations_take_turns(tmp_path):
    path = write_lines(tmp_path / "t", conversation("a", 2), conversation("b", 1), conversation("c", 3))
    assert [r.id for r in open_trace(path)] == ["a/0", "b/0", "c/0", "a/1", "c/1", "c/2"]


def test_timestamps_order(tmp_path):
    timed = [
        conversation("a", 2, timestamps=[5, 9.5]),
        conversation("b", 1, timestamps=[7]),
        conversation("c", 2, timestamps=[0, 7]),
        conversation("none", 0),
    ]
    path = write_lines(tmp_path / "t", *timed)
    assert [(r.id, r.timestamp_s) for r in open_trace(path)] == [
        ("c/0", 0),
        ("a/0", 5),
        ("b/0", 7),
        ("c/1", 7),
        ("a/1", 9.5),
    ]


@pytest.mark.parametrize("cache_bytes", [0, 3000, 2**28])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("as_array", [True, False])
def test_what_is_kept_in_memory_changes_nothing(tmp_path, cache_bytes, timed, as_array):
    records = [
        conversation(f"c{i}", i % 4, **({"timestamps": [(7 * i + 5 * t) % 13 for t in range(i % 4)]} if timed else {}))
        for i in range(20)
    ]
    path = tmp_path / "t"
    if as_array:
        path.write_text(json.dumps(records))
    else:
        write_lines(path, *records)
    trace = open_trace(path, cache_bytes=cache_bytes)
    got = list(trace)
    assert got == list(trace) == list(open_trace(path))
    assert len(got) == 30 and trace.counts.num_without_output == 5
    for request in got:
        label, turn = request.id.split("/")
        assert text_of(request.output) == f"{label} says {turn}<|im_end|>\n"
        assert text_of(request.prompt).count("<|im_start|>assistant") == int(turn) + 1


def test_a_file_that_changes_under_the_reading(tmp_path):
    path = write_lines(tmp_path / "t", conversation("a", 2), conversation("b", 2))
    requests = iter(open_trace(path, cache_bytes=0, skip_bad=True))
    next(requests), next(requests)
    path.write_bytes(path.read_bytes().replace(b"assistant", b"assistent"))
    with pytest.raises(TraceError, match="line 1: the file changed while it was read"):
        next(requests)


def test_sharegpt(tmp_path):
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h"},
        {"from": "gpt", "value": "g"},
        {"from": "observation", "value": "o"},
        {"from": "function_call", "value": "f"},
    ]
    records = [{"id": "x", "conversations": turns}, {"conversations": [{"from": "bard", "value": "first"}]}]
    expected = [
        ("x/0", "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\n", "g"),
        ("conversation2/0", "<|im_start|>assistant\n", "first"),
        (
            "x/1",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\ng<|im_end|>\n"
            "<|im_start|>tool\no<|im_end|>\n<|im_start|>assistant\n",
            "f",
        ),
    ]
    path = write_lines(tmp_path / "lines.jsonl", *records)
    assert read_texts(path) == [(i, p, o + "<|im_end|>\n") for i, p, o in expected]
    path = tmp_path / "array.json"
    path.write_text(json.dumps(records, indent=1))
    assert read_texts(path) == [(i, p, o + "<|im_end|>\n") for i, p, o in expected]


def test_tool_calls_and_tools(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"x":  1}'}}
    messages = [
        {"role": "user", "content": "u", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "assistant", "content": "so", "function_call": {"name": "put", "arguments": {"é": [1]}}},
    ]
    tools = [{"type": "function", "function": {"name": "get"}}]
    path = write_lines(tmp_path / "t", {"id": "a", "messages": messages, "tools": tools})
    (_, prompt, first), (_, _, second) = read_texts(path)
    assert prompt.startswith(
        '<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "get"}}\n</tools>'
        "<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    )
    one = '<tool_call>\n{"name": "get", "arguments": {"x":  1}}\n</tool_call>'
    assert first == f"{one}\n{one}<|im_end|>\n"
    assert second == 'so\n<tool_call>\n{"name": "put", "arguments": {"é": [1]}}\n</tool_call><|im_end|>\n'


def test_content_parts_and_media(tmp_path):
    def image(url):
        return {"type": "image_url", "image_url": {"url": url}}

    def parts(url):
        return [{"type": "text", "text": "look: "}, image(url), "?", {"type": "input_text", "text": "!"}]

    records = [
        {
            "id": url,
            "messages": [
                {"role": "user", "content": parts(url)},
                {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
                {"role": "user", "content": parts("other")},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
        }
        for url in "XY"
    ]
    requests = list(open_trace(write_lines(tmp_path / "t", *records)))
    text = "<|im_start|>user\nlook: <|vision_start|><|image_pad|><|vision_end|>?!<|im_end|>\n"
    assert text_of(requests[0].prompt) == text + "<|im_start|>assistant\n"
    (x,), (y,) = requests[0].namespace, requests[1].namespace
    assert isinstance(x, Media) and x.digest != y.digest
    assert (x.start, x.length) == (text.index("<|image_pad|>"), len("<|image_pad|>"))
    later = requests[2].namespace
    assert later[0] == x and later[1].start == text_of(requests[2].prompt).rindex("<|image_pad|>")
    assert requests[2].namespace[1] == requests[3].namespace[1]


def test_anthropic_blocks(tmp_path):
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "ls", "input": {"d": "/"}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "etc"}]}]},
        {"role": "assistant", "content": "done"},
    ]
    path = write_lines(tmp_path / "t", {"messages": messages})
    assert '<tool_call>\n{"name": "ls", "arguments": {"d": "/"}}\n</tool_call>' in read_texts(path)[0][2]
    assert "<|im_start|>user\n<tool_response>\netc\n</tool_response><|im_end|>" in read_texts(path)[1][1]


GOOD = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "expected a JSON object, got a list"),
        ({"messages": None}, "messages: expected a list of messages, got null"),
        ({"messages": [None]}, r"messages\[0\]: expected a message \(an object\), got null"),
        ({"messages": [GOOD, {}]}, r"messages\[1\]: expected `role` or `from`, got an empty object"),
        ({"messages": [{"role": None, "content": "x"}]}, r"messages\[0\]\.role: expected a string, got null"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: expected text or a list of parts, got null"),
        ({"messages": [{"role": "user", "content": 7}]}, r"content: expected text or a list of parts, got a number"),
        ({"messages": [{"role": "user", "content": [None]}]}, r"content\[0\]: expected a part .*, got null"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\]: expected text, got null"),
        ({"messages": [{"role": "user", "content": [{"type": ["?"]}]}]}, r"content\[0\]\.type: expected one of"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "character 0 is a lone surrogate"),
        ({"messages": [{**GOOD, "tool_calls": [None]}]}, r"tool_calls\[0\]: expected an object, got null"),
        ({"messages": [{**GOOD, "tool_calls": {}}]}, "tool_calls: expected a list, got an object"),
        ({"messages": [{**GOOD, "tool_calls": [{"function": None}]}]}, "function: expected an object, got null"),
        ({"messages": [{**GOOD, "function_call": {"name": None}}]}, "function_call.name: expected a string"),
        ({"messages": [GOOD], "timestamps": [1, 2]}, "timestamps: expected a list of 1, .*, got 2"),
        ({"messages": [GOOD], "timestamps": [None]}, r"timestamps\[0\]: expected a time, got none"),
        ({"messages": [GOOD], "timestamps": [True]}, r"timestamps\[0\]: expected a finite number"),
        ({"messages": [GOOD], "timestamps": "x"}, "timestamps: expected a list of 1, .*, got a string"),
        ({"messages": [GOOD], "tools": "x"}, "tools: expected a list of objects, got a string"),
        ({"messages": [GOOD], "id": []}, "id: expected a string or an integer, got a list"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\]\.from: expected one of human"),
    ],
)
def test_bad_records_name_file_line_and_field(tmp_path, record, reason):
    path = write_lines(tmp_path / "t", conversation("a", 1), record, conversation("b", 1))
    with pytest.raises(TraceError, match=rf"{path}: line 2: .*{reason}"):
        list(open_trace(path))
    trace = open_trace(path, skip_bad=True)
    assert [r.id for r in trace] == ["a/0", "b/0"]
    assert trace.counts.num_bad == 1
    assert trace.counts.examples[0].where == "line 2"


def test_limit_and_several_files(tmp_path):
    first = write_lines(tmp_path / "one.jsonl", conversation("a", 2), conversation("b", 1))
    second = write_lines(tmp_path / "two.jsonl", {"prompt": "p", "id": "r"})
    trace = open_trace([first, str(second)])
    assert [r.id for r in trace] == ["a/0", "b/0", "a/1", "r"]
    assert (trace.name, trace.formats) == ("one+two", ("conversations", "requests"))
    for limit in range(6):
        limited = open_trace([first, second], limit=limit)
        assert [r.id for r in limited] == ["a/0", "b/0", "a/1", "r"][:limit]
        assert limited.counts.num_requests == min(limit, 4)


SYSTEM, USER, ANSWER = ({"role": role, "content": role} for role in ("system", "user", "assistant"))


@pytest.mark.parametrize(
    ("record", "format", "num_requests"),
    [
        ({"messages": [SYSTEM, USER]}, "requests", 1),
        ({"model": "m", "messages": [SYSTEM, USER]}, "requests", 1),
        ({"messages": [SYSTEM, USER, ANSWER, USER]}, "requests", 1),
        ({"model": "m", "messages": [USER, ANSWER, USER, ANSWER, USER]}, "requests", 1),
        ({"messages": [SYSTEM, USER, ANSWER]}, "conversations", 1),
        ({"model": "m", "messages": [USER, ANSWER, USER, ANSWER]}, "conversations", 2),
        ({"timestamp": 1.0, "messages": [SYSTEM, USER, ANSWER]}, "requests", 1),
    ],
)
def test_messages_that_end_with_an_answer_are_a_conversation(tmp_path, record, format, num_requests):
    trace = open_trace(write_lines(tmp_path / "log.jsonl", record))
    requests = list(trace)
    assert (trace.formats, len(requests)) == ((format,), num_requests)
    last = requests[-1]
    assert text_of(last.prompt).endswith("user<|im_end|>\n<|im_start|>assistant\n")
    assert (text_of(last.output) == "assistant<|im_end|>\n") == (record["messages"][-1] is ANSWER)
