from __future__ import annotations

import numpy as np
import pytest
import reference
import tensorflow as tf

from tfkv.architecture import Rope
from tfkv.layers.rotary import look_from, rotary_angles, rotate


@pytest.mark.parametrize("base", [10000.0, 100000.0])
def test_equals_complex_turns(base: float):
    x = np.random.default_rng(0).normal(size=(6, 3, 16))
    positions = np.array([0, 1, 5, 63, 500, 4000])
    actual = rotate(tf.constant(x, tf.float32), *rotary_angles(tf.constant(positions), 16, base))
    # float32 holds an angle of 4000 radians to 2e-4.
    np.testing.assert_allclose(actual, reference.rope(x, positions, base), atol=2e-3)
    np.testing.assert_allclose(actual[:4], reference.rope(x, positions, base)[:4], atol=2e-5)


def test_equals_keras_nlp():
    embedding = pytest.importorskip("keras_hub").layers.RotaryEmbedding(max_wavelength=10000)
    x = tf.random.stateless_normal([2, 9, 4, 8], [1, 2])
    for start in (0, 100):
        positions = tf.range(start, start + 9)
        actual = rotate(x, *rotary_angles(positions, 8, 10000.0))
        np.testing.assert_allclose(actual, embedding(x, start_index=start), atol=2e-5)


def test_scores_depend_on_the_distance_alone():
    queries, keys = tf.random.stateless_normal([2, 1, 1, 32], [3, 4])

    def score(query: int, key: int) -> float:
        angles = rotary_angles(tf.constant([[query], [key]]), 32, 10000.0)
        turned = rotate(tf.stack([queries, keys]), *angles)
        return float(tf.reduce_sum(turned[0] * turned[1]))

    assert score(7, 2) == pytest.approx(score(107, 102), abs=1e-4)


def test_the_first_channels_turn_and_the_others_stay():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    positions = tf.constant([[0, 5, 9]])
    found = rotate(tf.constant(x), *rotary_angles(positions, 8, Rope(100.0, channels=4)))
    alone = rotate(tf.constant(x[..., :4]), *rotary_angles(positions, 4, 100.0))
    np.testing.assert_allclose(found[..., :4], alone, rtol=1e-6)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])


def test_divisors_and_magnitude():
    rope = Rope(100.0, divisors=(1.0, 3.0), magnitude=1.5)
    cosine, sine = rotary_angles(tf.constant([7]), 4, rope)
    angles = 7 * np.array([1.0, 0.1 / 3.0])
    np.testing.assert_allclose(cosine[0], 1.5 * np.cos(angles), rtol=1e-5)
    np.testing.assert_allclose(sine[0], 1.5 * np.sin(angles), rtol=1e-5)


def test_looking_from_elsewhere_does_not_scale_twice():
    rope = Rope(100.0, magnitude=1.5)
    x = tf.random.stateless_normal([1, 1, 2, 8], [1, 2])
    at, near = tf.constant([[9]]), tf.constant([[4]])
    turned = tf.transpose(rotate(x, *rotary_angles(at, 8, rope)), [0, 2, 1, 3])
    expected = tf.transpose(rotate(x, *rotary_angles(near, 8, rope)), [0, 2, 1, 3])
    np.testing.assert_allclose(look_from(turned, at, 4, rope), expected, atol=1e-5)
