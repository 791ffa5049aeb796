from __future__ import annotations

import numpy as np
import pytest
import reference
import tensorflow as tf
from keras_weights import by_path

from tfkv.architecture import Attention, BlockOptions, Experts, FeedForward, Norms, Rope
from tfkv.errors import ConfigError
from tfkv.layers import DecoderBlock
from tfkv.layers.keras_api import keras


def _block(**kwargs) -> DecoderBlock:
    keras.utils.set_random_seed(5)
    block = DecoderBlock(4, 2, 8, 40, 100.0, capacity=16, name="block", **kwargs)
    block.build((None, None, 24))
    return block


def test_by_definition():
    block = _block()
    x = tf.random.stateless_normal([1, 6, 24], [1, 2])
    weights = {
        path.removeprefix("block/"): w.numpy().astype(np.float64)
        for path, w in by_path(block).items()
    }

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    kernels = ("query", "key", "value", "attention_output")
    named = {
        name.removeprefix("attention_"): weights[f"attention/{name}/kernel"] for name in kernels
    }
    hidden = x[0].numpy().astype(np.float64)
    hidden = hidden + reference.attention(norm(hidden), named, base=100.0)
    normed = norm(hidden)
    gate = normed @ weights["gate/kernel"]
    inner = gate / (1 + np.exp(-gate)) * (normed @ weights["up/kernel"])
    expected = hidden + inner @ weights["down/kernel"]
    output, state = block(x)
    np.testing.assert_allclose(output[0], expected, atol=3e-6)
    assert state == {}
    cached, state = block(x, state=block.init_state(1))
    np.testing.assert_allclose(cached, output, atol=3e-6)
    assert state.keys() == block.get_state_spec(1).keys()


def test_config_round_trip():
    block = _block(cache="sliding_window(window=8)+int8", rms_epsilon=1e-6, slack=2)
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(block))
    assert twin.get_config() == block.get_config()
    assert twin.get_config()["cache"] == "sliding_window(window=8)+int8"


def test_arguments_out_of_range():
    with pytest.raises(ConfigError, match="`intermediate_dim` must be an integer of at least 1"):
        DecoderBlock(4, 2, 8, 0)


def test_options_round_trip():
    options = BlockOptions(
        rope=Rope(500.0, 4, (1.0, 2.0), 1.2),
        window=5,
        attention=Attention(soft_cap=2.0, query_key_epsilon=1e-6, bias=True, output_bias=True),
        norms=Norms("layer", post_attention=True, post_feedforward=True),
        feed_forward=FeedForward("gelu_tanh"),
        experts=Experts(4, 2, 16, True, 8),
        parallel_residual=True,
    )
    block = _block(options=options)
    twin = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(block))
    assert twin.get_config() == block.get_config()
    assert twin.options == options
    if not twin.built:  # Keras 2 leaves that to the first call
        twin.build((None, None, 24))
    assert list(by_path(twin)) == list(by_path(block))


def test_plain_options_are_a_llama():
    names = list(by_path(_block()))
    assert names == list(by_path(_block(options=BlockOptions())))
    assert not any(word in name for name in names for word in ("bias", "experts", "post"))
