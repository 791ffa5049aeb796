"""Passkey: one number in a long text."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.task import Context, Hay, Question, Task, evenly, numbers

FACT = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


class Passkey(Task):
    """A single number, said twice, at one depth of each text; the easiest of all.

    Reference:
        Mohtashami and Jaggi, Landmark Attention, https://arxiv.org/abs/2305.16300.
    """

    name = "passkey"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        random, places = np.random.default_rng(seed), evenly(depths) * count
        made = []
        for stretch, place in zip(hay.stretches(length, len(places)), places, strict=True):
            (key,) = numbers(random, 5, 1)
            text = hay.hide(stretch, [FACT.format(key=key)], [place])
            asked = Question(hay.encode(QUESTION), hay.encode(f" {key}"), place)
            made.append(Context(text, [asked]))
        return made
