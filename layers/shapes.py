"""Shapes that may hold unknown axes."""

from __future__ import annotations

import tensorflow as tf


def shape_of(x: tf.Tensor) -> list[int | tf.Tensor]:
    """Length of each axis: a number where it is known, a scalar tensor where it is not.

    XLA knows every length when it compiles, so one trace serves all batch sizes.
    """
    known = x.shape.as_list()
    if None not in known:
        return known
    dynamic = tf.shape(x)
    return [dynamic[axis] if length is None else length for axis, length in enumerate(known)]


def keep_shape(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """`new` with the static shape of `old`, as a loop variable needs it."""
    return tf.ensure_shape(new, old.shape)
