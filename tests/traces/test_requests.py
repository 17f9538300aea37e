"""Single requests: prompts as text, ids or messages, and OpenAI's logs."""

import pytest

from radixkv.cache.namespace import Salt
from radixkv.cache.tokens import unpack
from radixkv.traces import TraceError, open_trace
from tests.traces.trace_files import read_texts, write_lines

CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
CHAT_PROMPT = (
    "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_prompts_and_outputs(tmp_path):
    path = write_lines(
        tmp_path / "t.requests.jsonl",
        {"id": "a", "prompt": "hé", "output": "x", "session": 7},
        {"prompt": ["one"], "output": None},
        {"id": 3, "messages": CHAT, "output": {"content": "z"}},
    )
    assert read_texts(path) == [("a", "hé", "x"), ("request2", "one", ""), ("3", CHAT_PROMPT, "z<|im_end|>\n")]
    assert [r.session for r in open_trace(path)] == ["7", None, None]


def test_token_ids(tmp_path):
    path = write_lines(
        tmp_path / "t", {"prompt_token_ids": [5, 2**31 - 1], "output_token_ids": [0]}, {"prompt": [1, 2, 3]}
    )
    first, second = open_trace(path)
    assert unpack(first.prompt).tolist() == [5, 2**31 - 1] and unpack(first.output).tolist() == [0]
    assert unpack(second.prompt).tolist() == [1, 2, 3]


def test_openai_batch_lines_and_responses(tmp_path):
    def response(choice):
        return {"status_code": 200, "body": {"choices": [choice]}}

    path = write_lines(
        tmp_path / "t",
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": CHAT}},
        {"custom_id": "d", "body": {"prompt": "p"}, "response": response({"text": "q"})},
        {"request": {"messages": CHAT}, "response": response({"message": {"role": "assistant", "content": "r"}})},
        {"body": {"prompt": "p", "cache_salt": "tenant"}, "response": {"error": {}}},
    )
    assert read_texts(path) == [
        ("c", CHAT_PROMPT, ""),
        ("d", "p", "q"),
        ("request3", CHAT_PROMPT, "r<|im_end|>\n"),
        ("request4", "p", ""),
    ]
    assert list(open_trace(path))[3].namespace == (Salt("tenant"),)


@pytest.mark.parametrize("key", ["model", "output", "session", "timestamp", "response"])
def test_messages_with_what_only_requests_have_are_one_request(tmp_path, key):
    path = write_lines(tmp_path / "t", {"messages": CHAT, key: None})
    assert open_trace(path).formats == ("requests",)
    assert read_texts(path) == [("request1", CHAT_PROMPT, "")]
    assert len(read_texts(path, format="conversations")) == 1


def test_timestamps_in_text(tmp_path):
    path = write_lines(
        tmp_path / "t",
        {"prompt": "p", "timestamp": "1970-01-01T00:01:00.5Z"},
        {"prompt": "p", "timestamp": "1970-01-01 01:00:00+01:00"},
        {"prompt": "p", "timestamp": " 1700000000.25 "},
    )
    assert [r.timestamp_s for r in open_trace(path)] == [0, 60.5, 1700000000.25]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "expected prompt, prompt_token_ids or messages, got none of them"),
        ({"prompt": None}, "got none of them"),
        ({"prompt": ["a", "b"]}, "prompt: expected one, got 2 in one record: give each a record of its own"),
        ({"prompt": [[1], [2]]}, "prompt: expected one, got 2 in one record"),
        ({"prompt": ["a", 1]}, "prompt: expected one, got 2 in one record"),
        ({"prompt": [1, "a"]}, "prompt: expected a list of token ids"),
        ({"prompt": {}}, "prompt: expected a list of token ids, got an object"),
        ({"prompt": "\udcff"}, "prompt: character 0 is a lone surrogate"),
        ({"prompt_token_ids": [-1]}, "expected token ids in 0..2147483647"),
        ({"prompt_token_ids": [2**31]}, "expected token ids in 0..2147483647"),
        ({"prompt_token_ids": [2**70]}, "expected token ids in 0..2147483647"),
        ({"prompt_token_ids": [1.5]}, "expected a list of token ids"),
        ({"prompt_token_ids": [True]}, "expected a list of token ids"),
        ({"prompt_token_ids": [1], "output": "x"}, "needs output_token_ids"),
        ({"prompt": "p", "output": 3}, "expected a JSON object, got a number"),
        ({"prompt": "p", "timestamp": float("inf")}, "timestamp: expected a finite number"),
        ({"prompt": "p", "timestamp": float("nan")}, "timestamp: expected a finite number"),
        ({"prompt": "p", "timestamp": 10**400}, "timestamp: expected a finite number"),
        ({"prompt": "p", "timestamp": "yesterday"}, "timestamp: expected a finite number or an ISO 8601 time"),
        ({"prompt": "p", "session": {}}, "session: expected a string or an integer"),
        ({"prompt": "p", "cache_salt": 1}, "cache_salt: expected a string"),
        ({"body": []}, "expected a JSON object, got a list"),
    ],
)
def test_bad_records_name_the_field(tmp_path, record, reason):
    path = write_lines(tmp_path / "t", record)
    with pytest.raises(TraceError, match=f"line 1: .*{reason}"):
        list(open_trace(path, format="requests"))
    assert list(open_trace(path, format="requests", skip_bad=True)) == []
