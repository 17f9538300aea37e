"""Every part of a record that an engine renders is in the tokens, to the token; every other key is named."""

import copy
import json
import random

import pytest

from radixkv.cache.namespace import LoRA, Salt
from radixkv.cache.tokens import unpack
from radixkv.traces import TraceError, open_trace
from radixkv.traces.problems import OTHER_KEYS
from tests.traces.trace_files import read_texts, text_of, write_lines

HEAD = "<|im_start|>assistant\n"
MEDIA = "<|vision_start|><|image_pad|><|vision_end|>"


def said(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


USER = {"role": "user", "content": "u"}
TOOL = {"type": "function", "function": {"name": "get"}, "cache_control": {"type": "ephemeral"}}
TOOLS = '# Tools\n\n<tools>\n{"type": "function", "function": {"name": "get"}}\n</tools>'
CALL = {"name": "ls", "arguments": {"d": "/"}}
CALLED = '<tool_call>\n{"name": "ls", "arguments": {"d": "/"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"

# A record, its prompt and its output.
SHAPES = {
    "Anthropic": (
        {
            "model": "m",
            "max_tokens": 5,
            "system": "s",
            "messages": [USER],
            "tools": [TOOL],
            "response": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "t", "name": "ls", "input": {}}],
                "stop_reason": "tool_use",
                "usage": {"input_tokens": 1},
            },
        },
        said("system", f"s\n\n{TOOLS}") + said("user", "u") + HEAD,
        'a<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n',
    ),
    "a system prompt in blocks": (
        {
            "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t", "cache_control": {}}],
            "messages": [USER],
        },
        said("system", "st") + said("user", "u") + HEAD,
        "",
    ),
    "a system prompt of its own and one among the messages": (
        {"system": "s", "messages": [{"role": "system", "content": "t"}, USER], "functions": [{"name": "get"}]},
        said("system", 's\n\nt\n\n# Tools\n\n<tools>\n{"name": "get"}\n</tools>') + said("user", "u") + HEAD,
        "",
    ),
    "a system prompt of nothing": (
        {"system": "", "messages": [USER], "tools": [], "functions": None},
        said("user", "u") + HEAD,
        "",
    ),
    "everything beside messages": (
        {
            "messages": [USER],
            "response_format": {"type": "json_object"},
            "documents": [{"title": "é"}, "text"],
            "functions": [{"name": "f"}],
            "tools": [TOOL],
        },
        said(
            "system",
            TOOLS.removesuffix("</tools>")
            + '{"name": "f"}\n</tools>\n\n# Documents\n\n<documents>\n{"title": "é"}\ntext\n</documents>\n\n'
            '# Response format\n\n<response_format>\n{"type": "json_object"}\n</response_format>',
        )
        + said("user", "u")
        + HEAD,
        "",
    ),
    "a prompt with a system prompt": (
        {"system": "s", "prompt": "p", "output": "o"},
        said("system", "s") + said("user", "p") + HEAD,
        "o<|im_end|>\n",
    ),
    "a prompt with images": (
        {"prompt": "p", "images": ["aGk="], "response": "o"},
        said("user", MEDIA + "p") + HEAD,
        "o<|im_end|>\n",
    ),
    "a prompt with tools": ({"prompt": "p", "tools": [TOOL]}, said("system", TOOLS) + said("user", "p") + HEAD, ""),
    "a prompt with a suffix": (
        {"prompt": "p", "suffix": "q", "output": "o"},
        "<|fim_prefix|>p<|fim_suffix|>q<|fim_middle|>",
        "o",
    ),
    "a prompt alone": ({"prompt": "p", "temperature": 0.5, "user": "x"}, "p", ""),
    "an empty prompt with a system prompt": (
        {"prompt": "", "system": "s"},
        said("system", "s") + said("user", "") + HEAD,
        "",
    ),
    "ShareGPT with a system prompt": (
        {
            "system": "s",
            "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
            "tools": [TOOL],
        },
        said("system", f"s\n\n{TOOLS}") + said("user", "u") + HEAD,
        "a<|im_end|>\n",
    ),
    "names and results of tools": (
        {
            "messages": [
                {"role": "user", "name": "bob", "content": "u"},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "7", "type": "function", "function": CALL}]},
                {"role": "tool", "name": "ls", "tool_call_id": "7", "content": "etc"},
            ]
        },
        said("user name=bob", "u") + said("assistant", CALLED) + said("tool name=ls tool_call_id=7", "etc") + HEAD,
        "",
    ),
    "an answer with a name": (
        {"messages": [USER, {"role": "assistant", "name": "eve", "content": "a"}]},
        said("user", "u") + "<|im_start|>assistant name=eve\n",
        "a<|im_end|>\n",
    ),
    "thoughts, said twice": (
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "hm", "reasoning": "hm"}, USER]},
        said("user", "u") + said("assistant", THOUGHT + "a") + said("user", "u") + HEAD,
        "",
    ),
    "thoughts and calls": (
        {"messages": [USER], "output": {"content": None, "thinking": "hm", "function_call": CALL}},
        said("user", "u") + HEAD,
        THOUGHT + CALLED + "<|im_end|>\n",
    ),
    "thoughts in parts": (
        {
            "messages": [USER],
            "output": {
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "xyz"},
                    {"type": "redacted_thinking", "data": "hm"},
                    {"type": "text", "text": "a"},
                ]
            },
        },
        said("user", "u") + HEAD,
        THOUGHT * 2 + "a<|im_end|>\n",
    ),
    "results of tools in parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "7",
                            "is_error": True,
                            "content": [
                                {"type": "text", "text": "etc"},
                                {"type": "image", "source": {"type": "base64", "data": "aGk="}},
                            ],
                        },
                        {"type": "tool_result", "tool_use_id": "8", "is_error": False},
                        "so",
                    ],
                }
            ]
        },
        said(
            "user",
            f"<tool_response tool_use_id=7 is_error=true>\netc{MEDIA}\n</tool_response>"
            "<tool_response tool_use_id=8>\n\n</tool_response>so",
        )
        + HEAD,
        "",
    ),
    "documents that are text": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
                        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "e"}]}},
                    ],
                }
            ]
        },
        said("user", "de") + HEAD,
        "",
    ),
    "Ollama's chat": (
        {
            "model": "m",
            "messages": [{"role": "user", "content": "u", "images": ["aGk="]}],
            "options": {"temperature": 1},
            "response": {"model": "m", "message": {"role": "assistant", "content": "a"}, "done": True},
        },
        said("user", MEDIA + "u") + HEAD,
        "a<|im_end|>\n",
    ),
    "a refusal": (
        {
            "messages": [USER],
            "response": {"choices": [{"message": {"role": "assistant", "content": None, "refusal": "no"}, "index": 0}]},
        },
        said("user", "u") + HEAD,
        "no<|im_end|>\n",
    ),
    "token ids and what they were made of": (
        {"prompt_token_ids": [104, 105], "prompt": "hi", "output_token_ids": [33], "output": "!", "messages": [USER]},
        "hi",
        "!",
    ),
    "an answer of no parts": (
        {"messages": [USER], "output": {"content": []}},
        said("user", "u") + HEAD,
        "<|im_end|>\n",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_to_the_token(tmp_path, shape):
    record, prompt, output = SHAPES[shape]
    path = write_lines(tmp_path / "t", record)
    (found,) = read_texts(path)
    assert found[1:] == (prompt, output)
    trace = open_trace(path)
    list(trace)
    assert trace.counts.unread == {} and trace.counts.remarks() == []
    if "conversations" not in record:
        beside = {key: value for key, value in record.items() if key in LOG}
        body = {key: value for key, value in record.items() if key not in LOG}
        inner = write_lines(tmp_path / "inner", {"body": body, **beside})
        assert read_texts(inner)[0][1:] == (prompt, output)


LOG = ("output", "output_token_ids", "response")  # what stands beside a body


@pytest.mark.parametrize("key", ["model", "lora", "adapter_id", "lora_request"])
@pytest.mark.parametrize("where", ["record", "body", "conversation"])
def test_models_and_adapters_are_kept_apart(tmp_path, key, where):
    def record(name):
        asked = {"messages": [USER]} if where != "conversation" else {"messages": [USER, {**USER, "role": "assistant"}]}
        named = {} if name is None else {key: name}
        return (
            {"body": asked, **named}
            if where == "record"
            else {"body": asked | named}
            if where == "body"
            else (asked | named)
        )

    names = ["m", "n", {"lora_name": "x", "lora_int_id": 1}] if key == "lora_request" else ["m", "n"]
    trace = open_trace(write_lines(tmp_path / "t", *map(record, [*names, None])))
    found = list(trace)
    assert len({request.prompt for request in found}) == 1 and trace.counts.unread == {}
    assert len({request.namespace for request in found}) == len(found)
    assert found[0].namespace == (LoRA("m"),) and found[-1].namespace is None


def test_model_adapter_and_salt_together(tmp_path):
    record = {"model": "m", "request": {"prompt": "p", "model": "inner", "lora": 7, "cache_salt": "s"}}
    (request,) = open_trace(write_lines(tmp_path / "t", record))
    assert request.namespace == (LoRA("inner"), LoRA("7"), Salt("s"))


# ---- keys that are not understood


def test_an_unknown_key_is_named_once_with_its_count_and_share(tmp_path):
    records = [
        {"messages": [{**USER, "mood": "fine"}] * 2, "extra": {"text": "x" * 90}, "id": str(i)} for i in range(5)
    ]
    trace = open_trace(write_lines(tmp_path / "t", *records, {"messages": [USER], "extra": None}))
    assert len(list(trace)) == 6
    unread = trace.counts.unread
    assert set(unread) == {"messages[].mood", "extra"}
    assert (unread["messages[].mood"].num_times, unread["extra"].num_times) == (10, 5)
    size = sum(len(json.dumps(record)) for record in records)
    assert unread["extra"].num_record_chars == unread["messages[].mood"].num_record_chars == size
    assert unread["extra"].share == 5 * len(json.dumps(records[0]["extra"])) / size
    first, second = trace.counts.remarks()
    assert (
        first == f"extra is not understood and was not read: 5 times, {unread['extra'].share:.1%} of its records' text"
    )
    assert second.startswith("messages[].mood is not understood and was not read: 10 times, ")
    list(trace)
    assert trace.counts.unread["extra"].num_times == 5  # counted anew, and once though records are read twice
    trace = open_trace(tmp_path / "t", cache_bytes=0)
    list(trace)
    assert trace.counts.unread == unread


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": "p", "messages": [USER]}, ["messages"]),
        ({"prompt": "p", "input_ids": [1, 2]}, ["input_ids"]),
        ({"prompt": "p", "output": "o", "response": "other"}, ["response"]),
        ({"prompt": [1, 2], "system": "s"}, ["system"]),
        ({"body": {"prompt": "p"}, "system": "s"}, ["system"]),
        ({"body": {"prompt": "p"}, "request": {"prompt": "q"}}, ["request"]),
        ({"messages": [{"role": "user", "content": "c", "value": "v"}]}, ["messages[].value"]),
        ({"messages": [{"role": "user", "from": "human", "content": "c"}]}, ["messages[].from"]),
        ({"messages": [{**USER, "reasoning": {"effort": "high"}}]}, ["messages[].reasoning"]),
        ({"prompt": "p", "response": {"choices": [{"text": "a"}, {"text": "b"}]}}, ["response.choices[1:]"]),
        ({"prompt": "p", "response": {"body": {"choices": [{"text": "a", "z": 1}]}}}, ["response.body.choices[].z"]),
        ({"prompt": "p", "response": {"candidates": ["a"]}}, ["response.candidates"]),
        ({"prompt": "p", "a\nb": 1}, [r"'a\nb'"]),
        ({"prompt": "p", "context": [0], "none": None, "empty": {}, "list": [], "text": ""}, ["context"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": 1}]}]},
            ["messages[].content[].bold"],
        ),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {**CALL, "strict": 1}}]}]},
            ["messages[].tool_calls[].function.strict"],
        ),
        ({"hash_ids": [1], "input_length": 3, "model": "m"}, ["model"]),
    ],
)
def test_what_is_passed_over_is_named(tmp_path, record, named):
    trace = open_trace(write_lines(tmp_path / "t", record))
    assert len(list(trace)) == 1
    assert list(trace.counts.unread) == named


