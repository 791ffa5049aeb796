from __future__ import annotations

import numpy as np
import pytest

from tfkv.errors import ConfigError
from tfkv.needles import QUESTION, found, haystacks

HAY = np.arange(5000, dtype=np.int32) + 1000


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens) -> str:
    return "".join(map(chr, tokens))


def test_each_fact_stands_once_in_its_text_and_has_its_question():
    for stack, length in zip(haystacks(HAY, encode, [600, 900], facts=5), (600, 900), strict=True):
        assert len(stack.tokens) == length and stack.tokens.dtype == np.int32
        text = decode(token for token in stack.tokens if token < 1000)
        names = set()
        for question, answer in zip(stack.questions, stack.answers, strict=True):
            name = decode(question).split("number of ")[1].split("?")[0]
            assert decode(question) == QUESTION.format(name=name)
            assert text.count(f"The secret number of {name} is{decode(answer)}.") == 1
            names.add(name)
        assert len(names) == 5
        assert stack.depths == sorted(stack.depths) and 0 < stack.depths[0] < stack.depths[-1] < 1


def test_the_hay_is_in_order_and_is_not_used_twice():
    stacks = haystacks(HAY, encode, [600, 900], facts=2)
    hay = [stack.tokens[stack.tokens >= 1000] for stack in stacks]
    assert hay[0].tolist() == list(range(1000, 1000 + len(hay[0])))
    assert hay[1].tolist() == list(range(1600, 1600 + len(hay[1])))


def test_a_question_is_answered_where_every_token_is_the_likeliest():
    (stack,) = haystacks(HAY, encode, [600], facts=3)
    asked = []

    def read(tokens: np.ndarray, position: int, state: str) -> np.ndarray:
        """Knows every answer but the last digit of the second."""
        assert (position, state) == (600, "cache")
        logits = np.zeros([len(tokens), 6000])
        logits[np.arange(len(tokens) - 1), tokens[1:]] = 1
        if len(asked) == 1:
            logits[len(tokens) - 2] = 0
        asked.append(tokens)
        return logits

    assert found(stack, "cache", read) == [True, False, True]


@pytest.mark.parametrize(
    ("lengths", "facts", "message"),
    [
        ([600], 0, "`facts` must be from 1 to 20"),
        ([6000], 2, "`text` must hold 6000 tokens"),
        ([40], 2, "must hold 2 facts"),
    ],
)
def test_what_does_not_fit_is_refused(lengths, facts: int, message: str):
    with pytest.raises(ConfigError, match=message):
        haystacks(HAY, encode, lengths, facts)
