"""A chat template taken apart: the ids and the text around each message of a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from tfkv.chat_template import ChatTemplate
from tfkv.errors import ModelSourceError, TextError

#: Stand for messages in a rendered conversation; no template knows them.
_SYSTEM, _USER, _ANSWER, _NEXT = (f"{chr(0xE0F0 + number)}message" for number in range(4))


class Turn(NamedTuple):
    """``first``, then the system message between ``system``, ``then``, the user's message between
    ``user``, ``last``; texts are encoded with the message between them, as special tokens are
    not.

    Attributes:
        first: Token ids.
        system: Text before and after a system message; None where there is none.
        then: Token ids.
        user: Text before and after the user's message.
        last: Token ids.
    """

    first: tuple[int, ...]
    system: tuple[str, str] | None
    then: tuple[int, ...]
    user: tuple[str, str]
    last: tuple[int, ...]


class ChatTurns(NamedTuple):
    """How messages become tokens.

    Attributes:
        opening: Of a new session.
        with_system: Likewise, with a system message; None where the template has none.
        following: Of a session whose last token ended an answer.
        end: The token that ends an answer.
        trims: Whether messages lose white space at both ends.
    """

    opening: Turn
    with_system: Turn | None
    following: Turn
    end: int
    trims: bool


def turns_of(
    template: str,
    special_tokens: Mapping[str, str],
    tokenizer_json: str,
    stop_tokens: Sequence[int],
) -> ChatTurns:
    """Takes a template apart, by what it makes of made-up messages.

    Args:
        template: Jinja2.
        special_tokens: Role to text, as of `ChatTemplate`.
        tokenizer_json: Of the same model.
        stop_tokens: Ids that end an answer.

    Raises:
        ModelSourceError: The template cannot be taken apart; the message says why.
    """
    cut = _Cutter(tokenizer_json)

    def render(*messages: tuple[str, str]) -> str:
        return chat.render([{"role": role, "content": text} for role, text in messages])

    try:
        chat = ChatTemplate(template, special_tokens)
        opening = render(("user", _USER))
        longer = render(("user", _USER), ("assistant", _ANSWER), ("user", _NEXT))
        spaced = render(("user", f" {_USER} "))
    except TextError as error:
        raise _no(str(error)) from error
    if not longer.startswith(opening + _ANSWER):
        raise _no("it changes earlier messages when a conversation goes on")
    following = cut.turn(longer.removeprefix(opening + _ANSWER), _NEXT)
    if not following.first or following.first[0] not in stop_tokens:
        raise _no("it does not end an answer with a stop token")
    try:
        with_system = cut.turn(render(("system", _SYSTEM), ("user", _USER)), _USER, _SYSTEM)
    except TextError:
        with_system = None
    return ChatTurns(
        cut.turn(opening, _USER),
        with_system,
        following._replace(first=following.first[1:]),
        following.first[0],
        f" {_USER}" not in spaced,
    )


class _Cutter:
    """Cuts rendered text at special tokens and at messages."""

    def __init__(self, tokenizer_json: str) -> None:
        added = json.loads(tokenizer_json).get("added_tokens", ())
        for token in added:
            if token.get("lstrip") or token.get("rstrip"):
                raise _no(f"the token {token['content']!r} takes white space away")
        words = sorted((token["content"] for token in added), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        tokenizer = Tokenizer.from_str(tokenizer_json)
        self._encode: Callable[[str], tuple[int, ...]] = lambda text: tuple(
            tokenizer.encode(text, add_special_tokens=False).ids
        )

    def turn(self, text: str, user: str, system: str | None = None) -> Turn:
        """A rendered turn as ids and texts."""
        found, then = None, text
        first: tuple[int, ...] = ()
        if system is not None:
            before, found, then = self._around(text, system)
            first = self._encode(before)
        before, around, after = self._around(then, user)
        ids = self._encode(before)
        if system is None:
            return Turn(ids, None, (), around, self._encode(after))
        return Turn(first, found, ids, around, self._encode(after))

    def _around(self, text: str, message: str) -> tuple[str, tuple[str, str], str]:
        """What stands before, right around and after a message: right around it is all up to the
        next special tokens."""
        if text.count(message) != 1:
            raise _no("it shows a message other than once")
        before, after = text.split(message)
        start = max((found.end() for found in self._special.finditer(before)), default=0)
        behind = self._special.search(after)
        end = len(after) if behind is None else behind.start()
        return before[:start], (before[start:], after[:end]), after[end:]


def _no(why: str) -> ModelSourceError:
    return ModelSourceError(f"The chat template cannot be put into a graph: {why}.")