def test_a_record_that_is_skipped_names_nothing(tmp_path):
    trace = open_trace(
        write_lines(tmp_path / "t", {"prompt": 5, "extra": 1}, {"prompt": "p"}), format="requests", skip_bad=True
    )
    assert len(list(trace)) == 1 and trace.counts.num_bad == 1 and trace.counts.unread == {}


def test_keys_that_are_data_do_not_fill_memory(tmp_path):
    trace = open_trace(write_lines(tmp_path / "t", *({"prompt": "p", f"k{i}": 1, f"l{i}": 1} for i in range(300))))
    list(trace)
    assert len(trace.counts.unread) == 101 and trace.counts.unread[OTHER_KEYS].num_times == 500
    assert sum(key.num_times for key in trace.counts.unread.values()) == 600


# ---- random records


def objects_of(record):
    """Yields (name of its keys, object) of each object whose keys are looked at one by one."""
    yield "", record
    for key in ("body", "request", "output", "response"):
        if isinstance(record.get(key), dict):
            yield from ((f"{key}.{name}" if name else f"{key}.", inside) for name, inside in objects_of(record[key]))
    if isinstance(record.get("choices"), list):
        yield "choices[].", record["choices"][0]
        yield from message_objects("choices[].message.", record["choices"][0].get("message"))
    for key in ("messages", "conversations"):
        for message in record.get(key, ()):
            yield from message_objects(f"{key}[].", message)
    if isinstance(record.get("system"), list):
        yield from (("system[].", part) for part in record["system"])
    if isinstance(record.get("content"), list):
        yield from (("content[].", part) for part in record["content"])


