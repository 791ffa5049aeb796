"""Keras models that are nobody's architecture but their own, for tests of `CachedModel`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfkv.layers import CachedCrossAttention, CachedMultiHeadAttention, DecoderBlock
from tfkv.layers.keras_api import keras

VOCABULARY, WIDTH = 23, 24


@keras.saving.register_keras_serializable(package="test")
class MeanNorm(keras.layers.Layer):
    """A norm of one's own: divides by the mean of what a token's channels are in size."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x / (tf.reduce_mean(tf.abs(x), axis=-1, keepdims=True) + 1e-3)


def decoder(
    caches: Sequence[str] = ("dense", "sliding_window(window=5,sinks=1)"),
    dtype: str = "float32",
    slack: int = 16,
) -> keras.Model:
    """A functional decoder: tokens to logits, a cache for each of its layers, and feed-forward
    layers of two halves, one of which opens the other."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, dtype=dtype)(tokens)
    for cache in caches:
        attention = CachedMultiHeadAttention(
            4, 6, 2, 100.0, cache, capacity=48, slack=slack, dtype=dtype
        )
        x = x + attention(MeanNorm(dtype=dtype)(x))[0]
        y = MeanNorm(dtype=dtype)(x)
        opens = keras.layers.Dense(40, activation="sigmoid", dtype=dtype)(y)
        y = keras.layers.Dense(40, dtype=dtype)(y) * opens
        x = x + keras.layers.Dense(WIDTH, dtype=dtype)(y)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(MeanNorm()(x)))


def trained(model: keras.Model) -> keras.Model:
    """A model that has seen some text, so that its answers vary."""
    text = (np.arange(48)[:, np.newaxis] * 5 + np.arange(13) ** 2) % VOCABULARY
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    model.fit(text[:, :-1], text[:, 1:], epochs=4, verbose=0)
    return model


def naive(model: keras.Model, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What follows greedily, the whole text computed anew for each token."""
    answers = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(count):
            logits = np.asarray(model(np.array([text], np.int32)))
            text.append(int(logits[0, -1].argmax()))
        answers.append(text[len(prompt) :])
    return answers


@keras.saving.register_keras_serializable(package="test")
class Learned(keras.Model):
    """A subclassed decoder with learned positions, blocks that share keys, and one attention
    layer that is called twice."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.words = keras.layers.Embedding(VOCABULARY, WIDTH)
        self.places = keras.layers.Embedding(64, WIDTH)
        sizes = {"rope_max_wavelength": None, "capacity": 32}
        self.first = DecoderBlock(4, 2, 6, 40, name="first", **sizes)
        self.second = DecoderBlock(4, 2, 6, 40, share_kv_with="first", name="second", **sizes)
        self.twice = CachedMultiHeadAttention(2, 12, capacity=32)
        self.out = keras.layers.Dense(VOCABULARY)

    def call(self, tokens: tf.Tensor, positions: tf.Tensor | None = None) -> tf.Tensor:
        places = tf.range(tf.shape(tokens)[1])[tf.newaxis] if positions is None else positions
        x = self.words(tokens) + self.places(tf.maximum(places, 0))
        x, _, kv = self.first(x, return_kv=True)
        x, _ = self.second(x, kv=kv)
        for _ in range(2):
            x = x + self.twice(x)[0]
        return self.out(x)


def translator(inner: int = 37) -> keras.Model:
    """A functional encoder-decoder, its encoder of one width that occurs nowhere else."""
    keras.utils.set_random_seed(2)
    source = keras.Input([None], dtype="int32", name="source")
    tokens = keras.Input([None], dtype="int32", name="tokens")
    encoded = keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(source)
    encoded = keras.layers.Dense(inner, activation="gelu")(encoded)
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x = x + CachedMultiHeadAttention(2, 12, None, 100.0, capacity=32)(x)[0]
    x = x + CachedCrossAttention(2, 12, capacity=9)(x, encoded)[0]
    return keras.Model([source, tokens], keras.layers.Dense(VOCABULARY)(MeanNorm()(x)))
