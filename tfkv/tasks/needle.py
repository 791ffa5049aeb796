"""Needles: a fact about another person at each depth, and a question about each."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.task import Context, Hay, Question, Task, drawn, evenly, numbers
from tfkv.tasks.words import PEOPLE

#: What is hidden, and what is asked.
FACT = "\n\nThe secret number of {name} is {number}.\n\n"
QUESTION = (
    "\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
)


class Needle(Task):
    """One fact at each depth of a text; each is asked for.

    Reference:
        Kamradt, needle in a haystack, https://github.com/gkamradt/LLMTest_NeedleInAHaystack.
    """

    name = "needle"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        random, places = np.random.default_rng(seed), evenly(depths)
        made = []
        for stretch in hay.stretches(length, count):
            told = zip(drawn(random, PEOPLE, depths), numbers(random, 4, depths), strict=True)
            pairs = list(told)
            facts = [FACT.format(name=name, number=number) for name, number in pairs]
            questions = [
                Question(hay.encode(QUESTION.format(name=name)), hay.encode(f" {number}"), place)
                for (name, number), place in zip(pairs, places, strict=True)
            ]
            made.append(Context(hay.hide(stretch, facts, places), questions))
        return made