def message_objects(name, message):
    if not isinstance(message, dict):
        return
    yield name, message
    for key in ("content", "tool_calls"):
        for part in message.get(key) or () if isinstance(message.get(key), list) else ():
            yield f"{name}{key}[].", part
            if isinstance(part.get("function"), dict):
                yield f"{name}{key}[].function.", part["function"]
            if isinstance(part.get("source"), dict):
                yield f"{name}{key}[].source.", part["source"]
            if isinstance(part.get("image_url"), dict):
                yield f"{name}{key}[].image_url.", part["image_url"]
    if isinstance(message.get("function_call"), dict):
        yield f"{name}function_call.", message["function_call"]


def a_text(rng):
    return "".join(rng.choice("ab é\n") for _ in range(rng.randrange(1, 8))) + str(rng.randrange(10**9))


def some_parts(rng):
    parts = [
        {"type": "text", "text": a_text(rng)},
        {"type": "thinking", "thinking": a_text(rng)},
        {"type": "tool_use", "id": "1", "name": a_text(rng), "input": {"x": a_text(rng)}},
        {"type": "tool_result", "tool_use_id": a_text(rng), "content": a_text(rng)},
        {"type": "image_url", "image_url": {"url": "https://x/" + str(rng.random()), "detail": "low"}},
        {"type": "image", "source": {"type": "url", "url": "https://x/" + str(rng.random())}},
    ]
    return rng.sample(parts, rng.randrange(1, 4))


