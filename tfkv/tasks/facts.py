"""Questions about short descriptions of people."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.task import Context, Hay, Question, Task, drawn, evenly
from tfkv.tasks.words import ANIMALS, CITIES, JOBS, PEOPLE

FACT = "\n\n{name} lives in {city}. {name} works as a {job}. {name} owns a {animal}.\n\n"
#: Question, and the place in `FACT` that answers it.
QUESTIONS = (
    ("\n\nQuestion: Where does {name} live?\nAnswer: {name} lives in", "city"),
    ("\n\nQuestion: What is the job of {name}?\nAnswer: {name} works as a", "job"),
    ("\n\nQuestion: Which animal does {name} own?\nAnswer: {name} owns a", "animal"),
)


class Facts(Task):
    """Somebody's town, job and animal at each depth, in words rather than numbers.

    Reference:
        Hsieh et al., RULER, question answering, https://arxiv.org/abs/2404.06654; there it
        takes questions of data sets, here facts that no model knows beforehand.
    """

    name = "facts"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        random, places = np.random.default_rng(seed), evenly(depths)
        made: list[Context] = []
        for stretch in hay.stretches(length, count):
            columns = {"name": PEOPLE, "city": CITIES, "job": JOBS, "animal": ANIMALS}
            words = {kind: drawn(random, all_of, depths) for kind, all_of in columns.items()}
            people = [{kind: words[kind][row] for kind in words} for row in range(depths)]
            questions = []
            for row, (person, place) in enumerate(zip(people, places, strict=True)):
                asked, kind = QUESTIONS[(row + len(made)) % len(QUESTIONS)]
                answer = hay.encode(f" {person[kind]}")
                questions.append(Question(hay.encode(asked.format(**person)), answer, place))
            facts = [FACT.format(**person) for person in people]
            made.append(Context(hay.hide(stretch, facts, places), questions))
        return made
