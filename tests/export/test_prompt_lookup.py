"""Guesses are what followed the newest place that ends like the text."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.export.prompt_lookup import PromptLookup


def guess(lookup: PromptLookup, texts, size: int):
    """Guesses for texts in rings of `size` places, as lists; None where there is none."""
    ring = np.full([len(texts), size], -7, np.int32)
    for row, text in zip(ring, texts, strict=True):
        for position, token in enumerate(text):
            row[position % size] = token
    tokens, found = lookup.guess(tf.constant(ring), tf.constant([len(t) for t in texts]))
    return [t.tolist() if f else None for t, f in zip(tokens.numpy(), found.numpy(), strict=True)]


def expected(lookup: PromptLookup, text, size: int):
    """The same, by looking at every place in turn."""
    forgotten = max(0, len(text) - size)
    for ngram in range(lookup.ngram, lookup.shortest - 1, -1):
        for end in range(len(text) - 1, forgotten + ngram - 1, -1):
            if text[end - ngram : end] == text[-ngram:]:
                behind = text[end:]
                return [behind[n % len(behind)] for n in range(lookup.tokens)]
    return None


@pytest.mark.parametrize("size", [16, 9])
@pytest.mark.parametrize("lookup", [PromptLookup(3, 3, 1), PromptLookup(5, 2, 2), PromptLookup(4)])
def test_guesses_are_those_of_a_search_through_the_text(lookup, size):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 3, length).tolist() for length in range(1, 25) for _ in range(6)]
    found = guess(lookup, texts, size)
    wanted = [expected(lookup, text, size) for text in texts]
    assert found == wanted
    assert None in wanted
    assert sum(one is not None for one in wanted) > 40


def test_longest_end_counts_before_the_newest():
    text = [5, 6, 7, 1, 2, 9, 6, 7, 3, 4, 5, 6, 7]
    assert guess(PromptLookup(2, 3, 1), [text], 32) == [[1, 2]]
    assert guess(PromptLookup(2, 2, 1), [text], 32) == [[3, 4]]


def test_text_behind_a_near_place_is_repeated():
    assert guess(PromptLookup(5, 2, 1), [[8, 1, 2, 1, 2]], 32) == [[1, 2, 1, 2, 1]]


def test_reads_back_what_it_writes():
    lookup = PromptLookup.parse("prompt_lookup(ngram=4, shortest=1)")
    assert lookup == PromptLookup(7, 4, 1)
    assert PromptLookup.parse(str(lookup)) == lookup
    assert PromptLookup.parse("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_look", "Did you mean 'prompt_lookup'"),
        ("prompt_lookup(token=3)", "Did you mean 'tokens'"),
        ("prompt_lookup(tokens=0)", "must be an integer of at least 1"),
        ("prompt_lookup(tokens=2.5)", "must be an integer of at least 1"),
        ("prompt_lookup(ngram=2,shortest=3)", "must not exceed ngram=2"),
        ("prompt_lookup+prompt_lookup", "must read prompt_lookup"),
        ("prompt_lookup(", "must read prompt_lookup"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        PromptLookup.parse(text)