def a_message(rng, key="role"):
    if key == "from":
        return {"from": rng.choice(["human", "gpt", "tool"]), "value": a_text(rng)}
    message = {"role": rng.choice(["user", "assistant", "tool"]), "content": rng.choice([a_text, some_parts])(rng)}
    for more in MESSAGE_KEYS:
        if rng.random() < 0.15:
            message[more] = MESSAGE_KEYS[more](rng)
    return message


def a_tool(rng):
    return {"type": "function", "function": {"name": a_text(rng)}}


def a_call(rng):
    return {"name": a_text(rng), "arguments": rng.choice([a_text(rng), {"x": a_text(rng)}])}


# Keys that are understood: leaving one out, or putting one in, changes the tokens or the namespace.
MESSAGE_KEYS = {
    "name": a_text,
    "tool_call_id": a_text,
    "reasoning_content": a_text,
    "reasoning": a_text,
    "thinking": a_text,
    "refusal": a_text,
    "images": lambda rng: [str(rng.random())],
    "tool_calls": lambda rng: [{"id": "1", "type": "function", "function": a_call(rng)}],
    "function_call": a_call,
}
BODY_KEYS = {
    "system": lambda rng: rng.choice([a_text(rng), [{"type": "text", "text": a_text(rng)}]]),
    "tools": lambda rng: [a_tool(rng)],
    "functions": lambda rng: [{"name": a_text(rng)}],
    "documents": lambda rng: [{"title": a_text(rng)}, a_text(rng)],
    "response_format": lambda rng: {"type": a_text(rng)},
    "model": a_text,
    "lora": a_text,
    "cache_salt": a_text,
}
IGNORED_KEYS = ("temperature", "max_tokens", "top_p", "stream", "user", "seed", "stop", "metadata", "tool_choice")


