"""Chat messages as traces have them, brought to one form: a role and parts of text and media.

Understands OpenAI's messages (content as a string or a list of parts, tool calls, function calls), ShareGPT's
(`from`/`value`), and Anthropic's content blocks. Called by the readers; `radixkv.workloads.chat` renders the result.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.workloads.problems import BadRecord
from radixkv.workloads.values import kind, shown

ASSISTANT = "assistant"

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_MEDIA_TYPES = ("image_url", "input_image", "image", "input_audio", "audio", "video_url", "video", "file", "input_file")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, recording or file in a message, known by the digest of what the trace says about it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message: who speaks, and text and media in order. Adjacent texts may be several parts."""

    role: str
    parts: tuple[str | MediaPart, ...]


def parse_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Reads a list of messages.

    Args:
        value: decoded JSON.
        name: what errors call it.

    Raises:
        BadRecord: naming the place within `value` and what was expected there.
    """
    if not isinstance(value, list):
        raise BadRecord(f"{name}: expected a list of messages, got {kind(value)}")
    return tuple(parse_message(message, f"{name}[{i}]") for i, message in enumerate(value))


def parse_message(value: Any, name: str) -> Message:
    """Reads one message of any of the known forms. Raises BadRecord as `parse_messages` does."""
    if not isinstance(value, dict):
        raise BadRecord(f"{name}: expected a message (an object), got {kind(value)}")
    if "role" in value:
        role = value["role"]
        if not isinstance(role, str) or not role:
            raise BadRecord(f"{name}.role: expected a string, got {kind(role)}")
        check_text(role, f"{name}.role")
    elif "from" in value:
        speaker = value["from"]
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            raise BadRecord(f"{name}.from: expected one of {', '.join(_SHAREGPT_ROLES)}, got {shown(speaker)}")
        role = _SHAREGPT_ROLES[speaker]
    else:
        raise BadRecord(f"{name}: expected `role` or `from`, got {_keys(value)}")
    return Message(role, _message_parts(value, name))


def tools_text(tools: Any, name: str) -> str:
    """Renders a request's tool definitions, which chat templates put into the system message.

    Args:
        tools: decoded JSON: a list of objects, or None for none.

    Raises:
        BadRecord: no list of objects.
    """
    if not tools and (tools is None or isinstance(tools, list)):
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"{name}: expected a list of objects, got {kind(tools)}")
    lines = "\n".join(_dumps(tool) for tool in tools)
    return f"# Tools\n\n<tools>\n{lines}\n</tools>"


def with_tools(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Adds rendered tool definitions at the end of the system message, or as one where there is none."""
    if not text:
        return messages
    if messages and messages[0].role == "system":
        system = messages[0]
        return (Message("system", (*system.parts, "\n\n" + text)), *messages[1:])
    return (Message("system", (text,)), *messages)


def check_text(text: str, name: str) -> str:
    """Returns `text`. Raises BadRecord if it holds a lone surrogate, which no tokenizer can encode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"{name}: character {error.start} is a lone surrogate, which is no text") from None
    return text


def _message_parts(message: Mapping[str, Any], name: str) -> tuple[str | MediaPart, ...]:
    key = "content" if "content" in message or "value" not in message else "value"
    content = message.get(key)
    calls = _tool_calls(message, name)
    if content is None:
        if not calls:
            raise BadRecord(f"{name}.{key}: expected text or a list of parts, got null and no tool calls")
        return (calls,)
    parts = _content_parts(content, f"{name}.{key}")
    if not calls:
        return parts
    return (*parts, "\n" + calls) if any(parts) else (calls,)


def _content_parts(content: Any, name: str) -> tuple[str | MediaPart, ...]:
    if isinstance(content, str):
        return (check_text(content, name),)
    if not isinstance(content, list):
        raise BadRecord(f"{name}: expected text or a list of parts, got {kind(content)}")
    parts: list[str | MediaPart] = []
    for i, part in enumerate(content):
        parts.extend(_part(part, f"{name}[{i}]"))
    return tuple(parts)


def _part(part: Any, name: str) -> Sequence[str | MediaPart]:
    if isinstance(part, str):
        return (check_text(part, name),)
    if not isinstance(part, dict):
        raise BadRecord(f"{name}: expected a part (an object), got {kind(part)}")
    type_ = part.get("type")
    if type_ in _TEXT_TYPES:
        text = part.get("refusal" if type_ == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRecord(f"{name}: expected text, got {kind(text)}")
        return (check_text(text, name),)
    if type_ in _MEDIA_TYPES:
        return (MediaPart(hashlib.sha256(_dumps(part).encode("utf-8", "surrogatepass")).hexdigest()[:32]),)
    if type_ == "tool_use":
        return (_call_text(part.get("name"), part.get("input"), name),)
    if type_ == "tool_result":
        return _content_parts(part.get("content", ""), f"{name}.content")
    known = ", ".join((*_TEXT_TYPES, *_MEDIA_TYPES, "tool_use", "tool_result"))
    raise BadRecord(f"{name}.type: expected one of {known}; got {shown(type_)}")


def _tool_calls(message: Mapping[str, Any], name: str) -> str:
    calls = message.get("tool_calls")
    if calls is None:
        calls = []
    if not isinstance(calls, list):
        raise BadRecord(f"{name}.tool_calls: expected a list, got {kind(calls)}")
    functions = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise BadRecord(f"{name}.tool_calls[{i}]: expected an object, got {kind(call)}")
        functions.append((call.get("function", call), f"{name}.tool_calls[{i}].function"))
    if message.get("function_call") is not None:
        functions.append((message["function_call"], f"{name}.function_call"))
    texts = []
    for function, where in functions:
        if not isinstance(function, dict):
            raise BadRecord(f"{where}: expected an object, got {kind(function)}")
        texts.append(_call_text(function.get("name"), function.get("arguments"), where))
    return "\n".join(texts)


def _call_text(function: Any, arguments: Any, name: str) -> str:
    if not isinstance(function, str):
        raise BadRecord(f"{name}.name: expected a string, got {kind(function)}")
    # OpenAI keeps the arguments as the text that the model wrote: whatever it was, that was in the KV.
    written = arguments if isinstance(arguments, str) else _dumps({} if arguments is None else arguments)
    text = f'<tool_call>\n{{"name": {_dumps(function)}, "arguments": {written}}}\n</tool_call>'
    return check_text(text, f"{name}.arguments")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _keys(value: Mapping[str, Any]) -> str:
    return "the keys " + ", ".join(shown(key) for key in list(value)[:8]) if value else "an empty object"
