"""Matrix products that TensorFlow's kernels get right."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.shapes import shape_of


def times(x: tf.Tensor, matrix: tf.Tensor, transpose_b: bool = False) -> tf.Tensor:
    """``x [..., M, C]`` times ``matrix [C, R]``, or one ``[K, C, R]`` for each of its ``[..., K]``.

    `tf.matmul` would do, but that TensorFlow 2.21's oneDNN kernel writes past its output where a
    product of rank 4 broadcasts the matrix and an axis of the other has length 1: numbers are
    wrong, or the process dies. XLA has no such fault.

    Args:
        x: Vectors, the last axis but one counts them.
        matrix: One, or one a head.
        transpose_b: Whether the matrix is given as ``[..., R, C]``.
    """
    *lead, count, width = shape_of(x)
    if matrix.shape.rank == 2:
        flat = tf.matmul(tf.reshape(x, [-1, width]), matrix, transpose_b=transpose_b)
        return tf.reshape(flat, [*lead, count, shape_of(flat)[-1]])
    every = tf.broadcast_to(matrix, [*lead, *shape_of(matrix)[-2:]])
    return tf.matmul(x, every, transpose_b=transpose_b)
