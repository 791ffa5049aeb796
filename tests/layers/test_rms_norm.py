from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from keras_weights import by_path

from tfkv.errors import ConfigError
from tfkv.layers import RMSNorm
from tfkv.layers.keras_api import keras


def test_by_definition():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)) * 3
    layer = RMSNorm(epsilon=1e-3)
    layer.build((None, None, 8))
    scale = np.linspace(0.5, 2, 8)
    layer.set_weights([scale])
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(layer(tf.constant(x, tf.float32)), expected, atol=1e-6)
    assert list(by_path(layer)) == [f"{layer.name}/scale"]


def test_statistics_do_not_overflow_in_float16():
    layer = RMSNorm(dtype="float16")
    output = layer(tf.fill([1, 8], tf.constant(1000, tf.float16)))
    assert output.dtype == tf.float16
    np.testing.assert_allclose(output, 1, atol=1e-3)


def test_config_round_trip():
    layer = RMSNorm(epsilon=1e-6, name="norm")
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert twin.get_config() == layer.get_config()
    with pytest.raises(ConfigError, match="`epsilon` must be greater than 0"):
        RMSNorm(epsilon=0)
