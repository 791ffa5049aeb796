"""Least and greatest keys of pages, by which a policy selects."""

from __future__ import annotations

import tensorflow as tf

#: Bounds rank pages: half precision is enough.
DTYPE = tf.float16


def bounds_of(keys: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
    """Greatest and least number of each channel of pages, ``[..., 2H]``; zeros of an empty one.

    Args:
        keys: float32 ``[..., C, H]``, as they are read.
        there: bool, broadcast to ``[..., C]``, which of them there are.
    """
    there = there[..., tf.newaxis]
    greatest = tf.reduce_max(tf.where(there, keys, DTYPE.min), axis=-2)
    least = tf.reduce_min(tf.where(there, keys, DTYPE.max), axis=-2)
    both = tf.concat([greatest, least], axis=-1)
    both = tf.where(tf.reduce_any(there, axis=-2), both, 0.0)
    return tf.cast(tf.clip_by_value(both, DTYPE.min, DTYPE.max), DTYPE)


def bytes_per_token(head_dim: int, page_size: int) -> int:
    """Bytes of bounds for each token of a page, in one KV head."""
    return 2 * head_dim * DTYPE.size // page_size
