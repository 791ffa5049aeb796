"""Rotary position embedding by absolute position."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.architecture import Rope
from tfkv.layers.shapes import shape_of


def rotary_angles(
    positions: tf.Tensor, head_dim: int, rope: Rope | float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Cosine and sine for `rotate`, float32 ``[..., C/2]``, where C channels turn: H, unless
    `rope` says otherwise.

    Args:
        positions: int32, any shape.
        head_dim: Width of a head (axis H).
        rope: How they turn; a number is the base of plain RoPE ("theta").
    """
    rope = rope if isinstance(rope, Rope) else Rope(rope)
    width = rope.channels or head_dim
    exponents = tf.range(0, width, 2, dtype=tf.float32) / width
    frequencies = tf.pow(tf.constant(rope.max_wavelength, tf.float32), -exponents)
    if rope.divisors:
        frequencies /= tf.constant(rope.divisors, tf.float32)
    angles = tf.cast(positions, tf.float32)[..., tf.newaxis] * frequencies
    if rope.magnitude == 1:
        return tf.cos(angles), tf.sin(angles)
    return rope.magnitude * tf.cos(angles), rope.magnitude * tf.sin(angles)


def rotate(x: tf.Tensor, cosine: tf.Tensor, sine: tf.Tensor) -> tf.Tensor:
    """Turns the halves of each head against each other (the rotate-half convention).

    Args:
        x: ``[..., heads, H]``.
        cosine: ``[..., C/2]`` of `rotary_angles`, without the heads axis; channels from C on
            stay as they are.
        sine: Likewise.

    Returns:
        Rotated tensor of the same shape and dtype.

    Reference:
        Su et al., RoFormer, https://arxiv.org/abs/2104.09864
    """
    turned = 2 * cosine.shape[-1]
    cosine = tf.cast(cosine, x.dtype)[..., tf.newaxis, :]
    sine = tf.cast(sine, x.dtype)[..., tf.newaxis, :]
    rest = [] if turned == x.shape[-1] else [x[..., turned:]]
    first, second = tf.split(x[..., :turned] if rest else x, 2, axis=-1)
    parts = [first * cosine - second * sine, second * cosine + first * sine, *rest]
    return tf.concat(parts, axis=-1)


def look_from(
    queries: tf.Tensor, positions: tf.Tensor, furthest: int, rope: Rope | float
) -> tf.Tensor:
    """Queries as if none stood beyond a position.

    Args:
        queries: Grouped and rotated, ``[B, K, Q, H]``; Q is a multiple of T.
        positions: int32 ``[B, T]``, where they were rotated to; −1 = padding.
        furthest: Where those beyond it shall stand.
        rope: How they were turned.
    """
    back, head_dim = steps_back(positions, furthest), shape_of(queries)[-1]
    return turn_grouped(queries, *rotary_angles(back, head_dim, once_more(rope)))


def steps_back(positions: tf.Tensor, furthest: int) -> tf.Tensor:
    """By how much positions have to change to be at most `furthest`."""
    return tf.minimum(positions, furthest) - positions


def once_more(rope: Rope | float) -> Rope:
    """The rotation of what has been multiplied by its magnitude already."""
    return dataclasses.replace(rope, magnitude=1.0) if isinstance(rope, Rope) else Rope(rope)


def turn_grouped(queries: tf.Tensor, cosine: tf.Tensor, sine: tf.Tensor) -> tf.Tensor:
    """As `rotate`, of grouped queries ``[B, K, Q, H]`` by angles ``[B, T, C/2]``."""
    rows, heads, grouped, head_dim = shape_of(queries)
    width = shape_of(cosine)[1]
    split = tf.reshape(queries, [rows, heads * (grouped // width), width, head_dim])
    turned = rotate(tf.transpose(split, [0, 2, 1, 3]), cosine, sine)
    return tf.reshape(tf.transpose(turned, [0, 2, 1, 3]), [rows, heads, grouped, head_dim])
