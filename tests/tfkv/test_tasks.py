from __future__ import annotations

import re

import numpy as np
import pytest

from tfkv.errors import ConfigError
from tfkv.tasks import TASKS, Context, Hay, Question, chosen
from tfkv.tasks.asking import answered, ask
from tfkv.tasks.needle import FACT, QUESTION

#: Tokens below are letters.
FIRST = 1000


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens) -> str:
    return "".join(chr(token) for token in tokens if token < FIRST)


def hay(size: int = 6000) -> Hay:
    return Hay(np.arange(size) + FIRST, encode)


@pytest.mark.parametrize("name", TASKS)
def test_contexts_have_their_length_and_are_drawn_from_the_seed(name: str):
    task = TASKS[name]
    made = [task.contexts(hay(), 1600, 2, depths=4, seed=seed) for seed in (7, 7, 8)]
    for context in made[0]:
        assert context.tokens.shape == (1600,) and context.tokens.dtype == np.int32
        assert context.questions
    texts = [[decode(c.tokens) for c in some] for some in made]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == len(texts[0]), "contexts of one seed differ"


@pytest.mark.parametrize("name", sorted({*TASKS} - {"common_word"}))
def test_an_answer_stands_once_in_its_context_and_where_it_says(name: str):
    """A question ends with the words before its answer, and only there they are followed by it."""
    for context in TASKS[name].contexts(hay(), 1600, 2, depths=4):
        whole = decode(context.tokens)
        for question in context.questions:
            said = decode(question.tokens).rpartition("\n\n")[2].rpartition("Answer: ")[2]
            claim = said.rpartition("? ")[2] + decode(question.answer)
            key = claim[0].lower() + claim[1:] if claim not in whole else claim
            assert len(re.findall(re.escape(key) + r"\b", whole)) <= 2
            found = whole.lower().find(claim.lower())
            assert found >= 0, claim
            if question.depth is not None:
                at = next(
                    first
                    for first in range(len(context.tokens))
                    if decode(context.tokens[first : first + len(claim)]).lower() == claim.lower()
                )
                assert abs(at / 1600 - question.depth) < 0.12


def test_the_common_word_is_the_commonest():
    for context in TASKS["common_word"].contexts(hay(), 2000, 1, depths=3):
        words = re.findall(r'"(\w+)"', decode(context.tokens))
        (question,) = context.questions
        answer = decode(question.answer)
        counts = sorted((words.count(word), word) for word in set(words))
        assert counts[-1][1] == answer
        assert counts[-1][0] > 3 * counts[-2][0]
        assert question.depth is None


def test_needles_hide_a_fact_for_each_question_among_text_in_order():
    first, second = TASKS["needle"].contexts(hay(), 900, 2, depths=5)
    for context in (first, second):
        text = decode(context.tokens)
        for question in context.questions:
            name = decode(question.tokens).split("number of ")[1].split("?")[0]
            assert decode(question.tokens) == QUESTION.format(name=name)
            assert text.count(FACT.format(name=name, number=decode(question.answer).strip())) == 1
    depths = [question.depth for question in first.questions]
    assert depths == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    straws = first.tokens[first.tokens >= FIRST]
    assert straws.tolist() == list(range(FIRST, FIRST + len(straws)))
    assert second.tokens[0] == FIRST + 5100, "the last stretch of the text"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="must hold 600 tokens"):
        TASKS["needle"].contexts(hay(500), 600, 1)
    with pytest.raises(ConfigError, match="must hold 2 facts"):
        TASKS["needle"].contexts(hay(), 40, 1, depths=2)
    with pytest.raises(ConfigError, match="`depths` must be from 1 to 20"):
        TASKS["needle"].contexts(hay(), 4000, 1, depths=21)


def test_tasks_are_chosen_by_name():
    assert chosen(["all"]) == list(TASKS)
    assert chosen(["passkey", "needle", "passkey"]) == ["passkey", "needle"]
    assert chosen(["none"]) == []
    with pytest.raises(ConfigError, match=r"of needle, passkey.*Received: 'needles'"):
        chosen(["needles"])


def test_a_question_is_answered_where_every_token_is_the_likeliest():
    right = Question([1, 2], [7, 8, 9])

    def reading(*following):
        return lambda tokens, position: np.array([0, *following, 0])

    assert answered(right, 600, reading(7, 8, 9))
    assert not answered(right, 600, reading(7, 8, 1))
    assert not answered(right, 600, reading(0, 8, 9))


class Notebook:
    """Remembers which tokens it read; compressing keeps the last one that was read as a question,
    and no other one above 10."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.log: list[tuple[str, int]] = []

    def start(self) -> None:
        self.held = []

    def read(self, tokens, position, prompt=False):
        given = [int(token) for token in tokens if token >= 0]
        assert position == len(self.held), "nothing else was read meanwhile"
        self.held += given
        self.log.append(("prompt" if prompt else "answer", len(given)))
        logits = np.zeros([len(tokens), 100])
        logits[:, 50 if 42 in self.held else 51] = 1
        return logits

    def save(self):
        return list(self.held)

    def resume(self, saved) -> None:
        self.held = list(saved)

    def compress(self, position) -> None:
        assert position == len(self.held)
        # Who has seen the question, 5, knows that 42 is asked for.
        self.held = [0 if token == 42 and 5 not in self.held else token for token in self.held]


def test_a_question_is_asked_of_what_was_kept_before_and_after_it_was_known():
    context = Context(np.array([1, 42, 3]), [Question([5, 6], [50]), Question([7, 6], [50])])
    reader = Notebook()
    answers = ask(reader, context, [True, True], aware=True)
    assert answers.agnostic == [False, False]
    assert answers.aware == [True, False]
    # The context once; then per question one read, and where it was known a prompt before.
    assert reader.log == [
        *[("prompt", 3), ("answer", 3), ("answer", 3)],
        *[("prompt", 1), ("answer", 2), ("prompt", 1), ("answer", 2)],
    ]


def test_what_is_not_wanted_is_not_asked():
    context = Context(np.array([1, 4, 3]), [Question([5], [51]), Question([7], [51])])
    reader = Notebook()
    answers = ask(reader, context, [False, True], aware=False)
    assert answers.agnostic == answers.aware == [False, True]
    assert reader.log == [("prompt", 3), ("answer", 2)]
