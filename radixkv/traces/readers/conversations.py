"""Reader of conversations: one record holds many requests, each the start of the next.

Forms: `{"id", "messages", "timestamps"?}`, ShareGPT's `{"id", "conversations": [{"from", "value"}]}`.
"""

from typing import Any

from radixkv.cache.namespace import LoRA, Salt
from radixkv.traces.body import namespace_of, with_system
from radixkv.traces.chat import ChatEncoder, Encoded, chat_request
from radixkv.traces.fields import Fields
from radixkv.traces.keys import RECORD
from radixkv.traces.messages import ASSISTANT, Message, parse_messages
from radixkv.traces.problems import BadRecord
from radixkv.traces.reader import JsonFormat
from radixkv.traces.request import TraceRequest
from radixkv.traces.values import kind, label_of, seconds_of


class ConversationReader:
    """Conversations: `messages` (or ShareGPT's `conversations`); every assistant message is a request.

    Its prompt is all messages before it. Optional: `id`, `timestamps` (seconds, one per assistant message), and what
    `radixkv.traces.keys` says of what stands beside messages.
    """

    ignored = RECORD

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def parse(self, record: Fields, number: int, ordinal: int) -> "Conversation":
        key = "conversations" if "conversations" in record and "messages" not in record else "messages"
        messages = with_system(parse_messages(record, key), record)
        turns = [i for i, message in enumerate(messages) if message.role == ASSISTANT]
        stamps = record.get("timestamps")
        if stamps is not None:
            if not isinstance(stamps, list) or len(stamps) != len(turns):
                got = f"{len(stamps)}" if isinstance(stamps, list) else kind(stamps)
                raise BadRecord(f"timestamps: expected a list of {len(turns)}, one per assistant message, got {got}")
            stamps = [_seconds(stamp, f"timestamps[{i}]") for i, stamp in enumerate(stamps)]
        label = label_of(record.get("id"), "id") or f"conversation{number}"
        return Conversation(self._encoder, label, messages, turns, stamps, namespace_of(record, record))


class Conversation:
    """A conversation and, message by message as its turns are asked for, its tokens."""

    def __init__(
        self,
        encoder: ChatEncoder,
        label: str,
        messages: tuple[Message, ...],
        turns: list[int],
        timestamps_s: list[float] | None,
        namespace: tuple[LoRA | Salt, ...],
    ) -> None:
        self._encoder, self._label, self._messages, self._turns = encoder, label, messages, turns
        self._namespace = namespace
        self._encoded: list[Encoded] = []
        self.num_requests = len(turns)
        self.timestamps_s = timestamps_s
        # Text once and, with one token a byte, four bytes a character in tokens; 300 for the objects of a message.
        self.num_bytes = sum(300 + 5 * len(part) for m in messages for part in m.parts if isinstance(part, str))

    def request(self, turn: int) -> TraceRequest:
        """Cost: O(prompt) copied, plus encoding the messages that no earlier turn has brought."""
        at = self._turns[turn]
        before, answer = self._messages[:at], self._messages[at]
        if self._encoder.tokenizer.joins_at_messages:
            self._encoded.extend(map(self._encoder.message, self._messages[len(self._encoded) : at]))
            prompt = self._encoder.prompt(before, self._encoded[:at], answer.attributes)
        else:
            prompt = self._encoder.prompt(before, attributes=answer.attributes)
        return chat_request(
            f"{self._label}/{turn}",
            prompt,
            self._encoder.output(answer),
            timestamp_s=None if self.timestamps_s is None else self.timestamps_s[turn],
            session=self._label,
            namespace=self._namespace,
        )


def _seconds(value: Any, name: str) -> float:
    seconds = seconds_of(value, name)
    if seconds is None:
        raise BadRecord(f"{name}: expected a time, got none")
    return seconds


CONVERSATIONS = JsonFormat(
    "conversations",
    ("messages", "conversations"),
    lambda keys: "conversations" in keys or "messages" in keys,
    ConversationReader,
    rank=9,
)
