"""Text <-> token ids, one class whatever the vocabulary's file was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from radixkv.engine.model.chat import Message
from radixkv.engine.model.vocabulary import Detokenizer, Vocabulary


class Encoder(Protocol):
    """Text -> token ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text, after the start token where that is asked for and there is one."""
        ...


class Template(Protocol):
    """Messages -> text."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation, with the beginning of an answer where that is asked for."""
        ...


class Tokenizer:
    """A checkpoint's vocabulary and chat template.

    Args:
        template: None where the checkpoint has none.
    """

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary, template: Template | None) -> None:
        self._encoder = encoder
        self._template = template
        self.vocabulary = vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, after the vocabulary's start token where it has one. Special tokens in it count."""
        return self._encoder.encode(text, add_special_tokens)

    def encode_messages(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, as the chat template writes it; the template puts the start token itself.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError("messages: expected a checkpoint with a chat template, this one has none")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self._encoder.encode(text, False)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text that tokens stand for, special ones left out. SentencePiece's first space stays."""
        return self.vocabulary.decode(token_ids)

    def detokenizer(self) -> Detokenizer:
        """Text of one growing sequence, see `Detokenizer`."""
        return self.vocabulary.detokenizer()
