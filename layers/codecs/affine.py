"""Asymmetric integers: the lowest number is code 0, the highest the last one."""

from __future__ import annotations

import tensorflow as tf

#: Least scale: a float16 scale of 0 cannot divide.
LEAST_SCALE = 6e-8


def affine_of(x: tf.Tensor, bits: int, axis: int) -> tf.Tensor:
    """Scale and zero of numbers that share them, float16, side by side in the last axis.

    Args:
        x: float32.
        bits: Of a code.
        axis: Along which they are shared; it is reduced.
    """
    low = tf.reduce_min(x, axis=axis)
    scale = tf.maximum((tf.reduce_max(x, axis=axis) - low) / _top(bits), 1e-7)
    return tf.cast(tf.concat([scale, low], axis=-1), tf.float16)


def affine_codes(x: tf.Tensor, affine: tf.Tensor, bits: int, axis: int) -> tf.Tensor:
    """uint8 codes of ``x`` by what `affine_of` gave, against its rounded pair."""
    scale, low = (
        tf.expand_dims(half, axis) for half in tf.split(tf.cast(affine, tf.float32), 2, axis=-1)
    )
    codes = tf.round((x - low) / tf.maximum(scale, LEAST_SCALE))
    return tf.cast(tf.clip_by_value(codes, 0.0, _top(bits)), tf.uint8)


def _top(bits: int) -> float:
    return float(2**bits - 1)
