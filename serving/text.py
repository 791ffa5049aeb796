"""Text at the edge: tokenizer, chat template, and text that streams without broken characters."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from tfkv.serving.failures import TextError

#: One message of a conversation: ``{"role": ..., "content": ...}``, and what a template adds.
Message = Mapping[str, Any]

_BROKEN = "\ufffd"
_CONTEXT = 16


class Tokenizer:
    """Turns text into the model's token ids and back.

    Args:
        backend: A tokenizer of the Hugging Face `tokenizers` library.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        # Padding and truncation of a training set-up would silently alter prompts.
        self.backend.no_padding()
        self.backend.no_truncation()

    @classmethod
    def from_file(cls, path: str | pathlib.Path) -> Self:
        """Reads a ``tokenizer.json``.

        Raises:
            TextError: There is no such file, or it is not a tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise TextError(
                f"{path} is not a readable tokenizer.json of the `tokenizers` library ({error})."
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text; special tokens written in it are recognised.
            add_special_tokens: Whether to add what starts a text of this model, such as BOS.

        Raises:
            TextError: The text is not valid Unicode.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise TextError(f"Not text that can be encoded: {error}.") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character come out as U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))


class Detokenizer:
    """Text of a stream of ids, piece by piece, never with half a character.

    A character may span several tokens, and some tokenizers decode a token differently by
    its neighbours (leading spaces, runs of bytes). So a window that begins before the new
    tokens is decoded, and text is given out only when its tail cannot change any more: while
    it ends in U+FFFD it is held back.

    Args:
        tokenizer: What decodes.
        context: Ids before the stream, so that its first token is decoded in its place.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        self._window = 0
        self._given = len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids; returns the text that is certain now, which may be empty."""
        pieces = []
        for token in ids:
            self._ids.append(token)
            pieces.append(self._advance(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, at the end of the stream; an unfinished character shows as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._given == len(self._ids):
            return ""
        before = self._tokenizer.decode(self._ids[self._window : self._given])
        whole = self._tokenizer.decode(self._ids[self._window :])
        if whole.endswith(_BROKEN) and not final:
            return ""
        self._window, self._given = self._given, len(self._ids)
        # Ids before the window are never decoded again.
        del self._ids[: self._window]
        self._given -= self._window
        self._window = 0
        return whole[len(before) :]


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
