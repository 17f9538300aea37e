"""What the body of a request gives an engine: messages, text or tokens, and the namespace that its KV is kept under.

Which keys, and where each goes, stands in `radixkv.traces.keys`. The readers of requests and conversations call it.
"""

import json
from contextlib import suppress
from typing import Any

from radixkv.cache.namespace import LoRA, Salt
from radixkv.cache.tokens import pack
from radixkv.traces.fields import Fields
from radixkv.traces.keys import ADAPTERS, SECTIONS, SYSTEM, TEXT_OF_PROMPT
from radixkv.traces.messages import USER, Message, Parts, content_parts, images_of, json_text, parse_messages
from radixkv.traces.problems import BadRecord
from radixkv.traces.values import check_text, kind, label_of

# Messages, text as it stands, or packed tokens.
Prompt = tuple[Message, ...] | str | bytes


def prompt_of(body: Fields) -> Prompt:
    """Reads the prompt of a request: of `prompt_token_ids`, `prompt` and `messages` the first there is.

    Raises:
        BadRecord: none of them, or one that is not understood.
    """
    given = next((key for key in ("prompt_token_ids", "prompt", "messages") if key in body), None)
    if given is None:
        raise BadRecord("expected prompt, prompt_token_ids or messages, got none of them")
    if given == "messages":
        messages = parse_messages(body, "messages")
        return with_system(messages, body) if messages else b""
    if given == "prompt_token_ids":
        for key in TEXT_OF_PROMPT:
            body.get(key)
        return packed_ids(body, given)
    value = body.value[given]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    elif isinstance(value, list) and value and isinstance(value[0], str | list):
        raise BadRecord(f"prompt: expected one, got {len(value)} in one record: give each a record of its own")
    if not isinstance(value, str):
        return packed_ids(body, given, value)
    body.get(given)
    text = check_text(value, given)
    if "suffix" in body:
        suffix = body.get("suffix")
        if not isinstance(suffix, str):
            raise BadRecord(f"suffix: expected text, got {kind(suffix)}")
        text = f"<|fim_prefix|>{text}<|fim_suffix|>{check_text(suffix, 'suffix')}<|fim_middle|>"
    images = images_of(body)
    messages = with_system((), body)
    # Beside what only a chat template can place, a text is what the user says.
    return (*messages, Message(USER, (*images, text))) if messages or images else text


def with_system(messages: tuple[Message, ...], body: Fields) -> tuple[Message, ...]:
    """Puts what a request has beside its messages into their system message, or before them where there is none.

    A system prompt of its own comes before that message's text; tools and the like after.

    Raises:
        BadRecord: a system prompt that is no text, or tools that are no list of objects.
    """
    first: Message | None = messages[0] if messages and messages[0].role == SYSTEM else None
    texts: list[Parts] = [content_parts(body, SYSTEM)] if SYSTEM in body else []
    if first is not None:
        texts.append(first.parts)
    texts += [(text,) for keys, title, tag in SECTIONS if (text := _section(body, keys, title, tag))]
    parts: list[Any] = []
    for given in texts:
        if any(given):
            parts += ("\n\n", *given) if parts else given
    if first is not None:
        return (Message(SYSTEM, tuple(parts), first.attributes), *messages[1:])
    return (Message(SYSTEM, tuple(parts)), *messages) if parts else messages


def namespace_of(body: Fields, record: Fields) -> tuple[LoRA | Salt, ...]:
    """Reads what the KV of a request is kept apart by: model and adapters, of its body or else of the record, and salt.

    Raises:
        BadRecord: a name that is no text.
    """
    holders = (body, record) if record is not body else (body,)
    found: list[LoRA | Salt] = []
    for key in ("model", *ADAPTERS):
        for holder in holders:
            value = holder.get(key)
            if value is not None:
                name = _adapter(value, key) if isinstance(value, dict) else label_of(value, holder.path(key))
                if name:
                    found.append(LoRA(check_text(name, holder.path(key))))
                break
    salt = body.get("cache_salt")
    if salt is not None:
        if not isinstance(salt, str):
            raise BadRecord(f"cache_salt: expected a string, got {kind(salt)}")
        found.append(Salt(check_text(salt, "cache_salt")))
    return tuple(found)


def packed_ids(holder: Fields, key: str, value: Any = None) -> bytes:
    """Reads token ids under a key, or given; [n] int32. Raises BadRecord for anything else."""
    read = holder.get(key)
    value, name = read if value is None else value, holder.path(key)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRecord(f"{name}: expected a list of token ids, got {kind(value)}")
    try:
        return pack(value)
    except (ValueError, OverflowError):
        raise BadRecord(f"{name}: expected token ids in 0..{2**31 - 1}") from None


def _adapter(value: dict[str, Any], key: str) -> str:
    """The name of an adapter that is described by an object, whatever the order of its keys."""
    return json_text(dict(sorted(value.items())), key)


def _section(body: Fields, keys: tuple[str, ...], title: str, tag: str) -> str:
    lines = []
    for key in keys:
        value, name = body.get(key), body.path(key)
        if not value and (value is None or isinstance(value, list)):
            continue
        if tag == "tools" and isinstance(value, str):  # ShareGPT's: the list as text
            with suppress(ValueError):
                value = json.loads(value)
        if tag == "tools" and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
            raise BadRecord(f"{name}: expected a list of objects, got {kind(value)}")
        for each in value if isinstance(value, list) else [value]:
            # Where a cache may break is no part of what it caches.
            said = {k: v for k, v in each.items() if k != "cache_control"} if isinstance(each, dict) else each
            lines.append(said if isinstance(said, str) else json_text(said, name))
    return f"# {title}\n\n<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>" if lines else ""
