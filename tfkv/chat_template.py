"""Conversations as the text that a model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from tfkv.errors import TextError

__all__ = ["ChatTemplate", "Message"]

#: One message of a conversation: ``{"role": ..., "content": ...}``, and what a template adds.
Message = Mapping[str, Any]


class ChatTemplate:
    """Renders conversations with a model's Jinja2 chat template, in a sandbox.

    The environment is the one Hugging Face templates are written for: `raise_exception`,
    `strftime_now`, ``tojson`` and loop controls, with blocks trimmed.

    Args:
        source: The template.
        special_tokens: Role to text, ``bos`` or ``bos_token``; templates see ``bos_token``.

    Raises:
        TextError: The template is not valid Jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = {
            name if name.endswith("_token") else f"{name}_token": text
            for name, text in (special_tokens or {}).items()
        }
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(f"The chat template is not valid Jinja2: {error}.") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: At least one; each with a ``role`` and a ``content``.
            add_generation_prompt: Whether to end with the start of the model's next turn.

        Raises:
            TextError: There is no message, or the template refuses the conversation.
        """
        if not messages:
            raise TextError("A conversation needs at least one message. Received: messages=[].")
        for index, message in enumerate(messages):
            if "role" not in message:
                raise TextError(
                    f"Each message needs a `role`. Received: messages[{index}]={dict(message)!r}."
                )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as error:
            raise TextError(f"The chat template refused the conversation: {error}.") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a model never saw in training.
    return json.dumps(value, ensure_ascii=False, indent=indent)
