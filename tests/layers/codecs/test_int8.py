from __future__ import annotations

import numpy as np
import pytest
import reference
import tensorflow as tf

from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.codecs import Int8Codec

CODEC = Int8Codec()


def _numbers(scale: float, shift: float, shape=(2, 3, 50, 16)) -> np.ndarray:
    x = np.random.default_rng(7).normal(size=shape) * scale + shift
    x[..., 3] *= 20  # an outlier channel, as keys have
    return x.astype(np.float32)


@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (1e-3, 0), (30, 0), (1, 50), (1e-4, 1)])
def test_error_is_at_most_what_the_scale_says(scale: float, shift: float):
    """Half a code, and what rounding the pair to float16 moves the ends of the range by.

    vllm PR #11906: the scale is measured, never assumed.
    """
    x = _numbers(scale, shift)
    error = np.abs(CODEC.round_trip(tf.constant(x)) - x)
    span = np.ptp(x, axis=-1, keepdims=True)
    middle = np.abs(x.max(-1, keepdims=True) + x.min(-1, keepdims=True)) / 2
    step = np.maximum(span / 254, 2.0**-24)
    bound = 0.5 * step * (1 + 2.0**-10) + (middle + span / 2) * 2.0**-11 + 2.0**-24 * 128
    assert (error <= bound).all()


def test_equals_the_reference():
    x = _numbers(1, 0.5)
    np.testing.assert_allclose(
        CODEC.decode(CODEC.encode(tf.constant(x))), reference.stored(x, "int8"), atol=1e-5
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9])
def test_equal_numbers_have_no_range_and_stay_what_they_are(value: float):
    stored = CODEC.round_trip(tf.fill([1, 1, 1, 8], value))
    np.testing.assert_allclose(stored, value, atol=1e-6)


def test_folded_dots_equal_dots_of_decoded_numbers():
    queries = tf.constant(np.random.default_rng(1).normal(size=(2, 3, 4, 16)), tf.float32)
    weights = tf.nn.softmax(tf.random.stateless_normal([2, 3, 4, 50], [1, 1]))
    coded = CODEC.encode(tf.constant(_numbers(1, 0)))
    numbers = CODEC.decode(coded)
    scores = tf.einsum("akqh,aksh->akqs", queries, numbers)
    np.testing.assert_allclose(CODEC.scores(queries, coded), scores, atol=2e-4)
    mixed = tf.einsum("akqs,aksh->akqh", weights, numbers)
    np.testing.assert_allclose(CODEC.mix(weights, coded), mixed, atol=2e-4)


def test_writing_what_was_read_changes_nothing():
    """transformers #35185: a group is quantised once; a copy of a copy is no worse."""
    once = CODEC.round_trip(tf.constant(_numbers(1, 0)))
    twice = CODEC.round_trip(once)
    span = np.ptp(once, axis=-1, keepdims=True)
    assert (np.abs(twice - once) <= span / 254).all()


def test_no_dequantised_copy_of_the_cache():
    """Codes are widened for the dots, but no number of the size of the cache is computed."""
    capacity = 331
    layer = CachedMultiHeadAttention(4, 8, 2, cache="int8", capacity=capacity)
    state = layer.init_state(1)
    step = tf.function(lambda x, state: layer(x, state=state))
    graph = step.get_concrete_function(tf.zeros([1, 1, 16]), state).graph
    arithmetic = {"Mul", "AddV2", "Sub", "RealDiv", "FusedMulAdd"}
    sizes = [
        (op.type, output.shape)
        for op in graph.get_operations()
        for output in op.outputs
        if op.type in arithmetic and output.shape.rank and capacity in output.shape
    ]
    assert all(shape.num_elements() < capacity * 2 * 8 for _, shape in sizes), sizes
