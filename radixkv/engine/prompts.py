"""What a caller hands in as a prompt -> token ids that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from radixkv.engine.model.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class PromptReader:
    """Reads prompts for one model.

    Args:
        tokenizer: None where prompts come as token ids.
        vocab_size, max_positions: the model's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_positions = max_positions

    def read(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """Returns the token ids of a prompt.

        Args:
            prompt: a text, token ids, or messages for the checkpoint's chat template.
            max_tokens: that are to be generated.

        Raises:
            ValueError: the prompt is empty, has tokens that the model has not, needs more positions than the model has,
                or a tokenizer that is not there.
        """
        token_ids = self._token_ids(prompt)
        bad = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt: expected token ids in 0..{self._vocab_size - 1}, got {bad!r}")
        if not token_ids:
            raise ValueError("prompt: expected at least one token, got none")
        if len(token_ids) + max_tokens - 1 > self._max_positions:
            raise ValueError(
                f"prompt: expected prompt + max_tokens - 1 <= {self._max_positions}, the model's positions, got "
                f"{len(token_ids)} + {max_tokens} - 1"
            )
        return token_ids

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt: expected token ids, as this engine has no tokenizer, got a text")
            return self._tokenizer.encode(prompt)
        try:
            items: list[Any] = list(prompt)
        except TypeError:
            raise ValueError(f"prompt: expected a text, token ids or messages, got {prompt!r}") from None
        if items and isinstance(items[0], dict):
            if self._tokenizer is None:
                raise ValueError("prompt: expected token ids, as this engine has no tokenizer, got messages")
            return self._tokenizer.encode_messages(items)
        return [int(item) if isinstance(item, Integral) else item for item in items]
