"""Root-mean-square normalisation as a pure function."""

from __future__ import annotations

import tensorflow as tf


def rms_normalize(x: tf.Tensor, scale: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Divides by the root mean square of the last axis, in float32, and scales.

    Args:
        x: ``[..., D]``.
        scale: ``[D]``.
        epsilon: Added to the mean square.

    Reference:
        Zhang and Sennrich, https://arxiv.org/abs/1910.07467
    """
    wide = tf.cast(x, tf.float32)
    mean_square = tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True)
    return tf.cast(wide * tf.math.rsqrt(mean_square + epsilon), x.dtype) * tf.cast(scale, x.dtype)
