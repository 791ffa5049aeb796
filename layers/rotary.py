"""Rotary position embedding by absolute position."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.shapes import shape_of


def rotary_angles(
    positions: tf.Tensor, head_dim: int, max_wavelength: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Cosine and sine for `rotate`, float32 ``[..., H/2]``.

    Args:
        positions: int32, any shape.
        head_dim: Width of a head (axis H), even.
        max_wavelength: Base of the frequencies ("theta").
    """
    exponents = tf.range(0, head_dim, 2, dtype=tf.float32) / head_dim
    frequencies = tf.pow(tf.constant(max_wavelength, tf.float32), -exponents)
    angles = tf.cast(positions, tf.float32)[..., tf.newaxis] * frequencies
    return tf.cos(angles), tf.sin(angles)


def rotate(x: tf.Tensor, cosine: tf.Tensor, sine: tf.Tensor) -> tf.Tensor:
    """Turns the halves of each head against each other (the rotate-half convention).

    Args:
        x: ``[..., heads, H]``.
        cosine: ``[..., H/2]`` of `rotary_angles`, without the heads axis.
        sine: Likewise.

    Returns:
        Rotated tensor of the same shape and dtype.

    Reference:
        Su et al., RoFormer, https://arxiv.org/abs/2104.09864
    """
    cosine = tf.cast(cosine, x.dtype)[..., tf.newaxis, :]
    sine = tf.cast(sine, x.dtype)[..., tf.newaxis, :]
    first, second = tf.split(x, 2, axis=-1)
    return tf.concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def look_from(
    queries: tf.Tensor, positions: tf.Tensor, furthest: int, max_wavelength: float
) -> tf.Tensor:
    """Queries as if none stood beyond a position.

    Args:
        queries: Grouped and rotated, ``[B, K, Q, H]``; Q is a multiple of T.
        positions: int32 ``[B, T]``, where they were rotated to; −1 = padding.
        furthest: Where those beyond it shall stand.
        max_wavelength: Base of the frequencies.
    """
    rows, heads, grouped, head_dim = shape_of(queries)
    width = shape_of(positions)[1]
    back = tf.minimum(positions, furthest) - positions
    split = tf.reshape(queries, [rows, heads * (grouped // width), width, head_dim])
    turned = rotate(
        tf.transpose(split, [0, 2, 1, 3]), *rotary_angles(back, head_dim, max_wavelength)
    )
    return tf.reshape(tf.transpose(turned, [0, 2, 1, 3]), [rows, heads, grouped, head_dim])
