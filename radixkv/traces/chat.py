"""ChatML: messages to the tokens that a model would be given.

A message is `<|im_start|>role\\ncontent<|im_end|>\\n`; a prompt is all messages so far and `<|im_start|>assistant\\n`;
an output is the content and `<|im_end|>\\n`. Where the tokenizer allows, messages are encoded one by one and joined:
the result equals that of the whole text, and a growing conversation costs its new messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from radixkv.cache.namespace import LoRA, Media, Namespace, Salt
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.traces.media import MediaPart
from radixkv.traces.messages import ASSISTANT, Message
from radixkv.traces.request import TraceRequest
from radixkv.traces.tokenizers import IM_END, IM_START, Tokenizer

# A trace does not say how many tokens an image takes; one placeholder carries its digest.
_MEDIA_BEFORE, _MEDIA_PLACEHOLDER, _MEDIA_AFTER = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of some text, [n] int32 packed, and the media in it with positions counted from its first token."""

    packed: bytes
    media: tuple[Media, ...] = ()


class ChatEncoder:
    """Encodes messages, prompts and outputs with one tokenizer. Keeps nothing but the encoded generation head."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._head = Encoded(tokenizer.encode(_head(ASSISTANT)))

    def message(self, message: Message) -> Encoded:
        """Encodes one message. Joined messages are a prompt only if `tokenizer.joins_at_messages`."""
        return self._encode(_rendered(message))

    def prompt(
        self, messages: Sequence[Message], encoded: Sequence[Encoded] | None = None, attributes: str = ""
    ) -> Encoded:
        """Encodes a prompt that asks for the assistant's next message.

        Args:
            messages: all of the prompt's messages.
            encoded: what `message` returned for each, if the caller kept it; used where joining is exact.
            attributes: of the message that is asked for: the head that its answer follows says them.

        Cost: O(tokens) copied, plus encoding where `encoded` is missing or the tokenizer can't join.
        """
        head = _head(ASSISTANT, attributes)
        if self.tokenizer.joins_at_messages:
            last = self._encode([head]) if attributes else self._head
            return join([*(map(self.message, messages) if encoded is None else encoded), last])
        parts = [part for message in messages for part in _rendered(message)]
        return self._encode([*parts, head])

    def output(self, message: Message) -> Encoded:
        """Encodes an assistant's message as what was sampled after its prompt."""
        return self._encode([*message.parts, f"{IM_END}\n"])

    def _encode(self, parts: Iterable[str | MediaPart]) -> Encoded:
        pieces: list[Encoded] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            before = self.tokenizer.encode(text + _MEDIA_BEFORE)
            placeholder = self.tokenizer.encode(_MEDIA_PLACEHOLDER)
            pieces.append(Encoded(before))
            pieces.append(Encoded(placeholder, (Media(part.digest, 0, len(placeholder) // TOKEN_BYTES),)))
            text = _MEDIA_AFTER
        pieces.append(Encoded(self.tokenizer.encode(text)))
        return join(pieces)


def join(pieces: Sequence[Encoded]) -> Encoded:
    """Puts encoded pieces one after the other, moving the positions of their media. Cost: O(tokens) copied."""
    if len(pieces) == 1:
        return pieces[0]
    media: list[Media] = []
    if any(piece.media for piece in pieces):
        start = 0
        for piece in pieces:
            media.extend(replace(found, start=found.start + start) for found in piece.media)
            start += len(piece.packed) // TOKEN_BYTES
    return Encoded(b"".join(piece.packed for piece in pieces), tuple(media))


def chat_request(
    label: str,
    prompt: Encoded,
    output: Encoded,
    *,
    timestamp_s: float | None,
    session: str | None,
    namespace: tuple[LoRA | Salt, ...] = (),
) -> TraceRequest:
    """Makes a request of an encoded prompt and output, its media joining the namespace."""
    found: Namespace = namespace
    if prompt.media or output.media:
        found = (*namespace, *join([prompt, output]).media)
    return TraceRequest(label, prompt.packed, output.packed, timestamp_s, session, found or None)


def _rendered(message: Message) -> list[str | MediaPart]:
    return [_head(message.role, message.attributes), *message.parts, f"{IM_END}\n"]


def _head(role: str, attributes: str = "") -> str:
    return f"{IM_START}{role}{attributes}\n"