def a_record(rng):
    """A valid record, and the part of it that holds its prompt."""
    kind = rng.choice(["messages", "prompt", "conversations", "conversation"])
    if kind == "prompt":
        body = {"prompt": a_text(rng)}
        if rng.random() < 0.2:
            body["suffix"] = a_text(rng)
        if rng.random() < 0.2:
            body["images"] = [str(rng.random())]
    elif kind == "conversations":
        body = {
            "conversations": [*(a_message(rng, "from") for _ in range(rng.randrange(3))), {"from": "gpt", "value": "a"}]
        }
    else:
        last = {"role": "assistant" if kind == "conversation" else "user", "content": a_text(rng)}
        body = {"messages": [*(a_message(rng) for _ in range(rng.randrange(4))), last]}
    for more in BODY_KEYS:
        if rng.random() < 0.2:
            body[more] = BODY_KEYS[more](rng)
    for ignored in IGNORED_KEYS:
        if rng.random() < 0.1:
            body[ignored] = rng.choice([1, "x", {"y": [2]}])
    if kind not in ("messages", "prompt"):
        return body, body, "conversations"
    record = body if rng.random() < 0.5 else {rng.choice(["body", "request"]): body, "custom_id": "1"}
    if rng.random() < 0.6:
        message = a_message(rng) | {"role": "assistant"}
        answers = [
            ("output", a_text(rng)),
            ("output", message),
            ("response", a_text(rng)),
            ("response", {"message": message}),
            ("response", {"choices": [{"index": 0, "message": message}]}),
            ("response", {"status_code": 200, "body": {"choices": [{"text": a_text(rng)}]}}),
            ("response", {"type": "message", "role": "assistant", "content": some_parts(rng)}),
        ]
        key, value = rng.choice(answers)
        record[key] = value
    return record, body, "requests"


def read(path, record, format):
    """The requests of a record without their names, and the names of its keys that were not read."""
    trace = open_trace(write_lines(path, record), format=format)
    found = [(r.prompt, r.output, r.namespace) for r in trace]
    return found, {name: key.num_times for name, key in trace.counts.unread.items()}


def test_random_unknown_keys_are_named_and_change_nothing(tmp_path):
    rng = random.Random(5)
    names = set()
    for _ in range(400):
        record, _, format = a_record(rng)
        before, unread = read(tmp_path / "t", record, format)
        assert unread == {}, record
        changed, planted = copy.deepcopy(record), {}
        places = list(objects_of(changed))
        for _ in range(rng.randrange(1, 5)):
            where, inside = rng.choice(places)
            key = rng.choice(["mood", "x_extra", "Temperature", "systems", "message_text"])
            if key not in inside:
                inside[key] = rng.choice([1, 0, False, "text", ["text"], {"role": "user", "content": "y"}])
                planted[where + key] = planted.get(where + key, 0) + 1
        after, unread = read(tmp_path / "t", changed, format)
        assert unread == planted, changed
        assert after == before, changed
        names |= set(planted)
    assert len({name.rpartition(".")[0] for name in names}) > 12  # at many levels


def test_a_key_that_is_understood_changes_the_tokens_and_any_other_does_not(tmp_path):
    rng = random.Random(6)
    seen = set()
    for _ in range(400):
        record, body, format = a_record(rng)
        before, _ = read(tmp_path / "t", record, format)
        messages = body.get("messages", ())
        answers = sum(message["role"] == "assistant" for message in messages)
        holders = [(body, BODY_KEYS)] + [(message, MESSAGE_KEYS) for message in messages]
        inside, known = rng.choice(holders)
        key = rng.choice([*known, *IGNORED_KEYS] if inside is body else [*known])
        kept = inside.get(key)
        if kept is not None:
            del inside[key]
        elif key in known:
            inside[key] = known[key](rng)
        else:
            inside[key] = "x"
        after, unread = read(tmp_path / "t", record, format)
        assert unread == {}
        is_after_all = (
            format == "conversations"
            and inside is not body
            and answers
            and messages.index(inside)
            > max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        )
        assert (after != before) == (key in known and not is_after_all), (key, record)
        seen.add((key, kept is None))
    assert {(key, True) for key in (*BODY_KEYS, *MESSAGE_KEYS)} <= seen


def test_a_character_more_in_any_text_is_its_bytes_more(tmp_path):
    rng = random.Random(7)
    for _ in range(200):
        record, body, format = a_record(rng)
        before, _ = read(tmp_path / "t", record, format)
        texts = [(body, key) for key in ("system", "prompt", "suffix") if isinstance(body.get(key), str)]
        texts += [(m, "content") for m in body.get("messages", ()) if isinstance(m["content"], str)]
        if not texts:
            continue
        inside, key = rng.choice(texts)
        inside[key] += "ü"
        after, _ = read(tmp_path / "t", record, format)
        grown = [
            len(unpack(a[0])) + len(unpack(a[1])) - len(unpack(b[0])) - len(unpack(b[1]))
            for a, b in zip(after, before, strict=True)
        ]
        assert set(grown) <= {0, 2} and 2 in grown


