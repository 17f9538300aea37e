"""Reader of single requests: `{"id", "session"?, "timestamp"?, "prompt", "output"?}` and request logs of APIs."""

from collections.abc import Mapping
from typing import Any

from radixkv.cache.namespace import LoRA, Salt
from radixkv.traces.body import Prompt, namespace_of, packed_ids, prompt_of
from radixkv.traces.chat import ChatEncoder, Encoded, chat_request
from radixkv.traces.fields import Fields
from radixkv.traces.keys import CHOICE, MESSAGE, RECORD, RESPONSE
from radixkv.traces.messages import ASSISTANT, Message, parse_message
from radixkv.traces.problems import BadRecord
from radixkv.traces.reader import JsonFormat
from radixkv.traces.request import TraceRequest
from radixkv.traces.values import check_text, label_of, seconds_of

# What only a log of single requests has beside `messages`.
_REQUEST_KEYS = ("output", "output_token_ids", "response", "session", "timestamp", "cache_salt")


class RequestReader:
    """Single requests: `prompt`, `prompt_token_ids` or `messages`, also inside `body` or `request` (batch lines, logs).

    Optional: `id` (or `custom_id`), `session`, `timestamp`, what `radixkv.traces.keys` says of a body, and the
    output as `output`, `output_token_ids`, a `response` of OpenAI's, Anthropic's or Ollama's, or the last of the
    `messages` where that is the assistant's.
    """

    ignored = RECORD

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def parse(self, record: Fields, number: int, ordinal: int) -> "Request":
        inner = next((key for key in ("body", "request") if key in record), None)
        body = record if inner is None else record.inside(inner, RECORD)
        label = label_of(record.get("id"), "id") or label_of(record.get("custom_id"), "custom_id")
        prompt, output = prompt_of(body), _output_of(record)
        if not output and isinstance(prompt, tuple) and len(prompt) > 1 and prompt[-1].role == ASSISTANT:
            prompt, output = prompt[:-1], prompt[-1]  # a log that keeps the answer where it belongs in the chat
        if isinstance(prompt, bytes) and prompt and not isinstance(output, bytes):
            raise BadRecord("output: a prompt of token ids needs output_token_ids, got text")
        return Request(
            self._encoder,
            label or f"request{number}",
            prompt,
            output,
            timestamp_s=seconds_of(record.get("timestamp"), "timestamp"),
            session=label_of(record.get("session"), "session"),
            namespace=namespace_of(body, record),
        )


class Request:
    """One request whose prompt is text, messages, or packed tokens already."""

    def __init__(
        self,
        encoder: ChatEncoder,
        label: str,
        prompt: Prompt,
        output: Message | bytes,
        *,
        timestamp_s: float | None,
        session: str | None,
        namespace: tuple[LoRA | Salt, ...] = (),
    ) -> None:
        self._encoder, self._label, self._prompt, self._output = encoder, label, prompt, output
        self._session, self._namespace = session, namespace
        self.num_requests = 1
        self.timestamps_s = None if timestamp_s is None else (timestamp_s,)
        self.num_bytes = 1000 + _num_chars(prompt) + (len(output) if isinstance(output, bytes) else 0)

    def request(self, turn: int) -> TraceRequest:
        encoder, output = self._encoder, self._output
        if isinstance(self._prompt, tuple):
            prompt = encoder.prompt(self._prompt, attributes=output.attributes if isinstance(output, Message) else "")
        elif isinstance(self._prompt, str):
            prompt = Encoded(encoder.tokenizer.encode(self._prompt))
        else:
            prompt = Encoded(self._prompt)
        if isinstance(output, bytes):
            sampled = Encoded(output)
        elif isinstance(self._prompt, tuple):
            sampled = encoder.output(output)
        else:
            # A raw prompt is continued by raw text: no chat template ends it.
            sampled = Encoded(encoder.tokenizer.encode("".join(p for p in output.parts if isinstance(p, str))))
        return chat_request(
            self._label,
            prompt,
            sampled,
            timestamp_s=None if self.timestamps_s is None else self.timestamps_s[0],
            session=self._session,
            namespace=self._namespace,
        )


def _output_of(record: Fields) -> Message | bytes:
    if "output_token_ids" in record:
        for key in ("output", "response"):  # what the ids spell
            record.get(key)
        return packed_ids(record, "output_token_ids")
    if "output" in record:
        return _answer(record, "output")
    return _answer(record, "response") if "response" in record else b""


def _answer(holder: Fields, key: str) -> Message | bytes:
    """Returns what a model answered, b"" where it did not (a failed call)."""
    value = holder.get(key)
    if isinstance(value, str):
        return Message(ASSISTANT, (check_text(value, holder.path(key)),))
    if value is None:
        return b""
    if key in ("output", "message"):
        return parse_message(holder.inside(key, MESSAGE), ASSISTANT)
    found = holder.inside(key, RESPONSE)
    if isinstance(found.value.get("body"), dict):
        found = found.inside("body", RESPONSE)
    choices = found.value.get("choices")
    if isinstance(choices, list) and choices:
        choice = found.inside("choices", CHOICE, 0)
        found.drop("choices[1:]", choices[1:])
        return _answer(choice, "message" if "message" in choice.value else "text")
    inner = next((key for key in ("message", "response") if key in found), None)  # Ollama's chat, and its generate
    if inner:
        return _answer(found, inner)
    return parse_message(found, ASSISTANT) if "content" in found else b""  # Anthropic's is a message


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, tuple):
        return sum(len(part) for message in prompt for part in message.parts if isinstance(part, str))
    return len(prompt)


def _is_request(keys: Mapping[str, Any]) -> bool:
    if any(keys.get(key) is not None for key in ("prompt", "prompt_token_ids", "body", "request")):
        return True
    if "messages" not in keys or "conversations" in keys:
        return False
    return any(key in keys for key in _REQUEST_KEYS) or _awaits_answer(keys["messages"], "model" in keys)


def _awaits_answer(messages: Any, is_call: bool) -> bool:
    """Whether messages are a request's: the last is not the assistant's. Else they are a conversation with its answers.

    Conversations of tools and simulated users may end with another's word too; what has answers in it and is no API
    call (it names no model) is taken for one.
    """
    roles = [m.get("role") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    return bool(roles) and roles[-1] != ASSISTANT and (is_call or roles.count(ASSISTANT) < 2)


REQUESTS = JsonFormat("requests", ("prompt", "prompt_token_ids", "body"), _is_request, RequestReader, rank=8)
