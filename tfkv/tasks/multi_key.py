"""Many needles of one kind, of which some are asked for: the others distract."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.needle import FACT, QUESTION
from tfkv.tasks.task import Context, Hay, Question, Task, drawn, evenly, numbers
from tfkv.tasks.words import PEOPLE

_KEYS = 12


class MultiKey(Task):
    """A dozen needles of three digits, so that a cache has to keep each apart from many.

    As many as there are depths are asked for.

    Reference:
        Hsieh et al., RULER, niah_multikey, https://arxiv.org/abs/2404.06654.
    """

    name = "multi_key"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        random, keys = np.random.default_rng(seed), max(depths, _KEYS)
        places = evenly(keys)
        made = []
        for stretch in hay.stretches(length, count):
            names, values = drawn(random, PEOPLE, keys), numbers(random, 3, keys)
            told = zip(names, values, strict=True)
            facts = [FACT.format(name=name, number=number) for name, number in told]
            questions = []
            for depth in evenly(depths):
                key = int(keys * depth)
                asked = hay.encode(QUESTION.format(name=names[key]))
                questions.append(Question(asked, hay.encode(f" {values[key]}"), depth))
            made.append(Context(hay.hide(stretch, facts, places), questions))
        return made