# ---- what used to be read wrong


def claude_log(path, num_requests=10, num_chars=19_800):
    """Requests to Anthropic's API: a long system prompt that begins with what is the request's own, and a question."""
    rng = random.Random(0)
    lines = [
        {
            "model": "claude",
            "max_tokens": 1000,
            "system": f"{i} " + "".join(rng.choice("abcdef") for _ in range(num_chars - 2)),
            "messages": [{"role": "user", "content": f"Summarise what the log of this session says, please, in {i}"}],
        }
        for i in range(num_requests)
    ]
    return write_lines(path, *lines)


def test_a_system_prompt_beside_the_messages_is_read(tmp_path):
    requests = list(open_trace(claude_log(tmp_path / "t")))
    assert sum(request.num_prompt_tokens for request in requests) == 10 * (
        19_800
        + len(said("system", "") + said("user", "Summarise what the log of this session says, please, in 0") + HEAD)
    )
    assert text_of(requests[3].prompt).startswith("<|im_start|>system\n3 ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice in an object"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "the key 'content' stands twice"),
        ('{"prompt": "a"},', "no JSON: Extra data"),
        ('{"prompt": "a",}', "no JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "no JSON: Extra data"),
        ('\ufeff{"prompt": "a"}', "no JSON"),
        ('{"messages": [{"role": "user", "content": [["a"]]}]}', r"content\[0\]: expected a part .*, got a list"),
        ('{"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}', r"content\[0\]\.type: expected one of"),
        ('{"messages": [{"role": "user", "content": "a"}], "system": 5}', "system: expected text or a list of parts"),
        ('{"messages": [{"role": "user", "content": "a"}], "functions": "f"}', "functions: expected a list of objects"),
        ('{"prompt": "a", "suffix": 1}', "suffix: expected text, got a number"),
        ('{"prompt": "a", "model": []}', "model: expected a string or an integer, got a list"),
        ('{"prompt": "a", "model": "\\ud800"}', "model: character 0 is a lone surrogate"),
        ('{"prompt": "a", "tools": [{"name": "\\ud800"}]}', "tools: character .* is a lone surrogate"),
        ('{"prompt": "a", "images": "aGk="}', "images: expected a list, got a string"),
        ('{"messages": [{"role": "user", "content": "a", "name": ["x"]}]}', r"messages\[0\]\.name: expected a string"),
    ],
)
def test_bad_records_are_refused_with_their_line_and_a_way_on(tmp_path, line, reason):
    path = write_lines(tmp_path / "t", '{"prompt": "first"}', line)
    with pytest.raises(TraceError, match=rf"line 2: .*{reason}.*\(skip_bad, --skip-bad: ") as raised:
        list(open_trace(path))
    assert raised.value.where == "line 2"
    trace = open_trace(path, skip_bad=True)
    assert len(list(trace)) == 1 and "--skip-bad" not in str(trace.counts.examples[0])


def test_texts_are_compared_as_they_are_written(tmp_path):
    """Nothing is normalised: an engine's tokenizer gets the characters that came."""
    texts = ["\u00e9", "e\u0301", "\ufb01", "fi", " x", "x ", "x\r\n", "x\n", "\u200bx"]
    path = write_lines(tmp_path / "t", *({"prompt": text} for text in texts))
    assert [prompt for _, prompt, _ in read_texts(path)] == texts


def test_an_adapter_described_in_another_order_is_the_same(tmp_path):
    described = {"lora_name": "q", "lora_int_id": 1}
    records = [{"prompt": "p", "lora_request": each} for each in (described, dict(reversed(described.items())))]
    one, other = open_trace(write_lines(tmp_path / "t", *records))
    assert one.namespace == other.namespace is not None


def test_tools_as_text_are_the_tools(tmp_path):
    asked = {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}
    one, other = open_trace(
        write_lines(tmp_path / "t", asked | {"tools": [TOOL]}, asked | {"tools": json.dumps([TOOL])})
    )
    assert one.prompt == other.prompt
    with pytest.raises(TraceError, match="tools: expected a list of objects, got a string"):
        list(open_trace(write_lines(tmp_path / "t", asked | {"tools": "call me"})))
