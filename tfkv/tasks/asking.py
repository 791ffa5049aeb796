"""Asks a cache what it knows of a context: before it compressed it, and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfkv.evaluation import SessionReader, read_on
from tfkv.tasks.task import Context, Question


class Answers(NamedTuple):
    """Which questions about one context were answered.

    Attributes:
        agnostic: Where the context was read, and compressed by policies that evict, before
            anything was asked.
        aware: Where the question was read with the context, before anything was evicted.
    """

    agnostic: list[bool]
    aware: list[bool]


def answered(
    question: Question, position: int, read: Callable[[Sequence[int], int], np.ndarray]
) -> bool:
    """Whether each token of an answer is the likeliest after the question and those before it:
    then greedy decoding would give it.

    Args:
        question: What is asked.
        position: Of its first token.
        read: Reads tokens ``[T]`` at a position, and gives the likeliest next one after each,
            int ``[T]``.
    """
    greedy = read([*question.tokens, *question.answer], position)
    return greedy[len(question.tokens) - 1 : -1].tolist() == question.answer


def ask(
    reader: SessionReader, context: Context, wanted: Sequence[bool], aware: bool, piece: int = 64
) -> Answers:
    """Reads a context once, and asks each question of a copy of what was kept of it.

    Args:
        reader: Through the cache in question.
        context: What is read.
        wanted: For each question, whether it is asked; the others count as not answered.
        aware: Whether to ask before anything is evicted, too. Where a cache reads the same
            however a text is cut, that is the same, and is not done again.
        piece: Tokens of questions and answers read at once.
    """
    size = len(context.tokens)
    reader.start()
    read_on(reader, context.tokens, 0, prompt=True)
    whole = reader.save()
    reader.compress(size)
    compressed = reader.save()

    def read(tokens: Sequence[int], at: int) -> np.ndarray:
        return read_on(reader, tokens, at, piece=piece)

    def after(question: Question) -> bool:
        reader.resume(compressed)
        return answered(question, size, read)

    def with_the_rest(question: Question) -> bool:
        reader.resume(whole)
        *most, last = question.tokens
        read_on(reader, most, size, prompt=True)
        # As a server does: the last token of a prompt is read with the answer.
        reader.compress(size + len(most))
        rest = Question([last], question.answer)
        return answered(rest, size + len(most), read)

    asked = list(zip(context.questions, wanted, strict=True))
    agnostic = [does and after(question) for question, does in asked]
    if not aware:
        return Answers(agnostic, agnostic)
    return Answers(agnostic, [does and with_the_rest(question) for question, does in asked])
