"""A list of words, of which one is far more frequent than the others."""

from __future__ import annotations

import numpy as np

from tfkv.tasks.task import Context, Hay, Question, Task, drawn
from tfkv.tasks.words import NOUNS

TITLE = "The list of words:"
QUESTION = '\n\nQuestion: Which word is most often in the list?\nAnswer: "'
_SHARE = 0.4


class CommonWord(Task):
    """What is asked for is everywhere: a cache that keeps any part of the text can tell.

    It shows whether a cache still counts, where the others show whether it still finds.

    Reference:
        Hsieh et al., RULER, common words, https://arxiv.org/abs/2404.06654.
    """

    name = "common_word"

    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        random = np.random.default_rng(seed)
        made = []
        for _ in range(count * depths):
            common, *others = drawn(random, NOUNS, len(NOUNS))
            text = hay.encode(TITLE)
            while len(text) < length:
                word = common if random.random() < _SHARE else random.choice(others)
                text += hay.encode(f' "{word}",')
            asked = Question(hay.encode(QUESTION), hay.encode(common))
            made.append(Context(np.array(text[:length], np.int32), [asked]))
        return made
