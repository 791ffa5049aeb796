from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.keras_api import keras
from tfkv.layers.layer_norm import LayerNorm


def test_equals_keras():
    x = tf.random.stateless_normal([2, 3, 8], [1, 2]) * 3 + 1
    layer, theirs = LayerNorm(1e-3), keras.layers.LayerNormalization(epsilon=1e-3)
    layer.build(x.shape)
    theirs.build(x.shape)
    draw = np.random.default_rng(0)
    for ours, other in ((layer.scale, theirs.gamma), (layer.bias, theirs.beta)):
        value = draw.normal(size=8)
        ours.assign(value)
        other.assign(value)
    np.testing.assert_allclose(layer(x), theirs(x), atol=2e-6)


def test_statistics_are_float32_in_half_precision():
    layer = LayerNorm(dtype="float16")
    x = tf.cast(tf.random.stateless_normal([1, 1, 64], [1, 2]) * 2000, tf.float16)
    assert np.isfinite(layer(x)).all()  # its square would overflow


def test_epsilon_must_be_positive():
    with pytest.raises(ConfigError, match="`epsilon` must be greater than 0"):
        LayerNorm(0.0)
