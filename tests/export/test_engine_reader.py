"""Measuring on an engine's pages: against NumPy, and against the Keras model where it evicts."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tiny_model

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.evaluation import ModelReader, continuation, read_on
from tfkv.export import Engine
from tfkv.export.engine_reader import EngineReader
from tfkv.tasks import Context, Question
from tfkv.tasks.asking import ask

TEXT = tiny_model.text(300, seed=11)
SIZE = 150
SNAPKV = "snapkv(budget=40,interval=64,sinks=2,window=16,whole_prompt=True)"


@functools.cache  # compiling takes seconds
def reader(cache: str) -> EngineReader:
    config = EngineConfig(
        cache=cache,
        slots=1,
        capacity=320,
        page_size=16,
        scan_pages=4,
        decode_chunk=8,
        prefill_tokens=128,
        batch_sizes=(1,),
    )
    return EngineReader(Engine(tiny_model.CONFIG, tiny_model.WEIGHTS, config))


@functools.cache
def layers(cache: str) -> ModelReader:
    model = CausalLM.from_weights(
        tiny_model.CONFIG, tiny_model.WEIGHTS, cache=cache, capacity=320, slack=64
    )
    return ModelReader(model)


@pytest.fixture(scope="module")
def full() -> EngineReader:
    return reader("dense+float32")


def question(tokens: list[int], count: int = 4) -> Question:
    """What the model says by itself after the context and some tokens."""
    return Question(tokens, tiny_model.greedy(TEXT[:SIZE] + tokens, count), depth=0.5)


@pytest.fixture(scope="module")
def context() -> Context:
    asked = [TEXT[200 + 10 * index :][: 5 + index] for index in range(4)]
    return Context(np.array(TEXT[:SIZE], np.int32), [question(tokens) for tokens in asked])


def test_greedy_tokens_are_those_of_numpy(full: EngineReader):
    full.start()
    found = read_on(full, TEXT[:100], 0)
    np.testing.assert_array_equal(found, tiny_model.logits(TEXT[:100]).argmax(-1))
    assert continuation(full, TEXT[:70], 12) == tiny_model.greedy(TEXT[:70], 12)
    assert continuation(full, TEXT[:1], 3) == tiny_model.greedy(TEXT[:1], 3)


@pytest.mark.parametrize(
    "cache",
    [
        "dense+float32",
        "sliding_window(window=70,sinks=3)+int8",
        "streaming_llm(window=61,sinks=3)+k4v4(recent=64,sinks=2)",
        "expected_attention(budget=40,interval=64,sinks=2,recent=8)+int8",
        SNAPKV,
    ],
)
def test_a_state_can_be_returned_to(cache: str):
    """To the last bit, however much was read meanwhile."""
    through = reader(cache)
    through.start()
    read_on(through, TEXT[:SIZE], 0, prompt=True)
    through.compress(SIZE)
    saved = through.save()
    answers = []
    for later in (TEXT[200:210], TEXT[200:290], TEXT[200:210]):
        through.resume(saved)
        row = np.full([64], -1, np.int32)
        row[:10] = later[:10]
        answers.append(through.read(row, SIZE).numpy()[:10])
        read_on(through, later[10:], SIZE + 10)
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    through.start()
    read_on(through, tiny_model.text(SIZE, seed=5), 0, prompt=True)
    through.compress(SIZE)
    other = through.read(np.array(TEXT[200:264], np.int32), SIZE).numpy()[:10]
    assert np.abs(other - answers[0]).max() > 0.1, "another text is another state"


def test_compressing_keeps_what_the_keras_model_keeps():
    through = reader(SNAPKV)
    through.start()
    read_on(through, TEXT[:SIZE], 0, prompt=True)
    through.compress(SIZE)
    model = layers(SNAPKV)
    state = model.evicted(model.state_after(np.array(TEXT[:SIZE])))
    later = np.array(TEXT[200:230])
    expected = model.read_on(state, later, SIZE)
    row = np.full([64], -1, np.int32)
    row[:30] = later
    np.testing.assert_allclose(through.read(row, SIZE).numpy()[:30], expected, atol=3e-4)


def test_what_keeps_everything_answers_all_that_the_full_cache_answers(
    full: EngineReader, context: Context
):
    every = [True] * len(context.questions)
    assert ask(full, context, every, aware=True) == (every, every)
    roomy = "snapkv(budget=200,interval=64,sinks=2,window=16,whole_prompt=True)"
    for cache in ("sliding_window(window=256)", roomy):
        assert ask(reader(cache), context, every, aware=True) == (every, every), cache


def test_a_window_answers_as_if_nothing_before_it_had_been(context: Context):
    """It misses what the full cache answers, and says what NumPy says of that window."""
    window = 24

    def sees(query: int, key: int) -> bool:
        return 0 <= query - key < window

    asked = [
        dataclasses.replace(one, answer=tiny_model.greedy(TEXT[:SIZE] + one.tokens, 4, sees))
        for one in context.questions
    ]
    narrow = reader(f"sliding_window(window={window})")
    every = [True] * len(asked)
    missed = ask(narrow, context, every, aware=True)
    assert not any(missed.agnostic) and not any(missed.aware)
    found = ask(narrow, Context(context.tokens, asked), every, aware=True)
    assert all(found.agnostic) and all(found.aware)


def test_evicting_before_and_after_the_question_was_known_is_told_apart(context: Context):
    """Each against the Keras model that evicts at that point."""
    model = layers(SNAPKV)

    def said(known: list[int], rest: list[int]) -> list[int]:
        tokens = [*context.tokens.tolist(), *known]
        state = model.evicted(model.state_after(np.array(tokens)))
        made = list(rest)
        for _ in range(4):
            logits = model.read_on(state, np.array(made), len(tokens))
            made.append(int(logits[-1].argmax()))
        return made[len(rest) :]

    through, differ = reader(SNAPKV), 0
    for one in context.questions:
        unknown = Question(one.tokens, said([], one.tokens))
        known = Question(one.tokens, said(one.tokens[:-1], one.tokens[-1:]))
        both = Context(context.tokens, [unknown, known])
        answers = ask(through, both, [True, True], aware=True)
        assert answers.agnostic[0] and answers.aware[1]
        same = unknown.answer == known.answer
        assert answers.agnostic[1] == answers.aware[0] == same
        differ += not same
    assert differ, "the questions must be told apart by this budget"
