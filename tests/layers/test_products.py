"""Products with one matrix for all, or one for each head, without XLA and with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfkv.layers.products import times

#: Batch, heads and vectors: axes of length 1 made TensorFlow's own kernel write past its output.
SHAPES = list(itertools.product((1, 2, 5, 8), (1, 3), (1, 7, 8)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("heads_differ", [False, True])
@pytest.mark.parametrize("xla", [False, True])
def test_products_are_those_of_numpy(xla, heads_differ, transposed):
    rng = np.random.default_rng(0)
    run = tf.function(times, jit_compile=xla) if xla else times
    # XLA compiles each shape anew.
    for shape in SHAPES if not xla else SHAPES[::7]:
        x = rng.normal(size=(*shape, 32)).astype(np.float32)
        matrix = rng.normal(size=(*shape[1:2] * heads_differ, 32, 12)).astype(np.float32)
        given = np.swapaxes(matrix, -1, -2) if transposed else matrix
        made = run(tf.constant(x), tf.constant(given), transpose_b=transposed)
        np.testing.assert_allclose(made, x @ matrix, atol=1e-4)
