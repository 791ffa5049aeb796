from __future__ import annotations

import re

import numpy as np
import pytest
import reference
import tensorflow as tf
from keras_weights import by_path

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.keras_api import keras

HIDDEN = 24


def _layer(heads: int = 4, kv_heads: int | None = 2, **kwargs) -> CachedMultiHeadAttention:
    keras.utils.set_random_seed(3)
    layer = CachedMultiHeadAttention(heads, 8, kv_heads, **{"capacity": 16, **kwargs})
    layer.build((None, None, HIDDEN))
    return layer


def _input(batch: int = 2, length: int = 9) -> tf.Tensor:
    return tf.random.stateless_normal([batch, length, HIDDEN], [1, 2])


def _weights(layer: CachedMultiHeadAttention) -> dict[str, np.ndarray]:
    return dict(zip(("query", "key", "value", "output"), layer.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, None), (4, 2), (4, 1), (1, 1)], ids=["MHA", "GQA", "MQA", "one"]
)
@pytest.mark.parametrize("base", [None, 100.0])
def test_equals_the_reference(heads: int, kv_heads: int | None, base: float | None):
    layer = _layer(heads, kv_heads, rope_max_wavelength=base)
    x = _input()
    expected = [reference.attention(row, _weights(layer), base=base) for row in x.numpy()]
    output, state = layer(x)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    assert state == {}
    first, state = layer(x[:, :5], state=layer.init_state(2))
    rest, state = layer(x[:, 5:], state=state)
    np.testing.assert_allclose(tf.concat([first, rest], 1), expected, atol=2e-6)
    assert state["keys/codes"].shape == (2, kv_heads or heads, 16, 8)


def test_weights_are_named_and_shaped_as_in_keras_nlp():
    layer = _layer(use_bias=True, name="attention")
    assert {path: tuple(w.shape) for path, w in by_path(layer).items()} == {
        "attention/query/kernel": (HIDDEN, 4, 8),
        "attention/query/bias": (4, 8),
        "attention/key/kernel": (HIDDEN, 2, 8),
        "attention/key/bias": (2, 8),
        "attention/value/kernel": (HIDDEN, 2, 8),
        "attention/value/bias": (2, 8),
        "attention/attention_output/kernel": (4, 8, HIDDEN),
        "attention/attention_output/bias": (HIDDEN,),
    }


def test_absolute_positions_matter_only_by_their_distance():
    layer = _layer(rope_max_wavelength=100.0)
    x, positions = _input(), tf.tile(tf.range(9)[tf.newaxis], [2, 1])
    near, _ = layer(x, positions=positions)
    far, _ = layer(x, positions=positions + 1000)
    np.testing.assert_allclose(near, far, atol=2e-5)


def test_padding_of_a_training_batch_changes_nothing():
    """unsloth #3699, transformers #22707: left padding, here through the mask Keras hands on."""
    layer = _layer(rope_max_wavelength=100.0)
    x = _input(1, 5)
    padded = tf.concat([tf.zeros([1, 3, HIDDEN]), x, tf.zeros([1, 1, HIDDEN])], axis=1)
    output, _ = layer(keras.layers.Masking()(padded))
    np.testing.assert_allclose(output[:, 3:8], layer(x)[0], atol=2e-6)
    output, state = layer(keras.layers.Masking()(padded), state=layer.init_state(1))
    np.testing.assert_allclose(output[:, 3:8], layer(x)[0], atol=2e-6)
    assert state["filled"].numpy().tolist() == [5]


def test_training_trains_within_the_window():
    """The same mask with and without a cache: what is trained is what is served."""
    layer = _layer(cache="sliding_window(window=3)+int8", rope_max_wavelength=100.0)
    x = _input(1, 7)
    expected = reference.attention(x[0].numpy(), _weights(layer), window=3, base=100.0)
    np.testing.assert_allclose(layer(x, training=True)[0][0], expected, atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gradients_reach_every_weight_and_stay_finite(scale: float):
    layer = _layer(rope_max_wavelength=100.0)
    mask = tf.constant([[True] * 9, [False] * 9])
    with tf.GradientTape() as tape:
        output, _ = layer(_input() * scale, mask=mask, training=True)
        loss = tf.reduce_sum(output**2)
    for gradient in tape.gradient(loss, layer.trainable_variables):
        assert np.isfinite(gradient).all()
        # At 100 the softmax is saturated, and queries and keys have no slope left.
        assert scale > 1 or np.abs(gradient).max() > 0


def test_refuses_to_train_through_a_cache():
    layer = _layer()
    with pytest.raises(CacheError, match="`state` must be None in training"):
        layer(_input(), state=layer.init_state(2), training=True)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_compute_dtype_leaves_the_cache_as_its_codec_says(dtype: str):
    layer = _layer(cache="int8", dtype=dtype, rope_max_wavelength=100.0)
    x = _input()
    first, state = layer(x[:, :6], state=layer.init_state(2))
    rest, state = layer(x[:, 6:], state=state)
    assert first.dtype == layer.compute_dtype
    assert {n: t.dtype for n, t in state.items()} == {
        n: s.dtype for n, s in layer.get_state_spec(2).items()
    }
    exact = _layer(rope_max_wavelength=100.0)
    exact.set_weights(layer.get_weights())
    output = tf.cast(tf.concat([first, rest], 1), tf.float32)
    np.testing.assert_allclose(output, exact(x)[0], atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "`num_heads` must be an integer of at least 1. Received: num_heads=0"),
        ({"kv_heads": 3}, "`num_heads` must be a multiple of num_key_value_heads=3"),
        ({"kv_heads": 1.0}, "`num_key_value_heads` must be an integer"),
        ({"capacity": 0}, "`capacity` must be an integer of at least 1"),
        ({"cache": "densee"}, "Did you mean 'dense'"),
    ],
)
def test_arguments_out_of_range(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        _layer(**arguments)


def test_odd_heads_cannot_turn():
    with pytest.raises(ConfigError, match="`key_dim` must be even for RoPE"):
        CachedMultiHeadAttention(2, 7, rope_max_wavelength=100.0)
    CachedMultiHeadAttention(2, 7)


@pytest.mark.parametrize("cache", ["dense", "sliding_window(window=37)", "int8"])
def test_compiled_loop_copies_no_cache(cache: str):
    """The optimised HLO of a decode loop holds no copy and no transpose of a cache's size.

    (Its entry copies each input once a call: TensorFlow gives away no buffers.)
    """
    layer = _layer(cache=cache, capacity=41, rope_max_wavelength=100.0)

    @tf.function(jit_compile=True)
    def loop(x, state):
        return tf.while_loop(
            lambda *_: True, lambda x, s: layer(x, state=s), (x, state), maximum_iterations=3
        )

    state = layer.init_state(2)
    hlo = loop.experimental_get_compiler_ir(tf.zeros([2, 1, HIDDEN]), state)("optimized_hlo")
    entries = state["keys/codes"].shape[2]
    size = 2 * 2 * entries * 8
    inside = hlo[: hlo.index("\nENTRY ")] + hlo[hlo.index("\nENTRY ") :].partition("\n}\n")[2]
    assert "scatter(" in inside
    for line in inside.splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose)\(", line)
        if match:
            assert np.prod([int(n) for n in match[1].split(",")]) < size, line
