"""Several values of one key, far from each other, each asked for by its order."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.task import Context, Hay, Question, Task, drawn, evenly, numbers
from tfkv.tasks.words import PEOPLE

FACT = "\n\nThe {order} number of {name} is {value}.\n\n"
QUESTION = (
    "\n\nQuestion: What is the {order} number of {name}?\nAnswer: The {order} number of {name} is"
)
_ORDERS = ("first", "second")
_NAMES = 3


class MultiValue(Task):
    """Two values of each of three people: a fact must not stand for its neighbour of that name.

    Facts are spread over the whole text, whatever the depths.

    Reference:
        Hsieh et al., RULER, niah_multivalue, https://arxiv.org/abs/2404.06654.
    """

    name = "multi_value"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        del depths
        random, places = np.random.default_rng(seed), evenly(_NAMES * len(_ORDERS))
        made = []
        for stretch in hay.stretches(length, count):
            names, facts, questions = drawn(random, PEOPLE, _NAMES), [], []
            values = iter(numbers(random, 2, len(places)))
            for order in _ORDERS:
                for name in names:
                    value = next(values)
                    facts.append(FACT.format(order=order, name=name, value=value))
                    asked = hay.encode(QUESTION.format(order=order, name=name))
                    questions.append(Question(asked, hay.encode(f" {value}")))
            made.append(Context(hay.hide(stretch, facts, places), questions))
        return made
