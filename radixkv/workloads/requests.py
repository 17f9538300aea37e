"""Reader of single requests: `{"id", "session"?, "timestamp"?, "prompt", "output"?}` and OpenAI's request logs."""

from collections.abc import Mapping
from typing import Any

from radixkv.tokens import pack
from radixkv.workloads.chat import ChatEncoder, Encoded, chat_request
from radixkv.workloads.messages import (
    ASSISTANT,
    Message,
    check_text,
    parse_message,
    parse_messages,
    tools_text,
    with_tools,
)
from radixkv.workloads.problems import BadRecord
from radixkv.workloads.request import TraceRequest
from radixkv.workloads.values import kind, label_of, object_of, seconds_of


class RequestReader:
    """Single requests: `prompt`, `prompt_token_ids` or `messages`, also inside `body` (OpenAI batch lines).

    Optional: `id` (or `custom_id`), `session`, `timestamp`, `tools`, `cache_salt`, and the output as `output`,
    `output_token_ids`, an OpenAI `response`, or the last of the `messages` where that is the assistant's.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def parse(self, value: Any, number: int, ordinal: int) -> "Request":
        record = object_of(value)
        body = record
        for key in ("body", "request"):
            if record.get(key) is not None:
                body = object_of(record[key])
                break
        label = label_of(record.get("id"), "id") or label_of(record.get("custom_id"), "custom_id")
        salt = body.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise BadRecord(f"cache_salt: expected a string, got {kind(salt)}")
        prompt, output = _prompt_of(body), _output_of(record)
        if not output and isinstance(prompt, tuple) and len(prompt) > 1 and prompt[-1].role == ASSISTANT:
            prompt, output = prompt[:-1], prompt[-1]  # a log that keeps the answer where it belongs in the chat
        if isinstance(prompt, bytes) and not isinstance(output, bytes):
            raise BadRecord("output: a prompt of token ids needs output_token_ids, got text")
        return Request(
            self._encoder,
            label or f"request{number}",
            prompt,
            output,
            timestamp_s=seconds_of(record.get("timestamp"), "timestamp"),
            session=label_of(record.get("session"), "session"),
            salt=salt,
        )


class Request:
    """One request whose prompt is text, messages, or packed tokens already."""

    def __init__(
        self,
        encoder: ChatEncoder,
        label: str,
        prompt: str | bytes | tuple[Message, ...],
        output: Message | bytes,
        *,
        timestamp_s: float | None,
        session: str | None,
        salt: str | None,
    ) -> None:
        self._encoder, self._label, self._prompt, self._output = encoder, label, prompt, output
        self._session, self._salt = session, salt
        self.num_requests = 1
        self.timestamps_s = None if timestamp_s is None else (timestamp_s,)
        self.num_bytes = 1000 + _num_chars(prompt) + (len(output) if isinstance(output, bytes) else 0)

    def request(self, turn: int) -> TraceRequest:
        encoder = self._encoder
        if isinstance(self._prompt, tuple):
            prompt = encoder.prompt(self._prompt)
        elif isinstance(self._prompt, str):
            prompt = Encoded(encoder.tokenizer.encode(self._prompt))
        else:
            prompt = Encoded(self._prompt)
        if isinstance(self._output, bytes):
            output = Encoded(self._output)
        elif isinstance(self._prompt, tuple):
            output = encoder.output(self._output)
        else:
            # A raw prompt is continued by raw text: no chat template ends it.
            output = Encoded(encoder.tokenizer.encode("".join(p for p in self._output.parts if isinstance(p, str))))
        return chat_request(
            self._label,
            prompt,
            output,
            timestamp_s=None if self.timestamps_s is None else self.timestamps_s[0],
            session=self._session,
            salt=self._salt,
        )


def _prompt_of(body: Mapping[str, Any]) -> str | bytes | tuple[Message, ...]:
    given = [key for key in ("prompt_token_ids", "prompt", "messages") if body.get(key) is not None]
    if not given:
        raise BadRecord("expected prompt, prompt_token_ids or messages, got none of them")
    if given[0] == "messages":
        messages = parse_messages(body["messages"], "messages")
        if not messages:
            raise BadRecord("messages: expected at least one")
        return with_tools(messages, tools_text(body.get("tools"), "tools"))
    value = body[given[0]]
    if given[0] == "prompt" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if given[0] == "prompt" and isinstance(value, str):
        if not value:
            raise BadRecord("prompt: expected text, got none")
        return check_text(value, "prompt")
    packed = _packed(value, given[0])
    if not packed:
        raise BadRecord(f"{given[0]}: expected at least one token id")
    return packed


def _output_of(record: Mapping[str, Any]) -> Message | bytes:
    if record.get("output_token_ids") is not None:
        return _packed(record["output_token_ids"], "output_token_ids")
    output = record.get("output")
    if output is None and record.get("response") is not None:
        output = _response_message(record["response"])
    if output is None:
        return b""
    if isinstance(output, str):
        return Message(ASSISTANT, (check_text(output, "output"),))
    return parse_message({"role": ASSISTANT, **object_of(output)}, "output")


def _response_message(response: Any) -> Any:
    """Returns the message or text of an OpenAI response's first choice, None where it holds none (a failed call)."""
    if isinstance(response, str):
        return response
    body = object_of(response)
    if isinstance(body.get("body"), dict):
        body = body["body"]
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    choice = object_of(choices[0])
    return choice.get("message", choice.get("text"))


def _packed(value: Any, name: str) -> bytes:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise BadRecord(f"{name}: expected a list of token ids, got {kind(value)}")
    try:
        return pack(value)
    except (ValueError, OverflowError):
        raise BadRecord(f"{name}: expected token ids in 0..{2**31 - 1}") from None


def _num_chars(prompt: str | bytes | tuple[Message, ...]) -> int:
    if isinstance(prompt, tuple):
        return sum(len(part) for message in prompt for part in message.parts if isinstance(part, str))
    return len(prompt)
