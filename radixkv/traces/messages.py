"""Chat messages as traces have them, brought to one form: a role and parts of text and media.

Understands OpenAI's messages (content as a string or a list of parts, tool calls, function calls), ShareGPT's
(`from`/`value`), Ollama's, and Anthropic's content blocks. What becomes of each key stands in `radixkv.traces.keys`.
"""

import json
from dataclasses import dataclass
from typing import Any

from radixkv.traces.fields import Fields
from radixkv.traces.keys import CALL, MEDIA, MESSAGE, PART, REASONING
from radixkv.traces.media import MEDIA_TYPES, MediaPart, media_of, media_part
from radixkv.traces.problems import BadRecord
from radixkv.traces.values import check_text, kind, label_of, shown, shown_keys

ASSISTANT, USER = "assistant", "user"

_SHAREGPT_ROLES = {
    "human": USER,
    "user": USER,
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
# Types of parts of text and of thought, and the key that holds it.
_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT_TYPES = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": "data"}
_CALL_TYPES = ("tool_use", "server_tool_use")
# Anthropic's sources of a document that is text and no file.
_TEXT_SOURCES = {"text": "data", "content": "content"}

Parts = tuple[str | MediaPart, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its role, and text and media in order. Adjacent texts may be several parts.

    Attributes:
        attributes: what its head says besides the role, such as ` name=bob`.
    """

    role: str
    parts: Parts
    attributes: str = ""


def parse_messages(holder: Fields, key: str) -> tuple[Message, ...]:
    """Reads the list of messages under a key.

    Raises:
        BadRecord: naming the place within the record and what was expected there.
    """
    value = holder.get(key)
    if not isinstance(value, list):
        raise BadRecord(f"{holder.path(key)}: expected a list of messages, got {kind(value)}")
    return tuple(parse_message(holder.inside(key, MESSAGE, at, "a message (an object)")) for at in range(len(value)))


def parse_message(message: Fields, role: str = "") -> Message:
    """Reads one message of any of the known forms.

    Args:
        role: of a message that names none; empty: it has to.

    Raises:
        BadRecord: as `parse_messages` does.
    """
    name = message.name
    if "role" in message.value:
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise BadRecord(f"{name}.role: expected a string, got {kind(role)}")
        check_text(role, f"{name}.role")
    elif "from" in message.value:
        speaker = message.get("from")
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            raise BadRecord(f"{name}.from: expected one of {', '.join(_SHAREGPT_ROLES)}, got {shown(speaker)}")
        role = _SHAREGPT_ROLES[speaker]
    elif not role:
        raise BadRecord(f"{name}: expected `role` or `from`, got {shown_keys(message.value)}")
    return Message(role, _message_parts(message), _attributes(message, "name", "tool_call_id"))


def content_parts(holder: Fields, key: str) -> Parts:
    """Reads text, a part, or a list of both, under a key. Raises BadRecord for anything else."""
    content, name = holder.get(key), holder.path(key)
    if isinstance(content, str):
        return (check_text(content, name),)
    if isinstance(content, dict):
        return _part(holder.inside(key, PART))
    if not isinstance(content, list):
        raise BadRecord(f"{name}: expected text or a list of parts, got {kind(content)}")
    parts: list[str | MediaPart] = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            parts.append(check_text(part, f"{name}[{at}]"))
        else:
            parts.extend(_part(holder.inside(key, PART, at, "a part (an object)")))
    return tuple(parts)


def images_of(holder: Fields) -> Parts:
    """Reads Ollama's `images`: a list of base64 data beside a text. Raises BadRecord for anything else."""
    images = holder.get("images")
    if images is None:
        return ()
    if not isinstance(images, list):
        raise BadRecord(f"{holder.path('images')}: expected a list, got {kind(images)}")
    return tuple(media_of(image, f"{holder.path('images')}[{at}]", is_data=True) for at, image in enumerate(images))


def json_text(value: Any, name: str) -> str:
    """Renders a decoded JSON value as templates do. Raises BadRecord if there is a lone surrogate in it."""
    return check_text(json.dumps(value, ensure_ascii=False), name)


def _message_parts(message: Fields) -> Parts:
    key = "content" if "content" in message.value or "value" not in message.value else "value"
    said = content_parts(message, key) if key in message else ()
    if "refusal" in message:
        said += (_text(message, "refusal"),)
    calls = _tool_calls(message)
    if calls:
        said += ("\n" * any(said) + calls,)
    parts = (*images_of(message), *_thoughts(message), *said)
    if not parts and key not in message:
        raise BadRecord(f"{message.path(key)}: expected text or a list of parts, got null and no tool calls")
    return parts


def _thoughts(message: Fields) -> Parts:
    """What a model thought before its answer; logs name it twice, for old clients and for new ones."""
    found = dict.fromkeys(_text(message, key) for key in REASONING if isinstance(message.value.get(key), str))
    return (_thought("\n".join(found)),) if any(found) else ()


def _thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def _part(part: Fields) -> Parts:
    type_ = part.get("type")
    known = (*_TEXT_TYPES, *_THOUGHT_TYPES, *MEDIA_TYPES, *_CALL_TYPES, "tool_result")
    if not isinstance(type_, str) or type_ not in known:
        raise BadRecord(f"{part.path('type')}: expected one of {', '.join(known)}; got {shown(type_)}")
    if type_ in _TEXT_TYPES:
        return (_text(part, _TEXT_TYPES[type_]),)
    if type_ in _THOUGHT_TYPES:
        return (_thought(_text(part, _THOUGHT_TYPES[type_])),)
    if type_ in _CALL_TYPES:
        return (_call_text(part, "input"),)
    if type_ == "tool_result":
        inside = content_parts(part, "content") if "content" in part else ()
        return (f"<tool_response{_attributes(part, 'tool_use_id', 'is_error')}>\n", *inside, "\n</tool_response>")
    source = part.value.get("source")
    held = _TEXT_SOURCES.get(str(source.get("type"))) if isinstance(source, dict) else None
    if held is not None:
        return content_parts(part.inside("source", MEDIA), held)
    return (media_part(part),)


def _text(holder: Fields, key: str) -> str:
    text = holder.get(key)
    if not isinstance(text, str):
        raise BadRecord(f"{holder.name}: expected text, got {kind(text)}")
    return check_text(text, holder.path(key))


def _attributes(holder: Fields, *keys: str) -> str:
    """Renders what tells messages apart besides their roles and texts."""
    texts = []
    for key in keys:
        value = holder.get(key)
        label = "true" * value if isinstance(value, bool) else label_of(value, holder.path(key))
        if label:
            texts.append(f" {key}={check_text(label, holder.path(key))}")
    return "".join(texts)


def _tool_calls(message: Fields) -> str:
    calls = message.get("tool_calls")
    if calls is None:
        calls = []
    if not isinstance(calls, list):
        raise BadRecord(f"{message.path('tool_calls')}: expected a list, got {kind(calls)}")
    functions = []
    for at in range(len(calls)):
        call = message.inside("tool_calls", CALL, at, "an object")
        functions.append(call.inside("function", CALL, what="an object") if "function" in call.value else call)
    if "function_call" in message:
        functions.append(message.inside("function_call", CALL, what="an object"))
    return "\n".join(_call_text(function, "arguments") for function in functions)


def _call_text(call: Fields, key: str) -> str:
    function, arguments = call.get("name"), call.get(key)
    if not isinstance(function, str):
        raise BadRecord(f"{call.path('name')}: expected a string, got {kind(function)}")
    # OpenAI keeps the arguments as the text that the model wrote: whatever it was, that was in the KV.
    name = call.path(key)
    written = arguments if isinstance(arguments, str) else json_text({} if arguments is None else arguments, name)
    text = f'<tool_call>\n{{"name": {json_text(function, name)}, "arguments": {written}}}\n</tool_call>'
    return check_text(text, name)
