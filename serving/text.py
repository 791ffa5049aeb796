"""Text at the edge: a tokenizer, and text that streams without broken characters."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Self

import tokenizers

from tfkv.errors import TextError

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
