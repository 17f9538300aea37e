"""Messages -> the text that a model was trained to see. Templates are the checkpoint's own, in Jinja, run in a sandbox.

Templates get no clock: one that writes today's date into the system prompt would change every cached prefix at
midnight; those we know fall back to a fixed date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

Message = Mapping[str, Any]
"""{"role": .., "content": ..}, and whatever else a template looks at."""


class ChatTemplate:
    """A checkpoint's Jinja template.

    Args:
        source: its text.
        special_tokens: "bos_token", "eos_token", ... as the template names them.

    Raises:
        ValueError: it is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Jinja's own escapes characters for HTML.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._special_tokens = dict(special_tokens)
        self._error = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: expected valid Jinja, got {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: end with the head of the assistant's next message.

        Raises:
            ValueError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except self._error as error:
            raise ValueError(f"messages: refused by the chat template: {error}") from error


class ChatML:
    """`<|im_start|>role\\ncontent<|im_end|>\\n`: for presets, which bring no template of their own."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """As `ChatTemplate.render`."""
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError(f"messages: expected a role and a content in each, both text, got {message!r}")
        text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
