"""Guessed tokens are accepted by the exact rule: what is sampled has the model's distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfkv.export.decode_loop import DecodeLoop
from tfkv.export.history import History
from tfkv.export.plan import Plan
from tfkv.export.prompt_lookup import PromptLookup
from tfkv.export.rows import Request

ROWS, VOCABULARY, CHUNK = 4_000, 4, 3
TEXT = [0, 1, 2, 0]  # 0 is followed by 1, then by 2
LOOKUP = PromptLookup(tokens=2, ngram=1, shortest=1)


def distributions(temperature: float, top_k: int = 0) -> np.ndarray:
    """What follows each token, ``[V, V]``."""
    logits = np.random.default_rng(5).normal(size=[VOCABULARY, VOCABULARY]).astype(np.float32)
    if top_k:
        logits[logits < np.sort(logits, axis=1)[:, -top_k, None]] = -np.inf
    mass = np.exp(logits.astype(np.float64) / temperature)
    return mass / mass.sum(axis=1, keepdims=True)


def sampled(lookup, **sampling):
    """What a model samples whose next token depends on the last one: all rows say `TEXT`, each
    has a seed of its own."""
    table = np.log(distributions(1.0)).astype(np.float32)
    history = History(1, 16)
    zero = tf.zeros([ROWS], tf.int32)
    places = tf.range(len(TEXT))[tf.newaxis]
    history.write(tf.constant([0]), places, tf.constant([TEXT]), places, tf.zeros([1, len(TEXT)]))
    held = zero + len(TEXT)
    plan = Plan(**dict.fromkeys(Plan._fields, zero))
    plan = plan._replace(held=held, start=held - 1, steps=zero + CHUNK)
    real = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    whole = {"mode": 0, "top_k": 0, "seed": 0}
    values = {name: tf.fill([ROWS], sampling.get(name, value)) for name, value in real.items()}
    values |= {name: tf.fill([ROWS], sampling.get(name, value)) for name, value in whole.items()}
    values["seed"] = tf.range(ROWS, dtype=tf.int64)
    values["stop_tokens"] = tf.fill([ROWS, 8], -1)
    request = Request(**{name: values.get(name, zero) for name in Request._fields})
    loop = DecodeLoop(history, CHUNK, VOCABULARY, lookup)

    @tf.function
    def run():
        def feed(fresh, tokens, at):
            return tf.gather(table, tf.where(at >= 0, tokens, 0)), fresh

        return loop(request, plan, zero, (), feed)[0]

    return tf.nest.map_structure(lambda x: x.numpy(), run())


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        ({"temperature": 1.0}, 103.4),
        ({"temperature": 0.6}, 103.4),
        ({"temperature": 1.4, "top_k": 2}, 24.3),
    ],
)
def test_distribution_of_answers_is_the_models(sampling, most):
    """Chi-square over all answers of three tokens, at its 99.9th percentile: 63 or 7 degrees of
    freedom (table of the NIST handbook, 1.3.6.7.4)."""
    made = sampled(LOOKUP, **sampling)
    p = distributions(**sampling)
    answers = list(itertools.product(range(VOCABULARY), repeat=CHUNK))
    mass = np.array([p[0, a] * p[a, b] * p[b, c] for a, b, c in answers])
    counts = np.zeros(len(answers))
    numbers = made.tokens @ np.array([VOCABULARY**2, VOCABULARY, 1])
    np.add.at(counts, numbers, 1)
    possible = mass > 0
    assert counts[~possible].sum() == 0
    chi = ((counts - ROWS * mass) ** 2)[possible] / (ROWS * mass[possible])
    assert possible.sum() == (8 if "top_k" in sampling else 64)
    assert chi.sum() < most


def test_guess_is_accepted_as_often_as_the_model_would_have_said_it():
    """p(x), and p(x)·p(y) for the guess behind it; within four standard deviations."""
    made = sampled(LOOKUP)
    p = distributions(1.0)
    first = made.tokens[:, 0] == 1
    assert (made.accepted[first] >= 1).all()
    for share, wanted in (
        (first.mean(), p[0, 1]),
        ((first & (made.tokens[:, 1] == 2)).mean(), p[0, 1] * p[1, 2]),
    ):
        assert abs(share - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / ROWS)
    # What is said in place of a refused guess comes from the rest, in its proportions.
    others = made.tokens[~first, 0]
    for token in (0, 2, 3):
        wanted = p[0, token] / (1 - p[0, 1])
        deviation = np.sqrt(wanted * (1 - wanted) / len(others))
        assert abs((others == token).mean() - wanted) < 4 * deviation


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"repetition_penalty": 1.8}]
)
def test_answers_are_those_without_guesses(sampling):
    with_guesses, without = sampled(LOOKUP, **sampling), sampled(None, **sampling)
    for name in ("tokens", "logprobs", "fed", "stopped"):
        np.testing.assert_array_equal(getattr(with_guesses, name), getattr(without, name))
    assert with_guesses.guessed.min() >= 1
    assert without.guessed.max() == 0
