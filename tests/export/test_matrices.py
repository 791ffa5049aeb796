"""Matrices of an artifact: what is stored of them, and products with few and many vectors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.export.matrices import StoredMatrix, quantized

WIDTH, OUTPUTS = 96, 40


def weights(seed: int = 0, *lead: int) -> np.ndarray:
    """Rows of very different size, one of them nothing but zeros."""
    rng = np.random.default_rng(seed)
    value = rng.normal(size=(*lead, OUTPUTS, WIDTH)) * np.exp(rng.normal(size=(OUTPUTS, 1)) * 2)
    value[..., 3, :] = 0
    return value.astype(np.float32)


def vectors(count: int, seed: int = 1) -> np.ndarray:
    """With channels that dwarf the others, as those of language models do; one is all zeros."""
    x = np.random.default_rng(seed).normal(size=(count, WIDTH))
    x[:, 5] *= 300
    x[count // 2] *= count == 1
    return x.astype(np.float32)


def product(matrix: StoredMatrix, x: np.ndarray, xla: bool) -> np.ndarray:
    @tf.function(jit_compile=xla, input_signature=[tf.TensorSpec([None, x.shape[-1]], tf.float32)])
    def run(given: tf.Tensor) -> tf.Tensor:
        return matrix.read().times(given)

    return run(x).numpy()


def by_hand(value: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Weights rounded to 127ths of their row's largest, vectors to 16256ths of their own."""
    scale = np.abs(value).max(-1, keepdims=True).astype(np.float64) / 127
    codes = np.rint(np.divide(value, scale, out=np.zeros(value.shape), where=scale > 0))
    step = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 16256
    rounded = np.rint(np.divide(x, step, out=np.zeros(x.shape), where=step > 0))
    return (rounded * step) @ (codes * scale).T


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("count", [1, 2, 32, 33])
def test_codes_are_multiplied_alike_by_one_vector_some_and_many(count, xla):
    value, x = weights(), vectors(count)
    made = product(StoredMatrix(value, "int8"), x, xla)
    # A rounding of x that falls to the other side moves a product by a 16256th of its largest
    # channel; sums are rounded to float32.
    room = np.abs(value).max(-1) * np.abs(x).max(-1, keepdims=True) / 16256 * 1.01 + 1e-6
    expected = by_hand(value, x)
    assert (np.abs(made - expected) <= room).all()
    assert np.median(np.abs(made - expected) / room) < 1e-2


@pytest.mark.parametrize("count", [1, 2, 32, 33])
def test_a_vector_has_the_same_product_whatever_is_beside_it(count):
    matrix, x = StoredMatrix(weights(), "int8"), vectors(33)
    alone = np.concatenate([product(matrix, row[np.newaxis], True) for row in x[:count]])
    # Sums of integers below 2^24 are exact; beyond, float32 rounds, 96 terms a sum.
    room = 96 * 2.0**-24 * np.abs(alone).max()
    np.testing.assert_allclose(product(matrix, x[:count], True), alone, atol=room)


def test_two_digits_keep_small_channels_beside_large_ones():
    value, x = weights(), vectors(7)
    exact = x.astype(np.float64) @ value.T.astype(np.float64)
    codes, scale = quantized(value)
    of_weights = x.astype(np.float64) @ (codes * scale[:, np.newaxis].astype(np.float64)).T
    made = product(StoredMatrix(value, "int8"), x, True)
    assert np.abs(made - of_weights).max() < np.abs(of_weights - exact).max() / 20


def test_stacked_matrices_are_multiplied_each_for_itself():
    value, x = weights(2, 3), vectors(4)
    matrix = StoredMatrix(value, "int8")
    every = matrix.read().times(tf.constant(x)[tf.newaxis]).numpy()
    for index, one in enumerate(value):
        np.testing.assert_allclose(
            every[index], StoredMatrix(one, "int8").read().times(x).numpy(), rtol=1e-6
        )
        np.testing.assert_allclose(
            every[index], matrix.read().at(tf.constant(index)).times(x).numpy(), rtol=1e-6
        )


def test_codes_of_a_row_span_what_it_holds():
    value = weights()
    codes, scale = quantized(value)
    assert codes.dtype == np.int8
    assert (np.abs(codes.astype(int)).max(-1) == np.where(np.arange(OUTPUTS) == 3, 0, 127)).all()
    assert (np.abs(codes * scale[:, np.newaxis] - value) <= scale[:, np.newaxis] * 0.5001).all()


@pytest.mark.parametrize(("dtype", "room"), [("float32", 0), ("bfloat16", 2.0**-8)])
def test_floats_are_kept_to_what_their_type_holds(dtype, room):
    value = weights()
    matrix = StoredMatrix(value, dtype).read()
    assert matrix.scale is None
    np.testing.assert_allclose(matrix.floats().numpy(), value, rtol=room)
    np.testing.assert_allclose(
        matrix.take(tf.constant([[2], [0]])).numpy(), value[[[2], [0]]], rtol=room
    )
    x = vectors(3)
    expected = x @ matrix.floats().numpy().T
    np.testing.assert_allclose(matrix.times(x).numpy(), expected, rtol=1e-4, atol=1e-3)


def test_rows_are_taken_as_they_are_multiplied():
    matrix = StoredMatrix(weights(), "int8").read()
    rows = tf.constant([7, 3, 7])
    np.testing.assert_array_equal(matrix.take(rows).numpy(), matrix.floats().numpy()[[7, 3, 7]])
