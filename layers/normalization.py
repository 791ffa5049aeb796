"""Normalisation as pure functions."""

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


def layer_normalize(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Subtracts the mean of the last axis and divides by its standard deviation, in float32;
    scales, and adds a bias.

    Args:
        x: ``[..., D]``.
        scale: ``[D]``.
        bias: ``[D]``.
        epsilon: Added to the variance.

    Reference:
        Ba et al., https://arxiv.org/abs/1607.06450
    """
    wide = tf.cast(x, tf.float32)
    wide -= tf.reduce_mean(wide, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True)
    normal = tf.cast(wide * tf.math.rsqrt(variance + epsilon), x.dtype)
    return normal * tf.cast(scale, x.dtype) + tf.cast(bias, x.dtype)


def normalize(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor | None, epsilon: float) -> tf.Tensor:
    """`layer_normalize` where there is a bias, else `rms_normalize`."""
    if bias is None:
        return rms_normalize(x, scale, epsilon)
    return layer_normalize(x, scale, bias, epsilon)
