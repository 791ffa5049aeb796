from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfkv.layers.scoring import Scoring, alibi_slopes, grouped_slopes


def test_slopes_of_a_power_of_two_fall_from_head_to_head():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)])


def test_slopes_of_other_numbers_interleave_those_of_the_power_above():
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    np.testing.assert_allclose(alibi_slopes(6), expected)


def test_scores_by_definition():
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(2, 2, 6, 5)).astype(np.float32)  # K = 2, G = 2, T = 3, S = 5
    queries, keys = np.array([[4, 5, 6], [2, 3, -1]]), np.array([[0, 1, 2, 3, 4], [3, 2, 1, 0, -1]])
    scoring = Scoring(1.5, grouped_slopes(0.5, 2, 2))
    found = scoring.between(tf.constant(queries), tf.constant(keys))(tf.constant(scores))
    slopes = 0.5 * np.array(alibi_slopes(4)).reshape(1, 2, 2, 1, 1)
    apart = (keys[:, np.newaxis] - queries[..., np.newaxis])[:, np.newaxis, np.newaxis]
    expected = 1.5 * np.tanh(scores / 1.5).reshape(2, 2, 2, 3, 5) + slopes * apart
    np.testing.assert_allclose(found, expected.reshape(scores.shape), rtol=1e-5)


def test_a_window_counts_the_querys_own_token():
    seen = Scoring(window=2).narrow(tf.ones([1, 1, 5], tf.bool), tf.constant([[3]]), tf.range(5))
    assert seen[0, 0].numpy().tolist() == [False, False, True, True, True]


def test_what_is_off_is_no_operation():
    scores, mask = tf.zeros([1, 1, 1, 3]), tf.ones([1, 1, 3], tf.bool)
    positions = tf.constant([[0]])
    plain = Scoring()
    assert plain.between(positions, positions)(scores) is scores
    assert plain.narrow(mask, positions, positions) is mask
