from __future__ import annotations

import numpy as np
import tensorflow as tf
from keras_weights import by_path

from tfkv.architecture import Experts as Options
from tfkv.layers.experts import Experts
from tfkv.layers.feed_forward import route
from tfkv.layers.keras_api import keras


def _silu(x):
    return x / (1 + np.exp(-x))


def test_by_definition():
    keras.utils.set_random_seed(1)
    layer = Experts(Options(5, 2, 7, normalize=True, shared_dim=6), name="experts")
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    found = layer(x).numpy().reshape(6, 4)
    w = {
        path.rpartition("/")[2]: weight.numpy().astype(np.float64)
        for path, weight in by_path(layer).items()
    }
    for row, answer in zip(x.reshape(6, 4).astype(np.float64), found, strict=True):
        logits = row @ w["router"]
        shares = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(shares)[-2:]
        expected = sum(
            shares[e]
            / shares[best].sum()
            * ((_silu(row @ w["gate"][e]) * (row @ w["up"][e])) @ w["down"][e])
            for e in best
        )
        shared = (_silu(row @ w["shared_gate"]) * (row @ w["shared_up"])) @ w["shared_down"]
        expected = expected + shared / (1 + np.exp(-(row @ w["shared_router"])))
        np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_those_not_chosen_weigh_nothing():
    weights = route(tf.constant([[0.0, 3.0, 1.0, 2.0]]), 2, normalize=False).numpy()[0]
    shares = np.exp([0.0, 3.0, 1.0, 2.0])
    shares /= shares.sum()
    np.testing.assert_allclose(weights, [0, shares[1], 0, shares[3]], rtol=1e-6)


def test_the_router_learns():
    layer = Experts(Options(4, 2, 7), name="experts")
    layer.build((None, 5))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.random.stateless_normal([3, 5], [0, 1])) ** 2)
    assert np.abs(tape.gradient(loss, layer.trainable_weights[0])).max() > 0


def test_config_round_trip():
    layer = Experts(Options(4, 2, 7, shared_dim=3), "gelu", name="experts")
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert twin.get_config() == layer.get_config()
