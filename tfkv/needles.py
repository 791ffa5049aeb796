"""Facts hidden in a text, and questions about each: what a cache that forgets has to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfkv.errors import ConfigError

__all__ = ["FACT", "QUESTION", "Haystack", "found", "haystacks"]

_NAMES = (
    "Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jonas",
    "Karen", "Lucas", "Maria", "Nadia", "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tanya",
)  # fmt: skip

#: What is hidden, and what is asked.
FACT = "\n\nThe secret number of {name} is {number}.\n\n"
QUESTION = (
    "\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
)


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A text with facts in it.

    Attributes:
        tokens: int32 ``[S]``.
        questions: Token ids of a question for each fact.
        answers: Token ids of what has to follow it.
        depths: Where the facts stand, from 0 = first token to 1 = last.
    """

    tokens: np.ndarray
    questions: list[list[int]]
    answers: list[list[int]]
    depths: list[float]


def haystacks(
    text: np.ndarray,
    encode: Callable[[str], Sequence[int]],
    lengths: Sequence[int],
    facts: int = 8,
    seed: int = 0,
) -> list[Haystack]:
    """Texts with facts spread evenly over each of them.

    Args:
        text: Token ids of the hay; each stack takes the next stretch of it.
        encode: Token ids of a string.
        lengths: Tokens of each stack.
        facts: Facts of each; each is about another person.
        seed: Of names and numbers.

    Raises:
        ConfigError: There are too many facts, or the text is too short.
    """
    if not 1 <= facts <= len(_NAMES):
        raise ConfigError(f"`facts` must be from 1 to {len(_NAMES)}. Received: facts={facts}.")
    if sum(lengths) > len(text):
        raise ConfigError(
            f"`text` must hold {sum(lengths)} tokens. Received: {len(text)} tokens. Give a longer "
            "text, or ask for less."
        )
    random, stacks, first = np.random.default_rng(seed), [], 0
    for length in lengths:
        names = random.choice(_NAMES, facts, replace=False)
        numbers = random.choice(np.arange(1000, 10000), facts, replace=False)
        facts_told = zip(names, numbers, strict=True)
        hidden = [list(encode(FACT.format(name=who, number=what))) for who, what in facts_told]
        room = length - sum(map(len, hidden))
        if room < facts:
            raise ConfigError(f"`lengths` must hold {facts} facts. Received: a length of {length}.")
        cuts = np.linspace(0, room, facts + 2).astype(int)[1:-1]
        hay = np.split(text[first : first + room], cuts)
        first += length
        pieces, depths, at = [hay[0]], [], len(hay[0])
        for fact, more in zip(hidden, hay[1:], strict=True):
            depths.append(at / length)
            pieces += [np.array(fact), more]
            at += len(fact) + len(more)
        stacks.append(
            Haystack(
                np.concatenate(pieces).astype(np.int32),
                [list(encode(QUESTION.format(name=name))) for name in names],
                [list(encode(f" {number}")) for number in numbers],
                depths,
            )
        )
    return stacks


def found(
    stack: Haystack,
    state: Any,
    read: Callable[[np.ndarray, int, Any], np.ndarray],
) -> list[bool]:
    """Which questions a cache answers, each asked of the same state.

    Args:
        stack: What was read.
        state: The cache that has read it.
        read: Logits ``[T, V]`` after each of ``tokens [T]`` at a position, from a state.
    """
    right = []
    for question, answer in zip(stack.questions, stack.answers, strict=True):
        asked = np.array(question + answer, np.int32)
        logits = read(asked, len(stack.tokens), state)
        greedy = logits[len(question) - 1 : -1].argmax(axis=-1)
        right.append(greedy.tolist() == answer)
    return right
